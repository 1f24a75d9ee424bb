"""Reads .xz files to their end.

>>> import io
>>> XzReader(io.BytesIO(lzma.compress(b"to ") + lzma.compress(b"be"))).read(9)
b'to '
"""

import lzma
from typing import BinaryIO

BLOCK_BYTES = 1 << 16  # compressed bytes per read


class XzReader:
    """A .xz file of one stream or several (`cat a.xz b.xz`).

    Python's own reader ignores whatever follows a complete stream and is not one, so it would silently drop a second
    stream whose first bytes are damaged.
    """

    def __init__(self, file: BinaryIO):
        self._file, self._stream = file, lzma.LZMADecompressor()

    def read(self, size: int) -> bytes:
        """At most `size` bytes, none at the end. Raises LZMAError, EOFError."""
        out = b""
        while not out:
            block = b""
            if self._stream.eof:  # there may be zeros between two streams
                block = self._stream.unused_data.lstrip(b"\0")
                while not block:
                    if not (read := self._file.read(BLOCK_BYTES)):
                        return b""
                    block = read.lstrip(b"\0")
                self._stream = lzma.LZMADecompressor()
            elif self._stream.needs_input:
                block = self._file.read(BLOCK_BYTES)
                if not block:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            out = self._stream.decompress(block, size)
        return out
