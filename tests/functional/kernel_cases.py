"""Masks, arrays and the laws that every platform's attention kernel is held to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference

from jaxformer import masks
from jaxformer.functional.attention import attention

B, T, H, K = 2, 256, 4, 64
SEGMENTS = np.stack([np.arange(T) * 3 // T, np.arange(T) >= 2]).astype(np.int32)
PADDING = np.stack([np.arange(T) >= 2, np.arange(T) < T - 3])
# name -> (mask, the reference's rules); the last two hold queries that see nothing.
MASKS = {
    "causal_window_segments": (
        masks.causal() & masks.window(60) & masks.segments(jnp.array(SEGMENTS)),
        {"causal": True, "window": 60, "segments": SEGMENTS},
    ),
    "none": (None, {}),
    "causal": (masks.causal(), {"causal": True}),
    "window": (masks.window(60), {"window": 60}),
    "segments": (masks.segments(jnp.array(SEGMENTS)), {"segments": SEGMENTS}),
    "segments_of_two_arrays": (
        masks.segments(jnp.array(SEGMENTS), jnp.array(SEGMENTS.copy())),
        {"segments": SEGMENTS},
    ),
    "causal_padding": (masks.causal() & masks.padding(jnp.array(PADDING)), {"causal": True, "padding": PADDING}),
    "window_segments_padding": (
        masks.window(3) & masks.segments(jnp.array(SEGMENTS)) & masks.padding(jnp.array(PADDING)),
        {"window": 3, "segments": SEGMENTS, "padding": PADDING},
    ),
}


def arrays(groups, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.array(rng.normal(size=(B, T, heads, K)), dtype) for heads in (H, groups, groups)]


@functools.cache
def exact_gradients(soft_cap):
    """Compiled once for all masks: float64 gradients by query, key and value, where `allowed` says who sees whom."""

    def gradients(q, k, v, allowed, weights):
        def run(*x):
            return attention(*x, masks.dense(allowed), soft_cap=soft_cap, implementation="xla")

        return jax.vjp(run, q, k, v)[1](weights)

    return jax.jit(gradients)


def check(implementation, mask, rules, groups, soft_cap=None):
    """Value and gradients against float64, and exactly zero gradients of some queries wherever they may not see."""
    allowed = np.broadcast_to(reference.allowed(T, T, **rules), (B, H, T, T))
    q, k, v = arrays(groups)
    queries = np.array([0, 1, 2, 127, 128, T - 1])
    weights = np.random.default_rng(1).normal(size=(B, T, H, K)) + 2
    of_one = np.zeros((len(queries), *weights.shape))  # the weights of one query alone
    for own, t in zip(of_one, queries, strict=True):
        own[:, t] = weights[:, t]

    @jax.jit
    def run(q, k, v, cotangents):
        out, backward = jax.vjp(
            lambda *x: attention(*x, mask, soft_cap=soft_cap, implementation=implementation), q, k, v
        )
        return out, jax.lax.map(backward, cotangents)

    out, grads = jax.device_get(run(q, k, v, jnp.asarray(np.stack([weights, *of_one]), jnp.float32)))
    nothing = ~allowed.any(axis=-1)
    assert (np.moveaxis(out, 2, 1)[nothing] == 0).all()
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    np.testing.assert_allclose(out, reference.attention(*wide, allowed=allowed, soft_cap=soft_cap), atol=2e-5)
    with jax.enable_x64(True):
        exact = jax.device_get(exact_gradients(soft_cap)(*wide, allowed, weights))
    for found, right in zip(grads, exact, strict=True):
        np.testing.assert_allclose(found[0], right, atol=2e-5 * np.abs(right).max())
    seen = allowed.reshape(B, groups, H // groups, T, T).any(axis=2)
    for t, d_key, d_value in zip(queries, grads[1][1:], grads[2][1:], strict=True):
        hidden = ~np.moveaxis(seen[:, :, t], 1, 2)
        assert (d_key[hidden] == 0).all() and (d_value[hidden] == 0).all(), f"query {t} leaks"
