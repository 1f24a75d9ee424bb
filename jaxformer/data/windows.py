"""Windows of a split's tokens, documents packed end to end, and rows that are such windows."""

from collections.abc import Callable

import numpy as np

from jaxformer.data.checked_array import indexable
from jaxformer.data.corpus import Split
from jaxformer.data.rows import blanked
from jaxformer.data.shuffle import below, keys
from jaxformer.errors import ConfigError
from jaxformer.types import Batch

_OFFSETS = 1  # stream of `shuffle.keys`


class Windows:
    """Windows of the tokens of a split, documents packed end to end.

    Of n tokens, an epoch of next-token training reads (n - 1) // T - 1 windows (at least one) of T tokens, the first of
    which begins at a random offset from 0 to T - 1. So the last (n - 1) % T + 1 tokens are never read, and those near
    either end less often: the i-th token, counted from 0 at the first or from 1 at the last that is ever read, is a
    target in i / T of the epochs, from i = T on in all. For objectives that need no token ahead, read n for n - 1 and
    count i from 1. A text of fewer than two rows is a single window, and read to its end.

    Attributes:
      per_epoch: windows of one epoch.
      unread: tokens at the end of the split that no window reaches in any epoch.
    """

    def __init__(self, split: Split, length: int, *, ahead: int = 0, covering: bool, before: int = 0):
        """Counts the windows.

        Args:
          split: the tokens.
          length: T, tokens of a window.
          ahead: tokens that each has beyond those.
          before: tokens that each has before those; what would lie before the text fills up.
          covering: go over the split once, the last window filled up, for evaluation; otherwise whole windows at a
            random offset.

        Raises:
          ConfigError: the split is shorter than one window; of a covered one, empty.
        """
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
        self._columns = np.arange(-before, length + ahead)
        self._usable, self._length, self._covering, self._before = usable, length, covering, before

    def notes(self) -> list[str]:
        """Lines about what training leaves out, where it is a hundredth of the text or more."""
        total = len(self._tokens)
        note = f"the last {self.unread} of {total} training tokens fill no row of {self._length} and are never read"
        return [note] if self.unread * 100 >= total else []

    def read(self, index: np.ndarray, seed: int, epoch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """([R, before + T + ahead] tokens of some windows, [R, before + T] bool, which of them fill up the text).

        Args:
          index: [R] window.
          seed, epoch: [R] what the offset depends on.
        """
        start = index * self._length + below(self._offsets, keys(seed, _OFFSETS, epoch))
        places = start[:, None] + self._columns
        outside = places[:, : self._before + self._length] >= self._usable
        if self._before:
            outside |= places[:, : outside.shape[1]] < 0
            places = np.maximum(places, 0)
        if self._covering:
            places = np.minimum(places, len(self._tokens) - 1)
        return self._tokens[places], outside


class WindowRows:
    """Rows that are windows, as `rows.SplitRows`.

    Attributes:
      per_epoch: rows of one epoch.
      words: random 64-bit words a row takes.
    """

    def __init__(self, windows: Windows, ask: Callable[[np.ndarray, np.ndarray], Batch], pad_id: int, *, words: int):
        """`ask`: what `Objective.prepare` returns; `words`: random words a row takes."""
        self._windows, self._ask, self._pad_id = windows, ask, pad_id
        self.per_epoch, self.words, self.notes = windows.per_epoch, words, windows.notes

    def batch(self, index: np.ndarray, seed: int, epoch: np.ndarray, bits: np.ndarray) -> Batch:
        """The rows of some windows."""
        tokens, outside = self._windows.read(index, seed, epoch)
        return blanked(self._ask(tokens, bits), outside, self._pad_id)
