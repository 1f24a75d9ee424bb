"""Text in tables: .parquet files, and .arrow and .feather files (Arrow's IPC, as a file or as a stream).

Read through pyarrow one batch of rows at a time, and of the rows one column, or those of a source and its target. A row
is a document. Cells are decoded one by one, so that one that is not UTF-8 costs one row.
"""

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxformer.data.faults import Faults
from jaxformer.data.pair_text import joined, named
from jaxformer.errors import ConfigError

ROWS = 256  # of a .parquet file at a time
_BUFFER_BYTES = 1 << 20
_MAGIC, _OLD_MAGIC = b"ARROW1", b"FEA1"  # an IPC file begins with the first, a stream with neither


def _texts(
    batches: Callable[[Any, BinaryIO, Callable[[Any], list[str]]], Iterator[list[Any]]],
    path: Path,
    *,
    text_field: str | tuple[str, str],
    field: str,
    faults: Faults,
    open_file: Callable[[Path], BinaryIO],
    **_: Any,
) -> Iterator[str]:
    """The texts of a column, or the pairs of two, in order.

    Args:
      batches: ``(pyarrow, file, choose) -> arrays of the columns``; `choose(schema)` names them.
      path: of the file.
      text_field: name of the column; two of them: of source and target.
      field: config field to name in an error.
      faults: handles null cells, those that are not UTF-8 and pairs of which one text is blank.
      open_file: opens the file.

    Raises:
      ConfigError: the extra is not installed, no such column or it is none of text, the file is broken; depending on
        `faults` also a cell that is no text (names the row, counted from 1).
    """
    where = f"config.{field}: {path}"
    pa = pyarrow(where)

    def choose(schema: Any) -> list[str]:
        kinds = _kinds(pa, schema)
        for name, setting in named(text_field).items():
            if name not in kinds:
                raise ConfigError(f"config.{setting}: {name!r} is no column of {path}; it has {_listed(list(kinds))}")
            if (count := schema.names.count(_outer(schema, name))) > 1:
                raise ConfigError(f"config.{setting}: {name!r} names {count} columns of {path}; accepted: one")
            if not _is_text(pa, kinds[name]):
                others = [each for each, kind in kinds.items() if _is_text(pa, kind)]
                raise ConfigError(
                    f"config.{setting}: {name!r} of {path} is {kinds[name]}, not text; columns of text: "
                    f"{_listed(others)}"
                )
        return list(named(text_field))

    row = 0
    with opened(pa, path, where, open_file, lambda: row) as file:
        for arrays in batches(pa, file, choose):
            for cells in zip(*(_cells(pa, array) for array in arrays), strict=True):
                row += 1
                try:
                    text = joined([_decoded(cell, name) for cell, name in zip(cells, named(text_field), strict=True)])
                except UnicodeDecodeError as error:
                    faults.meet(ConfigError(f"{where}: row {row}: byte {error.start} is not UTF-8 text"))
                except ValueError as error:
                    faults.meet(ConfigError(f"{where}: row {row}: {error}"))
                else:
                    yield text


