"""Reading parts of a file by position: memory-mapped on this machine, by ranged requests elsewhere.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "ids"
>>> _ = path.write_bytes(bytes(range(10)))
>>> bytes(open_ranged(path).read(2, 5)), open_ranged(path).size
(b'\\x02\\x03\\x04', 10)
"""

import mmap
import os
from pathlib import Path
from typing import Any, Protocol

from jaxformer.storage import files, object_store
from jaxformer.storage.address import Address, is_address


class Ranged(Protocol):
    """A file that is read by position.

    Attributes:
      size: bytes.
      near: True if a read costs no request, so that nothing is gained by keeping or fetching ahead.
    """

    size: int
    near: bool

    def read(self, begin: int, end: int) -> Any:
        """The bytes from `begin` to `end` - 1, as bytes or a view. Raises OSError."""


class Mapped:
    """A memory-mapped file."""

    near = True

    def __init__(self, path: Path):
        """Raises OSError: it is missing, or is a pipe or a folder."""
        with files.open_to_read(path, follow=True) as file:
            self.size = os.fstat(file.fileno()).st_size
            self._bytes: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""

    def read(self, begin: int, end: int) -> memoryview:
        """A view of the bytes; nothing is copied."""
        return memoryview(self._bytes)[begin:end]


class Requested:
    """An object in a store, read by ranged requests."""

    near = False

    def __init__(self, address: Any, size: int | None = None):
        """Asks for the size unless it is known. Raises OSError: it is missing."""
        self._address = str(address)
        self.size = files.look(address)[0] if size is None else size

    def read(self, begin: int, end: int) -> bytes:
        """The bytes, by one request."""
        return object_store.part(self._address, begin, end) if begin < end else b""


def open_ranged(path: Any, size: int | None = None) -> Ranged:
    """Opens a file, or an address, whose size may be known already. Raises OSError."""
    return Requested(path, size) if is_address(path) else Mapped(path)


def sizes(folder: Any) -> dict[str, int]:
    """Name -> bytes of each file in a folder, from one listing. Raises OSError."""
    if is_address(folder):
        found = Address(str(folder)).objects()
        return {address.name: size for address, size in found.items() if address.parent == folder}
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
