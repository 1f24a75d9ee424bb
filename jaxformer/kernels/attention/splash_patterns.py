"""Masks of patterns for JAX's TPU kernel: lazy ones, of which it looks at a tile at a time when a program is made.

Tiles without a pair are not visited, those whose pairs all meet are not masked, and of the others the kernel keeps
each once: a pattern that repeats along the row, as those of Sparse Transformers, has few of them.

>>> from jaxformer import patterns
>>> seen = lazy_mask(256, True, None, patterns.strided(128))
>>> seen[0:128, 0:128].sum(), seen[128:256, 0:128].sum(), seen[0:128, 128:256].any()
(np.int64(8256), np.int64(8256), np.False_)
"""

import functools
from typing import Any

import numpy as np

from jaxformer.masks import Mask
from jaxformer.patterns import Comb, Local, MaskPattern, Neighbours, RandomBlocks, SummaryColumns
from jaxformer.patterns.kinds import BlockRange

LANES = 128  # tokens of the smallest tile
SELF = (Local, Neighbours, Comb)  # those in which every token sees itself
KINDS = (*SELF, SummaryColumns, RandomBlocks)


def unsupported(mask: Mask) -> str | None:
    """Why the kernel cannot apply the patterns of a mask; None: it can, or there are none."""
    if not mask.patterns:
        return None
    if not all(isinstance(pattern, KINDS) for pattern in mask.patterns):
        return "global tokens, which documents in a row have each their own"
    if not any(isinstance(pattern, SELF) for pattern in mask.patterns):
        return "patterns in which a token does not see itself"
    for pattern in mask.patterns:
        if isinstance(pattern, RandomBlocks) and (pattern.block % LANES or pattern.by_head):
            each = " of each head" if pattern.by_head else ""
            return f"random blocks of {pattern.block} tokens{each} (one table, multiples of {LANES})"
    return None


def tile(most: int, patterns: tuple[MaskPattern, ...]) -> int:
    """Tokens of a tile's side: at most `most`, no larger than random blocks."""
    sizes = [pattern.block & -pattern.block for pattern in patterns if isinstance(pattern, RandomBlocks)]
    return min(most, *sizes) if sizes else most


def lazy_mask(length: int, causal: bool, window: int | None, patterns: tuple[MaskPattern, ...]) -> Any:
    """A mask of the kernel's library: pairs that meet by one of the patterns, by causality and within the window."""
    return _kind()(length, causal, window, patterns)


@functools.cache
def _kind() -> type:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as shapes

    class LazyMask(shapes.Mask):
        """Equal to another one that says the same, so that heads share their tiles."""

        def __init__(self, *about: Any):
            self._about = about

        @property
        def shape(self) -> tuple[int, int]:
            return self._about[0], self._about[0]

        def __getitem__(self, index: Any) -> np.ndarray:
            return _seen(*index, *self._about)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, type(self)) and self._about == other._about

        def __hash__(self) -> int:
            return hash(self._about)

    return LazyMask


def _seen(
    rows: slice, columns: slice, length: int, causal: bool, window: int | None, patterns: tuple[MaskPattern, ...]
) -> np.ndarray:
    """[rows, columns] bool, without looking at pairs that tables of blocks decide."""
    query, key = (np.arange(length, dtype=np.int32)[each] for each in (rows, columns))
    ranges = [BlockRange(x[:1, None], x[-1:, None]) for x in (query, key)]
    tables = [pattern.tables(*ranges) for pattern in patterns]
    some, every = (any(table[at].any() for table in tables) for at in (0, 1))
    if not some or (causal and key[0] > query[-1]):
        return np.zeros((len(query), len(key)), bool)
    found = np.ones((len(query), len(key)), bool)
    if not every:
        found = functools.reduce(np.logical_or, [_of(pattern, query[:, None], key[None]) for pattern in patterns])
    if causal:
        found = found & (key[None] <= query[:, None])
    return found if window is None else found & (np.abs(query[:, None] - key[None]) < window)


def _of(pattern: MaskPattern, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    if not isinstance(pattern, RandomBlocks):
        return np.asarray(pattern.allows(query, key))  # type: ignore[arg-type]
    (pairs,) = pattern.pairs()
    count, numbers = len(pairs), (query // pattern.block, key // pattern.block)
    inside = (numbers[0] < count) & (numbers[1] < count)
    return pairs[np.minimum(numbers[0], count - 1), np.minimum(numbers[1], count - 1)] & inside


def visited(length: int, size: int, causal: bool, window: int | None, patterns: tuple[MaskPattern, ...]) -> float:
    """Share of the tiles of `size` tokens a side that may hold a pair.

    >>> from jaxformer import patterns
    >>> visited(2048, 512, True, None, (patterns.local(512),)), visited(2048, 512, True, None, patterns.strided(64))
    (0.4375, 0.625)
    """
    first = np.arange(0, length, size)
    query, key = BlockRange(first[:, None], first[:, None] + size - 1), BlockRange(first[None], first[None] + size - 1)
    found = functools.reduce(np.logical_or, [pattern.tables(query, key)[0] for pattern in patterns])
    if causal:
        found = found & (key.least <= query.most)
    if window is not None:
        found = found & Local(window).tables(query, key)[0]
    return float(found.mean())
