"""Text files: finds them by glob, decompresses them and splits them into documents, without holding a whole file
unless it is one document. Errors are one line that names the file and the place in it.

Any UTF-8 is text, NUL bytes included. A .jsonl line that cannot be read as text can be skipped and counted (`Faults`);
a file that cannot be read to its end always ends the program, because the amount of missing text is unknown.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxformer.data import arrow_files, line_files
from jaxformer.data.faults import Faults
from jaxformer.data.matching import matching
from jaxformer.data.unpacked_files import COMPRESSIONS, OpenFile, decoded, open_file
from jaxformer.errors import ConfigError
from jaxformer.storage.address import is_address

__all__ = ["OpenFile", "documents", "find", "kind", "open_file", "split"]
_LINES = (".txt", ".jsonl", ".tsv")  # what may be compressed


def find(patterns: tuple[str, ...], field: str, endings: tuple[str, ...] | None = None) -> list[Path]:
    """The files that glob patterns match, each once: pattern by pattern, sorted within a pattern.

    Args:
      patterns: globs, of paths or of addresses; `**` and a leading `~` work. The name of an existing file is taken
        literally, whatever characters it has (in a store no pattern is). Folders that a pattern matches are left out.
      field: config field to name in an error.
      endings: of the files that are read; None: those in READERS, some of which may be compressed.

    Raises:
      ConfigError: a pattern matches no file, or a pipe, a broken link or a file with another ending.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        names, matched = matching(pattern, field)
        for file in matched:
            if kind(file) not in (endings or READERS):
                accepted = " ".join(endings or READERS)
                accepted += "" if endings else f", and of {' '.join(_LINES)} also {' '.join(COMPRESSIONS)}"
                raise ConfigError(f"config.{field}: {file} is of no kind that is read; accepted: {accepted}")
        if not matched:
            folder = f"{names[0]} is a folder: give {_inside(names[0])}; " if names else ""
            where = "the store" if is_address(pattern) else Path.cwd()
            raise ConfigError(f"config.{field}: no file matches {pattern!r} ({folder}looked in {where})")
        found.update(dict.fromkeys(matched))
    return list(found)


def _inside(folder: str) -> str:
    """What to give in place of a folder, by what is in it."""
    names = {path.name for path in Path(folder).iterdir()} if Path(folder).is_dir() else set()
    if names & {"dataset_info.json", "dataset_dict.json"}:
        return f"--config.data.hf_dir={folder}, a saved dataset"
    if "tokens.json" in names:
        return f"--config.data.tokens={folder}, token shards"
    endings = sorted({"".join(Path(name).suffixes[-2:]) for name in names if kind(Path(name)) in READERS})
    ending = endings[0] if endings else ".txt"
    return f"{folder}/*{ending}, or {folder}/**/*{ending}"


def kind(path: Path) -> str:
    """The ending; of text also without that of the compression.

    >>> kind(Path("a/b.jsonl.xz")), kind(Path("c.txt")), kind(Path("c.parquet.xz"))
    ('.jsonl', '.txt', '.xz')
    """
    inside = Path(path.stem).suffix
    return inside if path.suffix in COMPRESSIONS and inside in _LINES else path.suffix


def documents(
    path: Path,
    *,
    separator: str | None,
    text_field: str | tuple[str, str],
    field: str,
    faults: Faults | None = None,
    open_file: OpenFile = open_file,
) -> Iterator[str]:
    """The documents of one file, in order, without blank ones.

    Args:
      path: a .txt (one document, or several with `separator` between them), .jsonl or .tsv (one per line), .parquet,
        .arrow or .feather file (one per row).
      separator: text between documents of a .txt file; None: the file is one document.
      text_field: field of a line, or column, that holds the text; two of them: those of a source and of its target.
      field: config field to name in an error.
      faults: handles the lines and rows that cannot be read as text; None: the first one is an error.
      open_file: opens the file, still compressed.

    Raises:
      ConfigError: unreadable, broken compression, not UTF-8 (names the byte), or no text at all; depending on `faults`
        also a line that is not a JSON object, lacks the field, or whose field is not text (names the line); of a table
        as `arrow_files` says.
    """
    faults = Faults("stop") if faults is None else faults
    before = faults.count
    read = READERS[kind(path)]
    texts = read(path, separator=separator, text_field=text_field, field=field, faults=faults, open_file=open_file)
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


def _plain(
    path: Path, *, separator: str | None, text_field: str | tuple[str, str], field: str, open_file: OpenFile, **_: Any
) -> Iterator[str]:
    if not isinstance(text_field, str):
        accepted = " ".join(ending for ending in READERS if ending != ".txt")
        raise ConfigError(f"config.{field}: {path} holds no pairs; accepted with data.source_field: {accepted}")
    blocks = decoded(path, field, open_file)
    yield from ["".join(blocks)] if separator is None else split(blocks, separator)


# Ending -> ``(path, *, separator, text_field, field, faults, open_file) -> iterator over texts``, as in `documents`.
READERS: dict[str, Callable[..., Iterator[str]]] = {
    ".txt": _plain,
    ".jsonl": line_files.json_lines,
    ".tsv": line_files.tabbed_lines,
    ".parquet": arrow_files.parquet,
    ".arrow": arrow_files.ipc,
    ".feather": arrow_files.ipc,
}
