"""Attention whose weights are products of features, phi(q) . phi(k), in time and memory linear in the tokens.

A row is read in chunks. Inside a chunk the weights are a small square, masked as usual. What lies outside is known by
its sum alone: of phi(k) [v, 1] over the keys of the running document, [m, K' + 1], however many they are. Only the sums
between chunks are kept for the backward pass, which computes everything inside a chunk again.

Features may be of any size, exp(w . k) say, so each key has a scale in front of them and sums are kept relative to the
largest scale so far, as in online softmax. A maximum over all keys, as published for Performers, would let one large
key push all earlier ones out of the range of float32: a query would depend on keys that it must not see.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.parallel.constraints import constrain
from jaxformer.types import Array

CHUNK = 128  # tokens
# [..., K] -> features [..., m], and the logarithm of their scale [...], or None: 1. A scale passes no gradient.
FeatureMap = Callable[[Array], tuple[Array, Array | None]]


class FeatureSums(NamedTuple):
    """What is known of keys that were read: the sum over them of exp(scale - shift) phi(k) [v, 1].

    Attributes:
      sums: [B, G, m, K' + 1], float32 or wider.
      shift: [B, G], the largest logarithm of a scale.
      bad: [B] bool, whether one of the keys or values was not finite.
    """

    sums: Array
    shift: Array
    bad: Array


class _Chunk(NamedTuple):
    """Some tokens of all rows. `segments`, `seen` (keys that are no padding) and `early` (keys that tokens before them
    see, too) are [B, C], or None: all alike."""

    query: Array  # [B, G, R, C, K]
    key: Array  # [B, G, C, K]
    value: Array  # [B, G, C, K'], in a step [B, G, C, K' + 1], the last of which is 1
    bad: Array  # [B, C]
    segments: Array | None
    seen: Array | None
    early: Array | None


def attend(
    query: Array,
    key: Array,
    value: Array,
    of_query: FeatureMap,
    of_key: FeatureMap,
    *,
    causal: bool,
    segments: Array | None = None,
    seen: Array | None = None,
    early: Array | None = None,
    state: FeatureSums | None = None,
    chunk: int = CHUNK,
) -> tuple[Array, FeatureSums]:
    """The mean of the values that each query sees, by weights phi(q) . phi(k).

    Args:
      query: [B, T, H, K].
      key: [B, S, G, K].
      value: [B, S, G, K'].
      of_query, of_key: the feature maps; the scale of a query's features cancels.
      causal: a query sees the keys up to its own place.
      segments: [B, T] int, documents, each without a gap; a query sees its own.
      seen: [B, S] bool, False for padding.
      early: [B, S] bool, with `causal`: keys that earlier queries of their document see as well.
      state: of causal attention, the sums over earlier tokens, which belong to the document of the first token.
      chunk: tokens that are read at once.

    Returns:
      [B, T, H, K'] in the dtype of `value`, 0 where nothing is seen or all weights are below 1e-36; and the sums over
      the keys of the last document, those of `state` among them.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scaled = jax.eval_shape(lambda x: of_key(x.astype(wide))[1], key) is not None
    most = jnp.inf if scaled else float(jnp.finfo(wide).max) ** 0.5
    chunks = _split(query, key, value, segments, seen, early, chunk, most)
    count, width = chunks.key.shape[0], value.shape[-1]
    absorb, over = functools.partial(_absorb, of_key=of_key), functools.partial(_over, count=count, dtype=wide)
    one = jax.eval_shape(lambda x: of_key(x.astype(wide))[0], chunks.key[0])
    empty = _empty(one.shape[:2], one.shape[-1], width + 1, wide)
    if not causal and segments is None:  # every query sees the same keys
        sums, _ = over(lambda sums, part, _: (absorb(sums, part, None, None), None), empty, chunks)
        out = over(lambda _, part, __: (None, _read_all(part, sums, of_query)), None, chunks)[1]
    else:
        before = jnp.zeros(query.shape[:1], jnp.int32) if segments is None else chunks.segments[0, :, 0]
        left = empty if state is None else jax.tree.map(lambda x, like: x.astype(like.dtype), state, empty)
        every = not causal
        after = None
        if count > 1 and (every or early is not None):  # what later chunks have for the document that this one ends in
            last = before if segments is None else chunks.segments[-1, :, -1]

            def back(carry, part, _):
                sums, running = carry
                first = None if part.segments is None else part.segments[:, 0]
                kept = part if every else part._replace(seen=_both(part.seen, part.early))
                return (absorb(sums, kept, first, running), running if first is None else first), carry

            after = over(back, (empty, last), chunks, reverse=True)[1]

        def forth(carry, part, later):
            sums, running = carry
            outside = [] if count == 1 and state is None else [carry]
            outside += [] if later is None else [later]
            out = _read(part, outside, of_query, of_key, every=every)
            last = None if part.segments is None else part.segments[:, -1]
            return (absorb(sums, part, last, running), running if last is None else last), out

        (sums, _), out = over(forth, (left, before), chunks, after)
    out = jnp.moveaxis(out, 0, 3)  # [n, B, G, R, C, K'] -> [B, G, R, n, C, K']
    out = out.reshape(*out.shape[:3], -1, width)[:, :, :, : query.shape[1]]
    out = jnp.moveaxis(out, 3, 1).reshape(*query.shape[:3], width)
    return out.astype(value.dtype), sums


def _split(query, key, value, segments, seen, early, chunk, most) -> _Chunk:
    """Chunks of equal size along a new first axis; of fewer queries than keys the chunks have more of the latter.
    Keys and values that are not below `most` count as not finite: without a scale, sums of their products would be."""
    batch, queries, heads, width = query.shape
    keys, groups = key.shape[1], key.shape[2]
    count = -(-max(queries, keys) // chunk)
    sizes = -(-queries // count), -(-keys // count)
    if count * sizes[1] > keys and seen is None:
        seen = jnp.ones((batch, keys), bool)

    def cut(x, size, mode="constant"):
        if x is None:
            return None
        fill = count * size - x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, fill), *[(0, 0)] * (x.ndim - 2)), mode=mode) if fill else x
        return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)

    fits = [jnp.abs(x) < most for x in (key, value)]
    fit = fits[0].all(-1) & fits[1].all(-1)
    key, value = (jnp.where(ok, x, 0) for ok, x in zip(fits, (key, value), strict=True))
    q = jnp.moveaxis(cut(query.reshape(batch, queries, groups, heads // groups, width), sizes[0]), 2, 4)
    k, v = (jnp.moveaxis(cut(x, sizes[1]), 2, 3) for x in (key, value))
    q, k, v = (constrain(x, None, "rows", "heads", *[None] * (x.ndim - 3)) for x in (q, k, v))
    rest = (cut(segments, sizes[1], "edge"), cut(seen, sizes[1]), cut(early, sizes[1]))
    return _Chunk(q, k, v, cut(~fit.all(-1), sizes[1]), *rest)


def _over(
    step: Callable, carry: Any, chunks: _Chunk, more: Any = None, *, count: int, dtype: Any, reverse: bool = False
) -> tuple[Any, Any]:
    """`lax.scan` that keeps nothing of a step but what it began with; one step is no loop.

    Args:
      step: (carry, chunk, its part of `more`) -> (carry, output); the chunk's queries, keys and values in `dtype`, the
        values with a 1 at the end.
    """

    def widened(carry, now):
        part, extra = now
        ones = jnp.ones((*part.value.shape[:-1], 1), dtype)
        value = jnp.concatenate([part.value.astype(dtype), ones], axis=-1)
        part = part._replace(query=part.query.astype(dtype), key=part.key.astype(dtype), value=value)
        return step(carry, part, extra)

    if count == 1:
        carry, out = widened(carry, jax.tree.map(lambda x: x[0], (chunks, more)))
        return carry, jax.tree.map(lambda x: x[None], out)
    return jax.lax.scan(jax.checkpoint(widened, prevent_cse=False), carry, (chunks, more), reverse=reverse)


def _empty(rows: tuple[int, int], features: int, width: int, dtype: Any) -> FeatureSums:
    sums = constrain(jnp.zeros((*rows, features, width), dtype), "rows", "heads", None, None)
    return FeatureSums(sums, jnp.full(rows, _least(dtype)), jnp.zeros(rows[:1], bool))


def _least(dtype: Any) -> Array:
    """The shift of no keys. Half of the least number, so that no difference of two shifts overflows."""
    return jnp.asarray(jnp.finfo(dtype).min / 2, dtype)


def _both(a: Array | None, b: Array | None) -> Array | None:
    return b if a is None else a if b is None else a & b


def _absorb(
    sums: FeatureSums, part: _Chunk, end: Array | None, running: Array | None, of_key: FeatureMap
) -> FeatureSums:
    """The sums with the keys of a chunk added that belong to document `end` [B]; those of another, `running`, are
    forgotten."""
    features, scale = of_key(part.key)
    kept, goes_on = part.seen, jnp.ones(part.bad.shape[:1], bool)
    if end is not None:
        kept, goes_on = _both(kept, part.segments == end[:, None]), running == end
    kept = jnp.ones(part.bad.shape, bool) if kept is None else kept
    bad = (kept & part.bad).any(-1) | (goes_on & sums.bad)
    least = _least(features.dtype)
    if scale is None:
        shift, weights, old = sums.shift, kept[:, None].astype(features.dtype), goes_on[:, None].astype(features.dtype)
    else:
        before = jnp.where(goes_on[:, None], sums.shift, least)
        scale = jnp.where(kept[:, None], jax.lax.stop_gradient(scale), -jnp.inf)
        shift = jnp.maximum(before, scale.max(-1))
        weights = jnp.exp(scale - shift[..., None])
        old = jnp.where(goes_on[:, None], jnp.exp(before - shift), 0)
    new = jnp.einsum("BGSM,BGSK->BGMK", features * weights[..., None], part.value)
    kept_sums = jnp.where(goes_on[:, None, None, None], old[..., None, None] * sums.sums, 0)
    return FeatureSums(kept_sums + new, shift, bad)


def _read_all(part: _Chunk, sums: FeatureSums, of_query: FeatureMap) -> Array:
    """[B, G, R, C, K']: what queries see that see all keys."""
    features, _ = of_query(part.query)
    return _mean(jnp.einsum("BGRTM,BGMK->BGRTK", features, sums.sums), sums.bad[:, None])


def _read(
    part: _Chunk,
    outside: list[tuple[FeatureSums, Array]],
    of_query: FeatureMap,
    of_key: FeatureMap,
    *,
    every: bool,
) -> Array:
    """[B, G, R, C, K']: what the queries of a chunk see of it, all or what is causal, and of sums over other chunks,
    each for the document that it names."""
    q_BGRTM, _ = of_query(part.query)
    k_BGSM, scale = of_key(part.key)
    size, dtype = k_BGSM.shape[2], k_BGSM.dtype
    see = None if every else jnp.tril(jnp.ones((1, size, size), bool))
    if see is not None and part.early is not None:
        see = see | part.early[:, None]
    if part.segments is not None:
        see = _both(see, part.segments[:, :, None] == part.segments[:, None])
    see = _both(see, None if part.seen is None else part.seen[:, None])
    see = jnp.ones((1, size, size), bool) if see is None else see
    everywhere = jnp.ones(part.bad.shape, bool)
    outside = [
        (sums, everywhere if part.segments is None else part.segments == running[:, None]) for sums, running in outside
    ]
    bad = (see & part.bad[:, None]).any(-1)
    for sums, mine in outside:
        bad |= mine & sums.bad[:, None]
    products = jnp.einsum("BGRTM,BGSM->BGRTS", q_BGRTM, k_BGSM)
    if scale is None:
        weights, factors = jnp.where(see[:, None, None], products, 0), [None for _ in outside]
    else:
        scale, least = jax.lax.stop_gradient(scale), _least(dtype)
        shift = jnp.where(see[:, None], scale[:, :, None], least).max(-1)
        for sums, mine in outside:
            of_sums = jax.lax.stop_gradient(sums.shift)[:, :, None]
            shift = jnp.maximum(shift, jnp.where(mine[:, None], of_sums, least))
        inside = jnp.exp(jnp.where(see[:, None], scale[:, :, None] - shift[..., None], -jnp.inf))
        weights = products * inside[:, :, None]
        shifts = (jax.lax.stop_gradient(sums.shift)[:, :, None] for sums, _ in outside)
        factors = [jnp.exp(jnp.minimum(each - shift, 0)) for each in shifts]
    total = jnp.einsum("BGRTS,BGSK->BGRTK", weights, part.value)
    for (sums, mine), factor in zip(outside, factors, strict=True):
        more = jnp.einsum("BGRTM,BGMK->BGRTK", q_BGRTM, sums.sums)
        more = more if factor is None else more * factor[:, :, None, :, None]
        total = total + jnp.where(mine[:, None, None, :, None], more, 0)
    return _mean(total, bad)


def _mean(total: Array, bad: Array) -> Array:
    """Weighted values over weights, from [..., T, K' + 1]; NaN where something bad was seen, [B, T].

    The derivative of a division has the square of its divisor, which may be too small for a float where the weight is
    not; so both sides are divided by the weight as a constant first. Weights at the end of the range are none.
    """
    least = 64 * jnp.finfo(total.dtype).tiny  # so that its inverse, times a gradient, is finite
    weight = jnp.where(total[..., -1:] > least, total[..., -1:], 1)
    constant = jax.lax.stop_gradient(weight)
    out = jnp.where(total[..., -1:] > least, total[..., :-1] / constant / (weight / constant), 0)
    return jnp.where(bad[:, None, None, :, None], jnp.nan, out)
