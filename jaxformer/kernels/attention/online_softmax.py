"""Online softmax over pairs of blocks, shared by `chunked` and `ring`.

A block of queries visits blocks of keys and keeps a running maximum, sum and weighted value. The gradients visit the
same pairs and recompute the weights from the largest score and the log of the sum. Pairs that the mask rules out are
skipped, and so are the keys of a block that causality hides. Heads come first, so that a block is contiguous for its
products.

Source: Rabe and Staats 2021, section 3; Dao et al. 2022, algorithms 1 and 4.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.kernels.attention.block_tables import each_listed
from jaxformer.kernels.attention.nonfinite import only_seen
from jaxformer.kernels.attention.tiles import TiledInputs, TileOptions, cut, cut_mask
from jaxformer.kernels.attention.xla_vjp import head_product, rank4, rows
from jaxformer.kernels.matmul import transposed_products
from jaxformer.masks import Mask, expand
from jaxformer.types import Array

# For each query, over the keys visited so far: the largest score, the sum of weights, the weighted sum of values.
Carry = tuple[Array, Array, Array]


class Normalizer(NamedTuple):
    """What turns the scores of each query into weights, [B, H, T]: exp((score - top) - log_total).

    Two numbers, because their sum, the log-sum-exp, rounds `log_total` away where the scores are large: with a bias of
    -1e9 on all keys of a query, float32 would give each of them the weight 1.
    """

    top: Array
    log_total: Array


class Gradients(NamedTuple):
    """Gradients of `TiledInputs`, float32 or wider."""

    query: Array  # [B, G, R, T, K]
    key: Array  # [B, G, K, S], the layout in which its products come out; `turned` transposes it
    value: Array  # [B, G, K', S]
    bias: tuple[Array, ...]


def _allowed(o: TileOptions, mask: Mask, i: Array, j: Array) -> Array:
    """Which pairs of query block i and key block j the mask allows, broadcastable to [B, H, t, s]."""
    sizes = o.query_block, o.key_block
    allowed = expand(cut_mask(mask, (i * o.query_block, j * o.key_block), sizes), *sizes)
    assert allowed is not None  # the key index is always explicit
    return rank4(allowed)


def _bounds(o: TileOptions, i: Array, key_blocks: int) -> tuple[Array, Array]:
    """First and one-past-last key block that causality and the window allow for query block i."""
    first, last = i * o.query_block, (i + 1) * o.query_block - 1
    low, high = jnp.zeros((), i.dtype), jnp.full((), key_blocks, i.dtype)
    if o.causal:
        high = jnp.minimum(high, last // o.key_block + 1)
    if o.window is not None:
        low = jnp.maximum(low, (first - o.window + 1) // o.key_block)
        high = jnp.minimum(high, (last + o.window - 1) // o.key_block + 1)
    return low, high


def _bias_block(o: TileOptions, bias: tuple[Array, ...], i: Array, j: Array, shape: tuple[int, ...]) -> Array:
    """The bias of a pair of blocks as [B, H, t, s], for the first s of its keys."""
    if o.bias is not None:
        q = i * o.query_block + jnp.arange(o.query_block)
        found = o.bias(q, j * o.key_block + jnp.arange(o.key_block), *bias)
    else:
        found = cut(cut(bias[0], 2, i * o.query_block, o.query_block), 3, j * o.key_block, o.key_block)
    return jnp.broadcast_to(rank4(found)[..., : shape[3]], shape)


def _scores(
    o: TileOptions, x: TiledInputs, query: Array, key: Array, i: Array, j: Array, allowed: Array | None
) -> tuple[Array, Array | None]:
    """Scores [B, H, t, s] of a pair of blocks, -inf where not allowed; and the soft cap's tanh, if there is one."""
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = head_product("GTK,GSK->GTS", rows(query), rows(key), wide)
    scores = scores.reshape(query.shape[0], -1, query.shape[3], key.shape[2])
    squashed = None
    if o.soft_cap is not None:
        squashed = jnp.tanh(scores / o.soft_cap)
        scores = o.soft_cap * squashed
    if x.bias or o.bias is not None:
        scores = scores + _bias_block(o, x.bias, i, j, scores.shape).astype(wide)
    return scores if allowed is None else jnp.where(allowed, scores, -jnp.inf), squashed


def _kept(o: TileOptions, x: TiledInputs, i: Array, j: Array, shape: tuple[int, ...], dtype) -> Array | None:
    """Dropout's factor for each weight, 0 or 1 / (1 - rate), the same in the backward pass; None: no dropout."""
    if o.dropout_rate == 0.0:
        return None
    rng = jax.random.fold_in(jax.random.fold_in(x.rng, i), j)
    return jax.random.bernoulli(rng, 1.0 - o.dropout_rate, shape).astype(dtype) / (1.0 - o.dropout_rate)


def _grouped(weights: Array, groups: int) -> Array:
    """[B, H, t, s] -> `rows` of [B, G, R, t, s]."""
    return rows(weights.reshape(weights.shape[0], groups, -1, *weights.shape[2:]))


