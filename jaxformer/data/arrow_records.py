"""Examples with labels in tables: .parquet, .arrow and .feather files, a row a record of all its columns.

Where the library datasets wrote the file, it says beside the columns which numbers stand for classes; these become the
names of the classes.

>>> features = {"label": {"names": ["no", "yes"]}, "tags": {"feature": {"names": ["O", "B"]}}}
>>> plain({"label": 1, "tags": [0, 1], "text": b"a"}, features)
{'label': 'yes', 'tags': ['O', 'B'], 'text': 'a'}
"""

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
        names[:] = schema.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{where}: {names.count(twice[0])} columns {twice[0]!r}; accepted: one")
        features.update(_features(schema.metadata))
        return names

    row = 0
    with arrow_files.opened(pa, path, where, open_file, lambda: row) as file:
        for arrays in batches(pa, file, choose):
            for array in arrays:
                array.validate(full=True)
            for cells in zip(*(array.to_pylist() for array in arrays), strict=True):
                row += 1
                try:
                    record = plain(dict(zip(names, cells, strict=True)), features)
                except (ValueError, IndexError) as error:
                    yield row, ValueError(str(error))
                else:
                    yield row, record


def _features(metadata: Any) -> dict[str, Any]:
    """What the library datasets says of the columns; {} if another wrote the file."""
    try:
        found = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def plain(value: Any, feature: Any = None) -> Any:
    """A value as JSON would have it, numbers of classes as their names; below 0 they are none, in test splits.

    Raises:
      ValueError, IndexError: bytes that are not UTF-8, or a class that has no name.
    """
    inside = feature if isinstance(feature, dict) else {}
    if isinstance(value, dict):
        return {name: plain(each, inside.get(name)) for name, each in value.items()}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) and feature else inside.get("feature")
        return [plain(each, inner) for each in value]
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(inside.get("names"), list) and type(value) is int:
        if value >= len(inside["names"]):
            raise ValueError(f"class {value} of {len(inside['names'])}")
        return None if value < 0 else inside["names"][value]
    return value


parquet = functools.partial(_records, arrow_files.parquet_batches)
ipc = functools.partial(_records, arrow_files.ipc_batches)
