"""What the rows of every objective share: their lengths, their documents, their padding.

>>> segments, positions = documents(np.array([[0, 7, 8, 0, 9]]), separator_id=0)
>>> segments.tolist(), positions.tolist()
([[1, 1, 1, 2, 2]], [[0, 1, 2, 0, 1]])
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxformer.types import Batch

HostBatch: Callable[..., Batch] = Batch  # of numpy arrays; `Batch` names the type they have on a device


class Lengths(NamedTuple):
    """Tokens that a row of a batch holds.

    Attributes:
      target: T, of what the model predicts.
      source: S, of what it reads beside that; None: nothing.
    """

    target: int
    source: int | None = None


class SplitRows(Protocol):
    """The rows of a split, by number.

    Attributes:
      per_epoch: rows of one epoch.
      words: random 64-bit words a row takes.
    """

    per_epoch: int
    words: int

    def batch(self, index: np.ndarray, seed: int, epoch: np.ndarray, bits: np.ndarray) -> Batch:
        """Some rows.

        Args:
          index: [R] numbers of the rows, from 0 to per_epoch - 1.
          seed, epoch: [R] what the rows of an epoch depend on besides.
          bits: [R, words] random uint64.
        """

    def notes(self) -> list[str]:
        """Lines about what training leaves out, where that is much."""


def documents(tokens: np.ndarray, separator_id: int) -> tuple[np.ndarray, np.ndarray]:
    """(segments, positions), [R, T] int32 each: documents of a row numbered from 1, and the place in each from 0.

    A row that begins inside a document begins at position 0 as well.
    """
    opens = tokens == separator_id
    opens[:, 0] = True
    segments = np.cumsum(opens, axis=1, dtype=np.int32)
    return segments, distance(opens)[1]


def distance(opens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(column of the last True at or before each place, how far back it is), [R, T] int32; column 0 is True."""
    column = np.arange(opens.shape[1], dtype=np.int32)[None, :]
    last = np.maximum.accumulate(np.where(opens, column, 0), axis=1)
    return last, column - last


def blanked(batch: Batch, blank: np.ndarray, pad_id: int) -> Batch:
    """A batch with some places, [R, T] bool, turned into padding: no weight, segment 0, position 0; `Batch.inputs` as
    said there."""
    if not blank.any():
        return batch

    def input_of(x: Any) -> np.ndarray:
        if x.ndim == 1:
            return np.where(blank.all(axis=1), np.int32(-1), x).astype(x.dtype)
        own = blank if x.shape[1] == blank.shape[1] else blank.all(axis=1, keepdims=True)  # of a source: whole rows
        return np.where(own.reshape(*own.shape, *[1] * (x.ndim - 2)), 0, x).astype(x.dtype)

    return HostBatch(
        tokens=np.where(blank, np.int32(pad_id), batch.tokens),
        targets=np.where(blank, np.int32(pad_id), batch.targets),
        weights=np.where(blank, np.float32(0), batch.weights),
        positions=np.where(blank, np.int32(0), batch.positions),
        segments=np.where(blank, np.int32(0), batch.segments),
        inputs=None if batch.inputs is None else {name: input_of(x) for name, x in batch.inputs.items()},
    )
