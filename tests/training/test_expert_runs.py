"""Models with experts on ten meshes of eight devices: an update is that of one device, if no router is near a tie."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import (
    CheckpointConfig,
    Config,
    Execution,
    Experts,
    LossConfig,
    MeshConfig,
    ModelConfig,
    Softmax,
    TrainConfig,
)
from jaxformer.functional import experts_layer, router
from jaxformer.models import gpt
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import ORDER, make_mesh
from jaxformer.specs import is_spec
from jaxformer.training.checkpoint.manager import Checkpoints
from jaxformer.training.optim import make_optimizer
from jaxformer.training.step import compile_steps
from jaxformer.types import Batch

ROWS, LENGTH, VOCAB = 32, 8, 32
MARGIN = 1e-3  # of logits of up to 20; rounding moves them by less
KIND = Experts(count=8, top_k=2, shared=1, width=8, activation="swiglu", balance=0.5, z_loss=0.1, bias_rate=0.01)
CONFIG = Config(
    model=ModelConfig(
        num_layers=4, width=16, context_length=LENGTH, vocab_size=VOCAB, attention=Softmax(2), feed_forward=KIND
    ),
    execution=Execution(
        gradient_accumulation_steps=4, layers="scan", attention="xla", experts="ragged", steps_per_dispatch=1
    ),
    train=TrainConfig(global_batch_size=ROWS),
)
ALONE = MeshConfig(data=1)
ROUTE = router.route
BEFORE, AFTER = MeshConfig(data=2, expert=4), MeshConfig(data=2, stage=2, expert=2)
MESHES = [
    ("dropless", BEFORE),
    ("dropless", AFTER),
    ("dropless", MeshConfig(data=1, expert=8)),
    ("dropless", MeshConfig(data=1, fsdp=2, expert=2, tensor=2)),
    ("dropless", MeshConfig(data=1, stage=4, expert=2)),
    ("dropless", MeshConfig(data=1, stage=2, expert=2, tensor=2)),
    ("capacity", MeshConfig(data=1, expert=4, tensor=2)),
    ("capacity", MeshConfig(data=1, fsdp=2, stage=2, expert=2)),
    ("capacity", MeshConfig(data=1, stage=2, expert=4)),
    ("capacity", MeshConfig(data=1, fsdp=2, stage=4)),
]
EXCHANGED = [
    ("dropless", BEFORE),
    ("dropless", AFTER),
    ("dropless", MeshConfig(data=1, fsdp=2, expert=2, tensor=2)),
    ("capacity", MeshConfig(data=1, expert=8)),
    ("capacity", MeshConfig(data=1, fsdp=2, stage=2, expert=2)),
]


def batch_of():
    """Packed documents, and padding at the end of some rows."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32)
    segments = 1 + (np.arange(LENGTH) >= rng.integers(2, LENGTH, (ROWS, 1))).astype(np.int32)
    segments[1::3, 5:] = 0
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    return Batch(tokens, (3 * tokens + 1) % VOCAB, (segments > 0).astype(np.float32), positions, segments)


class OnMesh:
    """The steps of a run on a mesh, compiled quickly."""

    def __init__(self, mesh, dispatch="dropless", exchange="auto"):
        self.mesh = make_mesh(mesh, jax.devices()[: int(np.prod([getattr(mesh, name) for name in ORDER]))])
        kind = replace(KIND, dispatch=dispatch)
        cfg = replace(CONFIG, mesh=mesh, model=replace(CONFIG.model, feed_forward=kind))
        cfg = replace(cfg, execution=replace(cfg.execution, expert_exchange=exchange))
        model = make_model(cfg.model, LossConfig(), cfg.execution)
        self.steps = compile_steps(model, make_optimizer(cfg.optimizer, 10, model.specs), self.mesh, cfg)
        self.like = self.steps.abstract_state

    def put(self, state):
        return jax.tree.map(lambda x, of: jax.device_put(np.array(x), of.sharding), state, self.like)

    def update(self, state):
        with jax.set_mesh(self.mesh):
            arguments = state, *self.steps.place_chunk([batch_of()])
            quickly = {"xla_backend_optimization_level": 0}
            return self.steps.train.lower(*arguments).compile(compiler_options=quickly)(*arguments)


def first_state(like):
    """A router so sure that rounding changes no choice, and moments of zero."""
    rng = np.random.default_rng(13)  # no router comes near a tie
    specs = gpt.specs(CONFIG.model)
    params = jax.tree.map(lambda s: rng.normal(float(s.role == "norm"), 0.3, s.shape), specs, is_leaf=is_spec)
    params["blocks"]["mlp"] |= {name: 0 * params["blocks"]["mlp"][name] for name in ("load", "bias")}
    params["blocks"]["mlp"]["w_router"] *= 5
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    return state._replace(params=jax.tree.map(lambda x, of: x.astype(of.dtype), params, like.params))


def agree(found, expected):
    """Loss and norm of an update, and the moments and the moved biases that it leaves."""
    np.testing.assert_allclose(found[1].loss, expected[1].loss, rtol=1e-6)
    np.testing.assert_allclose(found[1].grad_norm, expected[1].grad_norm, rtol=2e-6)
    for name in experts_layer.MEASURED:
        np.testing.assert_allclose(found[1].sums[name], expected[1].sums[name], rtol=1e-6)
    moments, wanted = found[0].opt_state[0].mu, expected[0].opt_state[0].mu
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-7 * largest), moments, wanted)
    biases = [each.params["blocks"]["mlp"]["bias"] for each in (found[0], expected[0])]
    np.testing.assert_array_equal(*biases)
    assert np.abs(biases[1]).max() > 0


@functools.cache
def updated_alone(dispatch):
    """The update of one device, if no choice is so close that rounding turns it over, which would be another model."""
    margins = []

    def watched(logits, per_token, *rest):
        ordered = jnp.sort(logits, axis=-1)  # the biases are 0
        jax.debug.callback(margins.append, jnp.min(ordered[..., -per_token] - ordered[..., -per_token - 1]))
        return ROUTE(logits, per_token, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "route", watched)
        run = OnMesh(ALONE, dispatch)
        out = jax.device_get(run.update(run.put(first_state(run.like))))
        jax.effects_barrier()
    assert len(margins) >= 4 * 4
    assert min(margins) > MARGIN
    return out


@pytest.mark.slow
@pytest.mark.parametrize("dispatch, mesh", MESHES, ids=str)
def test_an_update_is_that_of_one_device(dispatch, mesh):
    run = OnMesh(mesh, dispatch)
    agree(jax.device_get(run.update(run.put(first_state(run.like)))), updated_alone(dispatch))


@pytest.mark.slow
@pytest.mark.parametrize("dispatch, mesh", EXCHANGED, ids=str)
def test_an_update_of_tokens_sent_by_themselves_is_that_of_one_device(dispatch, mesh):
    run = OnMesh(mesh, dispatch, "ragged_all_to_all")
    agree(jax.device_get(run.update(run.put(first_state(run.like)))), updated_alone(dispatch))


@pytest.mark.slow
def test_a_run_with_four_parts_of_experts_goes_on_in_two_stages(tmp_path):
    before, after = OnMesh(BEFORE), OnMesh(AFTER)
    store = Checkpoints(tmp_path, CheckpointConfig())
    store.save(1, before.put(first_state(before.like)))
    store.close()
    restored = Checkpoints(tmp_path, CheckpointConfig()).restore(after.like)[0]
    agree(jax.device_get(after.update(restored)), updated_alone("dropless"))
