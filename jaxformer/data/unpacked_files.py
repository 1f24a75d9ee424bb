"""The content of a text file, plain or compressed: in blocks of bytes, in lines, or as text. Errors are one line that
names the file and the place in it."""

import codecs
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from jaxformer.data.xz import XzReader
from jaxformer.errors import ConfigError
from jaxformer.storage import files

COMPRESSIONS = (".gz", ".xz", ".zst")
BLOCK_BYTES = 1 << 20
LINE_BYTES = 1 << 29  # longest line of a .jsonl file; reading one takes about four times as much memory

OpenFile = Callable[[Path], BinaryIO]


def open_file(path: Path) -> BinaryIO:
    """Opens a file for reading its bytes. Raises OSError."""
    return files.open_to_read(path, follow=True)


def lines(path: Path, field: str, open_file: OpenFile) -> Iterator[bytes | None]:
    """The lines of a file without its byte order mark; None for each line longer than LINE_BYTES."""
    begun: list[bytes] = []
    size = number = 0
    found = blocks(path, field, open_file, lambda: f" beyond line {number}" if number else "")
    for block in found:
        *ended, last = (block or b"\n").split(b"\n")  # the empty block at the end ends the last line
        for rest in ended:
            size, line = 0, b"".join([*begun, rest]) if size + len(rest) <= LINE_BYTES else None
            begun.clear()
            number += 1
            yield line.removeprefix(codecs.BOM_UTF8) if number == 1 and line is not None else line
        size += len(last)
        begun.append(last)
        if size > LINE_BYTES:
            begun.clear()


def decoded(path: Path, field: str, open_file: OpenFile) -> Iterator[str]:
    """The text in blocks, without its byte order mark; line ends are unchanged."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    for block in blocks(path, field, open_file, lambda: ""):
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            held = len(error.object) - len(block)  # bytes of a character that began in the previous block
            inside = " of the decompressed text" if path.suffix in COMPRESSIONS else ""
            raise ConfigError(
                f"config.{field}: {path}: byte {done - held + error.start}{inside} is not UTF-8 text"
            ) from None
        yield text.removeprefix("\ufeff") if done == 0 else text
        done += len(block)


def blocks(path: Path, field: str, open_file: OpenFile, where: Callable[[], str]) -> Iterator[bytes]:
    """The decompressed bytes of a file, then an empty block; `where` says how far the reader has come, for errors."""
    try:
        file = open_file(path)
    except OSError as error:
        raise ConfigError(f"config.{field}: {path}: {error.strerror}") from None
    with file:
        unpacked: Any = {".gz": gzip.open, ".xz": XzReader, ".zst": _Zstandard}.get(path.suffix, lambda plain: plain)
        try:
            reader = unpacked(file)
        except ImportError:
            raise ConfigError(f"config.{field}: {path} needs the zstd extra: pip install 'jaxformer[zstd]'") from None
        block = None
        while block != b"":
            try:
                block = reader.read(BLOCK_BYTES)
            except Exception as error:
                known = isinstance(error, OSError | EOFError | lzma.LZMAError | zlib.error)
                if not known and type(error).__name__ != "ZstdError":  # by name: zstandard may not be installed
                    raise
                raise ConfigError(f"config.{field}: {path}: cannot be read{where()} ({error})") from None
            yield block


class _Zstandard:
    """Reads a .zst file to its end; the library's own reader does not notice that a file is truncated."""

    def __init__(self, file: IO[bytes]):
        from zstandard import ZstdDecompressor

        self._file, self._begun = file, False
        self._new_frame = lambda: ZstdDecompressor().decompressobj()
        self._frame = self._new_frame()

    def read(self, size: int) -> bytes:
        """Some bytes, none at the end, from at most `size` compressed bytes."""
        out = b""
        while not out:
            block = (self._frame.unused_data if self._frame.eof else b"") or self._file.read(min(size, 1 << 16))
            if not block:
                if self._begun and not self._frame.eof:
                    raise EOFError("the compressed file ends too early")
                return b""
            if self._frame.eof:
                self._frame = self._new_frame()
            self._begun = True
            out = self._frame.decompress(block)
        return out
