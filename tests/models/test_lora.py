"""LoRA: nothing changes at the start, merged is unmerged, what stays has no gradient, and nothing of it is computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import changed
from model_cases import B, T, config, random_params

from jaxformer.config import Execution, HeadConfig, LossConfig, MeshConfig, TuneConfig, from_mapping
from jaxformer.decoding.generation import generate
from jaxformer.decoding.sampling import Sampling
from jaxformer.errors import ConfigError
from jaxformer.functional.layers import linear, mlp
from jaxformer.low_rank import LowRank
from jaxformer.models.flops import training_flops
from jaxformer.models.lora import GROUP, merge_lora, with_adapters, without_adapters
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import make_mesh, param_shardings
from jaxformer.specs import is_spec, only_trained
from jaxformer.training.gradients import gradients
from jaxformer.types import Batch

TUNE = TuneConfig(lora_rank=3, lora_alpha=5.0)


def batch(length=T, rows=B):
    tokens = np.random.default_rng(0).integers(0, 20, (rows, length)).astype(np.int32)
    places = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return Batch(tokens, np.roll(tokens, -1, 1), np.ones(tokens.shape, np.float32), places, np.zeros_like(tokens))


def test_a_layer_of_low_rank_is_the_layer_with_the_sum():
    """Values and gradients in float64, with two inputs axes too; at rank 0 it is the weight alone, bit for bit."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)

        def draw(*shape):
            return jnp.asarray(rng.normal(size=shape))

        x, w = draw(5, 2, 3), LowRank(draw(2, 3, 4), draw(2, 3, 2), draw(2, 4), 0.7)
        up, down = LowRank(draw(4, 6), draw(4, 2), draw(2, 6), 0.5), LowRank(draw(6, 4), draw(6, 2), draw(2, 4), 2.0)

        @jax.jit
        def both(x, factors):
            def apply(merged, x, a, b, of_up, of_down):
                ws = (
                    LowRank(w.weight, a, b, w.scale),
                    *(LowRank(each.weight, *f, each.scale) for each, f in ((up, of_up), (down, of_down))),
                )
                ws = [each.merged() for each in ws] if merged else ws
                return jnp.sum(jnp.sin(mlp(linear(x, ws[0], num_inputs=2), ws[1], ws[2])))

            return [jax.value_and_grad(functools.partial(apply, m), (0, 1, 2, 3, 4))(x, *factors) for m in (0, 1)]

        ours, theirs = both(x, (w.a, w.b, (up.a, up.b), (down.a, down.b)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12), ours, theirs)
        nothing = LowRank(w.weight, w.a[..., :0], w.b[:0], 0.7)
        np.testing.assert_array_equal(linear(x, nothing, num_inputs=2), linear(x, w.weight, num_inputs=2))
        np.testing.assert_array_equal(nothing.merged(), w.weight)


@functools.cache
def model_and_params(**fields):
    model = make_model(config(**fields), LossConfig(), tune=TUNE)
    return model, jax.tree.map(jnp.asarray, random_params(model.specs))


@pytest.mark.slow
def test_a_model_begins_as_it_was_and_merged_is_unmerged():
    """The loss and its gradient; nothing but the adapters has one."""
    model, params = model_and_params(num_layers=1)
    cfg, rows = config(num_layers=1), batch()
    run = jax.jit(lambda params: gradients(params, rows, jax.random.key(0), model=model)[:2])
    plain = jax.jit(lambda params: make_model(cfg, LossConfig()).loss(params, rows, None)[0]["loss"])
    base = {name: group for name, group in params.items() if name != GROUP}

    def loss(params):
        total, weight = plain(params)
        return float(total / weight)

    loss_of, grads = run(params)
    described = with_adapters(params, TUNE)
    np.testing.assert_allclose(loss_of, loss(merge_lora(described)), rtol=1e-5)
    assert abs(loss_of - loss(base)) > 1e-3
    jax.tree.map(np.testing.assert_array_equal, without_adapters(described), base)
    assert only_trained(grads, model.specs)[GROUP].keys() == grads[GROUP].keys()
    assert jax.tree.leaves({name: group for name, group in grads.items() if name != GROUP}) == []
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads[GROUP]))
    begun = jax.tree_util.tree_map_with_path(lambda path, x: x * (path[-1].key == "a"), params[GROUP])
    assert float(run({**params, GROUP: begun})[0]) == pytest.approx(loss(base), abs=1e-7)
    fresh = jax.jit(model.init)(jax.random.key(0))[GROUP]["blocks"]["mlp"]["w_up"]
    assert not np.any(fresh["b"]) and 0.2 < np.abs(fresh["a"]).max() <= 0.25  # 1 / sqrt(16)


