"""Attention of one new token per row to the keys and values kept from earlier ones.

Rows and heads share one axis here, N = B * G. With axes of their own XLA's CPU backend makes eleven copies of the whole
memory in every step of a loop for a single row (2.9 against 31 GB/s measured at 12 heads and 1024 slots).
"""

import jax
import jax.numpy as jnp

from jaxformer.kernels.attention.xla import Bias
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
      key, value: [B * G, S, K]; the products are computed in their dtype. Where the mask hides a slot its key may be
        anything and its value anything finite: to look at each value would cost as much as to use it. `decoding.cache`
        fills empty slots with copies of the first token.
      mask: over [1, S]; each row must see at least one key.
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
        assert not callable(bias), "attend_one: a function has no indices to go by; pass what it returns"
        scores_BHTS = scores_BHTS + bias.reshape((1,) * (4 - bias.ndim) + bias.shape).astype(accumulate)
    allowed = expand(mask, 1, slots)
    if allowed is not None:
        scores_BHTS = jnp.where(allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape), scores_BHTS, -jnp.inf)
    weights_NRS = jax.nn.softmax(scores_BHTS, axis=-1).reshape(scores_NRS.shape).astype(value.dtype)
    out_NRK = jnp.einsum("NRS,NSK->NRK", weights_NRS, value, preferred_element_type=accumulate)
    return out_NRK.reshape(query.shape).astype(query.dtype)
