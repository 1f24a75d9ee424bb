"""Checksums of a file's blocks: computed while it is written, verified before its content is used.

A short file is verified whole when it is opened. In a longer one each block is verified before its first use, so that
opening stays fast and a host reads only what it trains on. The checksum is CRC-32: it detects damage, not forgery.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "ids"
>>> with BlockWriter(path) as file:
...     file.write(np.arange(10, dtype="<u2").tobytes())
>>> tokens = CheckedArray(path, "<u2", file.sums, most=9, failed=lambda problem: ValueError(problem))
>>> tokens[3:5].tolist(), len(tokens)
([3, 4], 10)
>>> CheckedArray(path, "<u2", file.sums, most=8, failed=lambda problem: ValueError(problem))[-2]
Traceback (most recent call last):
...
ValueError: ids holds 9 where at most 8 is possible
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.storage import files

BLOCK_BYTES = 1 << 20  # read and verified on the first use of a token in it
AT_ONCE = 1 << 26  # files of at most this many bytes are verified when they are opened


class BlockWriter:
    """Writes a new file and computes its checksums.

    Attributes:
      sums: of all blocks, eight hexadecimal digits each; complete after `close`.
    """

    def __init__(self, path: Path, block_bytes: int | None = None):
        """Blocks of BLOCK_BYTES unless said. Raises OSError if the file cannot be created or exists already."""
        self._file = open(path, "xb")  # noqa: SIM115 (closed by __exit__)
        self._block_bytes = BLOCK_BYTES if block_bytes is None else block_bytes
        self._crc = self._filled = 0
        self.sums = ""

    def write(self, data: bytes) -> None:
        """Appends some bytes."""
        rest = memoryview(data)
        while rest:
            room = self._block_bytes - self._filled
            part, rest = rest[:room], rest[room:]
            self._crc = zlib.crc32(part, self._crc)
            self._filled += len(part)
            if self._filled == self._block_bytes:
                self._end_block()
        self._file.write(data)

    def _end_block(self) -> None:
        self.sums += f"{self._crc:08x}"
        self._crc = self._filled = 0

    def __enter__(self) -> "BlockWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._filled:
            self._end_block()
        self._file.close()


class CheckedArray:
    """A memory-mapped array of one axis, each block of which is verified before its first use.

    Indexing gives plain NumPy arrays; `np.asarray` verifies everything and gives the memory map.

    Attributes:
      shape, dtype, nbytes: as for any array.
      failed: problem, as in "train.tokens is damaged at bytes 0 to 99" -> the error to raise.
    """

    def __init__(
        self, path: Path, dtype: str, sums: str, *, most: int | None, failed: Callable[[str], Exception]
    ) -> None:
        """Maps the file; verifies nothing yet.

        Args:
          path: a regular file.
          dtype: of its numbers.
          sums: from BlockWriter.
          most: the largest possible number; None: any.
          failed: see above.

        Raises:
          OSError: the file is missing, or a link, a pipe, a folder. The error of `failed`: it is empty, or its length
          does not match the checksums.
        """
        self._sums = numbers(sums)
        with files.open_to_read(path) as file:
            size = file.seek(0, 2)
            if size == 0 or size % np.dtype(dtype).itemsize or -(-size // BLOCK_BYTES) != len(self._sums):
                raise failed(f"{path.name} has {size} bytes, not what was written")
            self._array = np.memmap(file, dtype, "r")
        self._plain = np.asarray(self._array)  # indexing is faster without the memmap subclass
        self._name, self._most, self.failed = path.name, most, failed
        self._per_block = BLOCK_BYTES // self._array.itemsize
        self._seen = np.zeros(len(self._sums), bool)
        self._all_seen = False
        self.shape, self.dtype, self.nbytes = self._array.shape, self._array.dtype, self._array.nbytes

    def check(self, blocks: Any = None) -> None:
        """Verifies the given blocks; None: all that are not verified yet. Raises the error of `failed`."""
        for block in np.flatnonzero(~self._seen) if blocks is None else blocks:
            values = self._plain[block * self._per_block : (block + 1) * self._per_block]
            if zlib.crc32(values.data) != self._sums[block]:
                begin = int(block) * BLOCK_BYTES
                raise self.failed(f"{self._name} is damaged at bytes {begin} to {begin + values.nbytes - 1}")
            if self._most is not None and values.max() > self._most:
                raise self.failed(f"{self._name} holds {values.max()} where at most {self._most} is possible")
            self._seen[block] = True
        self._all_seen = bool(self._seen.all())

    def __len__(self) -> int:
        return len(self._plain)

    def __getitem__(self, index: Any) -> Any:
        if not self._all_seen:
            self.check(self._unseen(index))
        return self._plain[index]

    def _unseen(self, index: Any) -> Any:
        """The unverified blocks that an index touches; None (all) for an index that is neither integers nor a slice."""
        if isinstance(index, slice):
            reached = range(*index.indices(len(self)))
            if not reached:
                return []
            ends = reached[0] // self._per_block, reached[-1] // self._per_block
            blocks = np.arange(min(ends), max(ends) + 1)
        else:
            indices = np.asarray(index)
            if indices.dtype.kind not in "iu":
                return None
            inside = (indices >= -len(self)) & (indices < len(self))  # NumPy refuses the others
            blocks = np.where(indices < 0, indices + len(self), indices)[inside] // self._per_block
        return np.unique(blocks[~self._seen[blocks]])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.check()
        return np.array(self._array, dtype) if copy or dtype not in (None, self.dtype) else self._array


def indexable(array: Any) -> Any:
    """An array that reads what is asked for unchanged, anything else as a plain NumPy array."""
    return np.asarray(array) if isinstance(array, np.ndarray | list | tuple) else array


def numbers(sums: str) -> np.ndarray:
    """The checksums of all blocks; none if the text is not from BlockWriter."""
    try:
        return np.frombuffer(bytes.fromhex(sums), ">u4")
    except ValueError:
        return np.zeros(0, ">u4")