def _queries(o: TileOptions, x: Array, i: Array) -> Array:
    """Block i of [B, G, R, T, K]."""
    return jax.lax.dynamic_slice_in_dim(x, i * o.query_block, o.query_block, 3)


def _keys(o: TileOptions, x: Array, j: Array, size: int) -> Array:
    """The first keys of block j of [B, G, S, K]."""
    return jax.lax.dynamic_slice_in_dim(x, j * o.key_block, size, 2)


def _each_block(o: TileOptions, x: TiledInputs, i: Array, part: Callable, add: Callable, carry: Any) -> Any:
    """carry = add(carry, part(carry, j, number of keys, allowed), j) for every key block j that query block i may see.

    `allowed` is None if all pairs are allowed, and then no mask is applied. If a key block consists of whole query
    blocks, causality hides keys only in the one with the queries' own positions, and only the first keys of that one
    are visited. Their count depends only on the block index, so under `vmap` the `switch` stays a switch.
    """
    key_blocks, whole = x.key.shape[2] // o.key_block, o.key_block
    if x.visits is not None:
        return each_listed(o, x, i, functools.partial(_allowed, o, x.mask, i), part, add, carry)
    low, high = _bounds(o, i, key_blocks)
    at_end = o.causal and whole % o.query_block == 0 and x.query.shape[3] <= key_blocks * whole
    open_before = o.mask_is_positional and o.window is None and (at_end or not o.causal)

    def key_block(j, carry):
        allowed = None if open_before else _allowed(o, x.mask, i, j)

        def visit(carry):
            return add(carry, part(carry, j, whole, allowed), j)

        return (
            visit(carry) if o.mask_is_positional else jax.lax.cond(jnp.any(allowed), visit, lambda carry: carry, carry)
        )

    if not at_end:
        return jax.lax.fori_loop(low, high, key_block, carry)
    if key_blocks > 1:  # with one block the loop is empty, but XLA would hoist its products out and compute them
        carry = jax.lax.fori_loop(low, high - 1, key_block, carry)
    allowed = _allowed(o, x.mask, i, high - 1)
    sizes = range(o.query_block, whole + 1, o.query_block)
    branches = [functools.partial(part, carry, high - 1, size, allowed[..., :size]) for size in sizes]
    # Added outside the switch: inside, XLA's CPU backend would copy the gradients of all keys.
    return add(carry, jax.lax.switch(i % len(branches), branches), high - 1)


def visit_keys(o: TileOptions, x: TiledInputs, i: Array, carry: Carry) -> Carry:
    """Query block i visits all blocks of keys it may see.

    Args:
      o, x: from `pad_to_tiles` and `for_values`.
      i: () int, the block.
      carry: [B, H, t], [B, H, t] and [B, H, t, K'], from the keys visited before; initially `nothing(x, t)`.
    """
    wide = carry[0].dtype
    groups = x.query.shape[1]
    query = _queries(o, x.query, i)

    def part(carry, j, size, allowed):
        top, total, out = carry
        scores, _ = _scores(o, x, query, _keys(o, x.key, j, size), i, j, allowed)
        # The maximum cancels in the result, so derivatives treat it as a constant.
        new_top = jnp.maximum(top, jnp.max(jax.lax.stop_gradient(scores), axis=-1))
        safe = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
        shrink = jnp.exp(top - safe)
        weights = jnp.exp(scores - safe[..., None])
        total = shrink * total + jnp.sum(weights, axis=-1)
        kept = _kept(o, x, i, j, weights.shape, wide)
        weights = weights if kept is None else weights * kept
        value = rows(_keys(o, x.value, j, size))
        new = head_product("GTS,GSK->GTK", _grouped(weights, groups).astype(value.dtype), value, wide)
        return new_top, total, shrink[..., None] * out + new.reshape(out.shape)

    return _each_block(o, x, i, part, lambda _, new, j: new, carry)


def nothing(x: TiledInputs, queries: int) -> Carry:
    """The carry of `queries` queries before any key."""
    batch, groups, per_group = x.query.shape[:3]
    wide = jnp.promote_types(x.query.dtype, jnp.float32)
    shape = (batch, groups * per_group, queries)
    return jnp.full(shape, -jnp.inf, wide), jnp.zeros(shape, wide), jnp.zeros((*shape, x.value.shape[-1]), wide)


def finish(carry: Carry, dtype) -> tuple[Array, Normalizer]:
    """Output [B, t, H, K'] of these queries, zeros for those without any key, and what normalises their weights."""
    top, total, out = carry
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    out = out / total[..., None]
    return jnp.swapaxes(out, 1, 2).astype(dtype), Normalizer(jnp.where(empty, 0.0, top), jnp.log(total))


def log_sum(carry: Carry) -> Array:
    """The log of the sum of exp(score) of these queries, [B, H, t]; -inf for those without any key."""
    top, total, _ = carry
    empty = total == 0.0
    return jnp.where(empty, -jnp.inf, jnp.where(empty, 0.0, top) + jnp.log(jnp.where(empty, 1.0, total)))


