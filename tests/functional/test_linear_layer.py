"""Linear attention, Performer and Linformer in attention's place: decoding, documents, meshes, refusals, and runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import decode, params_of

from jaxformer import decoding, from_mapping
from jaxformer.config import LossConfig, MeshConfig, ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.functional.block import block, block_specs
from jaxformer.functional.layer import Context
from jaxformer.functional.linear_attention import favor_attention
from jaxformer.functional.sublayers import MIXERS
from jaxformer.models.families import family_of
from jaxformer.modules import Block, make_model
from jaxformer.parallel.mesh import check_context, make_mesh
from jaxformer.plan import measures, topology
from jaxformer.runs import evaluation, pretrain
from jaxformer.runs.command_line import parse_config, parser
from jaxformer.types import Batch

KINDS = {
    "linear": {"kind": "linear"},
    "performer": {"kind": "performer", "features": 12, "num_kv_heads": 2},
    "hyperbolic": {"kind": "performer", "feature_kind": "hyperbolic", "redraw": False, "qk_norm": True},
}
EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "performer" else []) for name in KINDS]
)
SIZES = {"num_layers": 2, "width": 32, "vocab_size": 20, "context_length": 16, "positions": "rotary"}
LINFORMER = {"family": "bert", "positions": "learned"}


def model(attention, **more):
    cfg = ModelConfig(**{**SIZES, **more}, attention=attention)
    return cfg, params_of(family_of(cfg).specs(cfg))


def tokens_of(rows, length):
    return np.random.default_rng(0).integers(0, 20, (rows, length))


def changed(tokens, *places):
    """Other tokens at some places."""
    tokens = tokens.copy()
    tokens[places] = (tokens[places] + 1) % 20
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_decoding_is_the_full_forward_pass(name):
    cfg, params = model(KINDS[name])
    tokens, lengths = tokens_of(3, 12), np.array([5, 1, 3])
    full, found, cache = decode(params, tokens, lengths, cfg, steps=7)
    for step, logits in enumerate(found):
        np.testing.assert_allclose(logits, full[np.arange(3), lengths + step - 1], rtol=2e-4, atol=2e-5)

    @jax.jit
    def with_prefix(params):
        hidden, _ = decoding.prefill(params, tokens, lengths, cfg, 12, prefix_lm=True)
        prefix = np.arange(12)[None] < lengths[:, None]
        return decoding.logits(params, hidden), family_of(cfg).apply(params, tokens, cfg, prefix=prefix)

    found, full = jax.device_get(with_prefix(params))
    np.testing.assert_allclose(found, full[np.arange(3), lengths - 1], rtol=2e-4, atol=2e-5)
    kind = cfg.attention
    features = kind.num_features(32) if name != "linear" else 8
    sums = cache.layers[0]["attention"].sums
    assert sums.shape == (3, kind.kv_heads, features, 8 + 1) and sums.dtype == jnp.float32  # whatever the length


@EACH
@pytest.mark.parametrize("family", ["gpt", pytest.param("bert", marks=pytest.mark.slow)])
def test_it_sees_no_other_document_and_no_later_token(name, family):
    cfg, params = model(KINDS[name], family=family)
    tokens = tokens_of(1, 10)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 2, 2, 2]])
    run = jax.jit(lambda tokens: family_of(cfg).apply(params, tokens, cfg, segments=segments))
    one = np.asarray(run(tokens))
    for own, kept in ((slice(0, 3), slice(3, None)), (slice(6, 10), slice(0, 6 if family == "gpt" else 3))):
        other = np.asarray(run(changed(tokens, 0, own)))
        np.testing.assert_array_equal(one[:, kept], other[:, kept])
        assert not np.array_equal(one[:, own], other[:, own])


@pytest.mark.slow
def test_features_are_drawn_anew_in_training_only():
    """By the key of the step; without one the block's own directions are used, which get no update."""
    cfg, _ = model(KINDS["performer"])
    params = params_of(block_specs(cfg))["attention"]
    x, apply = np.random.default_rng(1).normal(size=(1, 5, 32)).astype(np.float32), MIXERS["performer"].apply
    run = jax.jit(lambda params, rng: apply(params, x, cfg, Context(rng=rng))[0])
    fixed, *drawn = (np.asarray(run(params, rng)) for rng in (None, *map(jax.random.key, (1, 2, 2))))
    assert not np.array_equal(drawn[0], fixed) and not np.array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[1], drawn[2])
    moved = {**params, "directions": 2 * np.asarray(params["directions"])}
    np.testing.assert_array_equal(run(moved, jax.random.key(1)), drawn[0])
    spec = block_specs(cfg)["attention"]["directions"]
    assert not spec.trained and spec.shape == (12, 8)
    with jax.enable_x64(True):  # the layer is the function, between its projections
        wide = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
        wide["directions"] = np.random.default_rng(5).normal(size=(12, 8))
        cfg = ModelConfig(**SIZES, attention={**KINDS["performer"], "redraw": False}, use_bias=False)
        bare = {name: leaf for name, leaf in wide.items() if name.startswith("w_") or name == "directions"}

        @jax.jit
        def both(p, x, rng):
            q, k, v = (jnp.einsum("BTD,DHK->BTHK", x, p[f"w_{n}"]) for n in ("query", "key", "value"))
            wanted = jnp.einsum("BTHK,HKD->BTD", favor_attention(q, k, v, p["directions"]), p["w_out"])
            return apply(p, x, cfg, Context(rng=rng))[0], wanted

        np.testing.assert_allclose(*both(bare, x.astype(np.float64), jax.random.key(1)), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", ["none", "headwise", "key_value", "layerwise"])
def test_linformer(sharing):
    """It sees its own document and no padding; how many projections there are; all layers share the layerwise one."""
    kind = {"kind": "linformer", "projected_length": 5, "sharing": sharing, "num_kv_heads": 2}
    cfg, params = model(kind, **LINFORMER)
    tokens, segments = tokens_of(2, 10), np.array([[1] * 7 + [0] * 3, [1] * 10])

    @jax.jit
    def run(params, tokens):
        def loss(params):
            out = family_of(cfg).apply(params, tokens, cfg, segments=segments)
            return jnp.sum(out**2), out

        return jax.grad(loss, has_aux=True)(params)[::-1]

    given = tokens, changed(tokens, 0, slice(7, None)), changed(tokens, 1), changed(tokens, 0, 6)
    (one, grads), (other, _), (row, _), (token, _) = (jax.device_get(run(params, each)) for each in given)
    np.testing.assert_array_equal(one[:, :7], other[:, :7])
    np.testing.assert_array_equal(one[0, :7], row[0, :7])
    assert not np.array_equal(one[0, 0], token[0, 0])
    rows = {"none": 2 * 2 * 2, "headwise": 2 * 2, "key_value": 2, "layerwise": 1}[sharing] * 16 * 5
    own = [x.size for path, x in jax.tree_util.tree_leaves_with_path(params) if "w_row" in jax.tree_util.keystr(path)]
    assert sum(own) == rows
    assert all(np.any(x != 0) for path, x in jax.tree_util.tree_leaves_with_path(grads) if "w_row" in str(path))
    part, x = params_of(block_specs(cfg)), jnp.ones((1, 16, 32))
    if sharing == "layerwise":
        with pytest.raises(
            ConfigError, match=r"^config.model.attention.sharing: layerwise has a projection of the whole"
        ):
            Block(cfg).init(jax.random.key(0), x)
    else:
        assert jax.eval_shape(lambda p: block(p, x, cfg)[0], part).shape == x.shape


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention, more",
    [(KINDS["linear"], {}), (KINDS["performer"], {}), ({"kind": "linformer", "sharing": "layerwise"}, LINFORMER)],
)
def test_the_same_on_eight_devices(attention, more):
    cfg, params = model(attention, context_length=192, num_layers=2 if more else 1, **more)
    ids = tokens_of(8, 192)
    if more:
        segments = (np.arange(192)[None] < np.arange(100, 196, 12)[:, None]).astype(np.int32)
    else:
        segments = np.sort(np.random.default_rng(1).integers(1, 4, (8, 192)), axis=1)
    weights = (segments > 0).astype(np.float32)
    batch = Batch(*map(jnp.asarray, (ids, np.roll(ids, -1, 1), weights, ids * 0, segments)))
    loss_of, rng = make_model(cfg, LossConfig()).loss, jax.random.key(3)
    step = jax.jit(jax.value_and_grad(lambda params: loss_of(params, batch, rng)[0]["loss"][0]))
    loss, grads = step(params)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])):
        on_eight = jax.device_get(jax.jit(step)(params))
    assert float(on_eight[0]) == pytest.approx(float(loss), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-3), on_eight[1], grads)


