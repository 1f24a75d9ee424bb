"""Funnel-Transformers: what no token may see; parts and costs; a mesh; refusals; a run that goes on after a kill."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import random_params

from jaxformer import from_mapping
from jaxformer.config import Execution, LossConfig, MeshConfig, stacks_of
from jaxformer.errors import ConfigError
from jaxformer.functional.pooling import mean_pool, repeat_pooled
from jaxformer.models import funnel
from jaxformer.models.flops import count_parameters, flops_per_token
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import check_context, make_mesh
from jaxformer.plan import costs, hlo, measures, topology
from jaxformer.runs import pretrain
from jaxformer.runs.command_line import parse_config, parser
from jaxformer.specs import abstract_params
from jaxformer.types import Batch

T = 16
MODEL = {
    "family": "funnel", "attention": {"kind": "funnel", "num_heads": 2}, "positions": "none", "block": "post_norm",
    "num_layers": 5, "width": 16, "context_length": T, "vocab_size": 20,
    "funnel": {"blocks": [1, 2, 1], "decoder_layers": 1, "separate_cls": False},
}  # fmt: skip
DATA = {"objective": "masked"}


def config(funnel_fields=None, data=None, **fields):
    made = {**MODEL, **fields, "funnel": {**MODEL["funnel"], **(funnel_fields or {})}}
    return from_mapping({"model": made, "data": {**DATA, **(data or {})}}).model


def model(num_layers=5, **funnel_fields):
    cfg = config(funnel_fields, {"pairs": bool(funnel_fields.get("separate_cls"))}, num_layers=num_layers)
    return cfg, random_params(funnel.specs(cfg))


@pytest.mark.parametrize("separate_cls", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_token_sees_another_document(separate_cls):
    """Exactly, wherever a document begins: pooled tokens take nothing from another one, and give it nothing."""
    cfg, params = model(separate_cls=separate_cls, **({"blocks": [3, 1]} if not separate_cls else {}))
    tokens = np.random.default_rng(0).integers(0, 20, (1, T))
    run = jax.jit(lambda tokens, segments: funnel.apply(params, tokens, cfg, segments=segments))
    for cut in (4, 7, 9):
        segments = np.array([[1] * cut + [2] * (T - cut)])
        one = np.asarray(run(tokens, segments))
        for changed, kept in ((slice(0, cut), slice(cut, None)), (slice(cut, None), slice(0, cut))):
            moved = tokens.copy()
            moved[:, changed] = (moved[:, changed] + 1) % 20
            other = np.asarray(run(moved, segments))
            np.testing.assert_array_equal(one[:, kept], other[:, kept])
            assert not np.array_equal(one[:, changed], other[:, changed])


@pytest.mark.slow
def test_a_document_that_begins_where_all_blocks_pool_is_as_alone():
    cfg, params = model()
    tokens = np.random.default_rng(0).integers(0, 20, (1, T))
    run = jax.jit(lambda tokens, segments: funnel.apply(params, tokens, cfg, segments=segments))
    packed = run(tokens, np.array([[1] * 8 + [2] * 8]))
    alone = run(tokens[:, 8:], np.ones((1, 8), int))
    np.testing.assert_allclose(packed[:, 8:], alone, rtol=1e-5, atol=1e-5)


def test_what_is_repeated_belongs_to_the_document_of_the_token():
    segments, pooled = jnp.array([[1, 1, 1, 2, 2, 2, 2, 2]]), jnp.array([[1, 1, 2, 2]])
    x = jnp.arange(1.0, 9.0)[None, :, None]
    means = mean_pool(x, segments)
    assert means[0, :, 0].tolist() == [1.5, 3.0, 5.5, 7.5]
    back = repeat_pooled(means, 8, segments, pooled)
    assert back[0, :, 0].tolist() == [1.5, 1.5, 3.0, 0.0, 5.5, 5.5, 7.5, 7.5]


def test_parts_are_shorter_with_every_block():
    cfg = config()
    parts = [(part.num_layers, part.context_length, part.pools) for part in stacks_of(cfg)]
    assert parts == [(1, 16, False), (1, 8, True), (1, 8, False), (1, 4, True), (1, 16, False)]
    assert config({"blocks": []}, num_layers=9).funnel.layers(9) == (3, 3, 2)
    assert count_parameters(cfg).by_group["blocks"] == 5 * count_parameters(replace(cfg, num_layers=4, funnel=replace(
        cfg.funnel, blocks=(2, 1)))).by_group["blocks"] // 4  # fmt: skip


@pytest.mark.slow
def test_operations_are_those_of_the_program():
    """And the projection of the distances, once for all rows."""
    cfg, rows = config(), 2
    run = jax.jit(lambda p, t: funnel.apply(p, t, cfg, execution=Execution(attention="xla")))
    compiled = run.lower(abstract_params(funnel.specs(cfg)), jnp.zeros((rows, T), int)).compile()
    distances = [2 * p.context_length * (1 + p.pools) - 1 - p.pools for p in stacks_of(cfg)]
    shared = sum(2 * number * cfg.width**2 for number in distances)
    assert costs.flops(hlo.read(compiled.as_text())) == rows * T * flops_per_token(cfg).forward + shared


@pytest.mark.slow
def test_the_same_on_eight_devices():
    cfg, params = model(num_layers=3, blocks=[1, 1])
    ids = np.random.default_rng(0).integers(0, 20, (8, T))
    segments = np.sort(np.random.default_rng(1).integers(1, 4, (8, T)))
    batch = Batch(ids, np.roll(ids, -1, 1), np.ones(ids.shape, np.float32), ids * 0, segments)
    batch = jax.tree.map(jnp.asarray, batch)

    def loss(params, attention):
        made = make_model(cfg, LossConfig(), execution=Execution(attention=attention))
        return made.loss(params, batch, None)[0]["loss"][0]

    def whole(params):
        return jax.value_and_grad(loss)(params, "xla")

    wanted, grads = jax.jit(whole)(params)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])):
        both = jax.jit(lambda params: (whole(params), loss(params, "chunked")))
        (found, on_eight), chunked = jax.device_get(both(params))
    assert float(found) == pytest.approx(float(wanted), rel=1e-5) == pytest.approx(float(chunked), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), on_eight, grads)


def test_what_it_cannot_do_is_refused():
    for fields, line in (
        ({"funnel_fields": {"blocks": [4, 4, 4]}}, r"config.model.funnel.blocks: \(4, 4, 4\) and .*num_layers 5; acc"),
        ({"context_length": 18}, r"config.model.context_length: 18; model.funnel.blocks .* need rows divisible by 4"),
        ({"positions": "learned"}, "config.model.positions.kind: learned; accepted with model.family=funnel: none"),
        ({"block": "pre_norm"}, "config.model.block: pre_norm; accepted with model.family=funnel: post_norm"),
        ({"attention": "softmax"}, "config.model.attention.kind: softmax; accepted with model.family=funnel: funnel"),
        ({"funnel_fields": {"separate_cls": True}}, "config.model.funnel.separate_cls: True; rows of packed documents"),
        ({"funnel_fields": {"decoder_layers": 0}}, "config.model.funnel.decoder_layers: 0; accepted: at least 1"),
    ):
        with pytest.raises(ConfigError, match=line):
            config(**fields)
    with pytest.raises(ConfigError, match=r"config.model.funnel: Funnel\(.*; accepted with model.family=funnel"):
        from_mapping({"model": {"funnel": {}}})
    with pytest.raises(ConfigError, match=r"^config.model.attention.kind: funnel; accepted with model.family=funnel"):
        from_mapping({"model": {"attention": "funnel"}})
    with pytest.raises(ConfigError, match=r"^config.mesh.context: 2; model.attention.kind=funnel needs whole rows"):
        check_context(config(), make_mesh(MeshConfig(data=1, context=2), jax.devices()[:2]))


@pytest.mark.slow
def test_a_run_goes_on_as_if_it_had_never_stopped(tmp_path):
    """Of pairs with a separate [CLS], by overrides of funnel_tiny; a lost checkpoint is made again bit for bit."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"All happy families are alike. {n} " * (20 + n % 3) for n in range(40)))
    flags = [
        "--config=funnel_tiny", "--config.model.num_layers=3", "--config.model.width=16",
        "--config.model.context_length=32", "--config.model.funnel.blocks=1,1",
        "--config.model.funnel.decoder_layers=1", f"--config.data.files={text}", "--config.data.tokenizer=bytes",
        "--config.train.global_batch_size=8", "--config.train.steps=2", "--config.execution.steps_per_dispatch=1",
        "--config.optimizer.warmup_steps=0", "--config.train.eval_rows=8", "--config.checkpoint.save_every_steps=1",
        "--config.compilation_cache=false", f"--config.data.cache_dir={tmp_path / 'cache'}",
        "--config.data.separator=\\n\\n", "--config.execution.layers=scan",
    ]  # fmt: skip

    def run(name):
        parsed = parse_config(parser("", "pretrain"), [*flags, f"--config.workdir={tmp_path / name}"])
        return pretrain.pretrain(parsed)

    found = run("run")
    assert found.step == 2 and np.isfinite(found.evaluation["loss"])
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "checkpoints" / "2")
    assert run("killed").step == 2
    both = [pretrain.open_run(tmp_path / name).params for name in ("run", "killed")]
    jax.tree.map(np.testing.assert_array_equal, *both)
    plan = measures.make_plan(parse_config(parser("", "pretrain"), flags).config, topology.make("cpu:1"))
    assert plan["memory"]["activations"] > 0
