"""What the kernels of `flash_gpu` compute for one tile, a block of queries and a block of keys, of one head.

Scores are in units of log 2 (multiplied by log2 e), so that the weights are exp2 of them: the GPU's own exponential.

Source: Dao 2023, "FlashAttention-2", section 3.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxformer.kernels.attention.counter_dropout import kept
from jaxformer.kernels.attention.flash_gpu_blocks import padded_width
from jaxformer.patterns import Marked, MaskPattern
from jaxformer.types import Array

LOG2_E = math.log2(math.e)
ALONE = np.int32(0)  # the member of an array with one head
# What a tile needs: nothing, the mask without its patterns, or all of it.
OPEN, MASKED, PATTERNED = range(3)
Refs = Mapping[str, Any]  # of the arrays that only some calls have, see `flash_gpu_launch.FlashInputs`


class FlashOptions(NamedTuple):
    """Static settings of one device's attention."""

    scale: float
    soft_cap: float | None
    dropout_rate: float
    causal: bool
    window: int | None
    hides: bool  # True if the mask may hide anything
    edges: tuple[int, ...] | None  # of a step function of the distance, see `distance_bias`
    all_heads: int  # of all devices, for dropout
    queries: int
    keys: int
    heads: int
    groups: int
    width: int
    interpret: bool
    listed: bool = False  # True if lists name the tiles to visit, see `flash_gpu_lists`
    patterns: tuple[MaskPattern, ...] = ()  # one of them has to meet in a tile that is PATTERNED,
    excluded: tuple[MaskPattern, ...] = ()  # and none of these


class Scores(NamedTuple):
    """Of a tile [t, s]."""

    values: Array  # times log2 e, -inf where the mask hides them
    squashed: Array | None  # tanh of the soft cap
    allowed: Array | None  # None: all


def tokens(start: Array, size: int) -> Array:
    """[size] int32: the places start, start + 1, ... in the row."""
    return start + jax.lax.iota(jnp.int32, size)


def _inside(start: Array, size: int, length: int) -> Array | None:
    """[size] bool: which of these places exist; None: all, because blocks of that size divide the row."""
    return None if length % size == 0 else tokens(start, size) < length


def load_rows(ref: Any, member: Array | int, start: Array, size: int, length: int, width: int) -> Array:
    """[size, padded width]: a block of one head of [length, heads, width], zeros beyond its end and width."""
    mask = _inside(start, size, length)
    mask = None if mask is None else mask[:, None]
    padded = padded_width(width)
    if padded != width:
        columns = (jax.lax.iota(jnp.int32, padded) < width)[None, :]
        mask = columns if mask is None else mask & columns
    at = ref.at[pl.ds(start, size), member, :]
    if mask is None:
        return triton.load(at)
    return triton.load(at, mask=jnp.broadcast_to(mask, (size, padded)), other=0.0)


def load_numbers(ref: Any, member: Array | int, start: Array, size: int, length: int, other: Any = 0) -> Array:
    """[size] numbers of a block of [heads or 1, length], `other` beyond the row's end."""
    mask, at = _inside(start, size, length), ref.at[member, pl.ds(start, size)]
    return triton.load(at) if mask is None else triton.load(at, mask=mask, other=other)


def store_rows(ref: Any, start: Array, length: int, width: int, x: Array) -> None:
    """Writes the rows and columns of a block [size, padded width] that exist."""
    size, padded = x.shape
    mask = _inside(start, size, length)
    mask = jnp.broadcast_to(jnp.bool_(True), x.shape) if mask is None else jnp.broadcast_to(mask[:, None], x.shape)
    if padded != width:
        mask = mask & (jax.lax.iota(jnp.int32, padded) < width)[None, :]
    triton.store(ref.at[pl.ds(start, size), ALONE, :], x.astype(ref.dtype), mask=mask)


def store_numbers(ref: Any, start: Array, length: int, x: Array) -> None:
    """Writes the numbers of a block that exist."""
    size = x.shape[0]
    triton.store(ref.at[ALONE, pl.ds(start, size)], x.astype(ref.dtype), mask=_inside(start, size, length))


