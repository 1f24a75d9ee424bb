"""Text files: found by glob, read through their compression, cut into documents, never held whole unless one
document is the whole file. Everything wrong with a file is one line that says which file and where in it.
"""

import codecs
import contextlib
import glob
import gzip
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from jaxformer.config import ConfigError

ENDINGS = (".txt", ".jsonl")
COMPRESSIONS = (".gz", ".xz", ".zst")
BLOCK_BYTES = 1 << 20


def find(patterns: tuple[str, ...], field: str) -> list[Path]:
    """The files that glob patterns name, each once: pattern by pattern, sorted inside a pattern.

    Args:
      patterns: globs; `**` and a leading `~` work. A name that exists is taken as it is, whatever signs it holds.
      field: config field to blame in an error.

    Raises:
      ConfigError: a pattern that matches no file, or a file of a kind that is not read.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(os.path.expanduser(pattern))  # not of ./~name, which Path makes ~name
        names = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
        files = [Path(name) for name in names if Path(name).is_file()]
        if not files:
            raise ConfigError(f"config.{field}: no file matches {pattern!r} (looked in {Path.cwd()})")
        for file in files:
            if kind(file) not in ENDINGS:
                raise ConfigError(
                    f"config.{field}: {file} is of no kind that is read; accepted: {' '.join(ENDINGS)}, "
                    f"plain or {' '.join(COMPRESSIONS)}"
                )
        found.update(dict.fromkeys(files))
    return list(found)


def kind(path: Path) -> str:
    """The ending under the compression.

    >>> kind(Path("a/b.jsonl.xz")), kind(Path("c.txt"))
    ('.jsonl', '.txt')
    """
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def documents(path: Path, *, separator: str | None, text_field: str, field: str) -> Iterator[str]:
    """The documents of one file, in order; blank ones are left out.

    Args:
      path: a .txt (one document, or several with `separator` between them) or .jsonl file (one on each line).
      separator: text between documents of a .txt file; None: the file is one document.
      text_field: field of a .jsonl line that holds the text.
      field: config field to blame in an error.

    Raises:
      ConfigError: unreadable, broken compression, not UTF-8 (says the byte), a line that is no JSON object or lacks
        the field (says the line), or no text at all.
    """
    blocks = _decoded(path, field)
    if kind(path) == ".jsonl":
        texts = _json_lines(split(blocks, "\n"), path, text_field, field)
    else:
        texts = iter(["".join(blocks)]) if separator is None else split(blocks, separator)
    empty = True
    for text in texts:
        if text and not text.isspace():
            empty = False
            yield text
    if empty:
        raise ConfigError(f"config.{field}: {path} holds no text")


def split(blocks: Iterator[str], separator: str) -> Iterator[str]:
    """`"".join(blocks).split(separator)`, holding no more than one piece and one block at a time.

    >>> list(split(iter(["a-", "-b", "--c"]), "--"))
    ['a', 'b', 'c']
    """
    pieces: list[str] = []
    tail = ""  # the separator may begin in one block and end in the next
    for block in blocks:
        *ended, last = (tail + block).split(separator)
        for text in ended:
            yield "".join([*pieces, text])
            pieces.clear()
        cut = max(len(last) - len(separator) + 1, 0)
        pieces.append(last[:cut])
        tail = last[cut:]
    yield "".join([*pieces, tail])


def _json_lines(lines: Iterator[str], path: Path, text_field: str, field: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"config.{field}: {path}:{number}: not JSON ({error})") from None
        if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
            has = f"the fields {', '.join(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
            raise ConfigError(
                f"config.data.text_field: {path}:{number}: no field {text_field!r} holding text; the line has {has}"
            )
        yield record[text_field]


def _decoded(path: Path, field: str) -> Iterator[str]:
    """The text in blocks, without a byte order mark; line ends as they are in the file."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with _opened(path, field) as file:
        while True:
            block = _read(file, path, field)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                held = len(error.object) - len(block)  # bytes of a character that the last block cut
                inside = " of the decompressed text" if path.suffix in COMPRESSIONS else ""
                raise ConfigError(
                    f"config.{field}: {path}: byte {done - held + error.start}{inside} is not UTF-8 text"
                ) from None
            yield text.removeprefix("\ufeff") if done == 0 else text
            done += len(block)
            if not block:
                return


@contextlib.contextmanager
def _opened(path: Path, field: str) -> Iterator[Any]:
    open_: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        file = open_(path, "rb")
    except OSError as error:
        raise ConfigError(f"config.{field}: {path}: {error.strerror}") from None
    with file:
        yield _Zstandard(file, _zstandard(path, field)) if path.suffix == ".zst" else file


def _read(file: Any, path: Path, field: str) -> bytes:
    try:
        return file.read(BLOCK_BYTES)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ConfigError(f"config.{field}: {path}: cannot be read ({error})") from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":  # known by name, for zstandard need not be installed
            raise
        raise ConfigError(f"config.{field}: {path}: cannot be read ({error})") from None


class _Zstandard:
    """Reads a .zst file to its end; the library's own reader takes a file that was cut off for a shorter one."""

    def __init__(self, file: IO[bytes], library: Any):
        self._file, self._library = file, library
        self._frame = library.ZstdDecompressor().decompressobj()
        self._begun = False

    def read(self, size: int) -> bytes:
        """Some bytes, none at the end; `size` is of the compressed ones, not more than it."""
        out = b""
        while not out:
            block = self._frame.unused_data if self._frame.eof else b""
            block = block or self._file.read(min(size, 1 << 16))
            if not block:
                if self._begun and not self._frame.eof:
                    raise EOFError("the compressed file ends too early")
                return b""
            if self._frame.eof:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            self._begun = True
            out = self._frame.decompress(block)
        return out


def _zstandard(path: Path, field: str) -> Any:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"config.{field}: {path} needs the zstd extra: pip install 'jaxformer[zstd]'") from None
    return zstandard
