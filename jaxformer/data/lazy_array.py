"""Numbers in many files as one array of one axis, of which only the blocks that are asked for are read.

Files of this machine are memory-mapped, and of those at most `OPEN` at once. Of files elsewhere the blocks of a request
are fetched together, those that follow it ahead where it goes on from the last one, and the newest are kept.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "ids"
>>> _ = path.write_bytes(np.arange(10, dtype="<u2").tobytes())
>>> part = Part("ids", functools.partial(open_ranged, path), "<u2", 10)
>>> array = LazyArray([Part.of(np.array([7, 8], "<u2")), part])
>>> len(array), array[[0, 1, 2, -1]].tolist(), array[1:4].tolist()
(12, [7, 8, 0, 9], [8, 0, 1])
"""

import concurrent.futures
import copy
import functools
import itertools
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path  # noqa: F401 (in the example)
from typing import Any

import numpy as np

from jaxformer.storage.ranged import Ranged, open_ranged  # noqa: F401

BLOCK_BYTES = 1 << 16  # verified, and requested from a store, at once
OPEN = 256  # files mapped at once: each takes a file descriptor, of which a process may have 1024
KEPT = 1024  # blocks of far files that are kept, 64 MiB
AHEAD = 8  # blocks fetched ahead of a reader that goes on where it was
_THREADS = 16


