"""Masked keys and values have no influence, even if they are NaN, infinite or so large that products overflow.

The weight of a masked pair is exactly 0, but a matrix product computes it anyway, and 0 * NaN is NaN. So non-finite
numbers are replaced by 0 in products with the weights, and reach the queries that attend to them as NaN scores instead.
This takes passes over keys and values, but none over the scores, where one more operation would split a loop that
XLA's CPU backend fuses, from the product with the values to the gradient of the scores.
"""

import jax.numpy as jnp

from jaxformer.masks import Mask
from jaxformer.types import Array


def largest(dtype) -> float:
    """Larger values count as infinite, because their product with a gradient may overflow: 2^62 in float32, bfloat16.

    >>> largest(jnp.bfloat16) == 2.0**62
    True
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    return min(2.0 ** (jnp.finfo(wide).maxexp // 2 - 2), float(jnp.finfo(dtype).max))


def usable_key(key: Array) -> Array:
    """`key` with 0 where it is NaN or infinite, so that its product with the 0 of a masked pair is 0."""
    return jnp.where(jnp.isfinite(key), key, 0)


def usable_value(value: Array) -> Array:
    """`value` with 0 where it is NaN or beyond `largest`.

    >>> usable_value(jnp.array([1.0, jnp.nan, -jnp.inf, 1e38])).tolist()
    [1.0, 0.0, 0.0, 0.0]
    """
    return jnp.where(_fit(value), value, 0)


def marked(key: Array, value: Array) -> Array:
    """`key` [..., K] with NaN where `value` [..., K'] counts as infinite: queries that attend to it get NaN scores."""
    fit = _fit(value)
    if key.shape[-1] != value.shape[-1]:
        fit = jnp.all(fit, axis=-1, keepdims=True)
    return jnp.where(fit, key, jnp.nan)


def marks(key: Array, value: Array) -> Array:
    """[..., K] and [..., K'] -> [...]: NaN where key or value is not finite, else 0; to be added to scores.

    >>> marks(jnp.array([[1.0, 2.0], [1.0, jnp.inf]]), jnp.ones((2, 3))).tolist()
    [0.0, nan]
    """
    fit = jnp.all(jnp.isfinite(key), axis=-1) & jnp.all(_fit(value), axis=-1)
    return jnp.where(fit, 0.0, jnp.nan).astype(key.dtype)


def only_seen(weights: Array, x: Array) -> Array:
    """`x` with 0 where the weights, of the same shape, are 0, even if x is NaN there."""
    return jnp.where(weights == 0, 0, x)


def without_padding(mask: Mask, *arrays: Array) -> list[Array]:
    """Keys and values [B, S, G, K] with 0 for keys that are masked for all queries: padding and empty slots.

    For external kernels (splash, cuDNN), for which nothing more can be guaranteed.
    """
    for seen in (mask.keys, None if mask.key_index is None else mask.key_index >= 0):
        if seen is not None:
            seen = seen.reshape((1,) * (2 - seen.ndim) + seen.shape)[..., None, None]
            arrays = tuple(jnp.where(seen, x, 0) for x in arrays)
    return list(arrays)


def _fit(value: Array) -> Array:
    return jnp.abs(value) <= largest(value.dtype)
