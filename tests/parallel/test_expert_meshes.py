"""A layer of experts on eight devices: the same loss and gradients on every mesh, while no router is near a tie."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxformer.config import Dense, Execution, Experts, LossConfig, MeshConfig, ModelConfig, Rotary, Softmax
from jaxformer.errors import ConfigError
from jaxformer.functional import router
from jaxformer.models import gpt
from jaxformer.parallel.mesh import batch_sharding, check_context, check_experts, make_mesh, param_shardings
from jaxformer.specs import init_params
from jaxformer.training.gradients import gradients
from jaxformer.types import Batch, Model

B, T, V = 16, 16, 32
CFG = ModelConfig(
    num_layers=2, width=16, context_length=T, vocab_size=V, use_bias=False, attention=Softmax(4), positions=Rotary(),
    norm="rms_norm", feed_forward=Experts(
        count=4, per_token=2, shared=1, activation="swiglu", width=8, balance=0.5, z_loss=0.1, bias_rate=0.01),
)  # fmt: skip
MESHES = {
    "fsdp and tensor": MeshConfig(data=2, fsdp=2, tensor=2),
    "expert and tensor": MeshConfig(data=1, expert=4, tensor=2),
    "all axes": MeshConfig(data=1, fsdp=2, context=2, expert=2),
}
MARGIN = 1e-5  # of probabilities; rounding moves them by less


def config_of(dispatch):
    kind = replace(CFG.feed_forward, dispatch=dispatch)
    if dispatch != "expert_choice":
        return replace(CFG, feed_forward=kind)
    return replace(CFG, family="bert", use_bias=True, feed_forward=replace(kind, balance=None, bias_rate=0.0))


def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, V, (B, T)).astype(np.int32)
    segments = np.where(np.arange(T) < 7, 1, 2).astype(np.int32) * np.ones((B, 1), np.int32)
    segments[1, 10:], segments[-1] = 0, 0
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    return Batch(tokens, np.roll(tokens, -1, 1), (segments > 0).astype(np.float32), positions, segments)


def run(cfg, mesh, micro_batches):
    specs = gpt.specs(cfg)
    model = Model(
        specs, None, lambda p, b, rng, _: gpt.loss(p, b, cfg, LossConfig(), rng, Execution(layers="scan")),
        lambda b: gpt.weights(b, cfg),
    )  # fmt: skip
    params = jax.tree.map(np.asarray, init_params(specs, jax.random.key(0)))
    params["blocks"]["mlp"]["w_router"] *= 30
    step = jax.jit(functools.partial(gradients, model=model, micro_batches=micro_batches))
    if mesh is None:
        return params, step(params, batch(), jax.random.key(1))
    with jax.set_mesh(mesh):
        there = jax.device_put(params, param_shardings(specs, mesh))
        return params, step(there, jax.device_put(batch(), batch_sharding(mesh)), jax.random.key(1))


@functools.cache
def alone(dispatch):
    """On one device, where no choice may be so close that rounding turns it over: that would be another model."""
    seen, plain = [], router.route

    def note(logits, *args):
        jax.debug.callback(lambda x: seen.append(np.sort(np.asarray(jax.nn.softmax(x)), axis=-1)), logits)
        return plain(logits, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "route", note)
        found = jax.device_get(run(config_of(dispatch), None, 1))
        jax.effects_barrier()
    assert len(seen) >= CFG.num_layers
    there = batch().segments > 0
    assert min((x[..., -2] - x[..., -3])[there].min() for x in seen) > MARGIN
    return found


def same(dispatch, name, micro_batches):
    _, wanted = alone(dispatch)
    _, got = jax.device_get(run(config_of(dispatch), make_mesh(MESHES[name]), micro_batches))
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-5)

    def close(a, b):
        np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max(), rtol=1e-3)

    jax.tree.map(close, got[1], wanted[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_losses_and_gradients_are_those_of_one_device(name):
    same("dropless", name, 2)


@pytest.mark.slow
def test_experts_of_some_capacity():
    same("capacity", "expert and tensor", 1)


def refused(check, cfg, **mesh):
    with pytest.raises(ConfigError) as caught:
        check(cfg, make_mesh(MeshConfig(data=1, **mesh), jax.devices()[: np.prod(list(mesh.values()))]))
    return str(caught.value)


def test_what_a_mesh_cannot_split():
    assert refused(check_experts, CFG, expert=3) == (
        "config.mesh.expert: 3 does not divide model.feed_forward.count 4; accepted: a divisor of 4"
    )
    assert refused(check_experts, replace(CFG, feed_forward=Dense()), expert=2) == (
        "config.mesh.expert: 2 has no experts to split; accepted: 1, or model.feed_forward.kind=experts"
    )
    assert refused(check_context, config_of("capacity"), context=2) == (
        "config.mesh.context: 2; model.feed_forward.kind=experts needs whole rows; accepted: 1"
    )
