"""Relative attention of Transformer-XL, XLNet and Funnel: terms of the scores that depend on how far a key is.

    score = ((q + u) . k  +  (q + v) . r[distance]  +  (q + s) . e[same or other segment]) / sqrt(K)

The first term is ordinary attention: add u to the queries. The others are a bias, of which this makes a function, so
that no implementation has to keep it as an array. Distances are those of tokens at equal steps: token i of the queries
is at `first + stride * i`, and so are pooled ones.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from jaxformer.kernels.matmul import product
from jaxformer.types import Array


class Places(NamedTuple):
    """Where tokens stand: the i-th one at first + stride * i."""

    first: int = 0
    stride: int = 1


IN_ORDER = Places()


class SegmentTerm(NamedTuple):
    """The term that says whether a key is of the query's segment (sentence A or B).

    Attributes:
      bias: [H, K], s; or None.
      keys: [2, H, K], e: of a key of the same segment, and of one of another.
      query_types: [B, T] int; negative: the same as every other.
      key_types: [B, S] int.
    """

    bias: Array | None
    keys: Array
    query_types: Array
    key_types: Array


def distances(queries: int, keys: int, query_places: Places = IN_ORDER, key_places: Places = IN_ORDER) -> np.ndarray:
    """Every distance, query's place minus key's place, from the largest to the smallest: [R] int.

    Raises:
      ValueError: the queries' stride is no multiple of the keys'.

    >>> distances(2, 3).tolist()
    [1, 0, -1, -2]
    >>> distances(2, 4, Places(-1, 2)).tolist()
    [1, 0, -1, -2, -3, -4]
    """
    steps = _steps(query_places, key_places)
    largest = query_places.first + query_places.stride * (queries - 1) - key_places.first
    return largest - key_places.stride * np.arange(steps * (queries - 1) + keys)


def encoded(distance: np.ndarray, width: int) -> np.ndarray:
    """Sines and then cosines of distances [R], wavelengths from 2 pi to 10,000 * 2 pi: [R, D] float64.

    Source: Dai et al. 2019, section 3.3; Vaswani et al. 2017, section 3.5, whose sines and cosines alternate.
    """
    angles = distance[:, None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def relative_terms(
    query: Array,
    position_keys: Array,
    keys: int,
    *,
    scale: float,
    position_bias: Array | None = None,
    segments: SegmentTerm | None = None,
    query_places: Places = IN_ORDER,
    key_places: Places = IN_ORDER,
    query_there: Array | None = None,
    key_there: Array | None = None,
) -> Partial:
    """The terms of distance and segment as a `bias` of `attention`.

    A pair of blocks of t queries and s keys costs the product of the queries with the at most t + s (with pooled
    queries 2 t + s) distances between them. No array is larger than that.

    Args:
      query: [B, T, H, K], without biases.
      position_keys: [R, H, K]: r for each of `distances(T, keys, query_places, key_places)`, W_r times `encoded`.
      keys: S.
      scale: of the scores, as `attention` has it.
      position_bias: [H, K], v.
      segments: the term of segments; None: there is none.
      query_places, key_places: where the tokens stand.
      query_there, key_there: [T] or [B, T], [S] or [B, S] bool; pairs of which one is False have neither term.

    Returns:
      A function of (query index [t], key index [s]) that returns [B, H, t, s]. Each index has to count up by one; or
      both have a batch axis, [B, t] and [B, s], and any order, as in decoding.

    Raises:
      ValueError: `position_keys` are not as many as there are distances.

    Source: Dai et al. 2019, section 3.3; Yang et al. 2019, section 2.5 (segments); Dai et al. 2020, appendix A.2.

    >>> bias = relative_terms(jnp.ones((1, 2, 1, 4)), jnp.ones((3, 1, 4)), 2, scale=0.5)
    >>> bias(jnp.arange(2), jnp.arange(2)).tolist()
    [[[[2.0, 2.0], [2.0, 2.0]]]]
    """
    wanted = len(distances(query.shape[1], keys, query_places, key_places))
    if position_keys.shape[0] != wanted:
        raise ValueError(f"relative_terms: position_keys {position_keys.shape}; accepted: {wanted}, one for a distance")
    with_bias = query if position_bias is None else query + position_bias[None, None].astype(query.dtype)
    of_segments: tuple = ()
    if segments is not None:
        own = query if segments.bias is None else query + segments.bias[None, None].astype(query.dtype)
        wide = jnp.promote_types(query.dtype, jnp.float32)
        each = product("BTHK,NHK->BTHN", own, segments.keys.astype(query.dtype), wide)
        of_segments = each, segments.query_types, segments.key_types
    function = _function(_steps(query_places, key_places), float(scale))
    return Partial(function, with_bias, position_keys.astype(query.dtype), of_segments, query_there, key_there)


def _steps(query_places: Places, key_places: Places) -> int:
    """Places of keys between two queries that follow each other."""
    if query_places.stride % key_places.stride:
        raise ValueError(f"relative_terms: stride {query_places.stride}; accepted: multiples of {key_places.stride}")
    return query_places.stride // key_places.stride


@functools.cache
def _function(steps: int, scale: float):
    """The same function for the same numbers, so that a `Partial` of it does not compile again."""
    return functools.partial(_terms, steps, scale)


def _terms(
    steps: int, scale: float, query: Array, position_keys: Array, segments: tuple, query_there: Array | None,
    key_there: Array | None, query_index: Array, key_index: Array,
) -> Array:  # fmt: skip
    of_distance = _any_order if query_index.ndim == 2 else _in_order
    found = of_distance(steps, query, position_keys, query_index, key_index)
    if segments:
        each, query_types, key_types = segments
        of_query = jnp.moveaxis(_at(each, query_index), 1, 2)  # [B, H, t, 2]
        types, others = (_at(x, i) for x, i in ((query_types, query_index), (key_types, key_index)))
        types, others = types[:, None, :, None], others[:, None, None, :]
        same = (types == others) | (types < 0) | (others < 0)
        found = found + jnp.where(same, of_query[..., :1], of_query[..., 1:])
    found = found * scale
    if query_there is not None:
        query_there, key_there = (x if x.ndim == 2 else x[None] for x in (query_there, key_there))
        both = _at(query_there, query_index)[:, None, :, None] & _at(key_there, key_index)[:, None, None, :]
        found = jnp.where(both, found, 0.0)
    return found


def _in_order(steps: int, query: Array, position_keys: Array, query_index: Array, key_index: Array) -> Array:
    """[B, H, t, s]: (q + v) . r of tokens that follow each other.

    Query i is at entry steps * (T - 1 - i) + j of the distances from key j: one entry more for each key, `steps` fewer
    for each query. So all queries of the block are multiplied with the distances between the block's ends, and each
    row is shifted, by reading the rows as if they were `steps` shorter (Dai et al. 2019, appendix B).
    """
    queries, keys = query_index.shape[0], key_index.shape[0]
    first = steps * (query.shape[1] - query_index[0] - queries) + key_index[0]
    number = steps * (queries - 1) + keys
    between = jnp.take(position_keys, first + jnp.arange(number), axis=0, mode="clip")
    own = jnp.take(query, query_index, axis=1, mode="clip")
    found = product("BTHK,RHK->BHTR", own, between, jnp.promote_types(query.dtype, jnp.float32))
    if queries == 1:
        return found
    flat = found.reshape(*found.shape[:2], queries * number)
    start, row = steps * (queries - 1), number - steps
    flat = jnp.pad(flat, ((0, 0), (0, 0), (0, max(0, start + queries * row - queries * number))))
    return flat[..., start : start + queries * row].reshape(*found.shape[:3], row)[..., :keys]


def _any_order(steps: int, query: Array, position_keys: Array, query_index: Array, key_index: Array) -> Array:
    """[B, H, t, s]: (q + v) . r of tokens in any order, [B, t] and [B, s]."""
    entry = steps * (query.shape[1] - 1 - query_index)[:, :, None] + key_index[:, None, :]
    between = jnp.take(position_keys, entry, axis=0, mode="clip")
    return product("BTHK,BTSHK->BHTS", _at(query, query_index), between, jnp.promote_types(query.dtype, jnp.float32))


def _at(x: Array, index: Array) -> Array:
    """Entries of [B, T, ...] at [t], or in each row at [B, t]."""
    if index.ndim == 1:
        return jnp.take(x, index, axis=1, mode="clip")
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1, mode="clip")