def scores(
    o: FlashOptions, refs: Refs, member: Array | int, query: Array, key: Array, first_query: Array, first_key: Array,
    masked: int, turned: bool = False,
) -> Scores:  # fmt: skip
    """Scores of a tile.

    Args:
      o: static settings.
      refs: the arrays that only some calls have.
      member: the head among those that these arrays have.
      query, key: [t, K], [s, K].
      first_query, first_key: places of the first ones.
      masked: OPEN if the mask is known to allow all of the tile, MASKED if its patterns are, else PATTERNED.
      turned: all results are [s, t]. A product that sums over queries reads them from registers then, and else has to
        turn them through shared memory.
    """
    found, squashed = triton.dot(key, query, trans_b=True) if turned else triton.dot(query, key, trans_b=True), None
    if o.soft_cap is None:
        found = found * (o.scale * LOG2_E)
    else:
        squashed = _tanh(found * (o.scale / o.soft_cap))
        found = squashed * (o.soft_cap * LOG2_E)
    places = _Places(first_query, first_key, query.shape[0], key.shape[0], turned)
    bias = _bias(o, refs, member, places)
    found = found if bias is None else found + bias
    allowed = _allowed(o, refs, places, masked == PATTERNED) if masked else None
    return Scores(found if allowed is None else jnp.where(allowed, found, -jnp.inf), squashed, allowed)


class _Places(NamedTuple):
    """Where a tile lies in the row, and which of its axes are queries and keys."""

    first_query: Array
    first_key: Array
    queries: int
    keys: int
    turned: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Of the tile."""
        return (self.keys, self.queries) if self.turned else (self.queries, self.keys)

    def of_queries(self, x: Array) -> Array:
        """[t], along the tile's axis of queries."""
        return x[None, :] if self.turned else x[:, None]

    def of_keys(self, x: Array) -> Array:
        """[s], along the tile's axis of keys."""
        return x[:, None] if self.turned else x[None, :]

    def distances(self) -> Array:
        """int32, of the tile's shape: place of the key minus place of the query."""
        key, query = tokens(self.first_key, self.keys), tokens(self.first_query, self.queries)
        return self.of_keys(key) - self.of_queries(query)


def _tanh(x: Array) -> Array:
    """From the exponential, which is exact to float32's rounding of 1, unlike the GPU's own tanh."""
    return 1.0 - 2.0 / (jnp.exp2(x * (2.0 * LOG2_E)) + 1.0)


def distances(first_query: Array, first_key: Array, shape: tuple[int, ...]) -> Array:
    """[t, s] int32: place of the key minus place of the query."""
    return _Places(first_query, first_key, *shape, turned=False).distances()


def _bias(o: FlashOptions, refs: Refs, member: Array | int, places: _Places) -> Array | None:
    """The bias of a tile times log2 e, see `distance_bias`; None: there is none."""
    if "slopes" in refs:
        far = jnp.abs(places.distances()).astype(jnp.float32)
        return far * (refs["slopes"][member, 0] * -LOG2_E)
    if o.edges is None:
        return None
    first, last = steps_of(refs, places.first_query, places.first_key, (places.queries, places.keys))
    far = places.distances()

    def step(n: Array, bias: Array) -> Array:
        return jnp.where(far >= refs["edges"][n - 1], refs["steps"][member, n] * LOG2_E, bias)

    start = jnp.full(places.shape, refs["steps"][member, first] * LOG2_E)
    return jax.lax.fori_loop(first + 1, last + 1, step, start)  # far from the diagonal all of a tile is one step


