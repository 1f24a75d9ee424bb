"""Documents of files that hold one in each line: JSON objects, or columns with tabs between them.

Such a document is the text of one field, or the source and the target of two. A line that cannot be read as text can be
skipped and counted (`Faults`).
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxformer.data import unpacked_files
from jaxformer.data.faults import Faults
from jaxformer.data.pair_text import joined, named
from jaxformer.data.unpacked_files import OpenFile, lines
from jaxformer.errors import ConfigError

# The values of numbers do not matter, and float, unlike int, accepts any number of digits.
_JSON = json.JSONDecoder(parse_int=float)
_KINDS = {float: "number", bool: "boolean", type(None): "null", str: "string", list: "list", dict: "dict"}


def json_lines(
    path: Path, *, text_field: str | tuple[str, str], field: str, faults: Faults, open_file: OpenFile, **_: Any
) -> Iterator[str]:
    """One JSON object in each line; arguments and errors as of `text_files.documents`."""
    numbered = enumerate(lines(path, field, open_file), 1)
    return _texts(numbered, path, lambda line: _of_json(line, text_field), text_field, field, faults)


def tabbed_lines(
    path: Path, *, text_field: str | tuple[str, str], field: str, faults: Faults, open_file: OpenFile, **_: Any
) -> Iterator[str]:
    """Columns with tabs between them, without quotation marks or escapes; the first line names the columns, unless they
    are asked for by number, from 1. Arguments and errors as of `text_files.documents`."""
    numbered = enumerate(lines(path, field, open_file), 1)
    wanted = list(named(text_field))
    names = None
    if not all(name.isdecimal() for name in wanted):  # columns by number: there is no line of names
        try:
            names = _cells(next(numbered)[1])
        except ValueError as error:
            raise ConfigError(f"config.{field}: {path}:1: {reason(error)}") from None
        if names == [""]:
            raise ConfigError(
                f"config.{field}: {path} has no names of columns in its first line; accepted: names, or "
                "the numbers of columns for the fields"
            )
        for name, setting in named(text_field).items():
            if name not in names:
                raise ConfigError(
                    f"config.{setting}: {path}:1: no column {name!r}; the first line names {_listed(names)}; accepted: "
                    "one of these, or the numbers of columns where no line names them"
                )
    for name, setting in named(text_field).items():
        if name.isdecimal() and int(name) < 1 and names is None:
            raise ConfigError(f"config.{setting}: {name}; accepted: a name, or the number of a column, from 1")
    columns = [names.index(name) if names is not None else int(name) - 1 for name in wanted]

    def texts(line: bytes | None) -> list[str]:
        cells = _cells(line)
        if cells == [""]:
            return []
        if names is not None and len(cells) != len(names):
            raise ValueError(f"number of columns: {len(cells)}; the first line names {len(names)}")
        if not 0 <= min(columns) <= max(columns) < len(cells):
            raise ValueError(f"number of columns: {len(cells)}; asked for: {' and '.join(wanted)}")
        return [cells[column] for column in columns]

    return _texts(numbered, path, texts, text_field, field, faults)


def _texts(
    numbered: Iterator[tuple[int, bytes | None]], path: Path, texts: Callable[[bytes | None], list[str]],
    text_field: str | tuple[str, str], field: str, faults: Faults,
) -> Iterator[str]:  # fmt: skip
    """What `texts` finds in numbered lines, one text or source and target; [] in a blank line."""
    for number, line in numbered:
        try:
            text = joined(texts(line))
        except (ValueError, LookupError, RecursionError) as error:
            blamed = named(text_field)[error.args[1]] if isinstance(error, LookupError) else field
            faults.meet(ConfigError(f"config.{blamed}: {path}:{number}: {reason(error)}"))
        else:
            yield text


def _decoded_line(line: bytes | None) -> str:
    """A line, "" if it is blank; one of None was too long to keep. Raises ValueError."""
    if line is None:
        raise ValueError(f"the line is longer than {unpacked_files.LINE_BYTES} bytes")
    decoded = line.decode()
    return "" if not decoded or decoded.isspace() else decoded


def _cells(line: bytes | None) -> list[str]:
    return _decoded_line(line).removesuffix("\r").split("\t")


def _of_json(line: bytes | None, text_field: str | tuple[str, str]) -> list[str]:
    """The texts of a line, none if it is blank.

    Raises:
      LookupError: no such field, its second argument. ValueError, RecursionError: anything else, see `reason`.
    """
    decoded = _decoded_line(line)
    if not decoded:
        return []
    record = _JSON.decode(decoded)
    found = []
    for name in named(text_field):
        text = _inside(record, name)
        if not isinstance(text, str):
            raise LookupError(f"no field {name!r} holding text; {_instead(record, name)}", name)
        if not text.isascii() and "\\" in decoded:  # only a \u escape can bring a lone surrogate into UTF-8
            text.encode()
        found.append(text)
    return found


def _inside(record: Any, name: str) -> Any:
    """The field of a record, or of a record inside it: "translation.de"; None if there is none."""
    if not isinstance(record, dict) or name in record:
        return record.get(name) if isinstance(record, dict) else None
    outer, _, inner = name.partition(".")
    return _inside(record.get(outer), inner) if inner else None


def reason(error: Exception) -> str:
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
    return f"the line has the fields {_listed([*record])}"


def _listed(names: list[str]) -> str:
    shown = [name if name.isprintable() and len(name) < 40 else ascii(name[:40]) for name in names[:12]]
    return ", ".join(shown) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
