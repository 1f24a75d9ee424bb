"""What a mask hides has no influence, whatever stands there: NaN, infinities, numbers too large to be multiplied.

The weight of a hidden pair is exactly 0, but a product cannot skip it, and 0 * NaN is NaN. So products with weights are
given usable numbers, and a key or value that is not finite reaches the queries that may see it through their scores.
All of this costs passes over keys and values, none over the scores: one more operation there would split what XLA's CPU
backend does in one go, from the product with the values to the gradient of the scores.
"""

import jax.numpy as jnp

from jaxformer.masks import Mask
from jaxformer.types import Array


def largest(dtype) -> float:
    """A value beyond this counts as infinite, as its product with a gradient may be: 2^62 for float32 and bfloat16.

    >>> largest(jnp.bfloat16) == 2.0**62
    True
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    return min(2.0 ** (jnp.finfo(wide).maxexp // 2 - 2), float(jnp.finfo(dtype).max))


def usable_key(key: Array) -> Array:
    """`key` with 0 where it is NaN or infinite, so that its product with the 0 of a hidden pair is 0."""
    return jnp.where(jnp.isfinite(key), key, 0)


def usable_value(value: Array) -> Array:
    """`value` with 0 where it is NaN or beyond `largest`.

    >>> usable_value(jnp.array([1.0, jnp.nan, -jnp.inf, 1e38])).tolist()
    [1.0, 0.0, 0.0, 0.0]
    """
    return jnp.where(_fit(value), value, 0)


def marked(key: Array, value: Array) -> Array:
    """`key` [..., K] with NaN where `value` [..., K'] is not usable: queries that may see it then get scores of NaN."""
    fit = _fit(value)
    if key.shape[-1] != value.shape[-1]:
        fit = jnp.all(fit, axis=-1, keepdims=True)
    return jnp.where(fit, key, jnp.nan)


def marks(key: Array, value: Array) -> Array:
    """[..., K] and [..., K'] -> [...]: NaN where key or value is not usable, else 0; to be added to scores.

    >>> marks(jnp.array([[1.0, 2.0], [1.0, jnp.inf]]), jnp.ones((2, 3))).tolist()
    [0.0, nan]
    """
    fit = jnp.all(jnp.isfinite(key), axis=-1) & jnp.all(_fit(value), axis=-1)
    return jnp.where(fit, 0.0, jnp.nan).astype(key.dtype)


def only_seen(weights: Array, x: Array) -> Array:
    """`x` where the weights, of its shape, are not 0; there 0, whatever stands there."""
    return jnp.where(weights == 0, 0, x)


def without_padding(mask: Mask, *arrays: Array) -> list[Array]:
    """Keys and values [B, S, G, K] with 0 where the mask hides a key from all queries: padding and empty slots.

    For kernels that others wrote (splash, cuDNN), for which no more can be promised.
    """
    for seen in (mask.keys, None if mask.key_index is None else mask.key_index >= 0):
        if seen is not None:
            seen = seen.reshape((1,) * (2 - seen.ndim) + seen.shape)[..., None, None]
            arrays = tuple(jnp.where(seen, x, 0) for x in arrays)
    return list(arrays)


def _fit(value: Array) -> Array:
    return jnp.abs(value) <= largest(value.dtype)