def gradients(
    o: TileOptions, x: TiledInputs, passed: Array, normalizer: Normalizer, g_out: Array, start: Gradients | None = None
) -> Gradients:
    """Adds the gradients of attention to these keys.

    Args:
      o, x: from `pad_to_tiles` and `for_gradients`.
      passed: [B, T, H], sum over K' of output times its gradient, the softmax gradient's row term.
      normalizer: from `finish`, over all keys of the query (including those of other calls).
      g_out: [B, G, R, T, K'], gradient of the output, heads first.
      start: initial gradients; None: `zeros(x)`.
    """
    groups = x.query.shape[1]
    wide = jnp.promote_types(x.query.dtype, jnp.float32)
    passed = passed.swapaxes(1, 2)

    def query_block(grads, i):
        query, g = _queries(o, x.query, i), rows(_queries(o, g_out, i))
        row, top, log_total = (cut(a, 2, i * o.query_block, o.query_block)[..., None] for a in (passed, *normalizer))

        def part(_, j, size, allowed):
            key, value = _keys(o, x.key, j, size), rows(_keys(o, x.value, j, size))
            scores, squashed = _scores(o, x, query, key, i, j, allowed)
            weights = jnp.exp((scores - top) - log_total)
            kept = _kept(o, x, i, j, weights.shape, wide)
            d_weights = head_product("GTK,GSK->GTS", g, value, wide).reshape(weights.shape)
            used = weights if kept is None else weights * kept
            d_weights = d_weights if kept is None else d_weights * kept
            used = _grouped(used, groups).astype(g.dtype)
            d_value = transposed_products(g, used, wide)
            d_scores = weights * (d_weights - row)
            d_bias = (filled(d_scores),) if x.bias else ()
            if squashed is not None:
                d_scores = only_seen(weights, d_scores * (1 - squashed * squashed))
            d_scores = _grouped(d_scores, groups).astype(query.dtype)
            d_query = head_product("GTS,GSK->GTK", d_scores, rows(key), wide).reshape(query.shape)
            d_key = transposed_products(rows(query), d_scores, wide)
            return Gradients(d_query, filled(d_key), filled(d_value), d_bias)

        def filled(grad):  # [..., visited keys] -> [..., keys of a block]
            return jnp.pad(grad, [(0, 0)] * (grad.ndim - 1) + [(0, o.key_block - grad.shape[-1])])

        def add(total, parts, j):
            key, value = (_add(t, p, j * o.key_block) for t, p in ((total.key, parts.key), (total.value, parts.value)))
            return Gradients(total.query + parts.query, key, value, _add_bias(o, x.bias, total.bias, parts.bias, i, j))

        one = _each_block(o, x, i, part, add, grads._replace(query=_queries(o, grads.query, i)))
        whole = jax.lax.dynamic_update_slice_in_dim(grads.query, one.query, i * o.query_block, 3)
        return one._replace(query=whole), None

    return jax.lax.scan(
        query_block, zeros(x) if start is None else start, jnp.arange(x.query.shape[3] // o.query_block)
    )[0]


def zeros(x: TiledInputs) -> Gradients:
    """Gradients of 0."""

    def zero(a: Array) -> Array:
        return jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))

    key, value = (zero(a.swapaxes(2, 3)) for a in (x.key, x.value))
    return Gradients(zero(x.query), key, value, tuple(zero(a) for a in x.bias))


def turned(grad: Array) -> Array:
    """The gradient of keys or values [B, G, K, S] as [B, G, S, K]; a barrier stops XLA from transposing a product."""
    return jax.lax.optimization_barrier(grad).swapaxes(2, 3)


def _add(total: Array, part: Array, start: Array) -> Array:
    """`part` [(B,) G, K, s] added into `total` [B, G, K, S]."""
    part = part.reshape(*total.shape[:3], -1)
    old = jax.lax.dynamic_slice_in_dim(total, start, part.shape[3], 3)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, 3)


def _add_bias(
    o: TileOptions, bias: tuple[Array, ...], total: tuple[Array, ...], found: tuple[Array, ...], i: Array, j: Array
) -> tuple[Array, ...]:
    """Adds the gradient of the bias's constants or array from a pair of blocks' score gradients; () without a bias."""
    if not bias:
        return total
    (d_scores,) = found
    if o.bias is not None:
        block, pull = jax.vjp(lambda constants: _bias_block(o, constants, i, j, d_scores.shape), bias)
        return jax.tree.map(lambda t, p: t + p.astype(t.dtype), total, pull(d_scores.astype(block.dtype))[0])
    shape = bias[0].shape
    summed = tuple(axis for axis, size in enumerate(shape) if size == 1)
    part = jnp.sum(d_scores, axis=summed, keepdims=True).astype(total[0].dtype)
    start = [0, 0, 0 if shape[2] == 1 else i * o.query_block, 0 if shape[3] == 1 else j * o.key_block]
    old = jax.lax.dynamic_slice(total[0], start, part.shape)
    return (jax.lax.dynamic_update_slice(total[0], old + part, start),)
