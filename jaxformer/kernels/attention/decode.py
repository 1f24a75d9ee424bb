"""Attention of one new token per row to the cached keys and values of earlier ones, or of a source.

Rows and heads share one axis, N = B * G. With separate axes, XLA's CPU backend copies the whole cache several times in
every decoding step.
"""

import functools
import itertools
from collections.abc import Callable

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
    slots, accumulate = key.shape[1], jnp.promote_types(query.dtype, jnp.float32)
    q_NRK = _scaled(query, scale).reshape(key.shape[0], -1, query.shape[3]).astype(key.dtype)
    scores_NRS = jnp.einsum("NRK,NSK->NRS", q_NRK, key, preferred_element_type=accumulate)
    scores_BHTS = scores_NRS.reshape(query.shape[0], query.shape[2], 1, slots)
    weights_BHTS = _weights(scores_BHTS, mask, bias, soft_cap)
    weights_NRS = weights_BHTS.reshape(scores_NRS.shape).astype(value.dtype)
    out_NRK = jnp.einsum("NRS,NSK->NRK", weights_NRS, value, preferred_element_type=accumulate)
    return out_NRK.reshape(query.shape).astype(query.dtype)


def attend_beams(
    query: Array,
    keys: tuple[Array, ...],
    values: tuple[Array, ...],
    origins: Array,
    there: Array,
    mask: Mask | None,
    bias: Bias | None,
    *,
    scale: float,
    soft_cap: float | None,
) -> Array:
    """`attend_one` of W beams of each row, of which none has a copy of its own of what was before it: each of them is
    multiplied with what all wrote, and takes its ancestors' scores.

    Args:
      query: [B * W, 1, H, K].
      keys, values: [B * G, K, L * W] and [B * G, L * W, K] for every L of the S slots, of each slot what each beam
        wrote there.
      origins: [B, W, S] int32, the beam that wrote what each beam finds in each slot.
      there: [B * W, S] bool: where something was written; where nothing was, the mask hides it. L slots in which there
        is nothing are not read.
      mask, bias, scale, soft_cap: as of `attend_one`, of B * W rows.

    Returns:
      [B * W, 1, H, K] in the dtype of `query`.
    """
    rows, beams, slots = origins.shape
    groups, accumulate = keys[0].shape[0] // rows, jnp.promote_types(query.dtype, jnp.float32)
    q_NRK = _beside_heads(_scaled(query, scale), rows, groups).astype(keys[0].dtype)
    ends = list(itertools.accumulate(key.shape[2] // beams for key in keys))
    used = [None] if len(keys) == 1 else [jnp.any(there[:, a:b]) for a, b in itertools.pairwise([0, *ends])]
    parts = [
        _if_used(one, functools.partial(jnp.einsum, "NRK,NKS->NRS", preferred_element_type=accumulate), q_NRK, key)
        for one, key in zip(used, keys, strict=True)
    ]
    scores_NRS = jnp.concatenate(parts, axis=2)
    mine = origins[:, :, :, None] == jnp.arange(beams, dtype=jnp.int32)[None, None, None, :]
    mine = jax.lax.optimization_barrier(mine)[:, None, :, None]  # XLA would find it again for every score
    apart = scores_NRS.reshape(rows, groups, beams, -1, slots, beams)
    scores = jnp.swapaxes(jnp.sum(jnp.where(mine, apart, 0), axis=5), 1, 2)
    weights = _weights(scores.reshape(query.shape[0], query.shape[2], 1, slots), mask, bias, soft_cap)
    by_group = jnp.swapaxes(weights.reshape(scores.shape), 1, 2)[..., None]
    weights_NRS = jnp.where(mine, by_group, 0).reshape(scores_NRS.shape).astype(values[0].dtype)
    by_part = jnp.split(weights_NRS, [beams * end for end in ends[:-1]], axis=2)
    out = [
        _if_used(one, functools.partial(jnp.einsum, "NRS,NSK->NRK", preferred_element_type=accumulate), *pair)
        for one, *pair in zip(used, by_part, values, strict=True)
    ]
    return _as_queries(functools.reduce(jnp.add, out), query, rows)


def _if_used(used: Array | None, product: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
    """product(a, b), or zeros if `used` is False. None: always."""
    if used is None:
        return product(a, b)
    shape = jax.eval_shape(product, a, b)
    return jax.lax.cond(used, product, lambda a, b: jnp.zeros(shape.shape, shape.dtype), a, b)


def _scaled(query: Array, scale: float) -> Array:
    return query * jnp.asarray(scale, query.dtype)


def _weights(scores_BHTS: Array, mask: Mask | None, bias: Bias | None, soft_cap: float | None) -> Array:
    """The softmax of the scores of one token."""
    if soft_cap is not None:
        scores_BHTS = soft_cap * jnp.tanh(scores_BHTS / soft_cap)
    if bias is not None:
        assert not callable(bias), "attend_one: bias is a function; accepted: an array"
        scores_BHTS = scores_BHTS + rank4(bias).astype(scores_BHTS.dtype)
    allowed = expand(mask, 1, scores_BHTS.shape[3])
    if allowed is not None:
        scores_BHTS = jnp.where(rank4(allowed), scores_BHTS, -jnp.inf)
    return jax.nn.softmax(scores_BHTS, axis=-1)


def _beside_heads(query: Array, rows: int, groups: int) -> Array:
    """[B * W, 1, H, K] -> [B * G, W * H / G, K]: beams stand beside the query heads of a group, so that a product reads
    each key once."""
    heads, width = query.shape[2:]
    apart = query.reshape(rows, -1, groups, heads // groups, width)
    return jnp.swapaxes(apart, 1, 2).reshape(rows * groups, -1, width)


def _as_queries(out_NRK: Array, query: Array, rows: int) -> Array:
    """The inverse of `_beside_heads`, in the shape and dtype of the query."""
    groups, beams = out_NRK.shape[0] // rows, query.shape[0] // rows
    apart = out_NRK.reshape(rows, groups, beams, -1, out_NRK.shape[2])
    return jnp.swapaxes(apart, 1, 2).reshape(query.shape).astype(query.dtype)


def attend_shared(
    query: Array, key: Array, value: Array, there: Array, *, scale: float, soft_cap: float | None
) -> Array:
    """Attention of one token in each of W continuations of a row to the keys that they share.

    Args:
      query: [B * W, 1, H, K].
      key: [B * G, K, S], so stored because XLA's CPU backend multiplies a few rows with it faster. The products are
        computed in its dtype.
      value: [B * G, S, K].
      there: [B, S] bool; the others are masked; at least one in each row is True.
      scale, soft_cap: as in `functional.attention.attention`.

    Returns:
      [B * W, 1, H, K] in the dtype of `query`.
    """
    (rows, slots), accumulate = there.shape, jnp.promote_types(query.dtype, jnp.float32)
    groups = key.shape[0] // rows
    q_NRK = _beside_heads(_scaled(query, scale), rows, groups).astype(key.dtype)
    scores_BRS = jnp.einsum("NRK,NKS->NRS", q_NRK, key, preferred_element_type=accumulate).reshape(rows, -1, slots)
    if soft_cap is not None:
        scores_BRS = soft_cap * jnp.tanh(scores_BRS / soft_cap)
    weights_BRS = jax.nn.softmax(jnp.where(there[:, None, :], scores_BRS, -jnp.inf), axis=-1)
    weights_NRS = weights_BRS.reshape(rows * groups, -1, slots).astype(value.dtype)
    out_NRK = jnp.einsum("NRS,NSK->NRK", weights_NRS, value, preferred_element_type=accumulate)
    return _as_queries(out_NRK, query, rows)
