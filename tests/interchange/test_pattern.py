"""How arrays of others lie beside ours: every part of ours read alone is that part of the whole; writing undoes it."""

import itertools

import numpy as np
import pytest

from jaxformer.interchange.pattern import Pattern

# text, start, our shape, ours from theirs by hand
CASES = [
    ("v d -> v d", None, (5, 3), lambda x: x),
    ("o i -> i o", None, (3, 5), lambda x: x.T),
    ("(h k) d -> d h k", None, (5, 4, 3), lambda x: x.T.reshape(5, 4, 3)),
    ("d (h k) -> h k d", None, (4, 3, 5), lambda x: x.T.reshape(4, 3, 5)),
    ("d (1/3 h k) -> d h k", None, (5, 4, 2), lambda x: np.split(x, 3, axis=1)[1].reshape(5, 4, 2)),
    ("(h 2/3 k) d -> d h k", None, (5, 4, 2), lambda x: x.reshape(4, 3, 2, 5)[:, 2].transpose(2, 0, 1)),
    ("(2/3 h k) -> h k", None, (4, 2), lambda x: np.split(x, 3)[2].reshape(4, 2)),
    ("(h k) d -> d h k", 6, (5, 4, 2), lambda x: x[6:14].T.reshape(5, 4, 2)),
]
IDS = [f"{text}{'' if start is None else f' from {start}'}" for text, start, _, _ in CASES]


def drawn(text, start, shape):
    whole = Pattern(text, start).theirs(shape)
    whole = whole if start is None else (start + whole[0] + 3, *whole[1:])
    return np.random.default_rng(0).normal(size=whole)


@pytest.mark.parametrize("text, start, shape, by_hand", CASES, ids=IDS)
def test_reading(text, start, shape, by_hand):
    pattern, theirs = Pattern(text, start), drawn(text, start, shape)
    whole = pattern.read(theirs, shape)
    np.testing.assert_array_equal(whole, by_hand(theirs))
    parts = [[slice(0, 1), slice(1, size), slice(None), slice(size - 1, None)] for size in shape]
    for index in itertools.product(*parts):
        np.testing.assert_array_equal(pattern.read(theirs, shape, index), whole[index])


@pytest.mark.parametrize("text, start, shape, by_hand", CASES, ids=IDS)
def test_writing_undoes_reading_and_touches_nothing_else(text, start, shape, by_hand):
    pattern, theirs = Pattern(text, start), drawn(text, start, shape)
    out = np.full(theirs.shape, np.nan)
    pattern.place(pattern.read(theirs, shape), out)
    written = ~np.isnan(out)
    np.testing.assert_array_equal(out[written], theirs[written])
    assert written.sum() == np.prod(shape)


def test_only_what_is_needed_is_read():
    class Counting:
        """An array that counts what is taken out of it."""

        def __init__(self, array):
            self.array, self.taken = array, 0

        def __getitem__(self, index):
            self.taken += self.array[index].size
            return self.array[index]

    theirs = Counting(np.zeros((4 * 3, 6)))
    pattern = Pattern("(h k) d -> d h k")
    for d, h in itertools.product((slice(0, 3), slice(3, 6)), (slice(0, 2), slice(2, 4))):
        pattern.read(theirs, (6, 4, 3), (d, h, slice(None)))
    assert theirs.taken == theirs.array.size
