"""Recurrent layers in the place of attention: decoding, packed rows, meshes, counts, refusals, and a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import decode, params_of

from jaxformer import from_mapping
from jaxformer.config import LossConfig, MeshConfig
from jaxformer.errors import ConfigError
from jaxformer.models import gpt
from jaxformer.models.flops import count_parameters, flops_per_token
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import check_context, make_mesh
from jaxformer.plan import measures, topology
from jaxformer.runs import pretrain
from jaxformer.runs.command_line import parse_config, parser
from jaxformer.specs import init_params
from jaxformer.types import Batch

KINDS = {
    "lstm": {"kind": "lstm", "units": 24},
    "gru": {"kind": "gru"},
    "gru as published": {"kind": "gru", "units": 24, "reset_after": False},
}
EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "lstm" else []) for name in KINDS]
)
SIZES = {"num_layers": 2, "width": 32, "vocab_size": 20, "context_length": 16, "positions": "none"}


def model(name, **more):
    cfg = from_mapping({"model": {**SIZES, "attention": KINDS[name], **more}}).model
    return cfg, params_of(gpt.specs(cfg))


@pytest.mark.slow
@EACH
def test_decoding_is_the_full_forward_pass(name):
    cfg, params = model(name)
    tokens, lengths = np.random.default_rng(0).integers(0, 20, (3, 12)), np.array([5, 1, 3])
    full, found, cache = decode(params, tokens, lengths, cfg, steps=7)
    for step, logits in enumerate(found):
        np.testing.assert_allclose(logits, full[np.arange(3), lengths + step - 1], rtol=1e-4, atol=1e-5)
    units = cfg.attention.hidden_units(32)
    assert {leaf.shape for leaf in jax.tree.leaves(cache.layers)} == {(3, units)}  # whatever the length


@EACH
def test_it_sees_no_other_document_and_no_later_token(name):
    cfg, params = model(name)
    tokens, places = np.random.default_rng(0).integers(0, 20, (1, 10)), np.arange(10)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 2, 2, 2]])
    run = jax.jit(lambda tokens: gpt.apply(params, tokens, cfg, segments=segments))
    one = np.asarray(run(tokens))
    for changed, kept in ((slice(0, 3), slice(3, None)), (slice(6, 10), slice(0, 6))):
        other = np.asarray(run((tokens + np.isin(places, places[changed])) % 20))
        np.testing.assert_array_equal(one[:, kept], other[:, kept])
        assert not np.array_equal(one[:, changed], other[:, changed])


@EACH
@pytest.mark.slow
def test_the_same_on_eight_devices(name):
    cfg, params = model(name)
    ids = np.random.default_rng(0).integers(0, 20, (8, 16))
    segments = jnp.asarray(np.sort(np.random.default_rng(1).integers(1, 4, (8, 16)), axis=1))
    batch = Batch(*map(jnp.asarray, (ids, np.roll(ids, -1, 1), np.ones(ids.shape, np.float32), ids * 0)), segments)
    step = jax.jit(
        jax.value_and_grad(lambda params: make_model(cfg, LossConfig()).loss(params, batch, None)[0]["loss"][0])
    )
    loss, grads = step(params)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])):
        on_eight = jax.device_get(jax.jit(step)(params))
    assert float(on_eight[0]) == pytest.approx(float(loss), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), on_eight[1], grads)


@pytest.mark.slow
def test_counts():
    """By hand: D 32, H 24, LSTM: 4 H (D + H) + H D weights in each layer."""
    cfg, _ = model("lstm")
    params = jax.jit(lambda: init_params(gpt.specs(cfg), jax.random.key(0)))()
    matrices = 4 * 24 * (32 + 24) + 24 * 32
    assert flops_per_token(cfg).projections == 2 * 2 * matrices and flops_per_token(cfg).attention == 0
    leaves = params["blocks"]["attention"]
    assert sum(leaf.size for leaf in jax.tree.leaves(leaves)) == 2 * (matrices + 4 * 24 + 32)
    assert count_parameters(cfg).total == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert (leaves["bias"].reshape(2, 4, 24)[:, 1] == 1).all() and not leaves["bias"].reshape(2, 4, 24)[:, 0].any()
    long, short = (flops_per_token(cfg, length).training for length in (4096, 16))
    assert long == short


def test_what_it_cannot_do_is_one_line():
    line = r"^config.model.attention.kind: lstm reads a row from left to right; accepted with model.family=gpt or rec"
    with pytest.raises(ConfigError, match=line):
        from_mapping({"model": {"family": "bert", "attention": "lstm"}, "data": {"objective": "masked"}})
    with pytest.raises(
        ConfigError, match=r"^config.model.positions.kind: rotary needs queries and keys of heads, which model.att"
    ):
        from_mapping({"model": {"attention": "gru", "positions": "rotary"}})
    with pytest.raises(ConfigError, match=r"^config.model.attention.units: 0; accepted: at least 1$"):
        from_mapping({"model": {"attention": {"kind": "lstm", "units": 0}}})
    config = from_mapping({"model": {"attention": "lstm"}, "mesh": {"context": 2}})
    line = r"^config.mesh.context: 2; model.attention.kind=lstm needs whole rows; accepted: 1$"
    mesh = make_mesh(config.mesh, jax.devices()[:2])
    with pytest.raises(ConfigError, match=line):
        check_context(config.model, mesh)
    with pytest.raises(ConfigError, match=line):
        measures.make_plan(config, topology.make("cpu:2"))


@pytest.mark.slow
def test_a_run(tmp_path):
    """By one override of gpt_tiny; it learns more than how often each token comes."""
    words = [
        "--config=configs/gpt_tiny.py", "--config.model.attention=lstm",
        "--config.model.num_layers=1", "--config.model.width=64", "--config.train.steps=50",
        "--config.data.source=markov",
        "--config.data.language_tokens=40000", "--config.compilation_cache=false", "--config.model.context_length=64",
        "--config.train.eval_rows=64", "--config.train.global_batch_size=16", "--config.optimizer.learning_rate=0.02",
        f"--config.workdir={tmp_path / 'run'}", f"--config.data.cache_dir={tmp_path / 'cache'}",
    ]  # fmt: skip
    parsed = parse_config(parser("", "pretrain"), words)
    found = pretrain.pretrain(parsed)
    assert found.step == 50 and found.evaluation["loss"] < 0.9 * np.log(64)
    assert measures.make_plan(parsed.config, topology.make("cpu:1"))["memory"]["activations"] > 0
