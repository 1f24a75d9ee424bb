"""Attention by locality-sensitive hashing: a query attends to the keys that random rotations put near it.

Queries are the keys as well, up to their length. In each round the tokens are sorted by hash bucket and cut into
chunks; a chunk attends to itself and the one before it. Several rounds, each with its own rotations, find what one
misses. So the work grows with the length of the row, not with its square.

Source: Kitaev et al. 2020 (Reformer), section 2 and appendix A.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.functional.layers import dropout
from jaxformer.functional.lsh_hashing import Rotations, factors_of, hash_buckets, num_buckets
from jaxformer.kernels import derivatives
from jaxformer.kernels.attention.nonfinite import marks, usable_key, usable_value
from jaxformer.kernels.matmul import product
from jaxformer.types import Array

EPSILON = 1e-6  # added to the mean square of a key before it is normed


class _Tokens(NamedTuple):
    """What decides who sees whom, sorted and cut into chunks: [B, H, N, C] of N chunks of C tokens.

    Attributes:
      place: of the token in its row.
      segment: its document.
      bucket: in the round that its chunk is of; those of different rounds have different numbers.
      here: where it stands among the sorted tokens of all rounds.
      seen_in: [B, H, N, C, R], its bucket, or with `across_buckets` its chunk, in every round.
      sorted_place: [B, H, N, C, R], where it stands in every round.
    """

    place: Array
    segment: Array | None
    bucket: Array
    here: Array
    seen_in: Array
    sorted_place: Array


def unit_keys(query_key: Array) -> Array:
    """The keys: queries divided by their length. [..., K], in float32 or wider inside."""
    wide = query_key.astype(jnp.promote_types(query_key.dtype, jnp.float32))
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + EPSILON)
    return (wide * inverse / math.sqrt(wide.shape[-1])).astype(query_key.dtype)


def lsh_attention(
    query_key: Array,
    value: Array,
    rotations: Rotations,
    *,
    chunk: int = 64,
    causal: bool = False,
    segments: Array | None = None,
    across_buckets: bool = False,
    duplicates: bool = False,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
) -> Array:
    """LSH attention: softmax over the keys that some round puts into the query's bucket.

    A token does not attend to itself, unless it sees no other; then its output is its own value.

    With `across_buckets` a query sees all of its chunk and of the one before, whatever their bucket, as in the released
    implementations. Where a chunk begins then depends on the hashes of all tokens of the document, later ones too: of
    those no value and no gradient arrives, but which earlier keys are seen may change. Without, a causal query
    sees the last `chunk` tokens of its own bucket, which depends on nothing later; decoding needs that.

    Args:
      query_key: [B, T, H, K], queries, and keys before they are normed. Scores are not scaled.
      value: [B, T, H, K'].
      rotations: [H, K, R, buckets / 2] of R rounds, or a tuple of such, from `random_rotations`.
      chunk: C, tokens of a chunk; about twice the tokens of a bucket. Any T does: the last chunk is filled up. With
        `across_buckets`, rows of at most C tokens get attention to all of them.
      causal: a token sees none after it.
      segments: [B, T] int, document of each token; no token sees another document. None: one document per row.
      across_buckets: see above.
      duplicates: a key found in several rounds counts as often; otherwise once.
      dropout_rate, rng: of the attention weights, as of `attention`.

    Returns:
      [B, T, H, K'], in the dtype of `value`.

    Raises:
      ValueError: shapes that disagree, or a chunk below 1.

    Source: Kitaev et al. 2020, section 2 and appendix A.

    >>> from jaxformer.functional.lsh_hashing import random_rotations
    >>> x = jax.random.normal(jax.random.key(0), (1, 16, 2, 4))
    >>> rotations = random_rotations(jax.random.key(1), heads=2, width=4, rounds=3, buckets=4)
    >>> jax.jit(lambda x: lsh_attention(x, x, rotations, chunk=8, causal=True))(x).shape
    (1, 16, 2, 4)
    """
    _check(query_key, value, rotations, chunk, segments)
    length = query_key.shape[1]
    buckets = hash_buckets(jax.lax.stop_gradient(query_key), rotations)
    buckets = buckets + num_buckets(rotations) * jnp.arange(buckets.shape[2], dtype=jnp.int32)[None, None, :, None]
    if across_buckets and length <= chunk:  # one chunk, in which every round would find the same
        buckets, chunk = jnp.zeros_like(buckets[:, :, :1]), max(length, 1)
    beyond = -length % chunk
    if beyond:
        query_key, value = (jnp.pad(x, ((0, 0), (0, beyond), (0, 0), (0, 0))) for x in (query_key, value))
        buckets = jnp.pad(buckets, ((0, 0), (0, 0), (0, 0), (0, beyond)))
        segments = jnp.zeros((query_key.shape[0], length), jnp.int32) if segments is None else segments
        segments = jnp.pad(segments, ((0, 0), (0, beyond)), constant_values=jnp.iinfo(segments.dtype).max)
    order, inverse = _sort(buckets, segments)

    def chunks(x: Array) -> Array:
        """[B, H, R, T, ...] -> [B, H, N, C, ...]."""
        return x.reshape(*x.shape[:2], -1, chunk, *x.shape[4:])

    def with_previous(x: Array) -> Array:
        """[B, H, N, 2 C, ...]: each chunk after the one before it; the first one after the last."""
        return x if x.shape[2] == 1 else jnp.concatenate([jnp.roll(x, 1, axis=2), x], axis=3)

    query, value_sorted = (chunks(_permute(jnp.swapaxes(x, 1, 2), order, inverse)) for x in (query_key, value))
    key = unit_keys(query)
    tokens = _describe(buckets, segments, order, inverse, chunk, across_buckets)
    tokens = jax.tree.map(chunks, tokens)
    times = _times_seen(tokens, jax.tree.map(with_previous, tokens), chunk, causal, across_buckets, length)

    wide = jnp.promote_types(query.dtype, jnp.float32)
    mark = with_previous(marks(key, value_sorted).astype(wide))[..., None, :]
    scores = product("BHNCK,BHNSK->BHNCS", query, with_previous(usable_key(key)), wide)
    if not duplicates:
        scores = scores - jnp.log(jnp.maximum(times, 1).astype(wide))
    scores = jnp.where(times > 0, scores + mark, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1))
    top = jnp.where(jnp.isneginf(top), jnp.finfo(wide).min, top)
    weights = jnp.exp(scores - top[..., None])
    total = jnp.sum(weights, axis=-1)
    dropped = dropout(weights, dropout_rate, rng).astype(value.dtype)
    summed = product("BHNCS,BHNSK->BHNCK", dropped, with_previous(usable_value(value_sorted)), wide)

    def rounds(x: Array) -> Array:
        """[B, H, N, C, ...], sorted -> [B, H, R, T, ...], in the order of the row."""
        return _unpermute(x.reshape(*order.shape, *x.shape[4:]), order, inverse)

    top = rounds(top[..., None])[..., 0]
    share = jnp.exp(top - jnp.max(top, axis=2, keepdims=True))
    total = jnp.sum(share * rounds(total[..., None])[..., 0], axis=2)[..., None]
    summed = jnp.sum(share[..., None] * rounds(summed), axis=2)
    alone = total == 0
    out = jnp.where(alone, jnp.swapaxes(value, 1, 2).astype(wide), summed / jnp.where(alone, 1.0, total))
    return jnp.swapaxes(out, 1, 2)[:, :length].astype(value.dtype)


def _check(query_key: Array, value: Array, rotations: Rotations, chunk: int, segments: Array | None) -> None:
    if query_key.ndim != 4 or value.ndim != 4 or query_key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"lsh_attention: query_key {query_key.shape} and value {value.shape}; accepted: [B, T, H, K] and "
            "[B, T, H, K']"
        )
    for each in factors_of(rotations):
        if each.ndim != 4 or each.shape[:2] != query_key.shape[2:]:
            raise ValueError(
                f"lsh_attention: rotations {each.shape}; accepted: {query_key.shape[2:]} and rounds, buckets / 2"
            )
    if len(rounds := {each.shape[2] for each in factors_of(rotations)}) > 1:
        found = ", ".join(map(str, sorted(rounds)))
        raise ValueError(f"lsh_attention: rotations of {found} rounds; accepted: as many for each factor")
    if segments is not None and segments.shape != query_key.shape[:2]:
        raise ValueError(f"lsh_attention: segments {segments.shape}; accepted: {query_key.shape[:2]}")
    if chunk < 1:
        raise ValueError(f"lsh_attention: chunk {chunk}; accepted: at least 1")


def _sort(buckets: Array, segments: Array | None) -> tuple[Array, Array]:
    """(order, inverse), [B, H, R, T] int32: the tokens sorted by segment, bucket and place, and where each one goes.

    By segment first, because otherwise the buckets of one document would move the chunks of another."""
    place = jnp.broadcast_to(jnp.arange(buckets.shape[-1], dtype=jnp.int32), buckets.shape)
    keys: tuple[Array, ...] = (buckets,)
    if segments is not None:
        keys = jnp.broadcast_to(segments[:, None, None], buckets.shape), buckets
    order = jax.lax.sort((*keys, place), dimension=3, is_stable=True, num_keys=len(keys))[-1]
    return order, jax.lax.sort((order, place), dimension=3, is_stable=False, num_keys=1)[-1]


def _describe(
    buckets: Array, segments: Array | None, order: Array, inverse: Array, chunk: int, across_buckets: bool
) -> _Tokens:
    """The tokens, sorted: each field [B, H, R, T, ...]."""
    rounds, length = order.shape[2:]
    offsets = jnp.arange(rounds, dtype=jnp.int32)[None, None, :, None]
    sorted_place = inverse + offsets * length
    seen_in = sorted_place // chunk if across_buckets else buckets
    at = functools.partial(jnp.take_along_axis, indices=order, axis=3)

    def in_every_round(x: Array) -> Array:
        by_token = jnp.moveaxis(x, 2, 3)[:, :, None]  # [B, H, 1, T, R]
        return jnp.take_along_axis(by_token, order[..., None], axis=3)

    segment = None if segments is None else at(jnp.broadcast_to(segments[:, None, None], order.shape))
    here = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, None, None] + offsets * length, order.shape)
    return _Tokens(order, segment, at(buckets), here, in_every_round(seen_in), in_every_round(sorted_place))


def _times_seen(query: _Tokens, key: _Tokens, chunk: int, causal: bool, across_buckets: bool, length: int) -> Array:
    """In how many rounds each query sees each key of its chunk and the one before, [B, H, N, C, 2 C]; 0: hidden."""
    number, rounds = query.place.shape[2], query.seen_in.shape[-1]

    def pairs(x: Array, y: Array) -> tuple[Array, Array]:
        return x[..., :, None], y[..., None, :]

    def found(i: int, j: int) -> Array:
        """Whether a query sees a key where round i has put the query and round j the key."""
        q, k = pairs(query.seen_in[..., i], key.seen_in[..., j])
        if across_buckets:
            back = (q - k) % number
            return back <= 1 if i == j else back == 1
        q_at, k_at = pairs(query.sorted_place[..., i], key.sorted_place[..., j])
        back = q_at - k_at if causal else chunk * (q_at // chunk - k_at // chunk)
        return (q == k) & (back >= 0) & (back <= chunk)

    times = sum((found(i, i).astype(jnp.int32) for i in range(rounds)), jnp.zeros((), jnp.int32))
    if across_buckets and rounds > 1:  # the first chunk of a round comes after the last one of the round before
        times = times + sum(found(i, (i or rounds) - 1).astype(jnp.int32) for i in range(rounds))
    q, k = pairs(query.place, key.place)
    seen = (k < q if causal else k != q) & (k < length)
    if query.segment is not None and key.segment is not None:
        q, k = pairs(query.segment, key.segment)
        seen &= q == k
    if not across_buckets:
        q, k = pairs(query.bucket, key.bucket)
        seen &= q == k
        if causal:
            q, k = pairs(query.here, key.here)
            seen &= q - k <= chunk
    return jnp.where(seen, times, 0)


@jax.custom_jvp
def _permute(x: Array, order: Array, inverse: Array) -> Array:
    """[B, H, T, K] -> [B, H, R, T, K], sorted. Its gradient is a gather too, XLA would scatter, which is slow."""
    return jnp.take_along_axis(x[:, :, None], order[..., None], axis=3)


@jax.custom_jvp
def _unpermute(x: Array, order: Array, inverse: Array) -> Array:
    """[B, H, R, T, K], sorted -> the same in the order of the row."""
    return jnp.take_along_axis(x, inverse[..., None], axis=3)


derivatives.define(
    _permute,
    None,
    lambda saved, changes: _permute(changes[0], *saved[1:]),
    lambda saved, g: (jnp.sum(_unpermute(g, *saved[1:]), axis=2), None, None),
)
derivatives.define(
    _unpermute,
    None,
    lambda saved, changes: _unpermute(changes[0], *saved[1:]),
    lambda saved, g: (_unpermute(g, saved[2], saved[1]), None, None),
)
