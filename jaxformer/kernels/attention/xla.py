"""Reference attention: plain XLA operations, every option, and the only implementation that expands the mask.

Long causal self-attention is split into static blocks of queries that read only the keys up to their own end, which
saves almost half of the FLOPs; everything else is one block. Without a soft cap or dropout, `xla_vjp` computes it, with
a custom backward pass.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.kernels.attention import xla_vjp
from jaxformer.kernels.attention.nonfinite import marks, usable_key, usable_value
from jaxformer.kernels.attention.xla_vjp import log_sum_exp, rank4, softmax
from jaxformer.kernels.matmul import product
from jaxformer.masks import Mask, crop, expand
from jaxformer.types import Array

QUERY_BLOCK = 128  # least queries per block
BLOCKS = 8  # most blocks without a window, because each one adds to the gradients of all keys before it

Bias = Array | Callable[[Array, Array], Array]


def attend(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    bias: Bias | None,
    *,
    scale: float,
    soft_cap: float | None,
    dropout_rate: float,
    rng: Array | None,
    return_weights: bool = False,
    return_log_sum: bool = False,
) -> Array | tuple[Array, Array]:
    """Attention as `functional.attention.attention` documents it; arguments are already checked there."""
    options = {"scale": scale, "soft_cap": soft_cap, "dropout_rate": dropout_rate}
    queries, keys = query.shape[1], key.shape[1]
    spans = [((0, queries), (0, keys))]
    if mask.causal and mask.query_index is None and mask.key_index is None and queries == keys:
        spans = causal_spans(queries, mask.window)
    plain = soft_cap is None and (rng is None or dropout_rate == 0.0) and not return_log_sum
    if return_weights or (len(spans) == 1 and not plain):
        more = {"return_weights": return_weights, "return_log_sum": return_log_sum}
        return _attend_block(query, key, value, mask, bias, rng, **more, **options)

    parts = [(slice(*rows), slice(*columns)) for rows, columns in spans]
    if plain:
        allowed, biases = [], []
        for rows, columns in parts:
            sizes = rows.stop - rows.start, columns.stop - columns.start
            allowed.append(expand(crop(mask, queries, keys, rows, columns), *sizes))
            cropped = _crop_bias(bias, rows, columns)
            biases.append(cropped(*map(jnp.arange, sizes)) if callable(cropped) else cropped)
        return xla_vjp.attend(query, key, value, tuple(spans), allowed, biases, scale)
    outs: Any = [
        _attend_block(
            query[:, rows],
            key[:, columns],
            value[:, columns],
            crop(mask, queries, keys, rows, columns),
            _crop_bias(bias, rows, columns),
            None if rng is None else jax.random.fold_in(rng, number),
            return_log_sum=return_log_sum,
            **options,
        )
        for number, (rows, columns) in enumerate(parts)
    ]
    if return_log_sum:
        outs, log_sums = zip(*outs, strict=True)
        return jnp.concatenate(outs, axis=1), jnp.concatenate(log_sums, axis=2)
    return jnp.concatenate(outs, axis=1)


def causal_spans(length: int, window: int | None) -> list[tuple[xla_vjp.Span, xla_vjp.Span]]:
    """(first, end) of each block of queries, and of the keys that it reads.

    >>> causal_spans(256, None)
    [((0, 128), (0, 128)), ((128, 256), (0, 256))]
    """
    block = max(QUERY_BLOCK, math.ceil(length / BLOCKS)) if window is None else QUERY_BLOCK
    blocks = [(start, min(start + block, length)) for start in range(0, length, block)]
    return [((start, end), (0 if window is None else max(0, start - window + 1), end)) for start, end in blocks]


def _crop_bias(bias: Bias | None, rows: slice, columns: slice) -> Bias | None:
    if bias is None:
        return None
    if callable(bias):
        return lambda q, k: bias(q + rows.start, k + columns.start)
    bias = bias if bias.shape[-1:] in ((), (1,)) else bias[..., columns]
    return bias if bias.ndim < 2 or bias.shape[-2] == 1 else bias[..., rows, :]


def _attend_block(
    query, key, value, mask, bias, rng, *, scale, soft_cap, dropout_rate, return_weights=False, return_log_sum=False
) -> Array | tuple[Array, Array]:
    batch, queries, heads, width = query.shape
    keys, groups = key.shape[1], key.shape[2]
    per_group = heads // groups
    # Scores accumulate in float32 (float64 under x64); R is the number of query heads per key/value head.
    accumulate = jnp.promote_types(query.dtype, jnp.float32)
    allowed = expand(mask, queries, keys)
    if allowed is not None:
        allowed, marks_BGS = rank4(allowed), jnp.swapaxes(marks(key, value), 1, 2).astype(accumulate)
        marks_BHTS = jnp.repeat(marks_BGS, per_group, axis=1)[:, :, None]
        key, value = usable_key(key), usable_value(value)
    q_BTGRK = (query * jnp.asarray(scale, query.dtype)).reshape(batch, queries, groups, per_group, width)
    scores_BGRTS = product("BTGRK,BSGK->BGRTS", q_BTGRK, key, accumulate)
    scores_BHTS = scores_BGRTS.reshape(batch, heads, queries, keys)
    if soft_cap is not None:
        if allowed is not None:  # tanh has a NaN derivative where a masked score is not finite
            scores_BHTS = jnp.where(allowed, scores_BHTS, 0.0)
        scores_BHTS = soft_cap * jnp.tanh(scores_BHTS / soft_cap)
    if bias is not None:
        bias = bias(jnp.arange(queries), jnp.arange(keys)) if callable(bias) else bias
        scores_BHTS = scores_BHTS + rank4(bias).astype(accumulate)
    if allowed is not None:
        scores_BHTS = jnp.where(allowed, scores_BHTS + marks_BHTS, -jnp.inf)
    weights_BHTS = softmax(scores_BHTS)
    if dropout_rate > 0.0 and rng is not None:
        keep = jax.random.bernoulli(rng, 1.0 - dropout_rate, weights_BHTS.shape)
        weights_BHTS = jnp.where(keep, weights_BHTS / (1.0 - dropout_rate), 0.0)
    weights_BGRTS = weights_BHTS.reshape(batch, groups, per_group, queries, keys).astype(value.dtype)
    out_BTGRK = product("BGRTS,BSGK->BTGRK", weights_BGRTS, value, value.dtype)
    out_BTHK = out_BTGRK.reshape(batch, queries, heads, value.shape[-1])
    if return_log_sum:
        return out_BTHK, log_sum_exp(scores_BHTS)
    return (out_BTHK, weights_BHTS) if return_weights else out_BTHK
