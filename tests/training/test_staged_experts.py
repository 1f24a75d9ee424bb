"""Experts in stages: a run of four parts of experts goes on in two stages, and computes what one device computes."""

from dataclasses import replace

import jax
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
from jaxformer.models import gpt
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import ORDER, make_mesh
from jaxformer.specs import is_spec
from jaxformer.training.checkpoint.manager import Checkpoints
from jaxformer.training.optim import make_optimizer
from jaxformer.training.step import compile_steps
from jaxformer.types import Batch

ROWS, LENGTH, VOCAB = 16, 8, 32
KIND = Experts(count=4, top_k=2, width=8, balance=0.5, z_loss=0.1, bias_rate=0.01)
CONFIG = Config(
    model=ModelConfig(
        num_layers=2, width=16, context_length=LENGTH, vocab_size=VOCAB, attention=Softmax(2), feed_forward=KIND
    ),
    execution=Execution(
        gradient_accumulation_steps=2, layers="scan", attention="xla", experts="ragged", steps_per_dispatch=1
    ),
    train=TrainConfig(global_batch_size=ROWS),
)
BEFORE = MeshConfig(data=2, expert=4)
AFTER = MeshConfig(data=2, stage=2, expert=2)
ALONE = MeshConfig(data=1)


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

    def __init__(self, mesh):
        self.mesh = make_mesh(mesh, jax.devices()[: int(np.prod([getattr(mesh, name) for name in ORDER]))])
        cfg = replace(CONFIG, mesh=mesh)
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
    rng = np.random.default_rng(1)
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
    moments, wanted = found[0].opt_state[0].mu, expected[0].opt_state[0].mu
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-7 * largest), moments, wanted)
    biases = [each.params["blocks"]["mlp"]["bias"] for each in (found[0], expected[0])]
    np.testing.assert_array_equal(*biases)
    assert np.abs(biases[1]).max() > 0


@pytest.mark.slow
def test_a_run_with_four_parts_of_experts_goes_on_in_two_stages(tmp_path):
    """As it does on one device; that the parts are one device themselves, `test_expert_meshes.py` says."""
    before, after, alone = (OnMesh(mesh) for mesh in (BEFORE, AFTER, ALONE))
    store = Checkpoints(tmp_path, CheckpointConfig())
    store.save(1, before.put(first_state(before.like)))
    store.close()
    updated = [
        jax.device_get(each.update(Checkpoints(tmp_path, CheckpointConfig()).restore(each.like)[0]))
        for each in (after, alone)
    ]
    agree(*updated)
