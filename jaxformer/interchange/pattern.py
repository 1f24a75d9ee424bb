"""How an array of another library's checkpoint lies beside one of ours: one line, read in both directions.

"(h k) d -> d h k" says that their array has two axes, the first of them heads and head widths together, and that ours
has three. "(0/3 h k) d -> d h k" is the first of three equal parts that share one array of theirs.

>>> import numpy as np
>>> theirs = np.arange(12).reshape(4, 3)
>>> pattern, shape = Pattern("(h k) d -> d h k"), (3, 2, 2)
>>> ours = pattern.read(theirs, shape)
>>> back = np.empty(pattern.theirs(shape), int)
>>> pattern.place(ours, back)
>>> ours.shape, bool((back == theirs).all())
((3, 2, 2), True)
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Part = str | tuple[int, int]  # an axis of ours, or (which, of how many) of equal parts


@functools.cache
def _parsed(text: str) -> tuple[tuple[tuple[Part, ...], ...], tuple[str, ...]]:
    left, right = text.split("->")
    axes = []
    for group in re.findall(r"\([^)]*\)|\S+", left):
        words = group.strip("()").split()
        axes.append(tuple(_part(word) if "/" in word else word for word in words))
    return tuple(axes), tuple(right.split())


def _part(word: str) -> tuple[int, int]:
    which, number = word.split("/")
    return int(which), int(number)


class Pattern(NamedTuple):
    """A line as above.

    Attributes:
      text: the line.
      start: where, on their first axis, ours begins, if parts of unequal size share an array; None: they do not.
    """

    text: str
    start: int | None = None

    def theirs(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of theirs for one of ours, of all its equal parts together; `start` is not counted."""
        axes, names = _parsed(self.text)
        sizes = dict(zip(names, shape, strict=True))
        return tuple(math.prod(_size(each, sizes) for each in axis) for axis in axes)

    def read(self, theirs: Any, shape: Sequence[int], index: Sequence[slice] | None = None) -> np.ndarray:
        """Ours, or a part of it, reading of theirs only what that needs.

        Args:
          theirs: what gives an array when it is indexed with slices, as arrays and files do.
          shape: of ours, whole.
          index: the part, a slice for each axis of ours; None: all of it.
        """
        axes, names = _parsed(self.text)
        sizes = dict(zip(names, shape, strict=True))
        given = [slice(None)] * len(names) if index is None else index
        ranges = {n: each.indices(size)[:2] for n, each, size in zip(names, given, shape, strict=True)}
        slices, expanded, inner, order = [], [], [], []
        for number, axis in enumerate(axes):
            # Contiguous in the outermost place; what is left out further in is left out after it was read.
            first, rest = axis[0], math.prod(_size(each, sizes) for each in axis[1:])
            begin, end = _range(first, ranges)
            offset = 0 if number else self.start or 0
            slices.append(slice(offset + begin * rest, offset + end * rest))
            expanded += [end - begin, *(_size(each, sizes) for each in axis[1:])]
            inner += [0 if isinstance(first, tuple) else slice(None)]
            inner += [each[0] if isinstance(each, tuple) else slice(*ranges[each]) for each in axis[1:]]
            order += [each for each in axis if isinstance(each, str)]
        found = np.asarray(theirs[tuple(slices)]).reshape(expanded)[tuple(inner)]
        return found.transpose([order.index(name) for name in names])

    def place(self, ours: np.ndarray, out: np.ndarray) -> None:
        """Writes ours into its part of `out`, an array of theirs."""
        axes, names = _parsed(self.text)
        sizes = dict(zip(names, ours.shape, strict=True))
        start = self.start or 0
        view = out[start : start + self.theirs(ours.shape)[0]]
        expanded, inner, order = [], [], []
        for axis in axes:
            expanded += [_size(each, sizes) for each in axis]
            inner += [each[0] if isinstance(each, tuple) else slice(None) for each in axis]
            order += [each for each in axis if isinstance(each, str)]
        view.reshape(expanded)[tuple(inner)] = ours.transpose([names.index(name) for name in order])


def _size(each: Part, sizes: dict[str, int]) -> int:
    return each[1] if isinstance(each, tuple) else sizes[each]


def _range(each: Part, ranges: dict[str, tuple[int, int]]) -> tuple[int, int]:
    return (each[0], each[0] + 1) if isinstance(each, tuple) else ranges[each]
