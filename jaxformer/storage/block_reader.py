"""A file that is read block by block, from any place."""

import io
from typing import Any


class BlockReader(io.RawIOBase):
    """A readable, seekable file whose blocks a subclass fetches; it keeps the newest.

    >>> class Letters(BlockReader):
    ...     def fetch(self, number):
    ...         return b"abcdefgh"[4 * number : 4 * number + 4]
    >>> file = io.BufferedReader(Letters(8, 4))
    >>> file.seek(-5, io.SEEK_END), file.read()
    (3, b'defgh')
    """

    def __init__(self, size: int, block_bytes: int):
        """A file of `size` bytes; each block but the last has `block_bytes`."""
        self._size, self._block_bytes = size, block_bytes
        self._place, self._number, self._block = 0, -1, b""  # the newest block that was read, and its number

    def fetch(self, number: int) -> bytes:
        """The bytes of a block; none of one beyond the end."""
        raise NotImplementedError

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        self._place = max(0, offset + (0, self._place, self._size)[whence])
        return self._place

    def tell(self) -> int:
        """The place that is read next."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Some of the next bytes; 0 at the end."""
        number, begin = divmod(self._place, self._block_bytes)
        if number != self._number:
            self._block, self._number = self.fetch(number), number
        found = memoryview(self._block)[begin : begin + len(buffer)]
        buffer[: len(found)] = found
        self._place += len(found)
        return len(found)
