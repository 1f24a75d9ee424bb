"""Patterns of sparse attention as descriptions: which pairs of positions meet, and which blocks hold such a pair.

`masks.either` joins patterns by "or" into a condition of a `Mask`, which says "and" to causality, documents and
padding. A pattern is hashable and holds no array; where it is expanded, and which pairs of blocks are left out unseen,
follows from it.

>>> from jaxformer import masks
>>> mask = masks.causal() & masks.either(local(2), global_tokens(1))
>>> masks.expand(mask, 4, 4)[0].astype(int).tolist()
[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxformer.patterns.kinds import (
    LONGEST,
    Comb,
    GlobalPositions,
    GlobalTokens,
    Local,
    Marked,
    MaskPattern,
    Neighbours,
    RandomBlocks,
    SummaryColumns,
    union,
)

__all__ = [
    "Comb", "GlobalPositions", "GlobalTokens", "Local", "Marked", "MaskPattern", "Neighbours", "RandomBlocks",
    "SummaryColumns", "dilated", "fixed", "global_tokens", "local", "neighbours", "random_blocks", "random_table",
    "strided", "union",
]  # fmt: skip


def local(size: int) -> Local:
    """Pairs fewer than `size` tokens apart, as `masks.window`; with causality the last `size` keys.

    Raises:
      ValueError: `size` is below 1.

    Source: Beltagy et al. 2020, section 3.1 (sliding window).
    """
    return Local(_count("local", "size", size))


def dilated(size: int, step: int) -> Comb:
    """Pairs a multiple of `step` tokens apart, fewer than `size` such steps: a window with gaps.

    Raises:
      ValueError: `size` or `step` is below 1.

    Source: Beltagy et al. 2020, section 3.1 (dilated sliding window).
    """
    return Comb(_count("dilated", "step", step), _count("dilated", "size", size))


def strided(stride: int) -> tuple[MaskPattern, ...]:
    """The last `stride` tokens, and those a multiple of `stride` away.

    Raises:
      ValueError: `stride` is below 1.

    Source: Child et al. 2019, section 4.2.
    """
    return local(_count("strided", "stride", stride)), Comb(stride)


def fixed(block: int, last: int) -> tuple[MaskPattern, ...]:
    """The token's own block of `block` tokens, and the `last` tokens of every block, which sum it up.

    Raises:
      ValueError: `block` is below 1, `last` below 1 or above `block`.

    Source: Child et al. 2019, section 4.2.
    """
    if _count("fixed", "last", last) > _count("fixed", "block", block):
        raise ValueError(f"fixed: last {last}; accepted: 1 to block {block}")
    return Neighbours(block), SummaryColumns(block, last)


def neighbours(block: int, reach: int = 1) -> Neighbours:
    """The token's own block of `block` tokens and `reach` blocks on each side.

    Raises:
      ValueError: `block` is below 1, or `reach` no integer of at least 0.

    Source: Zaheer et al. 2020, section 2 (window of blocks).
    """
    if not isinstance(reach, int | np.integer) or reach < 0:
        raise ValueError(f"neighbours: reach {reach}; accepted: an integer of at least 0")
    return Neighbours(_count("neighbours", "block", block), reach)


def global_tokens(
    of: int | Array, *, last: int = 0, length: int | None = None, see: bool = True, seen: bool = True
) -> GlobalPositions | GlobalTokens:
    """Tokens that see all tokens (`see`) and that all tokens see (`seen`).

    Args:
      of: the first so many of a row; or [B, T] bool, the tokens that are True: with documents in a row, those of each.
      last: with a number, the last so many of a row of `length` too.
      length: of the row; needed by `last`.
      see, seen: one of the two can be left out.

    Raises:
      ValueError: a number below 0, `last` without `length`, or an array with other axes.

    Source: Beltagy et al. 2020, section 3.1 (global attention); Zaheer et al. 2020, section 2.
    """
    if isinstance(of, int | np.integer) and not isinstance(of, bool):
        if of < 0 or last < 0 or (last and (length is None or length < last)):
            raise ValueError(f"global_tokens: {of}, last {last}, length {length}; accepted: counts, last with length")
        return GlobalPositions(int(of), length - last if last and length is not None else None, see, seen)
    marked = jnp.asarray(of)
    if marked.ndim != 2 or marked.dtype != bool or last:
        raise ValueError(
            f"global_tokens: {marked.dtype}{list(marked.shape)}, last {last}; accepted: a number, or [B, T] bool alone"
        )
    return GlobalTokens(marked, see, seen)


def random_blocks(block: int, table: Sequence | np.ndarray) -> RandomBlocks:
    """For each block of `block` queries the blocks of keys that a table names.

    Args:
      block: tokens of a block.
      table: [blocks, r] or, for each head, [H, blocks, r] int, as from `random_table`. A number may occur twice.

    Raises:
      ValueError: a table of other axes, or with a number that is no block.

    Source: Zaheer et al. 2020, section 2 (random attention).
    """
    found = np.asarray(table, int)
    found = found if found.ndim == 3 else found[None]
    if found.ndim != 3 or not found.shape[1] or np.any((found < 0) | (found >= found.shape[1])):
        raise ValueError(
            f"random_blocks: table {found.shape}; accepted: [blocks, r] or [H, blocks, r], 0 to blocks - 1"
        )
    rows = tuple(tuple(tuple(row) for row in head) for head in found.tolist())
    return RandomBlocks(_count("random_blocks", "block", block), rows)


def random_table(
    blocks: int, count: int, *, seed: int, heads: int = 1, causal: bool = False, around: int = 1, ends: int = 1
) -> np.ndarray:
    """A table for `random_blocks`, [heads, blocks, count] int: a function of its arguments alone.

    Each block of queries draws from the blocks that are neither its neighbours (`around` blocks on each side) nor one
    of the `ends` first or last, which all see anyway; with `causal` from those before it. Where there are too few, its
    own number stands in their place.

    >>> random_table(8, 2, seed=0)[0, 4].tolist(), random_table(8, 2, seed=0, causal=True)[0, 2].tolist()
    ([2, 1], [2, 2])
    """
    found = np.repeat(np.arange(blocks)[None, :, None], heads, 0).repeat(count, 2)
    for head in range(heads):
        for row in range(blocks):
            free = np.r_[ends : max(ends, row - around), row + around + 1 : blocks - ends]
            free = free[free < row] if causal else free
            rng = np.random.Generator(np.random.Philox(key=[seed, head << 32 | row]))
            chosen = rng.permutation(free[free >= ends])[:count]
            found[head, row, : len(chosen)] = chosen
    return found


def _count(function: str, name: str, value: int) -> int:
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{function}: {name} {value}; accepted: an integer of at least 1")
    return min(int(value), LONGEST)
