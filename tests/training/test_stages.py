"""Layers in stages compute what they compute one after another: losses, gradients, dropout, a run that goes on."""

import functools
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flat_config import model_config

from jaxformer.config import CheckpointConfig, Config, DataConfig, Execution, LossConfig, MeshConfig, TrainConfig
from jaxformer.models import backbone
from jaxformer.modules import make_model
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel.pipeline import STAGE
from jaxformer.specs import is_spec
from jaxformer.training.checkpoint.manager import Checkpoints
from jaxformer.training.gradients import gradients
from jaxformer.training.optim import make_optimizer
from jaxformer.training.state import abstract_state
from jaxformer.training.step import compile_steps, device_put_batch
from jaxformer.types import Batch

ROWS, LENGTH, VOCAB, LAYERS, MICRO = 16, 8, 32, 4, 4
MODELS = {
    "gpt": {"norm": "rms_norm", "num_heads": 4, "num_kv_heads": 2, "use_bias": False, "positions": "rotary"},
    "bert": {
        "family": "bert", "block": "post_norm", "positions": "t5", "dropout": 0.1,
        "attention": {"num_heads": 4}, "bert": {"token_types": 2, "next_sentence": True},
    },
}  # fmt: skip


def config(name, remat="none", repeats=1, **mesh):
    fields = {"num_layers": LAYERS, "width": 16, "context_length": LENGTH, "vocab_size": VOCAB}
    bert = name == "bert"
    return Config(
        model=model_config(**fields | MODELS[name]),
        execution=Execution(
            gradient_accumulation_steps=MICRO,
            pipeline_repeats=repeats,
            remat=remat,
            layers="scan",
            attention="xla",
            steps_per_dispatch=1,
        ),
        data=DataConfig(objective="masked" if bert else "next_token", pairs=bert),
        mesh=MeshConfig(**mesh),
        train=TrainConfig(global_batch_size=ROWS),
    )


def mesh_of(cfg):
    sizes = [getattr(cfg.mesh, name) for name in meshes.ORDER]
    return meshes.make_mesh(cfg.mesh, jax.devices()[: int(np.prod(sizes))])


@functools.cache
def batch(name):
    """Rows packed with documents of different lengths; about half of the tokens count."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32)
    starts = rng.random((ROWS, LENGTH)) < 0.2
    starts[:, 0] = True
    segments = np.cumsum(starts, axis=1, dtype=np.int32)
    first = np.maximum.accumulate(np.where(starts, np.arange(LENGTH), 0), axis=1)
    weights = (rng.random((ROWS, LENGTH)) < 0.5).astype(np.float32)
    positions = (np.arange(LENGTH) - first).astype(np.int32)
    inputs = {"token_types": segments % 2, "pair_labels": rng.integers(-1, 2, ROWS, dtype=np.int32)}
    return Batch(tokens, (3 * tokens + 1) % VOCAB, weights, positions, segments, inputs if name == "bert" else None)


def filled(specs):
    """Numbers for parameters, without a program that draws them."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda spec: rng.normal(float(spec.role == "norm"), 0.2, spec.shape).astype(np.float32), specs, is_leaf=is_spec
    )


@functools.cache
def program(name, remat="none", repeats=1, **mesh):
    """(batch, parameters) -> loss, gradient and metrics of a model on a mesh."""
    cfg = config(name, remat, repeats, **mesh)
    mesh, model = mesh_of(cfg), make_model(cfg.model, LossConfig(), cfg.execution)
    run = jax.jit(functools.partial(gradients, model=model, micro_batches=MICRO, staged=STAGE in mesh.shape))
    shardings = meshes.param_shardings(model.specs, mesh)

    def found(batch, params=None):
        params = jax.device_put(filled(model.specs) if params is None else params, shardings)
        with jax.set_mesh(mesh):
            return jax.device_get(run(params, device_put_batch(batch, mesh), jax.random.key(3))[:3])

    return found


def agree(found, expected):
    largest = max(float(np.abs(g).max()) for g in jax.tree.leaves(expected[1]))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-7 * largest), found[1], expected[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), found[2], expected[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat, repeats, mesh",
    [
        ("full", 1, {"data": 2, "stage": 4}),
        ("none", 1, {"data": 1, "stage": 2, "fsdp": 2, "tensor": 2}),
        ("full", 2, {"data": 2, "stage": 2, "fsdp": 2}),
        ("dots", 2, {"data": 1, "stage": 2}),
    ],
    ids=str,
)
def test_stages_are_the_layers_one_after_another(remat, repeats, mesh):
    agree(program("gpt", remat, repeats, **mesh)(batch("gpt")), program("gpt", data=1)(batch("gpt")))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_micro_batches_of_data_apart_add_up_to_the_whole(mesh):
    agree(program("gpt", **mesh)(batch("gpt")), program("gpt", data=1)(batch("gpt")))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 2, "stage": 2}], ids=str)
def test_dropout_is_drawn_for_all_rows_together(mesh):
    """So what is dropped does not depend on how many devices share out the rows."""
    alone = {name: size for name, size in mesh.items() if name == "stage"}
    expected = program("bert", data=1, **alone)(batch("bert"))
    agree(program("bert", **mesh)(batch("bert")), expected)