def steps_of(refs: Refs, first_query: Array, first_key: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The first and the last step of a step function of the distance that a tile meets."""
    nearest = first_key - first_query - (shape[0] - 1)
    edges = refs["edges"][...]
    return tuple(jnp.sum((edges <= at).astype(jnp.int32)) for at in (nearest, nearest + sum(shape) - 2))  # type: ignore


def _allowed(o: FlashOptions, refs: Refs, places: _Places, patterned: bool) -> Array | None:
    """Which pairs of a tile the mask allows, with `patterned` its patterns too, bool of its shape; None: all."""
    queries, keys, of_queries, of_keys = places.queries, places.keys, places.of_queries, places.of_keys
    query, key = tokens(places.first_query, queries), tokens(places.first_key, keys)
    conditions = []
    if o.keys % keys:
        conditions.append(of_keys(key < o.keys))
    if "query_index" in refs:
        query = load_numbers(refs["query_index"], ALONE, places.first_query, queries, o.queries)
    if "key_index" in refs:
        key = load_numbers(refs["key_index"], ALONE, places.first_key, keys, o.keys, -1)
        conditions.append(of_keys(key >= 0))
    ahead = of_keys(key) - of_queries(query)
    if o.causal:
        conditions.append(ahead <= 0)
    if o.window is not None:
        conditions.append(jnp.abs(ahead) < o.window)
    if "prefix" in refs:
        conditions.append((ahead <= 0) | of_keys(key < refs["prefix"][0]))
    if "prefix_keys" in refs:
        early = load_numbers(refs["prefix_keys"], ALONE, places.first_key, keys, o.keys)
        conditions.append((ahead <= 0) | of_keys(early != 0))
    if "key_segments" in refs:
        mine = load_numbers(refs["query_segments"], ALONE, places.first_query, queries, o.queries)
        theirs = load_numbers(refs["key_segments"], ALONE, places.first_key, keys, o.keys)
        conditions.append(of_queries(mine) == of_keys(theirs))
    if patterned:
        met, before = (_met(refs, some, places, query, key) for some in (o.patterns, o.excluded))
        conditions += [functools.reduce(jnp.logical_or, met)] if met else []
        conditions += [~each for each in before]
    if not conditions:
        return None
    allowed = jnp.broadcast_to(conditions[0], places.shape)
    for condition in conditions[1:]:
        allowed = allowed & condition
    return allowed


def _met(refs: Refs, patterns: tuple[MaskPattern, ...], places: _Places, query: Array, key: Array) -> list[Array]:
    """Which pairs of a tile each of some patterns lets meet; `query`, `key`: the positions."""
    found = []
    for pattern in patterns:
        if not isinstance(pattern, Marked):
            found.append(pattern.allows(places.of_queries(query), places.of_keys(key)))
            continue
        for name, of, first, size in (
            ("global_queries", places.of_queries, places.first_query, places.queries),
            ("global_keys", places.of_keys, places.first_key, places.keys),
        ):
            if name in refs:
                found.append(of(load_numbers(refs[name], ALONE, first, size, refs[name].shape[-1]) != 0))
    return found


def finite(x: Array) -> Array:
    """`x` with 0 where it is NaN or infinite: its product with the weight 0 of a hidden pair is then 0."""
    return jnp.where(jnp.abs(x) < jnp.inf, x, 0.0)


def spoiled(value: Array) -> Array:
    """[s, K] -> [s]: NaN for values that are not finite, else 0; added to the scores of those that see them."""
    return jnp.sum(jnp.where(jnp.abs(value) < jnp.inf, 0.0, jnp.nan), axis=1)


def dropout_mask(
    o: FlashOptions, refs: Refs, row: Array, head: Array, first_query: Array, first_key: Array, shape: tuple[int, ...]
) -> Array:
    """Which weights of a tile dropout keeps, [t, s] bool; the same for every size of block and on every mesh."""
    seed = refs["seed"]
    number = (seed[2] + row.astype(jnp.uint32)) * o.all_heads + (seed[3] + head.astype(jnp.uint32))
    query, key = (tokens(at, n).astype(jnp.uint32) for at, n in zip((first_query, first_key), shape, strict=True))
    return kept((seed[0], seed[1]), number, query, key, o.dropout_rate)
