"""Masks, arrays and the laws that every platform's attention kernel is held to."""

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


def check(implementation, mask, rules, groups, soft_cap=None):
    """Value and gradients against float64, and exactly zero gradients of some queries wherever they may not see."""
    allowed = np.broadcast_to(reference.allowed(T, T, **rules), (B, H, T, T))
    q, k, v = arrays(groups)
    queries = np.array([0, 1, 2, 127, 128, T - 1])
    weights = np.random.default_rng(1).normal(size=(B, T, H, K)) + 2

    def run(q, k, v, implementation):
        return attention(q, k, v, mask, soft_cap=soft_cap, implementation=implementation)

    out, backward = jax.vjp(lambda *x: run(*x, implementation), q, k, v)
    nothing = ~allowed.any(axis=-1)
    assert (np.moveaxis(np.asarray(out), 2, 1)[nothing] == 0).all()
    expected = reference.attention(*(np.asarray(x, np.float64) for x in (q, k, v)), allowed=allowed, soft_cap=soft_cap)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    with jax.enable_x64(True):
        wide = [jnp.array(np.asarray(x), jnp.float64) for x in (q, k, v)]
        exact = jax.vjp(lambda *x: run(*x, "xla"), *wide)[1](jnp.array(weights))
    for found, right in zip(backward(jnp.array(weights, jnp.float32)), exact, strict=True):
        np.testing.assert_allclose(found, right, atol=2e-5 * np.abs(right).max())
    seen = allowed.reshape(B, groups, H // groups, T, T).any(axis=2)
    for t in queries:
        only = jnp.zeros((B, T, H, K)).at[:, t].set(jnp.array(weights[:, t], jnp.float32))
        _, d_key, d_value = (np.asarray(x) for x in backward(only))
        hidden = ~np.moveaxis(seen[:, :, t], 1, 2)
        assert (d_key[hidden] == 0).all() and (d_value[hidden] == 0).all(), f"query {t} leaks"
