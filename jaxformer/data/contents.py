"""Hashes of a corpus's files. Reading a file through `Contents` gives the bytes that were hashed or an error, so that a
corpus is never cached under the hash of another text.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "a.txt"
>>> _ = path.write_text("to be")
>>> found = Contents([Input(path, "train.txt")])
>>> found.open(path).read()
b'to be'
>>> _ = path.write_text("to be or")
>>> found.open(path).read()
Traceback (most recent call last):
...
jaxformer.errors.ConfigError: config.data: ...a.txt changed while it was read; start again when nobody writes to it
"""

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from jaxformer.data.sources import Input
from jaxformer.errors import ConfigError
from jaxformer.storage import files
from jaxformer.storage.block_reader import BlockReader

_BLOCK_BYTES = 1 << 20


def look(path: Path) -> list[int]:
    """`files.look`; where that does not tell, `verify` of `corpus.open_corpus` hashes again. Raises ConfigError."""
    try:
        return files.look(path)
    except OSError as error:
        raise ConfigError(f"config.data: {path}: {error.strerror}") from None


class Contents:
    """The hashed content of some files.

    Attributes:
      hashes: [label, SHA-256 over the hashes of its blocks] of each file.
      looks: `look` of each file, from when it was hashed.
    """

    def __init__(self, inputs: Sequence[Input]):
        """Reads all files once. Raises ConfigError if one cannot be read or changes meanwhile."""
        self._looks: dict[Path, list[int]] = {}
        self._blocks: dict[Path, list[bytes]] = {}
        for path in dict.fromkeys(each.path for each in inputs):
            self._looks[path], self._blocks[path] = _hashed(path)
        self.hashes = [[each.label, hashlib.sha256(b"".join(self._blocks[each.path])).hexdigest()] for each in inputs]
        self.looks = [self._looks[each.path] for each in inputs]

    def open(self, path: Path) -> BinaryIO:
        """Opens one of the files; reading raises ConfigError at bytes that changed since it was hashed."""
        if path not in self._blocks:
            raise _changed(path)
        file = files.open_to_read(path, follow=True)
        return io.BufferedReader(_Compared(file, path, self._blocks[path], self._looks[path][0]), 1 << 16)

    def confirm(self, inputs: Sequence[Input], *, hash_again: bool) -> None:
        """Raises ConfigError if the text now consists of other files, or one has changed since it was hashed.

        Args:
          inputs: the files found now.
          hash_again: also hash them, because they were not read through `open`.
        """
        if differing := sorted(self._looks.keys() ^ {each.path for each in inputs}):
            raise _changed(differing[0])
        for path in self._looks:
            if look(path) != self._looks[path] or (hash_again and _hashed(path)[1] != self._blocks[path]):
                raise _changed(path)


class _Compared(BlockReader):
    """A file of which every block is checked against its hash before it is returned."""

    def __init__(self, file: BinaryIO, path: Path, blocks: list[bytes], size: int):
        super().__init__(size, _BLOCK_BYTES)
        self._file, self._path, self._blocks = file, path, blocks

    def fetch(self, number: int) -> bytes:
        """Raises ConfigError unless it is what was hashed; so also where the file has grown."""
        self._file.seek(number * _BLOCK_BYTES)
        block = self._file.read(_BLOCK_BYTES)
        known = self._blocks[number] if number < len(self._blocks) else None
        if (hashlib.sha256(block).digest() if block else None) != known:
            raise _changed(self._path)
        return block

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()


def _hashed(path: Path) -> tuple[list[int], list[bytes]]:
    """(look, hash of each block) of a file; ConfigError if it changes meanwhile."""
    try:
        with files.open_to_read(path, follow=True) as file:
            before = files.look(path)
            blocks = [hashlib.sha256(block).digest() for block in iter(lambda: file.read(_BLOCK_BYTES), b"")]
        after = files.look(path)
    except OSError as error:
        raise ConfigError(f"config.data: {path}: {error.strerror}") from None
    if before != after:
        raise _changed(path)
    return before, blocks


def _changed(path: Path) -> ConfigError:
    return ConfigError(f"config.data: {path} changed while it was read; start again when nobody writes to it")
