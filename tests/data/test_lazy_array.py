"""Arrays over many files: indexing as NumPy's, and few requests where a request costs something."""

import threading
import time
import zlib

import numpy as np
import pytest

from jaxformer.data.lazy_array import AHEAD, BLOCK_BYTES, KEPT, LazyArray, Part
from jaxformer.data.position_hash import PositionHash, joined
from jaxformer.errors import StoreError
from jaxformer.storage import object_store
from jaxformer.storage.address import Address
from jaxformer.storage.ranged import open_ranged

PER_BLOCK = BLOCK_BYTES // 2


class Store:
    """An object of numbers; remembers the ranges that were asked for."""

    near = False

    def __init__(self, numbers):
        self.content, self.asked, self.lock = numbers.tobytes(), [], threading.Lock()
        self.size = len(self.content)

    def read(self, begin, end):
        with self.lock:
            self.asked.append((begin, end))
        return self.content[begin:end]


@pytest.fixture
def far():
    """Three stores, the array over them, and the numbers."""
    numbers = np.random.default_rng(0).integers(0, 60_000, 7 * PER_BLOCK + 11).astype("<u2")
    cuts = np.split(numbers, [3 * PER_BLOCK + 5, 3 * PER_BLOCK + 9])
    stores = [Store(cut) for cut in cuts]

    def part(store):
        sums = [zlib.crc32(store.content[i : i + BLOCK_BYTES]) for i in range(0, store.size, BLOCK_BYTES)]
        return Part("far", lambda: store, "<u2", store.size // 2, sums=lambda: np.array(sums), most=60_000)

    return stores, LazyArray([part(store) for store in stores]), numbers


def test_it_indexes_as_numpy_does(far):
    _, array, numbers = far
    dice = np.random.default_rng(1)
    for index in (0, -1, slice(2, 9), slice(-3, None), slice(9, 2, -2), slice(5, 5), np.array([], int),
                  dice.integers(-len(numbers), len(numbers), (5, 7)), np.arange(len(numbers)) % 1000 == 0):  # fmt: skip
        np.testing.assert_array_equal(array[index], numbers[index])
        assert np.asarray(array[index]).dtype == numbers.dtype
    np.testing.assert_array_equal(np.asarray(array), numbers)
    for index in (len(numbers), [0, -len(numbers) - 1]):
        with pytest.raises(IndexError):
            array[index]


def test_only_the_blocks_that_are_asked_for_are_requested_and_once(far):
    stores, array, numbers = far
    index = np.array([1, PER_BLOCK + 1, 5 * PER_BLOCK])
    for _ in range(3):
        np.testing.assert_array_equal(array[index], numbers[index])
    assert sorted(stores[0].asked) == [(0, BLOCK_BYTES), (BLOCK_BYTES, 2 * BLOCK_BYTES)]
    assert not stores[1].asked and len(stores[2].asked) == 1


def test_what_follows_is_fetched_ahead_of_a_reader_that_goes_on(far):
    stores, array, _ = far
    array[0:10]
    assert len(stores[0].asked) == 1
    array[10:20]
    begun = time.monotonic()
    while len(stores[0].asked) < 4 and time.monotonic() < begun + 20:  # other threads ask for them
        time.sleep(0.01)
    ahead = [(i * BLOCK_BYTES, min((i + 1) * BLOCK_BYTES, stores[0].size)) for i in range(4)]
    assert sorted(stores[0].asked) == ahead and len(ahead) <= 1 + AHEAD
    array[PER_BLOCK : PER_BLOCK + 3]
    assert sorted(stores[0].asked) == ahead


def test_the_blocks_of_a_request_are_fetched_together():
    """Each read waits for the other: one after the other they would wait for ever."""
    both = threading.Barrier(2, timeout=20)

    class Slow(Store):
        def read(self, begin, end):
            both.wait()
            return super().read(begin, end)

    store = Slow(np.arange(3 * PER_BLOCK, dtype="<u4").astype("<u2"))
    array = LazyArray([Part("far", lambda: store, "<u2", 3 * PER_BLOCK)])
    assert array[[0, 2 * PER_BLOCK]].tolist() == [0, (2 * PER_BLOCK) % 65536]


def test_sums_are_asked_for_once_and_while_the_first_block_comes():
    """Each waits for the other, as above."""
    both, asked = threading.Barrier(2, timeout=20), []

    class Slow(Store):
        def read(self, begin, end):
            if begin == 0:
                both.wait()
            return super().read(begin, end)

    store = Slow(np.zeros(2 * PER_BLOCK, "<u2"))

    def sums():
        asked.append(both.wait())
        return np.array([zlib.crc32(bytes(BLOCK_BYTES))] * 2)

    array = LazyArray([Part("far", lambda: store, "<u2", 2 * PER_BLOCK, sums=sums)])
    assert [array[0], array[PER_BLOCK]] == [0, 0] and len(asked) == 1


def test_damage_far_away_is_found_and_does_not_stay(far):
    stores, array, numbers = far
    content = stores[2].content
    stores[2].content = b"\xff\xff" + content[2:]
    with pytest.raises(ValueError, match="far is damaged at bytes 0 to 65535"):
        array[3 * PER_BLOCK + 9]
    stores[2].content = content
    assert array[3 * PER_BLOCK + 9] == numbers[3 * PER_BLOCK + 9]


def test_what_is_kept_is_bounded():
    store = Store(np.zeros((KEPT + 5) * PER_BLOCK, "<u2"))
    array = LazyArray([Part("far", lambda: store, "<u2", store.size // 2)])
    array[:: PER_BLOCK // 2]
    assert len(array._kept) == KEPT


def test_the_hash_depends_on_every_id_and_its_place_and_on_no_cut():
    ids = np.random.default_rng(0).integers(0, 50_000, 200_000)

    def of(ids):
        made = PositionHash()
        made.update(ids)
        return made.value, made.count

    whole = of(ids)[0]
    for cuts in ([1], [65_536], [17, 18, 100_000]):
        assert joined(of(part) for part in np.split(ids, cuts)) == whole
    for place in (0, 99_999, 199_999):
        other = ids.copy()
        other[place] += 1
        assert of(other)[0] != whole
    assert len({of(np.roll(ids, by))[0] for by in range(50)} | {of(ids[:-1])[0], of(np.append(ids, 0))[0]}) == 52
    assert of(np.array([3]))[0] == int(mix64(4))


def mix64(value):
    """splitmix64's finaliser in Python's integers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor % 2**64
    return value ^ (value >> 31)


def test_objects_in_a_store_take_part(tmp_path, monkeypatch):
    object_ = Address(f"memory://bucket/{tmp_path.name}/far")
    object_.write_atomically(np.arange(2 * PER_BLOCK, dtype="<u2").tobytes())

    def array(length):
        return LazyArray([Part("far", lambda: open_ranged(object_), "<u2", length, failed=RuntimeError)])

    found = array(2 * PER_BLOCK)
    assert found[[3, 99, -1]].tolist() == [3, 99, 2 * PER_BLOCK - 1]
    with pytest.raises(RuntimeError, match=f"far has {4 * PER_BLOCK} bytes, not {4 * PER_BLOCK + 2}"):
        array(2 * PER_BLOCK + 1)[0]

    def gone(*args):
        raise StoreError(5, "the store is gone", str(object_))

    monkeypatch.setattr(object_store, "part", gone)
    with pytest.raises(RuntimeError, match="far: the store is gone"):
        array(2 * PER_BLOCK)[PER_BLOCK]
    assert found[PER_BLOCK] == PER_BLOCK  # kept
