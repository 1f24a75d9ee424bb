"""Which blocks of keys each block of queries visits under a mask of patterns, and how tokens are put into blocks.

A pattern such as a comb has one pair in every block of a row. With the tokens of the same remainder side by side
(`regroup`) few blocks hold them all. So patterns are divided into groups, each with its own order of tokens and its own
sizes of blocks; what an earlier group allows, a later one leaves out, and attention adds them up by their log-sums.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.kernels.attention.tiles import TiledInputs, TileOptions, cut_mask
from jaxformer.kernels.attention.xla_vjp import rank4
from jaxformer.masks import Mask
from jaxformer.patterns import Comb, Local, Marked, MaskPattern, Neighbours, RandomBlocks, union
from jaxformer.patterns.kinds import BlockRange
from jaxformer.types import Array

# Tokens of a block, and what a pattern without a size of its own gets.
SMALLEST, LARGEST, USUAL = 64, 256, 128


class Order(NamedTuple):
    """Tokens of a row in another order: those `step` apart side by side, each such run padded to whole blocks.

    Attributes:
      length: tokens of the row.
      step: 1: the order of the row.
      block: tokens of a block.
    """

    length: int
    step: int
    block: int

    @property
    def run(self) -> int:
        """Tokens of a run, with its padding."""
        return math.ceil(math.ceil(self.length / self.step) / self.block) * self.block

    @property
    def tokens(self) -> int:
        """Of an array in this order, with its padding."""
        return self.length if self.step == 1 else self.step * self.run

    def positions(self) -> np.ndarray:
        """[step * run] int32: the position of each token, -1 for padding."""
        at = np.arange(self.run) * self.step + np.arange(self.step)[:, None]
        return np.where(at < self.length, at, -1).reshape(-1).astype(np.int32)

    def blocks(self, size: int | None = None) -> BlockRange:
        """The positions of each block of `size` tokens (None: of its own), [blocks]; of one without tokens the least is
        beyond all."""
        at, size = self.positions()[: self.tokens], size or self.block
        at = np.pad(at, (0, -len(at) % size), constant_values=-1).reshape(-1, size)
        return BlockRange(np.where(at < 0, 2**30, at).min(1), at.max(1), self.step)

    def regroup(self, x: Array, axis: int) -> Array:
        """`x` with the tokens along an axis in this order; an axis of size 1 broadcasts and stays, unless it is the
        row's only token."""
        axis %= x.ndim
        if self.step == 1 or x.shape[axis] == 1 != self.length:
            return x
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        short = math.ceil(self.length / self.step)
        x = _padded(x, axis, short * self.step - self.length)
        x = jnp.swapaxes(x.reshape(*before, short, self.step, *after), axis, axis + 1)
        x = _padded(x, axis + 1, self.run - short)
        return x.reshape(*before, self.step * self.run, *after)

    def restore(self, x: Array, axis: int) -> Array:
        """The inverse of `regroup`, without the padding."""
        if self.step == 1:
            return x
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        x = x.reshape(*before, self.step, self.run, *after)
        x = jnp.swapaxes(x, axis, axis + 1)  # [run, step]
        x = x.reshape(*before, self.run * self.step, *after)
        return x[(slice(None),) * axis + (slice(self.length),)]


def _padded(x: Array, axis: int, amount: int) -> Array:
    return jnp.pad(x, [(0, amount if i == axis else 0) for i in range(x.ndim)]) if amount else x


class Group(NamedTuple):
    """Patterns that share an order of tokens.

    Attributes:
      patterns: of this group.
      excluded: those of the groups before, whose pairs are left out.
      query, key: the orders.
    """

    patterns: tuple[MaskPattern, ...]
    excluded: tuple[MaskPattern, ...]
    query: Order
    key: Order

    def inside_blocks(self) -> tuple[MaskPattern, ...]:
        """The patterns that have to be looked at inside a block, where random blocks are whole ones."""
        return tuple(each for each in self.patterns if not isinstance(each, RandomBlocks))


