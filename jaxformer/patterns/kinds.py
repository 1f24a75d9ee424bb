"""The kinds of patterns: each says which positions meet, and which pairs of blocks of tokens hold such a pair."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

LONGEST = 2**30  # tokens: more than a row has, and sums of two are int32


class BlockRange(NamedTuple):
    """The positions of blocks of tokens: `least`, `least + step`, ..., `most` of each, as NumPy arrays."""

    least: Any
    most: Any
    step: int = 1


class MaskPattern:
    """Base of the patterns. `steps` are the distances (of queries, of keys) at which tokens are put side by side before
    they are divided into blocks, so that few blocks hold all pairs; 1: the order of the row."""

    steps: tuple[int, int] = (1, 1)

    def allows(self, query: Array, key: Array, heads: Array | None = None) -> Array:
        """Which pairs meet.

        Args:
          query, key: int positions [..., 1, T, 1] and [..., 1, 1, S].
          heads: [H] int, the numbers of the heads; None: 0, 1, ...

        Returns:
          bool, broadcastable to [..., H, T, S].
        """
        raise NotImplementedError

    def tables(self, query: BlockRange, key: BlockRange) -> tuple[np.ndarray, np.ndarray]:
        """Two tables [1 or H, query blocks, key blocks] of bool: blocks that may hold a pair that meets, and blocks all
        of whose pairs are sure to meet. `query` has shape [blocks, 1], `key` [1, blocks]."""
        raise NotImplementedError

    def keys(self, length: int) -> float:
        """How many keys a query meets in a row of `length` tokens, about, without causality."""
        raise NotImplementedError


def _gap(query: BlockRange, key: BlockRange) -> np.ndarray:
    """Least distance of two blocks."""
    return np.maximum(np.maximum(key.least - query.most, query.least - key.most), 0)


def _reach(query: BlockRange, key: BlockRange) -> np.ndarray:
    """Largest distance of two tokens of two blocks."""
    return np.maximum(key.most - query.least, query.most - key.least)


@dataclass(frozen=True)
class Local(MaskPattern):
    """Fewer than `size` tokens apart."""

    size: int

    def allows(self, query, key, heads=None):
        return (query - key < self.size) & (key - query < self.size)

    def tables(self, query, key):
        return (_gap(query, key) < self.size)[None], (_reach(query, key) < self.size)[None]

    def keys(self, length):
        return min(length, 2 * self.size - 1)


@dataclass(frozen=True)
class Neighbours(MaskPattern):
    """In blocks of `block` tokens that are at most `reach` blocks apart."""

    block: int
    reach: int = 0

    def allows(self, query, key, heads=None):
        apart = query // self.block - key // self.block
        return (apart <= self.reach) & (apart >= -self.reach)

    def tables(self, query, key):
        query, key = (BlockRange(x.least // self.block, x.most // self.block) for x in (query, key))
        return (_gap(query, key) <= self.reach)[None], (_reach(query, key) <= self.reach)[None]

    def keys(self, length):
        return min(length, (2 * self.reach + 1) * self.block)


@dataclass(frozen=True)
class Comb(MaskPattern):
    """A multiple of `step` tokens apart, fewer than `size` such steps; None: any number."""

    step: int
    size: int | None = None

    @property
    def steps(self):  # type: ignore[override]
        """Tokens of the same remainder side by side."""
        return self.step, self.step

    def allows(self, query, key, heads=None):
        same = (query - key) % self.step == 0
        return same if self.size is None else same & self._window().allows(query, key)

    def _window(self):
        return Local(min((self.size or 0) * self.step, LONGEST))

    def tables(self, query, key):
        near = np.ones(np.broadcast_shapes(query.least.shape, key.least.shape), bool)
        inside = near
        if self.size is not None:
            (near,), (inside,) = self._window().tables(query, key)
        if (query.step, key.step) != self.steps:
            return near[None], np.zeros_like(near)[None]
        same = query.least % self.step == key.least % self.step
        return (same & near)[None], (same & inside)[None]

    def keys(self, length):
        found = -(-length // self.step)
        return found if self.size is None else min(found, 2 * self.size - 1)


@dataclass(frozen=True)
class SummaryColumns(MaskPattern):
    """Keys that are among the last `last` of their block of `block` tokens."""

    block: int
    last: int

    @property
    def steps(self):  # type: ignore[override]
        """Keys of the same place in their block side by side."""
        return 1, self.block

    def allows(self, query, key, heads=None):
        return (key % self.block >= self.block - self.last) & (query >= 0)

    def tables(self, query, key):
        size = (key.most - key.least) // key.step + 1
        if key.step == self.block:
            found = np.where(key.least % self.block >= self.block - self.last, size, 0)
        else:
            found = self._before(key.most + 1) - self._before(key.least)
        found = np.broadcast_to(found, np.broadcast_shapes(query.least.shape, key.least.shape))
        return (found > 0)[None], (found == size)[None]

    def _before(self, position):
        """How many such keys lie before a position."""
        blocks, inside = position // self.block, position % self.block
        return blocks * self.last + np.maximum(inside - (self.block - self.last), 0)

    def keys(self, length):
        return length // self.block * self.last


@dataclass(frozen=True)
class GlobalPositions(MaskPattern):
    """Positions before `first` and from `end` on: they see all (`see`), and all see them (`seen`)."""

    first: int
    end: int | None = None
    see: bool = True
    seen: bool = True

    def allows(self, query, key, heads=None):
        found = [x < self.first if self.end is None else (x < self.first) | (x >= self.end) for x in (query, key)]
        return (found[0] & self.see) | (found[1] & self.seen)

    def tables(self, query, key):

        def some(x):
            return (x.least < self.first) | (False if self.end is None else x.most >= self.end)

        def every(x):
            return (x.most < self.first) | (False if self.end is None else x.least >= self.end)

        return tuple(((of(query) & self.see) | (of(key) & self.seen))[None] for of in (some, every))

    def keys(self, length):
        count = min(length, self.first + (0 if self.end is None else max(0, length - self.end)))
        share = count / max(length, 1)
        return self.seen * count + self.see * share * (length - count * self.seen)


@dataclass(frozen=True)
class RandomBlocks(MaskPattern):
    """Blocks of `block` keys that a table names for each block of `block` queries: for each head, or one for all,
    for each block of queries a tuple of numbers of blocks."""

    block: int
    table: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def by_head(self) -> bool:
        """True if heads have tables of their own."""
        return len(self.table) > 1

    def pairs(self) -> np.ndarray:
        """[1 or H, blocks, blocks] bool: which blocks meet."""
        return _pairs(self.table)

    def allows(self, query, key, heads=None):
        pairs = jnp.asarray(self.pairs())
        count = pairs.shape[1]
        numbers = jnp.arange(len(pairs)) if heads is None else heads if self.by_head else jnp.zeros(1, jnp.int32)
        rows, columns = (jnp.clip(x // self.block, 0, count - 1) for x in (query, key))
        inside = (query < count * self.block) & (key < count * self.block)
        return pairs[numbers.reshape((1,) * (query.ndim - 3) + (-1, 1, 1)), rows, columns] & inside

    def tables(self, query, key):
        pairs = self.pairs()
        count = pairs.shape[1]
        sums = np.zeros((len(pairs), count + 1, count + 1), np.int64)
        sums[:, 1:, 1:] = pairs.cumsum(1).cumsum(2)
        starts = [np.minimum(x.least // self.block, count) for x in (query, key)]
        ends = [np.minimum(x.most // self.block + 1, count) for x in (query, key)]
        found = sums[:, ends[0], ends[1]] - sums[:, starts[0], ends[1]]
        found = found - sums[:, ends[0], starts[1]] + sums[:, starts[0], starts[1]]
        area = (query.most // self.block + 1 - starts[0]) * (key.most // self.block + 1 - starts[1])
        return found > 0, (found == area) & (found > 0)

    def keys(self, length):
        return min(length, self.block * float(self.pairs().sum(2).mean()))


@functools.lru_cache(16)
def _pairs(table: tuple) -> np.ndarray:
    count = len(table[0])
    found = np.zeros((len(table), count, count), bool)
    for head, rows in enumerate(table):
        for row, chosen in enumerate(rows):
            found[head, row, list(chosen)] = True
    return found


@dataclass(frozen=True)
class Marked(MaskPattern):
    """Tokens that arrays of the mask mark: `global_queries` see all, all see `global_keys`; `masks.either` makes it."""

    def keys(self, length):
        return 0.0  # not known


class GlobalTokens(NamedTuple):
    """Global tokens that an array marks, [B, T] bool, for `masks.either`."""

    marked: Array
    see: bool
    seen: bool


def union(
    patterns: tuple[MaskPattern, ...],
    query: Array,
    key: Array,
    heads: Array | None = None,
    global_queries: Array | None = None,
    global_keys: Array | None = None,
) -> Array:
    """Which pairs meet by any of the patterns.

    Args:
      patterns: at least one.
      query, key, heads: as of `MaskPattern.allows`.
      global_queries, global_keys: [B, T] and [B, S] bool, those of `Marked`.

    Returns:
      bool, broadcastable to [B, H, T, S].
    """
    found = [p.allows(query, key, heads) for p in patterns if not isinstance(p, Marked)]
    if any(isinstance(p, Marked) for p in patterns):
        found += [] if global_queries is None else [global_queries[:, None, :, None]]
        found += [] if global_keys is None else [global_keys[:, None, None, :]]
    rank = max(x.ndim for x in found)
    return functools.reduce(jnp.logical_or, [x.reshape((1,) * (rank - x.ndim) + x.shape) for x in found])
