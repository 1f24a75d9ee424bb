"""A hash of token ids by their positions. The hash of a whole follows from those of its parts, however it is cut, so
that many machines hash a text together.

It tells texts apart that differ by accident; it is no protection from forgery.

>>> whole, first, second = PositionHash(), PositionHash(), PositionHash()
>>> whole.update(np.arange(10))
>>> first.update(np.arange(4))
>>> second.update(np.arange(4, 10))
>>> joined([(first.value, 4), (second.value, 6)]) == whole.value
True
"""

import functools
from collections.abc import Iterable

import numpy as np

from jaxformer.data.shuffle import mix

_FACTOR = 6364136223846793005  # Knuth's multiplier for 64 bits: its powers repeat only after 2 ** 62
_CHUNK = 1 << 16


class PositionHash:
    """The sum over i of mix(ids[i] + 1) * FACTOR ** i, in 64 bits.

    Attributes:
      value: of the ids so far.
      count: how many those are.
    """

    def __init__(self):
        """Of no ids."""
        self.value = self.count = 0

    def update(self, ids: np.ndarray) -> None:
        """Appends ids: [n] integers, at least 0."""
        for begin in range(0, len(ids), _CHUNK):
            chunk = mix(ids[begin : begin + _CHUNK].astype(np.uint64) + np.uint64(1))
            here = int((chunk * _powers()[: len(chunk)]).sum(dtype=np.uint64))
            self.value = joined([(self.value, self.count), (here, len(chunk))])
            self.count += len(chunk)


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """The hash of some parts end to end, each given as (hash, how many ids)."""
    value = before = 0
    for part, count in parts:
        value = (value + pow(_FACTOR, before, 1 << 64) * part) % (1 << 64)
        before += count
    return value


@functools.cache
def _powers() -> np.ndarray:
    factors = np.full(_CHUNK, _FACTOR, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)
