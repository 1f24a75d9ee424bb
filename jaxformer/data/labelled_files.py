"""Examples with labels from files: JSON lines, CSV, tab-separated columns as GLUE has them, SQuAD's JSON, and tables.

A file gives records, mappings of names to values; `record_examples` says how a record becomes an example.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxformer.config import DataConfig
from jaxformer.data import arrow_records, text_files
from jaxformer.data.faults import Faults
from jaxformer.data.labelled_text import Example
from jaxformer.data.line_files import reason
from jaxformer.data.record_examples import EXAMPLES, value_of
from jaxformer.data.unpacked_files import LINE_BYTES, OpenFile, decoded, lines
from jaxformer.errors import ConfigError


def examples(
    path: Path, *, data: DataConfig, field: str, faults: Faults, open_file: OpenFile, unlabelled: bool = False
) -> Iterator[Example]:
    """The examples of one file, in order.

    Args:
      path: one of READERS' endings.
      data: the objective, and the names of the fields.
      field: of the config, to name in an error.
      faults: handles records that are no examples.
      open_file: opens the file, still compressed.
      unlabelled: nobody reads the labels, so an example may lack one.

    Raises:
      ConfigError: the file cannot be read, or holds no example; depending on `faults` also a record that lacks a field,
        or whose label is not what the objective wants.
    """
    make, found = EXAMPLES[data.objective], False
    for place, record in READERS[text_files.kind(path)](path, data, field, open_file):
        try:
            if isinstance(record, Exception):
                raise record
            example = make(_without(data, record) if unlabelled else record, data)
            example.encode()  # a \\u escape can bring a lone surrogate, which no tokenizer takes
            json.dumps(example.label, ensure_ascii=False).encode()
            if example.label is None and not unlabelled:
                assert data.labelled is not None
                value_of(record, data.labelled.label_field)
                raise ValueError(f"the field {data.labelled.label_field!r} holds no label")
        except (ValueError, TypeError, OverflowError) as error:
            faults.meet(ConfigError(f"config.{field}: {path}:{place}: {' '.join(reason(error).split())[:300]}"))
        else:
            found = True
            yield example
    if not found:
        raise ConfigError(f"config.{field}: {path} holds no example{f' ({faults.first})' if faults.first else ''}")


def _without(data: DataConfig, record: Any) -> Any:
    """A record without its label, unless that says where something is asked."""
    assert data.labelled is not None
    if not isinstance(record, dict) or data.objective not in (
        "sequence_classification",
        "regression",
        "multiple_choice",
    ):
        return record
    return {**record, data.labelled.label_field: None}


def json_records(path: Path, data: DataConfig, field: str, open_file: OpenFile) -> Iterator[tuple[Any, Any]]:
    """(line, record or the error that it is) of each line that is not blank."""
    for number, line in enumerate(lines(path, field, open_file), 1):
        if line is None or line.strip():
            try:
                record = json.loads(line or b"")
                yield number, record if isinstance(record, dict) else ValueError("the line is no JSON object")
            except RecursionError as error:
                yield number, ValueError(reason(error))
            except ValueError as error:
                yield number, ValueError(f"not JSON ({error})")


def column_records(
    path: Path, data: DataConfig, field: str, open_file: OpenFile, **dialect: Any
) -> Iterator[tuple[Any, Any]]:
    """(line, record) of each line but the first, which names the columns, unless those are asked for by number."""
    assert data.labelled is not None
    wanted = [data.text_field, data.labelled.label_field, data.labelled.second_field or "1"]
    csv.field_size_limit(LINE_BYTES)  # the library's own is 128 KiB
    source = _Lines("".join(decoded(path, field, open_file)))
    reader, names, number = csv.reader(source, **dialect), None, 0
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield number, ValueError(str(error))
            continue
        if source.ended:  # the record goes on where the file does not
            yield number, ValueError("a quotation mark that nothing closes")
        elif names is None and cells and not all(name.isdecimal() for name in wanted):
            names = cells
            if twice := [name for name in wanted if names.count(name) > 1]:
                raise ConfigError(
                    f"config.{field}: {path}:{number}: {names.count(twice[0])} columns {twice[0]!r}; accepted: one"
                )
        elif cells:
            columns = [str(column) for column in range(1, len(cells) + 1)] if names is None else names
            if len(columns) == len(cells):
                yield number, dict(zip(columns, cells, strict=True))
            else:
                what = f"number of columns: {len(cells)}; the first line names {len(columns)}"
                yield number, ValueError(what)


class _Lines:
    """The lines of a text, which end in \\n, \\r or both.

    Attributes:
      ended: whether one was asked for after the last.
    """

    def __init__(self, text: str):
        self._lines, self.ended = io.StringIO(text, newline=""), False

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._lines.readline()
        self.ended = not line
        if self.ended:
            raise StopIteration
        return line


def tabbed_records(path: Path, data: DataConfig, field: str, open_file: OpenFile) -> Iterator[tuple[Any, Any]]:
    """As `column_records`, with tabs between columns and no quotation marks."""
    return column_records(path, data, field, open_file, delimiter="\t", quoting=csv.QUOTE_NONE)


def squad_records(path: Path, data: DataConfig, field: str, open_file: OpenFile) -> Iterator[tuple[Any, Any]]:
    """(id, record) of each question in SQuAD's JSON; a file that is a list of records gives those."""
    try:
        tree = json.loads("".join(decoded(path, field, open_file)))
    except RecursionError as error:
        raise ConfigError(f"config.{field}: {path}: {reason(error)}") from None
    except ValueError as error:
        raise ConfigError(f"config.{field}: {path}: not JSON ({error})") from None
    if isinstance(tree, list):
        yield from enumerate(tree, 1)
        return
    try:
        for article in tree["data"]:
            for paragraph in article["paragraphs"]:
                for each in paragraph["qas"]:
                    yield each["id"], {**each, "context": paragraph["context"]}
    except (KeyError, TypeError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else "is of another form"
        raise ConfigError(
            f"config.{field}: {path}: {what}; accepted: SQuAD's data, paragraphs, qas, or a list of records"
        ) from None


TABLES = {".parquet": arrow_records.parquet, ".arrow": arrow_records.ipc, ".feather": arrow_records.ipc}
# Ending -> ``(path, data, field, open_file) -> iterator over (place, record, or the error that stands there)``.
READERS: dict[str, Callable[..., Iterator[tuple[Any, Any]]]] = {
    ".jsonl": json_records,
    ".csv": column_records,
    ".tsv": tabbed_records,
    ".json": squad_records,
    **TABLES,
}