class Part:
    """The numbers of one file.

    Attributes:
      length: how many.
    """

    def __init__(
        self,
        name: str,
        opened: Callable[[], Ranged],
        dtype: str,
        length: int,
        *,
        begin: int = 0,
        sums: Callable[[], np.ndarray] | None = None,
        most: int | None = None,
        failed: Callable[..., Exception] = ValueError,
        add: int = 0,
    ):
        """Opens nothing yet.

        Args:
          name: for messages.
          opened: opens the file.
          dtype: of the numbers.
          length: how many.
          begin: byte of the file at which they begin.
          sums: CRC-32 of each block of BLOCK_BYTES from there on; None: not known.
          most: the largest possible number; None: any.
          failed: problem, and the OSError where it is one -> the error to raise.
          add: added to every number.
        """
        self.name, self.length, self.failed = name, length, failed
        self._opened, self._dtype, self._begin = opened, np.dtype(dtype), begin
        self._get_sums, self._most, self._add = sums, most, add
        self._file: Ranged | None = None
        self._numbers: Any = None  # all of a near file
        self._sums: np.ndarray | None = None
        self.per_block = BLOCK_BYTES // self._dtype.itemsize
        self._seen: np.ndarray | None = None
        self._once = threading.Lock()

    @classmethod
    def of(cls, numbers: np.ndarray) -> "Part":
        """Numbers that are in memory."""
        part = cls("", lambda: None, numbers.dtype.str, len(numbers))  # type: ignore[arg-type, return-value]
        part._numbers, part._seen = numbers, np.ones(-(-len(numbers) // part.per_block), bool)
        return part

    def shortened(self) -> "Part":
        """The same without its last number."""
        part = copy.copy(self)
        part.length -= 1
        return part

    @property
    def is_open(self) -> bool:
        """True if it holds a file open."""
        return self._file is not None

    def open(self) -> bool:
        """Opens the file unless it is open; True if it is near."""
        if self._numbers is not None and self._file is None and self._seen is not None:
            return True
        if self._file is None:
            try:
                self._file = self._opened()
            except OSError as error:
                raise self.failed(f"{self.name}: {error.strerror or error}", error) from None
            end = self._begin + self.length * self._dtype.itemsize
            if self._file.size < end:
                raise self.failed(f"{self.name} has {self._file.size} bytes, not {end}")
            if self._seen is None:
                self._seen = np.zeros(-(-self.length // self.per_block), bool)
            if self._file.near:
                self._numbers = np.frombuffer(self._file.read(self._begin, end), self._dtype)
        return self._file.near

    def close(self) -> None:
        """Lets go of the file; what was verified stays so."""
        if self._file is not None:
            self._file = self._numbers = None

    def take(self, places: np.ndarray) -> np.ndarray:
        """[n] numbers at [n] places of a near file, verified."""
        blocks = places // self.per_block
        assert self._seen is not None
        for block in np.unique(blocks[~self._seen[blocks]]).tolist():
            self.verify(block, self._numbers[block * self.per_block : (block + 1) * self.per_block])
            self._seen[block] = True
        found = self._numbers[places]
        return found + self._add if self._add else found

    def fetch(self, block: int) -> np.ndarray:
        """The verified numbers of one block, of a far file. Raises the error of `failed`."""
        assert self._file is not None
        begin = self._begin + block * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self._begin + self.length * self._dtype.itemsize)
        try:
            found = self._file.read(begin, end)
        except OSError as error:
            raise self.failed(f"{self.name}: {error.strerror or error}", error) from None
        if len(found) != end - begin:
            raise self.failed(f"{self.name} is damaged at bytes {begin} to {end - 1}")
        numbers = np.frombuffer(found, self._dtype)
        self.verify(block, numbers)
        return numbers + self._add if self._add else numbers

    def sums(self) -> np.ndarray | None:
        """CRC-32 of each block, asked for once; None: not known. Raises the error of `failed`."""
        with self._once:
            if self._sums is None and self._get_sums is not None:
                self._sums = self._get_sums()
            return self._sums

    def verify(self, block: int, numbers: np.ndarray) -> None:
        """Raises the error of `failed` if these are not the numbers of that block."""
        sums = self.sums()
        if sums is not None and zlib.crc32(numbers.data) != sums[block]:
            begin = self._begin + block * BLOCK_BYTES
            raise self.failed(f"{self.name} is damaged at bytes {begin} to {begin + numbers.nbytes - 1}")
        if self._most is not None:
            for number in (int(numbers.max()), int(numbers.min())):
                if not 0 <= number <= self._most:
                    raise self.failed(f"{self.name} holds {number}; accepted: 0 to {self._most}")


class LazyArray:
    """Parts end to end. Indexing by integers, arrays of them and slices gives plain NumPy arrays.

    Attributes:
      shape, dtype, nbytes: as for any array.
    """

    def __init__(self, parts: Sequence[Part], dtype: str | None = None):
        """`dtype` of the numbers; None: that of the first part. Opens nothing."""
        self._parts = [part for part in parts if part.length]
        self._ends = np.cumsum([part.length for part in self._parts], dtype=np.int64)
        self._length = int(self._ends[-1]) if self._parts else 0
        self.dtype = np.dtype(dtype) if dtype is not None else parts[0]._dtype
        self.shape, self.nbytes = (self._length,), self._length * self.dtype.itemsize
        self._open: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[tuple[int, int], concurrent.futures.Future] = OrderedDict()
        self._last = (-1, -1)
        self._asked: set[int] = set()  # far parts whose sums were asked for
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._locked(np.arange(*index.indices(self._length)))
        places = np.asarray(index)
        if places.dtype.kind == "b":
            places = np.flatnonzero(places)
        places = np.where(places < 0, places + self._length, places).astype(np.int64)
        if places.size and (places.min() < 0 or places.max() >= self._length):
            raise IndexError(f"index out of bounds for an array of {self._length}")
        found = self._locked(places.ravel()).reshape(places.shape)
        return found if places.shape else found[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        begins = np.append(0, self._ends).tolist()
        parts = (self[begin:end] for begin, end in itertools.pairwise(begins))
        whole = np.concatenate([np.zeros(0, self.dtype), *parts])
        return whole if dtype is None else whole.astype(dtype)

    def _locked(self, places: np.ndarray) -> np.ndarray:
        with self._lock:
            return self._take(places)

    def _take(self, places: np.ndarray) -> np.ndarray:
        out = np.empty(len(places), self.dtype)
        number = np.searchsorted(self._ends, places, side="right")
        far: list[tuple[int, int, int, int]] = []  # (part, block, from, to) of runs of places in one block
        for begin, end in _runs(number):
            which = int(number[begin])
            part = self._parts[which]
            local = places[begin:end] - (self._ends[which] - part.length)
            if self._near(which):
                out[begin:end] = part.take(local)
                continue
            blocks = local // part.per_block
            far += [(which, int(blocks[a]), begin + a, begin + b) for a, b in _runs(blocks)]
        if far:
            self._fetch([(which, block) for which, block, _, _ in far])
            for which, block, begin, end in far:
                part = self._parts[which]
                first = self._ends[which] - part.length + block * part.per_block
                out[begin:end] = self._kept[which, block].result()[places[begin:end] - first]
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return out

    def _near(self, which: int) -> bool:
        """Opens a part, and closes the one that was used longest ago if too many are open; True if it is near."""
        near = self._parts[which].open()
        if near and self._parts[which].is_open:
            self._open[which] = None
            self._open.move_to_end(which)
            if len(self._open) > OPEN:
                self._parts[self._open.popitem(last=False)[0]].close()
        return near

    def _fetch(self, wanted: list[tuple[int, int]]) -> None:
        """Has the blocks fetched that are not kept, all at once; some ahead, of a reader that goes on where it was."""
        which, block = wanted[-1]
        last, self._last = self._last, (which, block)
        ahead: list[tuple[int, int]] = []
        if wanted[0] in (last, (last[0], last[1] + 1)):
            blocks = -(-self._parts[which].length // self._parts[which].per_block)
            ahead = [(which, each) for each in range(block + 1, min(block + 1 + AHEAD, blocks))]
        for key in dict.fromkeys([*ahead, *wanted]):
            failed = key in self._kept and self._kept[key].done() and self._kept[key].exception() is not None
            if key not in self._kept or failed:
                if key[0] not in self._asked:  # while its first block comes, which asks again if this fails
                    self._asked.add(key[0])
                    _pool().submit(self._parts[key[0]].sums)
                self._kept[key] = _pool().submit(self._parts[key[0]].fetch, key[1])
            self._kept.move_to_end(key)


def _runs(numbers: np.ndarray) -> list[tuple[int, int]]:
    """(begin, end) of each run of equal numbers."""
    if not len(numbers):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    return list(itertools.pairwise(cuts))


@functools.cache
def _pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(_THREADS, "read-ahead")
