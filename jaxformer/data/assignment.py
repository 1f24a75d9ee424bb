"""Which source of a mixture each row is of: a pure function of (seed, row), with no state to save.

Without the seed, row r is of the first source if `floor((r + 1) * p) > floor(r * p)`, p being its share; the others
share the rows that are left in the same way. So after any number of rows each source has had its share to within a row
or two, and how many it has had is a formula. The seed then shuffles windows of `WINDOW` rows, so that no source comes
at regular steps.

>>> assignment = Assignment([0.7, 0.3], seed=0)
>>> source, number = assignment(np.arange(10 * WINDOW))
>>> np.bincount(source).tolist()
[1791, 769]
>>> number[source == 1].tolist() == list(range(769))
True
"""

from collections.abc import Sequence

import numpy as np

from jaxformer.data.shuffle import keys, permuted

WINDOW = 256
_STREAM = 23  # of `shuffle.keys`
_BITS = 32  # of a share


class Assignment:
    """Rows to sources."""

    def __init__(self, weights: Sequence[float], seed: int):
        """Shares are rounded to multiples of 2**-32, and are at least that.

        Args:
          weights: of the sources, above 0; only their ratios matter.
          seed: of the shuffle in each window.
        """
        rest = [sum(weights[i:]) for i in range(len(weights))]
        parts = [round(weight / left * 2**_BITS) for weight, left in zip(weights, rest, strict=True)]
        # Of what the sources before have left; the last takes all of it.
        self._parts = [np.uint64(min(max(part, 1), 2**_BITS - 1)) for part in parts[:-1]]
        self._seed = seed

    def __call__(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each row, and its number among the rows of that source.

        Args:
          rows: [R] integers, at least 0, in any order.

        Returns:
          ([R] int64 index of the source, [R] int64 how many earlier rows are of the same source).
        """
        rows = np.asarray(rows, np.int64)
        windows, where = np.unique(rows // WINDOW, return_inverse=True)
        places = np.tile(np.arange(WINDOW), len(windows))
        key = np.repeat(keys(self._seed, _STREAM, windows), WINDOW)
        shuffled = permuted(places, WINDOW, key).reshape(-1, WINDOW)
        source = self._regular(windows[:, None] * WINDOW + shuffled)
        number = np.zeros_like(source)
        for index, before in enumerate(self._before(windows * WINDOW)):
            mine = source == index
            number += np.where(mine, before[:, None] + np.cumsum(mine, axis=1) - 1, 0)
        return source[where, rows % WINDOW], number[where, rows % WINDOW]

    def _regular(self, rows: np.ndarray) -> np.ndarray:
        """The source of each row before the shuffle."""
        found = np.full(rows.shape, len(self._parts), np.int64)
        left, open_ = rows.astype(np.uint64), np.ones(rows.shape, bool)
        for index, part in enumerate(self._parts):
            before = _share(left, part)
            mine = open_ & (_share(left + np.uint64(1), part) > before)
            found[mine] = index
            open_ &= ~mine
            left = left - before
        return found

    def _before(self, rows: np.ndarray) -> list[np.ndarray]:
        """For each source, how many of the rows before each of `rows` are its own."""
        left, counts = rows.astype(np.uint64), []
        for part in self._parts:
            counts.append(_share(left, part))
            left = left - counts[-1]
        return [count.astype(np.int64) for count in (*counts, left)]


def _share(rows: np.ndarray, part: np.uint64) -> np.ndarray:
    """floor(rows * part / 2**_BITS), exactly, for rows below 2**63."""
    bits = np.uint64(_BITS)
    return (rows >> bits) * part + (((rows & np.uint64(2**_BITS - 1)) * part) >> bits)
