"""Examples with labels in tables: .parquet, .arrow and .feather files, a row a record of the columns that objectives
read.

Where the library datasets wrote the file, it says beside the columns which numbers stand for classes; these become the
names of the classes.

>>> features = {"label": {"names": ["no", "yes"]}, "tags": {"feature": {"names": ["O", "B"]}}}
>>> plain({"label": 1, "tags": [0, 1], "text": b"a"}, features)
{'label': 'yes', 'tags': ['O', 'B'], 'text': 'a'}
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxformer.config import DataConfig
from jaxformer.data import arrow_files
from jaxformer.data.unpacked_files import OpenFile
from jaxformer.errors import ConfigError


def _records(
    batches: Callable[..., Iterator[list[Any]]], path: Path, data: DataConfig, field: str, open_file: OpenFile
) -> Iterator[tuple[int, Any]]:
    """(row from 1, record or the error that it is); as the readers of `labelled_files`."""
    where = f"config.{field}: {path}"
    pa = arrow_files.pyarrow(where)
    names, features = list[str](), dict[str, Any]()

    def choose(schema: Any) -> list[str]:
        there = schema.names
        if twice := [name for name in there if there.count(name) > 1 and name in _read(data)]:
            raise ConfigError(f"{where}: {there.count(twice[0])} columns {twice[0]!r}; accepted: one")
        names[:] = [name for name in there if name in _read(data)]
        if not names:
            raise ConfigError(f"{where}: has no column {data.text_field!r}; it has {', '.join(there[:12]) or 'none'}")
        features.update(_features(schema.metadata))
        return names

    row = 0
    with arrow_files.opened(pa, path, where, open_file, lambda: row) as file:
        for arrays in batches(pa, file, choose):
            for array in arrays:
                array.validate(full=True)
            for cells in zip(*(_values(array, where) for array in arrays), strict=True):
                row += 1
                try:
                    record = plain(dict(zip(names, cells, strict=True)), features)
                except ValueError as error:
                    yield row, error
                else:
                    yield row, record


def class_names(path: Path, name: str, open_file: OpenFile) -> list[str]:
    """The names of the classes of a column, or of those in its lists, in the order of their numbers; [] if it has none.

    Raises:
      ConfigError: the file cannot be read.
    """
    where, found = f"config.data.files: {path}", dict[str, Any]()
    pa = arrow_files.pyarrow(where)

    def choose(schema: Any) -> list[str]:
        found.update(_features(schema.metadata))
        return []

    batches = arrow_files.parquet_batches if path.suffix == ".parquet" else arrow_files.ipc_batches
    with arrow_files.opened(pa, path, where, open_file, lambda: 0) as file:
        next(batches(pa, file, choose), None)
    feature = found.get(name)
    inner = feature[0] if isinstance(feature, list) and feature else feature
    inner = inner.get("feature", inner) if isinstance(inner, dict) else {}
    names = inner.get("names") if isinstance(inner, dict) else None
    return [str(each) for each in names] if isinstance(names, list) else []


def _read(data: DataConfig) -> set[str | None]:
    """The columns that some objective reads."""
    assert data.labelled is not None
    own = data.text_field, data.labelled.label_field, data.labelled.second_field
    return {*own, "id", "question", "context", "answers", "is_impossible", "choices", "messages"}


def _values(array: Any, where: str) -> list[Any]:
    try:
        return array.to_pylist()
    except Exception as error:  # a time zone that is none, a date beyond Python's
        raise ConfigError(
            f"{where}: a column of {array.type} cannot be read ({' '.join(str(error).split())})"
        ) from None


def _features(metadata: Any) -> dict[str, Any]:
    """What the library datasets says of the columns; {} if another wrote the file."""
    try:
        found = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def plain(value: Any, feature: Any = None) -> Any:
    """A value as JSON would have it, numbers of classes as their names; below 0 they are none, in test splits. Bytes
    that are not UTF-8 stay bytes.

    Raises:
      ValueError: a class that has no name.
    """
    inside = feature if isinstance(feature, dict) else {}
    if isinstance(value, dict):
        return {name: plain(each, inside.get(name)) for name, each in value.items()}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) and feature else inside.get("feature")
        return [plain(each, inner) for each in value]
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
        return value
    if isinstance(inside.get("names"), list) and type(value) is int:
        if value >= len(inside["names"]):
            raise ValueError(f"class {value}; accepted: 0 to {len(inside['names']) - 1}, which have names")
        return None if value < 0 else inside["names"][value]
    return value


parquet = functools.partial(_records, arrow_files.parquet_batches)
ipc = functools.partial(_records, arrow_files.ipc_batches)