def pyarrow(where: str) -> Any:
    """The library. Raises ConfigError, which begins with `where`: it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{where} needs the parquet extra: pip install 'jaxformer[parquet]'") from None
    return pyarrow


@contextlib.contextmanager
def opened(
    pa: Any, path: Path, where: str, open_file: Callable[[Path], BinaryIO], row: Callable[[], int]
) -> Iterator[BinaryIO]:
    """A file of which `row()` rows are read. Raises ConfigError, which begins with `where`: it cannot be opened, or it
    is broken."""
    try:
        file = open_file(path)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    with file, _broken(pa, where, lambda: f" beyond row {row()}" if row() else ""):
        yield file


def _decoded(cell: Any, name: str) -> str:
    content = cell.as_py()
    if content is None:
        raise ValueError(f"{name!r} is null, not text")
    return content.decode()


def _cells(pa: Any, array: Any) -> Any:
    """The cells of a column as bytes. None reaches beyond the text, as one of a damaged file may."""
    if pa.types.is_dictionary(array.type):
        array.validate(full=True)
        array = array.dictionary_decode()
    if pa.types.is_string_view(array.type):
        array = array.cast(pa.binary_view())
    if pa.types.is_binary_view(array.type):
        array.validate(full=True)
    cells = array.cast(pa.large_binary())
    cells.validate(full=True)
    return cells


def _kinds(pa: Any, schema: Any) -> dict[str, Any]:
    """Name -> type of the columns; of one that holds others, as "translation", also of these, as "translation.de"."""
    kinds = {each.name: each.type for each in schema}
    inside = {f"{each.name}.{one.name}": one.type for each in schema if pa.types.is_struct(each.type)
              for one in each.type}  # fmt: skip
    return inside | kinds


def _outer(schema: Any, name: str) -> str:
    """The column that `name` is or that holds it."""
    return name if name in schema.names else name.partition(".")[0]


def _column(batch: Any, name: str) -> Any:
    outer = _outer(batch.schema, name)
    column = batch.column(outer)
    if outer == name:
        return column
    return column.flatten()[column.type.get_field_index(name.removeprefix(f"{outer}."))]  # null where the outer one is


def parquet_batches(pa: Any, file: BinaryIO, choose: Callable[[Any], list[str]]) -> Iterator[list[Any]]:
    """The columns that `choose` names of a schema, some rows at a time."""
    # Without a buffer of its own the library reads a whole column of a row group at once.
    table = pa.parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
    names = choose(table.schema_arrow)
    for batch in table.iter_batches(ROWS, columns=names, use_threads=False):
        yield [_column(batch, name) for name in names]


def ipc_batches(pa: Any, file: BinaryIO, choose: Callable[[Any], list[str]]) -> Iterator[list[Any]]:
    """As `parquet_batches`, of Arrow's IPC, as a file or as a stream."""
    begin = file.read(len(_MAGIC))
    file.seek(0)
    if begin.startswith(_OLD_MAGIC):
        raise EOFError("it is of version 1 of Feather; pyarrow.feather.write_feather writes version 2")
    if begin == _MAGIC:
        opened = pa.ipc.open_file(file)
        names = choose(opened.schema)
        options = _only(pa, opened.schema, names)
        file.seek(0)
        table = pa.ipc.open_file(file, options=options)
        for number in range(table.num_record_batches):
            batch = table.get_batch(number)
            yield [_column(batch, name) for name in names]
        return
    with contextlib.closing(pa.ipc.open_stream(file)) as opened:
        names = choose(opened.schema)
        options = _only(pa, opened.schema, names)
    file.seek(0)
    watched = _Watched(file)
    for batch in pa.ipc.open_stream(watched, options=options):
        yield [_column(batch, name) for name in names]
    # A stream says where it ends. To the library one that was cut between two batches is a whole one.
    if watched.ended:
        raise EOFError("the stream ends too early")


class _Watched(io.RawIOBase):
    """A file that remembers whether more was read than it holds."""

    def __init__(self, file: BinaryIO):
        self._file, self.ended = file, False

    def readable(self) -> bool:
        """True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        found = self._file.read(size)
        self.ended = self.ended or len(found) < size
        return found

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """As of any file."""
        return self._file.tell()


def _only(pa: Any, schema: Any, names: list[str]) -> Any:
    indices = sorted({schema.get_field_index(_outer(schema, name)) for name in names})
    return pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)


@contextlib.contextmanager
def _broken(pa: Any, where: str, beyond: Callable[[], str]) -> Iterator[None]:
    """Turns what pyarrow says of a broken file into a ConfigError."""
    # A damaged length may be that of more memory than there is.
    errors = (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, MemoryError, OverflowError)
    try:
        yield
    except errors as error:
        if isinstance(error, ConfigError):
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where}: cannot be read{beyond()} ({reason[:200]})") from None


def _is_text(pa: Any, kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return any(getattr(pa.types, f"is_{test}")(kind) for test in tests)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") or "none"


parquet = functools.partial(_texts, parquet_batches)
ipc = functools.partial(_texts, ipc_batches)
