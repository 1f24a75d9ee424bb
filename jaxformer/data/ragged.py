"""Sequences of different lengths end to end in one array, and their place in the rows of a batch.

>>> words = Ragged(np.array([7, 8, 9]), np.array([1, 2]))
>>> framed(words, last=1)
Ragged(values=array([7, 1, 8, 9, 1]), sizes=array([2, 3]))
>>> ids, segments, positions = placed(framed(words, last=1), np.array([0, 0]), 1, 6)
>>> ids.tolist(), segments.tolist(), positions.tolist()
([[7, 1, 8, 9, 1, 0]], [[1, 1, 2, 2, 2, 0]], [[0, 1, 0, 1, 2, 0]])
"""

from typing import NamedTuple

import numpy as np

from jaxformer.data.rows import HostBatch, Lengths
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.types import Batch


class Ragged(NamedTuple):
    """P sequences end to end.

    Attributes:
      values: [n] integers.
      sizes: [P] int64, which add up to n; 0 is possible.
    """

    values: np.ndarray
    sizes: np.ndarray

    @property
    def begins(self) -> np.ndarray:
        """[P] int64: where each begins in `values`."""
        return np.cumsum(self.sizes) - self.sizes

    @property
    def owner(self) -> np.ndarray:
        """[n] int64: the sequence that each value is of."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    @property
    def places(self) -> np.ndarray:
        """[n] int64: the place of each value in its sequence, from 0."""
        return np.arange(len(self.values)) - np.repeat(self.begins, self.sizes)

    def where(self, kept: np.ndarray) -> "Ragged":
        """The values where `kept`, [n] bool."""
        return Ragged(self.values[kept], np.bincount(self.owner[kept], minlength=len(self.sizes)))

    def split(self) -> list[np.ndarray]:
        """Each sequence by itself."""
        return np.split(self.values, np.cumsum(self.sizes)[:-1])


def order_within(group: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """[n] the order that sorts by group and within each by random bits; what has the same bits stays in order.

    Args:
      group: [n] integers, at least 0, below 2**32.
      bits: [n] random uint64, of which the lowest give way to the group: one sort of numbers in place of two.

    >>> order_within(np.array([0, 1, 0, 1]), np.array([2**63, 0, 2**62, 2**63], np.uint64)).tolist()
    [2, 0, 1, 3]
    """
    width = np.uint64(int(group.max(initial=0)).bit_length())
    if not width:
        return np.argsort(bits, kind="stable")
    return np.argsort((group.astype(np.uint64) << (np.uint64(64) - width)) | (bits >> width), kind="stable")


def framed(sequences: Ragged, first: np.ndarray | None = None, last: int | None = None) -> Ragged:
    """Each sequence with a token in front, `first` [P], and one at the end, `last`."""
    before, sizes = int(first is not None), sequences.sizes
    out = Ragged(np.empty(0, sequences.values.dtype), sizes + before + (last is not None))
    values = np.empty(out.sizes.sum(), sequences.values.dtype)
    if first is not None:
        values[out.begins] = first
    if last is not None:
        values[out.begins + out.sizes - 1] = last
    values[np.repeat(out.begins + before, sizes) + sequences.places] = sequences.values
    return Ragged(values, out.sizes)


def placed(sequences: Ragged, row: np.ndarray, rows: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, segments, positions), [rows, length] int32 each, 0 where nothing is.

    Args:
      sequences: those of a row after each other, all of which fit.
      row: [P] the row of each, not falling.
      rows, length: of the batch.
    """
    used = np.bincount(row, sequences.sizes, minlength=rows).astype(np.int64)
    count = np.bincount(row, minlength=rows)
    column = sequences.begins - (np.cumsum(used) - used)[row]
    number = np.arange(len(row)) - (np.cumsum(count) - count)[row] + 1
    places = sequences.places
    where = np.repeat(row, sequences.sizes), np.repeat(column, sequences.sizes) + places
    out = np.zeros((3, rows, length), np.int32)
    for array, values in zip(out, (sequences.values, np.repeat(number, sequences.sizes), places), strict=True):
        array[where] = values
    return out[0], out[1], out[2]


def pair_batch(
    source: Ragged, target: Ragged, row: np.ndarray, rows: int, lengths: Lengths, tokenizer: Tokenizer
) -> Batch:
    """Pairs of sequences in the rows of a batch, those of a row after each other; no pair sees another.

    Pair number i of a row, from 1, has segment i on both sides. The decoder reads the start token and then the target
    shifted by one; every token of the target has weight 1.

    Args:
      source, target: of P pairs, their end tokens included.
      row: [P] the row of each pair, not falling; the pairs of a row fit both of its sides.
      rows: of the batch.
      lengths: T and S of its rows.
      tokenizer: for the ids of start and padding.

    Returns:
      Batch of [R, T], with `inputs` source_tokens, source_segments and source_positions, [R, S] int32.
    """
    assert lengths.source is not None
    shifted = np.empty_like(target.values)
    shifted[1:] = target.values[:-1]
    shifted[target.begins[target.sizes > 0]] = tokenizer.start_id
    sides = []
    for side, length in ((source, lengths.source), (target, lengths.target)):
        ids, segments, positions = placed(side, row, rows, length)
        sides.append((np.where(segments > 0, ids, np.int32(tokenizer.pad_id)), segments, positions))
    (source_ids, source_segments, source_positions), (targets, segments, positions) = sides
    tokens = placed(Ragged(shifted, target.sizes), row, rows, lengths.target)[0]
    inputs = {"source_tokens": source_ids, "source_segments": source_segments, "source_positions": source_positions}
    return HostBatch(
        tokens=np.where(segments > 0, tokens, np.int32(tokenizer.pad_id)),
        targets=targets,
        weights=(segments > 0).astype(np.float32),
        positions=positions,
        segments=segments,
        inputs=inputs,
    )