def test_what_it_cannot_do_is_one_line():
    config = from_mapping({"model": {"attention": "linear"}, "mesh": {"context": 2}})
    line = r"^config.mesh.context: 2; model.attention.kind=linear needs whole rows; accepted: 1$"
    with pytest.raises(ConfigError, match=line):
        check_context(config.model, make_mesh(config.mesh, jax.devices()[:2]))
    with pytest.raises(ConfigError, match=line):
        measures.make_plan(config, topology.make("cpu:2"))


RUNS = {
    "performer": ["gpt_tiny", "--config.model.attention=performer", "--config.data.source=markov"],
    "linformer": [
        "bert_tiny", "--config.model.attention=linformer", "--config.data.pairs=true",
        "--config.model.bert.next_sentence=true", "--config.data.tokenizer=bytes",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run(name, tmp_path):
    """By one override; it learns more than how often each token comes. Its loss by place adds up to its loss."""
    base, *flags = RUNS[name]
    given = "markov" in str(flags)
    if not given:  # documents of a few words each, which follow each other
        dice = np.random.default_rng(0)
        words = [" ".join(dice.choice(["to", "be", "or", "not", "that"], 60)) for _ in range(400)]
        (tmp_path / "text.txt").write_text("\n\n".join(words))
        flags += [f"--config.data.files={tmp_path / 'text.txt'}", "--config.data.separator=\n\n"]
    words = [
        f"--config=configs/{base}.py", *flags, "--config.model.num_layers=1", "--config.model.width=96",
        "--config.train.steps=50", "--config.model.context_length=160", "--config.compilation_cache=false",
        "--config.train.eval_rows=16", "--config.train.global_batch_size=8", "--config.optimizer.learning_rate=0.01",
        *(["--config.data.language_tokens=40000"] if given else []),
        f"--config.workdir={tmp_path / 'run'}", f"--config.data.cache_dir={tmp_path / 'cache'}",
    ]  # fmt: skip
    parsed = parse_config(parser("", "pretrain"), words)
    found = pretrain.pretrain(parsed)
    assert found.step == 50 and found.evaluation["loss"] < (0.95 * np.log(64) if given else 2.5)
    assert measures.make_plan(parsed.config, topology.make("cpu:1"))["memory"]["activations"] > 0
    if name == "performer":
        lines = []
        cache = str(tmp_path / "cache")
        told = evaluation.evaluate(tmp_path / "run", cache_dir=cache, by_position=True, log=lines.append)
        by_place = told["by_position"]
        assert [row["first"] for row in by_place] == [0, 1, 2, 4, 8, 16, 32, 64, 128]
        total = sum(row["weight"] for row in by_place)
        assert sum(row["weight"] * row["loss"] for row in by_place) / total == pytest.approx(told["loss"], rel=1e-4)
        assert total == told["weight"] and sum(line.startswith("  ") for line in lines) == 10
