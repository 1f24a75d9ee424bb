"""One model, one curve, whatever the mesh: every axis, rows cut into parts, packed documents, both families."""

import functools

import jax
import numpy as np
import pytest
from flat_config import model_config

from jaxformer.config import Config, DataConfig, Execution, LossConfig, MeshConfig, OptimizerConfig, TrainConfig
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import make_mesh
from jaxformer.training.gradients import gradients
from jaxformer.training.optim import make_optimizer
from jaxformer.training.step import compile_steps, device_put_batch, with_sequence_parallelism
from jaxformer.types import Batch

ROWS, LENGTH, SOURCE, VOCAB, STEPS = 8, 32, 48, 64, 10
# data, fsdp, tensor, context: each alone, and every two of them together
SHAPES = [
    (8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 1, 8), (2, 2, 2, 1), (1, 2, 2, 2), (2, 1, 2, 2), (1, 2, 1, 4),
]  # fmt: skip
WITH_GRADIENT = [(2, 2, 2, 1), (1, 1, 1, 8), (1, 2, 2, 2)]
FAMILIES = {
    "gpt": {"norm": "rms_norm", "activation": "swiglu", "num_kv_heads": 2, "use_bias": False, "qk_norm": True},
    "gpt_window": {"window": 7, "positions": "alibi"},
    "bert": {"family": "bert", "block": "post_norm", "positions": "t5"},
    "encoder_decoder": {
        "family": "encoder_decoder", "encoder": {"num_layers": 1, "source_length": SOURCE}, "positions": "t5",
        "norm": "rms_norm", "use_bias": False, "num_kv_heads": 4,
    },
}  # fmt: skip
OBJECTIVES = {"bert": "masked", "encoder_decoder": "span_corruption"}


def config(family, shape, **mesh):
    model = {"num_layers": 2, "width": 64, "num_heads": 8, "context_length": LENGTH, "vocab_size": VOCAB}
    model |= {"positions": "rotary"} | FAMILIES[family]
    return Config(
        model=model_config(**model),
        execution=Execution(layers="unroll" if family == "gpt_window" else "scan", steps_per_dispatch=STEPS),
        data=DataConfig(objective=OBJECTIVES.get(family, "next_token")),
        mesh=MeshConfig(*shape, **mesh),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=2),
        train=TrainConfig(steps=STEPS, global_batch_size=ROWS),
    )


@functools.cache
def batches(family):
    """Rows packed with documents of different lengths; every token has a target, about a third of them count."""
    out = []
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        tokens = rng.integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32)
        starts = rng.random((ROWS, LENGTH)) < 0.1
        starts[:, 0] = True
        segments = np.cumsum(starts, axis=1, dtype=np.int32)
        first = np.maximum.accumulate(np.where(starts, np.arange(LENGTH), 0), axis=1)
        positions = (np.arange(LENGTH) - first).astype(np.int32)
        weights = (rng.random((ROWS, LENGTH)) < 0.35).astype(np.float32)
        batch = Batch(tokens, (3 * tokens + 1) % VOCAB, weights, positions, segments)
        out.append(with_source(batch, rng) if family == "encoder_decoder" else batch)
    return out


def with_source(batch, rng):
    """The batch with a source for each document, of other lengths than the documents'."""
    segments = np.sort(rng.integers(1, batch.segments.max(axis=1, keepdims=True) + 1, (ROWS, SOURCE))).astype(np.int32)
    tokens = rng.integers(0, VOCAB, (ROWS, SOURCE), dtype=np.int32)
    first = np.array([np.searchsorted(row, row) for row in segments])
    inputs = {"tokens": tokens, "positions": (np.arange(SOURCE) - first).astype(np.int32), "segments": segments}
    return batch._replace(inputs={f"source_{name}": array for name, array in inputs.items()})


@functools.cache
def found(family, shape, with_gradient=True, **mesh_options):
    """Losses of some steps, and the gradient at the start."""
    cfg = config(family, shape, **mesh_options)
    mesh = make_mesh(cfg.mesh, jax.devices()[: int(np.prod(shape))])
    model = make_model(cfg.model, LossConfig())
    optimizer = make_optimizer(cfg.optimizer, cfg.train.steps, model.specs)
    with jax.set_mesh(mesh):
        steps = compile_steps(model, optimizer, mesh, cfg)
        state, grads = steps.init(), None
        if with_gradient:
            gradient = jax.jit(functools.partial(gradients, model=with_sequence_parallelism(model, cfg)))
            batch = device_put_batch(batches(family)[0], mesh)
            grads = jax.device_get(gradient(state.params, batch, jax.random.key(0))[1])
        _, metrics = steps.train(state, *steps.place_chunk(batches(family)))
        return np.asarray(metrics.loss), grads


def agree(family, shape, **options):
    (losses, grads), (expected, wanted) = found(family, shape, **options), found(family, (1, 1, 1, 1))
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert expected[-1] < expected[0]
    if grads is None:
        return
    largest = max(float(np.abs(g).max()) for g in jax.tree.leaves(wanted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6 * largest), grads, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_curves_and_gradients_agree(shape):
    agree("gpt", shape, with_gradient=shape in WITH_GRADIENT)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (1, 2, 2, 2)])
@pytest.mark.parametrize("family", ["gpt_window", "bert", "encoder_decoder"])
def test_so_do_other_models(family, shape):
    agree(family, shape, with_gradient=shape == (1, 2, 2, 2))


@pytest.mark.slow
def test_norms_may_be_split_over_the_tensor_axis():
    agree("gpt", (1, 2, 4, 1), with_gradient=False, sequence_parallel=True)
    agree("gpt", (1, 1, 4, 2), sequence_parallel=True)