def test_what_learns_and_where_it_lies():
    """Of a task the whole head learns; factors are sharded as the weight's axes; layers keep rates of their own."""
    cfg = changed(config(width=32), head=HeadConfig("sequence_classification", 2))
    specs = make_model(cfg, LossConfig(), tune=TuneConfig(1, 0.5, lora_rank=2)).specs
    paths = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
    assert {path[0].key for path, spec in paths if spec.trained} == {GROUP, "task"}
    found = specs[GROUP]["blocks"]["attention"]
    assert found["w_out"]["a"].rate == (0.0, 1.0) and found["w_out"]["a"].decay == 1
    shardings = param_shardings(found, make_mesh(MeshConfig(1, 4, 2, 1)))
    lie = {name: [tuple(shardings[name][each].spec) for each in "ab"] for name in ("w_query", "w_out")}
    assert lie["w_query"] == [(None, "fsdp"), (None, None, "tensor")]
    assert lie["w_out"] == [(None, "tensor"), (None, None, "fsdp")]


@pytest.mark.parametrize(("fields", "tune", "line"), [
    ({}, {"lora_rank": 17}, "17 is more than blocks.attention.w_key of 16 x 16 can have; accepted: at most 16$"),
    ({"num_kv_heads": 1}, {"lora_rank": 5, "lora_targets": ("key",)}, r"of 16 x 4 can have; accepted: at most 4$"),
    ({}, {"lora_rank": 2, "lora_targets": ("quary",)},
     r"lora_targets: 'quary'; accepted with this model: down, key, out, query, up, value; did you mean query\?$"),
    ({"family": "recurrent"}, {"lora_rank": 2}, "have no weight that can be adapted; accepted: 0$"),
])  # fmt: skip
def test_adapters_that_a_model_cannot_have(fields, tune, line):
    if fields.get("family") == "recurrent":
        cfg = from_mapping({"model": {"family": "recurrent", "attention": "lstm", "vocab_size": 20}}).model
    else:
        cfg = config(**fields)
    with pytest.raises(ConfigError, match=line):
        make_model(cfg, LossConfig(), tune=TuneConfig(**tune))


@pytest.mark.slow
def test_no_gradient_of_what_stays_is_computed():
    """Counted in the compiled program, beside full tuning and beside what we say ourselves."""
    cfg, rows, flops = config(width=64, num_heads=4, vocab_size=64), batch(), {}
    data = from_mapping({}).data
    for tune in (TuneConfig(), TuneConfig(lora_rank=2)):
        model = make_model(cfg, LossConfig(), Execution(layers="unroll"), tune=tune)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        step = jax.jit(lambda params, m=model: gradients(params, rows, jax.random.key(0), model=m)[:2])
        counted = step.lower(shapes).compile().cost_analysis()["flops"]
        flops[tune.lora_rank] = counted / rows.tokens.size, training_flops(cfg, data, tune)
    assert flops[2][0] < 0.75 * flops[0][0], flops
    saved, said = (flops[0][i] - flops[2][i] for i in (0, 1))
    first = 3 * 2 * 64 * 64  # the first layer's input needs no gradient either, which our count leaves in
    assert saved == pytest.approx(said + first, rel=0.02), flops


@pytest.mark.slow
def test_the_same_gradients_on_a_mesh():
    fields = {"num_layers": 1, "width": 32, "num_heads": 4, "context_length": 16}
    model, params = model_and_params(**fields)
    mesh, rows = make_mesh(MeshConfig(1, 2, 2, 2)), batch(16, 4)
    run = jax.jit(lambda params, rows: gradients(params, rows, jax.random.key(0), model=model)[:2])
    alone = run(params, rows)
    with jax.set_mesh(mesh):
        spread = run(jax.device_put(params, param_shardings(model.specs, mesh)), rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), jax.device_get(spread), alone)


@pytest.mark.slow
def test_generation_unmerged():
    """The same tokens as with the merged weights; in bfloat16, which merging rounds, layers and columns apart."""
    cfg = config(dtype="bfloat16", num_layers=1)
    _, params = model_and_params(dtype="bfloat16", num_layers=1)
    described = with_adapters(params, TUNE)
    prompts, lengths = np.array([[1, 2, 3], [4, 5, 0]]), np.array([3, 2])

    def tokens(params):
        greedy = Sampling(temperature=0.0)
        return generate(params, prompts, cfg, lengths=lengths, sampling=greedy, max_new_tokens=4).tokens

    ours, theirs = tokens(described), tokens(merge_lora(described))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
