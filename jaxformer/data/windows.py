"""Rows that are windows of a split's tokens, documents packed end to end."""

from typing import Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.checked_array import indexable
from jaxformer.data.corpus import Split
from jaxformer.data.objectives import OBJECTIVES, HostBatch
from jaxformer.data.shuffle import below, keys
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.types import Batch

_OFFSETS = 1  # stream of `shuffle.keys`


class WindowRows:
    """Rows that are windows of the tokens of a split, documents packed end to end.

    Of n tokens, an epoch of next-token training reads (n - 1) // T - 1 windows (at least one) of T tokens, the first of
    which begins at a random offset from 0 to T - 1. So the last (n - 1) % T + 1 tokens are never read, and those near
    either end less often: the i-th token, counted from 0 at the first or from 1 at the last that is ever read, is a
    target in i / T of the epochs, from i = T on in all. For objectives that need no token ahead, read n for n - 1 and
    count i from 1. A text of fewer than two rows is a single window, and read to its end.

    Attributes:
      per_epoch: rows of one epoch.
      unread: tokens at the end of the split that no window reaches in any epoch.
      words: random 64-bit words a row takes.
    """

    def __init__(self, split: Split, tokenizer: Tokenizer, data: DataConfig, length: int, *, covering: bool):
        """Counts the windows.

        Args:
          split: the tokens.
          tokenizer: what made them.
          data: names the objective, and has its settings.
          length: tokens of a row.
          covering: go over the split once, the last window filled up, for evaluation; otherwise whole windows at a
            random offset.

        Raises:
          ConfigError: the split is shorter than one row; of a covered one, empty.
        """
        objective = OBJECTIVES[data.objective]
        ahead = objective.ahead
        usable = len(split.tokens) - ahead
        if usable < (1 if covering else length):
            raise ConfigError(
                f"config.model.context_length: a row of {length} tokens needs {length + ahead}; the "
                f"{'held-out' if covering else 'training'} text has {len(split.tokens)} ({split.num_bytes} bytes)"
            )
        whole = usable // length
        # One window less than fit leaves room for any offset of the others.
        self.per_epoch = -(-usable // length) if covering else max(whole - 1, 1)
        self._offsets = 1 if covering else min(length, usable - self.per_epoch * length + 1)
        self.unread = 0 if covering else usable - self.per_epoch * length - self._offsets + 1
        self._tokens = indexable(split.tokens)
        self._columns = np.arange(length + ahead)
        self._usable, self._length = usable, length
        self._ask, self._pad_id, self._covering = objective.prepare(tokenizer, data), tokenizer.pad_id, covering
        self.words = objective.words * length

    def notes(self) -> list[str]:
        """Lines about what training leaves out, where it is a hundredth of the text or more."""
        total = len(self._tokens)
        note = f"the last {self.unread} of {total} training tokens fill no row of {self._length} and are never read"
        return [note] if self.unread * 100 >= total else []

    def batch(self, index: np.ndarray, seed: int, epoch: np.ndarray, bits: np.ndarray) -> Batch:
        """The rows of some windows.

        Args:
          index: [R] window.
          seed, epoch: [R] what the offset depends on.
          bits: [R, words] random uint64.
        """
        start = index * self._length + below(self._offsets, keys(seed, _OFFSETS, epoch))
        places = start[:, None] + self._columns
        if self._covering:
            places = np.minimum(places, len(self._tokens) - 1)
        batch = self._ask(self._tokens[places], bits)
        if self._covering:
            outside = start[:, None] + np.arange(self._length) >= self._usable
            batch = blanked(batch, outside, self._pad_id)
        return batch


def blanked(batch: Batch, blank: np.ndarray, pad_id: int) -> Batch:
    """A batch with some places, [R, T] bool, turned into padding: no weight, segment 0, position 0; `Batch.inputs` as
    said there."""
    if not blank.any():
        return batch

    def input_of(x: Any) -> np.ndarray:
        if x.ndim == 1:
            return np.where(blank.all(axis=1), np.int32(-1), x).astype(x.dtype)
        return np.where(blank.reshape(*blank.shape, *[1] * (x.ndim - 2)), 0, x).astype(x.dtype)

    return HostBatch(
        tokens=np.where(blank, np.int32(pad_id), batch.tokens),
        targets=np.where(blank, np.int32(pad_id), batch.targets),
        weights=np.where(blank, np.float32(0), batch.weights),
        positions=np.where(blank, np.int32(0), batch.positions),
        segments=np.where(blank, np.int32(0), batch.segments),
        inputs=None if batch.inputs is None else {name: input_of(x) for name, x in batch.inputs.items()},
    )
