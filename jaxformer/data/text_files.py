"""Text files: finds them by glob, decompresses them and splits them into documents, without holding a whole file
unless it is one document. Errors are one line that names the file and the place in it.

Any UTF-8 is text, NUL bytes included. A .jsonl line that cannot be read as text can be skipped and counted (`Faults`);
a file that cannot be read to its end always ends the program, because the amount of missing text is unknown.
"""

import codecs
import glob
import gzip
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from jaxformer.data.faults import Faults
from jaxformer.data.xz import XzReader
from jaxformer.errors import ConfigError

ENDINGS = (".txt", ".jsonl")
COMPRESSIONS = (".gz", ".xz", ".zst")
BLOCK_BYTES = 1 << 20
LINE_BYTES = 1 << 29  # longest line of a .jsonl file; reading one takes about four times as much memory
# The values of numbers do not matter, and float, unlike int, accepts any number of digits.
_JSON = json.JSONDecoder(parse_int=float)
_KINDS = {float: "number", bool: "boolean", type(None): "null", str: "string", list: "list", dict: "dict"}

OpenFile = Callable[[Path], BinaryIO]


def open_file(path: Path) -> BinaryIO:
    """Opens a file for reading its bytes. Raises OSError."""
    return open(path, "rb")


def find(patterns: tuple[str, ...], field: str) -> list[Path]:
    """The files that glob patterns match, each once: pattern by pattern, sorted within a pattern.

    Args:
      patterns: globs; `**` and a leading `~` work. The name of an existing file is taken literally, whatever characters
        it has. Folders that a pattern matches are left out.
      field: config field to name in an error.

    Raises:
      ConfigError: a pattern matches no file, or a pipe, a broken link or a file with another ending.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = str(Path(os.path.expanduser(pattern)))  # expanded first, because Path turns ./~name into ~name
        names = [path] if os.path.lexists(path) else sorted(set(_matches(path)))
        files = [Path(name) for name in names if not os.path.isdir(name)]
        for file in files:
            if not os.path.isfile(file):
                what = "a link to nothing" if file.is_symlink() else "a pipe, a socket or a device"
                raise ConfigError(f"config.{field}: {file} is {what}; accepted: files")
            if kind(file) not in ENDINGS:
                raise ConfigError(
                    f"config.{field}: {file} is of no kind that is read; accepted: {' '.join(ENDINGS)}, "
                    f"plain or {' '.join(COMPRESSIONS)}"
                )
        if not files:
            folder = f"{names[0]} is a folder: give {names[0]}/*.txt, or {names[0]}/**/*.txt; " if names else ""
            raise ConfigError(f"config.{field}: no file matches {pattern!r} ({folder}looked in {Path.cwd()})")
        found.update(dict.fromkeys(files))
    return list(found)


def _matches(pattern: str) -> Iterator[str]:
    """As `glob.iglob`, but `**` enters each folder once, however many links lead to it.

    With a link to a parent folder glob would find every file many times, so that validation text would also be trained
    on; with two such links it does not end.
    """
    deep = re.search(r"(?:^|(?<=/))\*\*(?:/+|$)", pattern)
    if deep is None:
        yield from glob.iglob(pattern)
        return
    before, after = pattern[: deep.start()], pattern[deep.end() :]
    entered: set[str] = set()
    for top in sorted(glob.glob(before)) if before else [""]:
        for folder, inside, _ in os.walk(top or ".", followlinks=True):
            real = os.path.realpath(folder)
            inside[:] = [] if real in entered else sorted(name for name in inside if name[0] != ".")
            if real not in entered:
                entered.add(real)
                here = folder if top else os.path.relpath(folder)
                yield from _matches(os.path.normpath(os.path.join(glob.escape(here), after or "*")))


def kind(path: Path) -> str:
    """The ending without that of the compression.

    >>> kind(Path("a/b.jsonl.xz")), kind(Path("c.txt"))
    ('.jsonl', '.txt')
    """
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def documents(
    path: Path,
    *,
    separator: str | None,
    text_field: str,
    field: str,
    faults: Faults | None = None,
    open_file: OpenFile = open_file,
) -> Iterator[str]:
    """The documents of one file, in order, without blank ones.

    Args:
      path: a .txt (one document, or several with `separator` between them) or .jsonl file (one per line).
      separator: text between documents of a .txt file; None: the file is one document.
      text_field: field of a .jsonl line that holds the text.
      field: config field to name in an error.
      faults: handles the lines of a .jsonl file that cannot be read as text; None: the first one is an error.
      open_file: opens the file, still compressed.

    Raises:
      ConfigError: unreadable, broken compression, not UTF-8 (names the byte), or no text at all; depending on `faults`
        also a line that is not a JSON object, lacks the field, or whose field is not text (names the line).
    """
    faults = Faults("stop") if faults is None else faults
    before = faults.count
    if kind(path) == ".jsonl":
        texts = _json_lines(path, text_field, field, faults, open_file)
    else:
        blocks = _decoded(path, field, open_file)
        texts = iter(["".join(blocks)]) if separator is None else split(blocks, separator)
    empty = True
    for text in texts:
        if text and not text.isspace():
            empty = False
            yield text
    if empty:
        left_out = faults.count - before
        why = (
            f" that can be read ({left_out} line{'s' * (left_out != 1)} left out, such as {faults.first})"
            if left_out
            else ""
        )
        raise ConfigError(f"config.{field}: {path} holds no text{why}")


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


def _json_lines(path: Path, text_field: str, field: str, faults: Faults, open_file: OpenFile) -> Iterator[str]:
    for number, line in enumerate(_lines(path, field, open_file), 1):
        try:
            text = _text_of(line, text_field)
        except (ValueError, LookupError, RecursionError) as error:
            blamed = "data.text_field" if isinstance(error, LookupError) else field
            faults.meet(ConfigError(f"config.{blamed}: {path}:{number}: {_reason(error)}"))
        else:
            yield text


def _text_of(line: bytes | None, text_field: str) -> str:
    """The text of a line, "" if it is blank; a `line` of None was too long to keep.

    Raises:
      LookupError: no such field. ValueError, RecursionError: anything else, see `_reason`.
    """
    if line is None:
        raise ValueError(f"the line is longer than {LINE_BYTES} bytes")
    decoded = line.decode()
    if not decoded or decoded.isspace():
        return ""
    record = _JSON.decode(decoded)
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise LookupError(f"no field {text_field!r} holding text; {_instead(record, text_field)}")
    if not text.isascii() and "\\" in decoded:  # only a \u escape can bring a lone surrogate into UTF-8
        text.encode()
    return text


def _reason(error: Exception) -> str:
    """What is wrong with a line, as text."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} of the line is not UTF-8 text"
    if isinstance(error, UnicodeEncodeError):
        surrogate = error.object[error.start]
        return f"the text has a lone surrogate, {surrogate!a}, at character {error.start}, so it is not valid Unicode"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error})"
    return "nested too deeply to be read" if isinstance(error, RecursionError) else str(error.args[0])


def _instead(record: Any, text_field: str) -> str:
    """What a line without the text field has instead: at most 12 field names, long or unprintable ones escaped."""
    if not isinstance(record, dict):
        return f"the line has a {_KINDS[type(record)]}"
    if text_field in record:
        return f"it holds a {_KINDS[type(record[text_field])]}"
    names = [name if name.isprintable() and len(name) < 40 else ascii(name[:40]) for name in [*record][:12]]
    return f"the line has the fields {', '.join(names)}" + (f" and {len(record) - 12} more" if len(record) > 12 else "")


def _lines(path: Path, field: str, open_file: OpenFile) -> Iterator[bytes | None]:
    """The lines of a file without its byte order mark; None for each line longer than LINE_BYTES."""
    begun: list[bytes] = []
    size = number = 0
    blocks = _blocks(path, field, open_file, lambda: f" beyond line {number}" if number else "")
    for block in blocks:
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


def _decoded(path: Path, field: str, open_file: OpenFile) -> Iterator[str]:
    """The text in blocks, without its byte order mark; line ends are unchanged."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    for block in _blocks(path, field, open_file, lambda: ""):
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


def _blocks(path: Path, field: str, open_file: OpenFile, where: Callable[[], str]) -> Iterator[bytes]:
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