def groups(patterns: tuple[MaskPattern, ...], queries: int, keys: int) -> list[Group]:
    """The patterns in groups; those in the order of the row come first."""
    by_steps: dict[tuple[int, int], list[MaskPattern]] = {}
    for pattern in sorted(patterns, key=lambda pattern: pattern.steps != (1, 1)):
        by_steps.setdefault(pattern.steps, []).append(pattern)
    found, before = [], ()
    for steps, some in by_steps.items():
        size = block_size(some)
        orders = (_order(length, step, size) for length, step in zip((queries, keys), steps, strict=True))
        found.append(Group(tuple(some), before, *orders))
        before += tuple(some)
    return found


def _order(length: int, step: int, size: int) -> Order:
    """Blocks of about `size` tokens that leave little padding in runs of tokens."""
    short = math.ceil(length / step)
    return Order(length, step, min(size, length) if step == 1 else math.ceil(short / math.ceil(short / size)))


def block_size(patterns: list[MaskPattern]) -> int:
    """Tokens of a block: small enough that blocks at the edge of a pattern hold few pairs that do not meet."""
    sizes = []
    for pattern in patterns:
        if isinstance(pattern, Neighbours | RandomBlocks):
            divisors = [n for n in range(1, LARGEST + 1) if pattern.block % n == 0]
            sizes.append(divisors[-1])
        elif isinstance(pattern, Local | Comb):
            size = USUAL * 4 if pattern.size is None else pattern.size
            sizes.append(1 << max(0, round(math.log2(size / 2))))
    return min(LARGEST, max(SMALLEST, min(sizes, default=USUAL)))


class BlockTable(NamedTuple):
    """What a group visits, as NumPy arrays [1 or H, query blocks, key blocks] of bool.

    Attributes:
      touched: blocks that may hold a pair that the patterns, causality and the window allow.
      whole: blocks all of whose pairs the patterns allow.
    """

    touched: np.ndarray
    whole: np.ndarray


def table(group: Group, mask: Mask) -> BlockTable:
    """The table of a group under a mask without indices of its own."""
    query, key = crossed(group.query.blocks(), group.key.blocks())
    found = tables_of(group.patterns, query, key)
    return BlockTable(found.touched & possible(query, key, mask), found.whole)


def crossed(query: BlockRange, key: BlockRange) -> tuple[BlockRange, BlockRange]:
    """Blocks of queries along the first axis, of keys along the second."""
    return (
        BlockRange(query.least[:, None], query.most[:, None], query.step),
        BlockRange(key.least[None], key.most[None], key.step),
    )


def tables_of(patterns: tuple[MaskPattern, ...], query: BlockRange, key: BlockRange) -> BlockTable:
    """The table of patterns alone, `Marked` left out, for blocks from `crossed`."""
    touched = whole = np.zeros((1, query.least.size, key.least.size), bool)
    for pattern in patterns:
        if not isinstance(pattern, Marked):
            some, every = pattern.tables(query, key)
            touched, whole = touched | some, whole | every
    return BlockTable(touched, whole)


def possible(query: BlockRange, key: BlockRange, mask: Mask) -> np.ndarray:
    """[1, query blocks, key blocks]: blocks with tokens that causality and the window do not rule out."""
    found = (query.most >= 0) & (key.most >= 0)
    if mask.causal:
        found = found & (key.least <= query.most)
    if mask.window is not None:
        found = found & Local(mask.window).tables(query, key)[0][0]
    return found[None]


class Visits(NamedTuple):
    """The blocks of keys that each block of queries visits.

    Attributes:
      blocks: [query blocks, V] int32, their numbers; only the first `counts` count.
      counts: [query blocks] int32.
      whole: [query blocks, V] bool, those all of whose pairs the patterns allow; None: all.
    """

    blocks: Array
    counts: Array
    whole: Array | None


def listed(of: BlockTable) -> Visits:
    """A table as lists, with a leading axis [1 or H]."""
    counts = of.touched.sum(2)
    order = np.argsort(~of.touched, axis=2, kind="stable")[:, :, : max(1, counts.max(initial=0))].astype(np.int32)
    every = bool(np.all(of.whole | ~of.touched))
    whole = None if every else jnp.asarray(np.take_along_axis(np.broadcast_to(of.whole, of.touched.shape), order, 2))
    return Visits(jnp.asarray(order), jnp.asarray(counts.astype(np.int32)), whole)


