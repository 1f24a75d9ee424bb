"""Whole models in forward mode: a tangent is the gradient's product; the Hessian of a loss is its gradient's change."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import both, changed
from jax.flatten_util import ravel_pytree
from model_cases import POSITIONS, SEGMENTS, B, T, random_params

from jaxformer.config import LossConfig, ModelConfig
from jaxformer.models import bert, gpt
from jaxformer.types import Batch


@dataclasses.dataclass(frozen=True)
class Exact(ModelConfig):
    """A model computed in float64, which no program offers."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float64"  # type: ignore[assignment]


def config(**fields):
    """(model, execution)"""
    sizes = {"num_layers": 1, "width": 16, "num_heads": 4, "context_length": T, "vocab_size": 20, "dtype": "float64"}
    return both(Exact, **{**sizes, **fields})


KINDS = {
    "gpt2": (gpt, *config()),
    "llama": (
        gpt,
        *config(
            norm="rms_norm", activation="swiglu", use_bias=False, positions="rotary", num_kv_heads=2,
            qk_norm=True, attention="chunked", layers="scan", num_layers=2, tie_embeddings=False,
        ),
    ),
    "t5": (gpt, *config(positions="t5", block="post_norm", attention_soft_cap=3.0, remat="dots")),
    "bert": (bert, *config(family="bert", block="post_norm", token_types=2)),
}  # fmt: skip


def batch_of(cfg):
    rng = np.random.default_rng(3)
    tokens, targets = rng.integers(0, cfg.vocab_size, (2, B, T))
    return Batch(*map(jnp.array, (tokens, targets, rng.random((B, T)) < 0.7, POSITIONS, SEGMENTS)))


def loss_of(family, cfg, execution):
    """(loss of the parameters as one vector, the parameters)."""
    flat, back = ravel_pytree(jax.tree.map(lambda x: jnp.array(x, jnp.float64), random_params(family.specs(cfg))))
    batch = batch_of(cfg)
    batch = batch._replace(weights=batch.weights.astype(jnp.float64))

    def loss(flat):
        total, weight = family.loss(back(flat), batch, cfg, LossConfig(z_loss=0.01), execution=execution)[0]["loss"]
        return total / weight

    return loss, flat, back


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5", "bert"])
def test_hessian_times_a_direction(kind):
    family, cfg, execution = KINDS[kind]
    with jax.enable_x64(True):
        loss, flat, back = loss_of(family, cfg, execution)
        v = np.random.default_rng(1).normal(size=flat.shape)
        tokens = batch_of(cfg).tokens

        def logits_of(flat):
            return gpt.apply(back(flat), tokens, cfg, execution=execution)

        @jax.jit
        def along(x):
            """The slope along v, the gradient and its change along v; of logits, both sides of the law of a product."""
            slope = jax.jvp(loss, (x,), (v,))[1]
            gradient, change = jax.jvp(jax.grad(loss), (x,), (v,))
            if family is not gpt:
                return slope, gradient, change, (0.0, 0.0)
            logits, tangent = jax.jvp(logits_of, (x,), (v,))
            (pulled,) = jax.vjp(logits_of, x)[1](jnp.cos(logits))
            return slope, gradient, change, (jnp.vdot(jnp.cos(logits), tangent), pulled @ v)

        slope, gradient, found, (forward, backward) = along(flat)
        np.testing.assert_allclose(slope, gradient @ v, rtol=1e-9)
        np.testing.assert_allclose(forward, backward, rtol=1e-8)
        assert bool(forward) == (family is gpt)
        step = 1e-5
        wanted = (along(flat + step * v)[1] - along(flat - step * v)[1]) / (2 * step)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.slow
def test_the_whole_hessian_of_a_small_gpt():
    """`jax.hessian` of all parameters: symmetric, and each row the change of the gradient."""
    family, cfg, execution = KINDS["gpt2"]
    cfg = changed(cfg, num_layers=1, width=4, num_heads=2, mlp_width=4)
    with jax.enable_x64(True):
        loss, flat, _ = loss_of(family, cfg, execution)
        found = np.asarray(jax.jit(jax.hessian(loss))(flat))
        step = 1e-5
        rows = jax.jit(jax.vmap(jax.grad(loss)))
        steps = step * jnp.eye(len(flat))
        wanted = (rows(flat[None] + steps) - rows(flat[None] - steps)) / (2 * step)
        scale = np.abs(found).max()
        np.testing.assert_allclose(found, found.T, atol=1e-12 * scale)
        np.testing.assert_allclose(found, wanted, atol=1e-6 * scale)
