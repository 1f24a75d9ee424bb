"""Attention of one new token per row to the cached keys and values of earlier ones, or of a source.

Rows and heads share one axis, N = B * G. With separate axes, XLA's CPU backend copies the whole cache several times in
every decoding step.
"""

import jax
import jax.numpy as jnp

from jaxformer.kernels.attention.xla import Bias
from jaxformer.kernels.attention.xla_vjp import rank4
from jaxformer.masks import Mask, expand
from jaxformer.types import Array


def attend_one(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask | None,
    bias: Bias | None,
    *,
    scale: float,
    soft_cap: float | None,
) -> Array:
    """Scaled dot-product attention with T = 1.

    Args:
      query: [B, 1, H, K].
      key, value: [B * G, S, K]; the products are computed in their dtype. In a masked slot the key may be anything and
        the value anything finite, because checking values costs as much as using them. `decoding.cache` fills empty
        slots with copies of the first token.
      mask: over [1, S]; each row must have at least one key that is not masked.
      bias: an array broadcastable to [B, H, 1, S], or None.
      scale, soft_cap: as in `functional.attention.attention`.

    Returns:
      [B, 1, H, K] in the dtype of `query`.
    """
    batch, _, heads, width = query.shape
    slots = key.shape[1]
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    q_NRK = (query * jnp.asarray(scale, query.dtype)).reshape(key.shape[0], -1, width).astype(key.dtype)
    scores_NRS = jnp.einsum("NRK,NSK->NRS", q_NRK, key, preferred_element_type=accumulate)
    scores_BHTS = scores_NRS.reshape(batch, heads, 1, slots)
    if soft_cap is not None:
        scores_BHTS = soft_cap * jnp.tanh(scores_BHTS / soft_cap)
    if bias is not None:
        assert not callable(bias), "attend_one: bias is a function; accepted: an array"
        scores_BHTS = scores_BHTS + rank4(bias).astype(accumulate)
    allowed = expand(mask, 1, slots)
    if allowed is not None:
        scores_BHTS = jnp.where(rank4(allowed), scores_BHTS, -jnp.inf)
    weights_NRS = jax.nn.softmax(scores_BHTS, axis=-1).reshape(scores_NRS.shape).astype(value.dtype)
    out_NRK = jnp.einsum("NRS,NSK->NRK", weights_NRS, value, preferred_element_type=accumulate)
    return out_NRK.reshape(query.shape).astype(query.dtype)


def attend_shared(
    query: Array, key: Array, value: Array, there: Array, *, scale: float, soft_cap: float | None
) -> Array:
    """Attention of one token in each of W continuations of a row to the keys that they share.

    Args:
      query: [B * W, 1, H, K].
      key, value: [B * G, S, K]; the products are computed in their dtype.
      there: [B, S] bool; the others are masked; at least one in each row is True.
      scale, soft_cap: as in `functional.attention.attention`.

    Returns:
      [B * W, 1, H, K] in the dtype of `query`.
    """
    (rows, slots), (_, _, heads, width) = there.shape, query.shape
    groups, accumulate = key.shape[0] // rows, jnp.promote_types(query.dtype, jnp.float32)
    # The continuations stand beside the query heads of a group, so that a product reads each key once.
    scaled = (query * jnp.asarray(scale, query.dtype)).reshape(rows, -1, groups, heads // groups, width)
    q_NRK = jnp.swapaxes(scaled, 1, 2).reshape(rows * groups, -1, width).astype(key.dtype)
    scores_BRS = jnp.einsum("NRK,NSK->NRS", q_NRK, key, preferred_element_type=accumulate).reshape(rows, -1, slots)
    if soft_cap is not None:
        scores_BRS = soft_cap * jnp.tanh(scores_BRS / soft_cap)
    weights_BRS = jax.nn.softmax(jnp.where(there[:, None, :], scores_BRS, -jnp.inf), axis=-1)
    weights_NRS = weights_BRS.reshape(rows * groups, -1, slots).astype(value.dtype)
    out_NRK = jnp.einsum("NRS,NSK->NRK", weights_NRS, value, preferred_element_type=accumulate)
    out = jnp.swapaxes(out_NRK.reshape(rows, groups, -1, heads // groups, width), 1, 2)
    return out.reshape(query.shape).astype(query.dtype)