def listed_with_marks(of: BlockTable, group: Group, mask: Mask) -> Visits:
    """The lists of a table and of the global tokens that the mask marks, with a leading axis [B * (1 or H)]; rows are
    apart, because what one row has to visit another need not. Documents that do not meet are left out."""
    query, key = group.query.blocks(), group.key.blocks()
    allowed = possible(
        BlockRange(query.least[:, None], query.most[:, None]), BlockRange(key.least[None], key.most[None]), mask
    )[:, None]
    found = jnp.asarray(of.touched)[None]  # [B or 1, H or 1, query blocks, key blocks]
    for marks, order, axis in ((mask.global_queries, group.query, -1), (mask.global_keys, group.key, -2)):
        if marks is not None:
            found = found | jnp.expand_dims(jnp.any(_in_blocks(order, marks, False), axis=2), (1, axis))
    found = found & allowed
    if mask.query_segments is not None and mask.key_segments is not None:
        least, most = (
            [reduce(_in_blocks(order, x, fill), axis=2) for order, x in
             ((group.query, mask.query_segments), (group.key, mask.key_segments))]
            for reduce, fill in ((jnp.min, jnp.iinfo(jnp.int32).max), (jnp.max, jnp.iinfo(jnp.int32).min))
        )  # fmt: skip
        meet = (least[1][:, None] <= most[0][:, :, None]) & (least[0][:, :, None] <= most[1][:, None])
        found = found & meet[:, None]
    found = found.reshape(-1, *found.shape[2:])
    counts = jnp.sum(found, axis=2, dtype=jnp.int32)
    at = jnp.where(found, jnp.cumsum(found, axis=2) - 1, found.shape[2])  # the others fall beyond the end
    numbers = jnp.broadcast_to(jnp.arange(found.shape[2], dtype=jnp.int32), found.shape)
    first, second = jnp.ogrid[: found.shape[0], : found.shape[1]]
    blocks = jnp.zeros(found.shape, jnp.int32).at[first[..., None], second[..., None], at].set(numbers, mode="drop")
    whole = jnp.broadcast_to(jnp.asarray(of.whole)[None], (len(found) // len(of.whole), *of.whole.shape))
    return Visits(blocks, counts, jnp.take_along_axis(whole.reshape(found.shape), blocks, axis=2))


def _in_blocks(order: Order, x: Array, fill) -> Array:
    """[B, T] -> [B, blocks, tokens of a block] in another order, with `fill` in the padding."""
    at = jnp.asarray(order.positions())
    found = jnp.where(at >= 0, jnp.broadcast_to(x, (len(x), order.length))[:, jnp.maximum(at, 0)], fill)
    return found.reshape(len(x), -1, order.block)


def each_listed(
    o: TileOptions, x: TiledInputs, i: Array, allowed_in: Callable, part: Callable, add: Callable, carry: Any
) -> Any:
    """carry = add(carry, part(carry, j, number of keys, allowed), j) for every key block j in the list of query block
    i. `allowed_in(j)`: what the rest of the mask allows, [B, H, t, s]."""
    visits: Visits = x.visits

    def meeting(patterns: tuple[MaskPattern, ...], j: Array) -> Array:
        mask = cut_mask(x.mask, (i * o.query_block, j * o.key_block), (o.query_block, o.key_block))
        query, key = (at.reshape(-1, 1, at.shape[-1]) for at in (mask.query_index, mask.key_index))
        marks = mask.heads, mask.global_queries, mask.global_keys
        return rank4(union(patterns, query[..., None], key[:, :, None], *marks))

    def visit(n: Array, carry: Any) -> Any:
        j = visits.blocks[i, n]
        allowed = allowed_in(j)
        if visits.whole is not None:
            inside = visits.whole[i, n]
            allowed = allowed & (meeting(o.patterns, j) | inside if o.patterns else inside)
        if o.excluded:
            allowed = allowed & ~meeting(o.excluded, j)

        def seen(carry: Any) -> Any:
            return add(carry, part(carry, j, o.key_block, allowed), j)

        return seen(carry) if o.mask_is_positional else jax.lax.cond(jnp.any(allowed), seen, lambda c: c, carry)

    return jax.lax.fori_loop(0, visits.counts[i], visit, carry)
