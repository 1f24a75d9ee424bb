"""An object of a store as a file: to append to, and to read in order."""

import io
import threading
import time
from pathlib import Path
from typing import Any

from jaxformer.storage import object_store
from jaxformer.storage.block_reader import BlockReader

SPOOL_SECONDS = 30.0
READ_BYTES = 1 << 23


class Spool(io.BytesIO):
    """What is appended to an object: kept in memory, and put as a whole by `sync`.

    It stays open for the next caller; leaving its context also puts it, if that was not done for SPOOL_SECONDS. A kill
    loses what was written since it was put last.
    """

    def __init__(self, address: str, content: bytes):
        super().__init__(content)
        self._address, self._put, self._at = address, content, time.monotonic()
        self._one_by_one = threading.Lock()  # or an older content may be put after a newer one

    def write(self, data: Any) -> int:
        """Appends."""
        self.seek(0, io.SEEK_END)
        return super().write(data)

    def sync(self) -> None:
        """Puts the object unless the store has this content."""
        with self._one_by_one:
            content = self.getvalue()
            if content != self._put:
                object_store.request("pipe_file", self._address, content, size=len(content))
            self._put, self._at = content, time.monotonic()

    def __exit__(self, *_: Any) -> None:
        if time.monotonic() - self._at > SPOOL_SECONDS:
            self.sync()


_spools: dict[str, Spool] = {}


def of(address: str) -> Spool:
    """The spool of an object in this process, which begins with the object's content."""
    if address not in _spools:
        try:
            content = object_store.request("cat_file", address)
        except FileNotFoundError:
            content = b""
        _spools[address] = Spool(address, content)
    return _spools[address]


def forget(address: str) -> None:
    """Drops a spool, whose object is written anew."""
    _spools.pop(address, None)


def sync_all(folder: Path, *, end: bool = False) -> None:
    """Puts what was appended to the objects in a folder; `end`: nothing more will be."""
    for address, spool in list(_spools.items()):
        if address.startswith(f"{folder}/"):
            spool.sync()
            if end:
                forget(address)


class Reader(BlockReader):
    """An object of `size` bytes."""

    def __init__(self, address: str, size: int):
        super().__init__(size, READ_BYTES)
        self._address = address

    def fetch(self, number: int) -> bytes:
        """A part of the object; none beyond its end, for which the store is not asked."""
        begin, end = number * READ_BYTES, min((number + 1) * READ_BYTES, self._size)
        return object_store.part(self._address, begin, end) if begin < end else b""
