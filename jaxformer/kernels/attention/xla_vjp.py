"""Attention by static blocks of queries with a custom backward pass; `xla` without a soft cap or dropout.

Heads are moved to the front once, so that each head's products read contiguous memory. Only the weights are kept for
the backward pass, in the dtype of the values.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jaxformer.kernels import derivatives
from jaxformer.kernels.attention.nonfinite import marked, only_seen, usable_key, usable_value
from jaxformer.kernels.matmul import rounded_einsum, transposed_products
from jaxformer.kernels.rematerialize import named_attention, rematerialize
from jaxformer.parallel.constraints import constrain
from jaxformer.types import Array

Span = tuple[int, int]


def attend(
    query: Array,
    key: Array,
    value: Array,
    spans: tuple[tuple[Span, Span], ...],
    allowed: list[Array | None],
    biases: list[Array | None],
    scale: float,
) -> Array:
    """Softmax attention.

    Args:
      query: [B, T, H, K].
      key, value: [B, S, G, K] and [B, S, G, K'], H a multiple of G.
      spans: for each block (first, end) of its queries, which cover T in order, and of the keys they read.
      allowed: for each block a bool array that broadcasts to [B, H, t, s], or None: all.
      biases: for each block None, or an array to add to the scores that broadcasts to [B, H, t, s].
      scale: of the scores.

    Returns:
      [B, T, H, K'], zeros for queries without any key.
    """
    batch, queries, heads, _ = query.shape
    groups = key.shape[2]
    split = functools.partial(_split_heads, groups=groups, per_group=heads // groups)
    out = _attend(
        spans, any(x is not None for x in allowed),
        heads_first(query * jnp.asarray(scale, query.dtype), groups), key.swapaxes(1, 2), value.swapaxes(1, 2),
        tuple(map(split, biases)), tuple(map(split, allowed)),
    )  # fmt: skip
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, queries, heads, -1)


def heads_first(x: Array, groups: int) -> Array:
    """[B, T, H, K] -> [B, G, R, T, K]."""
    return x.reshape(*x.shape[:2], groups, -1, x.shape[-1]).transpose(0, 2, 3, 1, 4)


def rank4(x: Array) -> Array:
    """`x` with leading axes of size 1: what broadcasts to [B, H, T, S] as an array of four axes."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _split_heads(x: Array | None, groups: int, per_group: int) -> Array | None:
    """An array that broadcasts to [B, H, t, s] -> one that broadcasts to [B, G, R, t, s]."""
    if x is None:
        return None
    x = rank4(x)
    heads = (1, 1) if x.shape[1] == 1 else (groups, per_group)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attend(spans, masked: bool, query, key, value, biases, allowed) -> Array:
    """query: [B, G, R, T, K]; key, value: [B, G, S, K]; masked: if any `allowed` is an array. [B, G, R, T, K']."""
    return _forward(spans, masked, query, key, value, biases, allowed)[0]


def _forward(spans, masked, query, key, value, biases, allowed):
    seen_key = key
    if masked:
        seen_key, key, value = marked(key, value), usable_key(key), usable_value(value)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    outs, kept = [], []
    for ((first, last), (start, stop)), bias, seen in zip(spans, biases, allowed, strict=True):
        q, (k, usable, v) = query[:, :, :, first:last], (x[:, :, start:stop] for x in (seen_key, key, value))
        scores = _scores(wide, rows(q), rows(k), rows(usable)).reshape(*q.shape[:4], stop - start)
        if bias is not None:
            scores = scores + bias.astype(wide)
        if seen is not None:
            scores = jnp.where(seen, scores, -jnp.inf)
        # All readers use the products' shape, because XLA would allocate the weights once for every shape.
        weights = softmax(rows(scores)).astype(value.dtype)
        outs.append(head_product("GTS,GSK->GTK", weights, rows(v), value.dtype).reshape(*q.shape[:4], v.shape[-1]))
        kept.append(weights)
    out, kept = named_attention((jnp.concatenate(outs, axis=3), kept))
    return out, (query, key, value, biases, kept)


def rows(x: Array) -> Array:
    """[B, G, R, t, s] -> [B, G, R t, s], and [B, G, s, K] unchanged; without B if it is 1. XLA drops that axis for its
    products, so that other readers of the array would need a copy."""
    batch = x.shape[:2] if x.shape[0] != 1 else x.shape[1:2]
    return x.reshape(*batch, math.prod(x.shape[2:-1]), x.shape[-1])


def head_product(spec: str, a: Array, b: Array, dtype) -> Array:
    """einsum per head, of arrays from `rows`, with or without a batch axis."""
    if a.ndim == 4:
        spec = "->".join(",".join("B" + letters for letters in side.split(",")) for side in spec.split("->"))
    return rounded_einsum(spec, a, b, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _scores(dtype, query: Array, seen_key: Array, key: Array) -> Array:
    """Products of queries with marked keys (`nonfinite.marked`). The derivative, needed only for second derivatives of
    attention, uses the finite keys instead, because 0 times a NaN mark would be NaN."""
    return head_product("GTK,GSK->GTS", query, seen_key, dtype)


@_scores.defjvp
def _scores_jvp(dtype, primals, tangents):
    (query, _, key), (d_query, _, d_key) = primals, tangents
    change = head_product("GTK,GSK->GTS", d_query, key, dtype) + head_product("GTK,GSK->GTS", query, d_key, dtype)
    return _scores(dtype, *primals), change


def _backward(spans, masked, saved, g_out):
    query, key, value, biases, kept = saved
    wide = jnp.promote_types(query.dtype, jnp.float32)
    d_query, d_biases = [], []
    if len(spans) > 2:  # otherwise XLA keeps every block's slices of keys and values, which are larger together
        key, value = (rematerialize(x, g_out[:, :, 0, :1, :1]) for x in (key, value))
    # Width before keys: the layout in which these products come out, without a transpose.
    d_key, d_value = (_sharded(jnp.zeros(rows(x).swapaxes(-2, -1).shape, wide)) for x in (key, value))
    for ((first, last), (start, stop)), bias, weights in zip(spans, biases, kept, strict=True):
        block = query[:, :, :, first:last]
        g, q = rows(g_out[:, :, :, first:last]), rows(block)
        k, v = rows(key[:, :, start:stop]), rows(value[:, :, start:stop])
        d_weights = head_product("GTK,GSK->GTS", g, v, wide)
        d_scores = _through_softmax(weights.astype(wide), d_weights)
        d_biases.append(None if bias is None else _summed(d_scores.reshape(*block.shape[:4], stop - start), bias))
        d_scores = _seen_changes(d_scores, weights).astype(query.dtype)
        d_query.append(head_product("GTS,GSK->GTK", d_scores, k, query.dtype).reshape(block.shape))
        d_key = d_key.at[..., start:stop].add(transposed_products(q, d_scores, wide))
        d_value = d_value.at[..., start:stop].add(transposed_products(g, weights, wide))
    # A barrier, because with one block XLA would fold the transpose into the product, which is slow.
    d_key, d_value = (
        d.astype(x.dtype).swapaxes(-2, -1).reshape(x.shape)
        for d, x in zip(jax.lax.optimization_barrier((d_key, d_value)), (key, value), strict=True)
    )
    return jnp.concatenate(d_query, axis=3), d_key, d_value, tuple(d_biases), None


def _sharded(x: Array) -> Array:
    """[B, G, K, S] sharded as what is added to it. XLA keeps zeros whole where it shards only some axes of the mesh."""
    return constrain(x, "rows", "heads", None, None) if x.ndim == 4 else x


@jax.custom_jvp
def _seen_changes(x: Array, weights: Array) -> Array:
    """`x`, with a derivative of 0 where the weights are 0: a huge masked key would make second derivatives infinite."""
    return x


@_seen_changes.defjvp
def _seen_changes_jvp(primals, tangents):
    x, weights = primals
    return x, only_seen(weights, tangents[0])


def _tangent(spans, masked, saved, changes):
    query, key, value, biases, kept = saved
    d_query, d_key, d_value, d_biases, _ = changes
    wide = jnp.promote_types(query.dtype, jnp.float32)
    outs = []
    for ((first, last), (start, stop)), bias, d_bias, weights in zip(spans, biases, d_biases, kept, strict=True):
        q, d_q = query[:, :, :, first:last], rows(d_query[:, :, :, first:last])
        k, v, d_k, d_v = (rows(x[:, :, start:stop]) for x in (key, value, d_key, d_value))
        d_scores = head_product("GTK,GSK->GTS", rows(q), d_k, wide) + head_product("GTK,GSK->GTS", d_q, k, wide)
        if bias is not None:
            d_scores = d_scores + rows(jnp.broadcast_to(d_bias.astype(wide), (*q.shape[:4], stop - start)))
        weights_wide = weights.astype(wide)
        d_weights = _through_softmax(weights_wide, only_seen(weights_wide, d_scores)).astype(value.dtype)
        out = head_product("GTS,GSK->GTK", d_weights, v, value.dtype)
        out = out + head_product("GTS,GSK->GTK", weights, d_v, value.dtype)
        outs.append(out.reshape(*q.shape[:4], v.shape[-1]))
    return jnp.concatenate(outs, axis=3)


derivatives.define(_attend, _forward, _tangent, _backward)


def _summed(grad: Array, like: Array) -> Array:
    """Sums over the axes along which `like` was broadcast."""
    axes = [axis for axis, size in enumerate(like.shape) if size == 1]
    return jnp.sum(grad, axis=axes, keepdims=True).astype(like.dtype)


@jax.custom_jvp
def softmax(scores: Array) -> Array:
    """Softmax over the last axis; zeros if all of it is -inf, for a query without any key.

    The custom derivative needs only the result; autodiff would keep two arrays of that size for the backward pass and
    compute a gradient of the maximum.
    """
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0.0, 1.0, total)


@softmax.defjvp
def _softmax_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    weights = softmax(*primals)
    return weights, _through_softmax(weights, tangents[0])


@jax.custom_jvp
def log_sum_exp(scores: Array) -> Array:
    """The log of the sum of exp(scores) over the last axis; -inf if all of it is -inf, with a derivative of 0."""
    top = jnp.max(scores, axis=-1, initial=-jnp.inf)
    safe = jnp.where(jnp.isfinite(top), top, 0.0)
    total = jnp.sum(jnp.exp(scores - safe[..., None]), axis=-1)
    return jnp.where(top == -jnp.inf, -jnp.inf, safe + jnp.log(jnp.where(total == 0.0, 1.0, total)))


@log_sum_exp.defjvp
def _log_sum_exp_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return log_sum_exp(*primals), jnp.sum(softmax(*primals) * tangents[0], axis=-1)


def _through_softmax(weights: Array, change: Array) -> Array:
    """The derivative's (symmetric) matrix times `change`."""
    part = weights * change
    return part - weights * jnp.sum(part, axis=-1, keepdims=True)