@pytest.mark.slow
def test_rows_that_do_not_divide_over_the_data_axis_are_evaluated():
    """Micro-batches of 2 rows on 4 groups of devices, as an evaluation may have them."""
    cfg, of = config("gpt", data=8), batch("gpt")
    model, params = make_model(cfg.model, LossConfig(), cfg.execution), filled(backbone.specs(cfg.model))
    run = jax.jit(lambda *args: model.loss(*args, None, None)[0])
    expected = run(params, of)
    cut = config("gpt", data=4, stage=2)
    cut = make_model(cut.model, LossConfig(), replace(cut.execution, gradient_accumulation_steps=8))
    with jax.set_mesh(mesh_of(config("gpt", data=4, stage=2))):
        found = jax.jit(lambda *args: cut.loss(*args, None, None)[0])(params, of)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), found, expected)


@pytest.mark.slow
def test_so_they_are_with_dropout_and_biases():
    """The same elements are dropped: those of each micro-batch by itself."""
    cfg, of = config("bert", data=1, stage=2), batch("bert")
    model, rngs = make_model(cfg.model, LossConfig(), cfg.execution), jax.random.split(jax.random.key(3), MICRO)
    params, run = filled(model.specs), jax.jit(lambda *args: model.loss(*args)[0])
    parts = [run(params, jax.tree.map(lambda x, m=m: x[m::MICRO], of), rngs[m]) for m in range(MICRO)]
    expected = jax.tree.map(lambda *each: sum(each), *parts)
    with jax.set_mesh(mesh_of(cfg)):
        found = run(params, of, rngs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), found, expected)


@pytest.mark.slow
def test_so_they_are_where_layers_differ():
    """Local, global, local, global, of which each stage has two."""
    cfg = config("gpt", data=1, stage=2)
    model = replace(cfg.model, attention=replace(cfg.model.attention, window=3, global_every=2))
    params, of = filled(backbone.specs(model)), batch("gpt")

    @jax.jit
    def run(params):
        fields = {"positions": of.positions, "segments": of.segments, "execution": cfg.execution}
        return backbone.hidden(params, of.tokens, model, **fields)

    expected = run(params)
    with jax.set_mesh(mesh_of(cfg)):
        np.testing.assert_allclose(run(params), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_packed_documents_do_not_see_each_other():
    """Another text in the first document of every row changes nothing of the others, to the last bit."""
    run, of = program("gpt", "full", data=2, stage=4), batch("gpt")
    of = of._replace(weights=np.where(of.segments > 1, of.weights, 0))
    other = of._replace(tokens=np.where(of.segments == 1, (of.tokens + 5) % VOCAB, of.tokens))
    one, two = run(of), run(other)
    assert one[0] == two[0]
    jax.tree.map(np.testing.assert_array_equal, *(found[1]["blocks"] for found in (one, two)))


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [1, 2])
def test_a_run_goes_on_without_its_stages(tmp_path, repeats):
    """A first update on stages leaves in the moments the gradient of one device; a second one finds the same loss there
    and, restored, on one device."""
    cfg, of = config("gpt", "full" if repeats > 1 else "none", repeats, data=4, stage=2), batch("gpt")
    mesh, model = mesh_of(cfg), make_model(cfg.model, LossConfig(), cfg.execution)
    optimizer = make_optimizer(cfg.optimizer, cfg.train.steps, model.specs)
    steps = compile_steps(model, optimizer, mesh, cfg)
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), steps.abstract_state)._replace(
        params=filled(model.specs)
    )
    state = jax.tree.map(lambda x, of: jax.device_put(x, of.sharding), state, steps.abstract_state)
    with jax.set_mesh(mesh):
        state, first = steps.train(state, *steps.place_chunk([of]))
        store = Checkpoints(tmp_path, CheckpointConfig())
        store.save(1, state)
        store.close()
        assert {x.sharding.spec[0] for x in jax.tree.leaves(state.params["blocks"])} == {STAGE}
        _, second = jax.device_get(steps.train(state, *steps.place_chunk([of])))

    alone = meshes.make_mesh(MeshConfig(data=1), jax.devices()[:1])
    restored, step = Checkpoints(tmp_path, CheckpointConfig()).restore(abstract_state(model, optimizer, alone))
    assert step == 1
    expected, then = (program("gpt", data=1)(of, params) for params in (None, restored.params))
    np.testing.assert_allclose([first.loss[0], second.loss[0]], [expected[0], then[0]], rtol=1e-6)
    norms = [optax.tree.norm(found[1]) for found in (expected, then)]
    np.testing.assert_allclose([first.grad_norm[0], second.grad_norm[0]], norms, rtol=2e-6)
    share = (1 - cfg.optimizer.beta1) * min(1.0, cfg.optimizer.clip_norm / norms[0])
    largest = share * max(float(np.abs(g).max()) for g in jax.tree.leaves(expected[1]))
    agree_with = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-7 * largest)
    jax.tree.map(lambda m, g: agree_with(m, share * g), restored.opt_state[0].mu, expected[1])
