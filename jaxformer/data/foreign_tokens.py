"""Token files of other projects: Megatron's .bin with its .idx, nanoGPT's .bin, and llm.c's with a header.

In all of them documents lie end to end. Ours are opened by the tokenizer's separator; those of nanoGPT and Megatron
end with it. It is the same stream but for its ends: where a stream does not begin with the separator, one is put in
front, and one at the very end, which would open a document without text, is left out. Megatron files whose documents do
not end with the separator (written without --append-eod) get one in front of each, by the document index.

Sources: Megatron-LM, `megatron/core/datasets/indexed_dataset.py` (index: MMIDIDX, version, code of the type, counts,
lengths, pointers, document index); nanoGPT, `data/openwebtext/prepare.py` (uint16, nothing else); llm.c,
`dev/data/data_common.py` (256 int32 of header: magic, version, number of tokens).
"""

import functools
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.data.lazy_array import LazyArray, Part
from jaxformer.errors import ConfigError
from jaxformer.storage.ranged import open_ranged

# Megatron's code -> type; of these only integers can be tokens.
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # (magic, version) -> type; the second for Llama 3's vocabulary
_LLM_C_EXAMPLES = 20240522  # of an evaluation, as HellaSwag's beside the text
_HEADER = 1024
_SAMPLES = 64  # blocks of each file that its fingerprint is made of, with its size and its index


class Stream(NamedTuple):
    """The tokens of one file.

    Attributes:
      part: of an array.
      documents: [d] int64, where each begins in it; None: the separators tell.
      fingerprint: hash of its size, its index and evenly spread blocks.
    """

    part: Part
    documents: np.ndarray | None
    fingerprint: str


def open_stream(path: Path, most: int, field: str) -> Stream:
    """The tokens of a .bin file; a file.idx beside it makes it Megatron's.

    Args:
      path: of the .bin.
      most: the largest id of the tokenizer.
      field: config field to name in an error.

    Raises:
      ConfigError: it is not of a kind that is read. Also raised by the part, at ids beyond the vocabulary.
    """
    where = f"config.{field}: {path}"
    index = path.with_suffix(".idx")
    try:
        opened = open_ranged(path)
        if index.is_file():
            return _megatron(path, index, opened.size, most, where)
        dtype, begin, length = _plain(opened, where)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from None
    return Stream(_part(path, dtype, length, begin, most, where), None, _fingerprint(opened, b""))


def _part(path: Path, dtype: str, length: int, begin: int, most: int, where: str) -> Part:
    def failed(problem: str, error: OSError | None = None) -> ConfigError:
        why = "" if error else "; the tokens are not those of data.tokenizer_file"
        return ConfigError(f"{where}: {problem}{why}")

    return Part(path.name, functools.partial(open_ranged, path), dtype, length, begin=begin, most=most, failed=failed)


def _plain(opened: Any, where: str) -> tuple[str, int, int]:
    """(type, first byte, number of tokens) of a file without an index."""
    if opened.size >= _HEADER:
        magic, version, count = struct.unpack("<3i", bytes(opened.read(0, 12)))
        if magic == _LLM_C_EXAMPLES:
            raise ConfigError(f"{where} holds the examples of an evaluation; accepted: files of text")
        if known := {number: kind for (known, number), kind in _LLM_C.items() if known == magic}:
            if version not in known:
                raise ConfigError(f"{where} has a header of version {version}; accepted: {', '.join(map(str, known))}")
            width = np.dtype(known[version]).itemsize
            if opened.size != _HEADER + width * count:
                raise ConfigError(
                    f"{where} has {opened.size} bytes; its header says {count} tokens; "
                    f"accepted: {_HEADER + width * count} bytes"
                )
            return known[version], _HEADER, count
    if opened.size % 2 or not opened.size:
        raise ConfigError(f"{where} has {opened.size} bytes; accepted: an even number of them, as uint16 tokens have")
    return "<u2", 0, opened.size // 2


def _megatron(path: Path, index: Path, size: int, most: int, where: str) -> Stream:
    opened = open_ranged(index)
    head = bytes(opened.read(0, 34))
    if len(head) < 34 or head[:9] != _MEGATRON_MAGIC:
        raise ConfigError(f"{where}: {index.name} is no index of Megatron's; accepted: one that begins with MMIDIDX")
    version, code, sequences, documents = struct.unpack("<QBQQ", head[9:])
    dtype = _MEGATRON_TYPES.get(code)
    if version != 1 or dtype is None:
        raise ConfigError(f"{where}: {index.name} has version {version} and type {code}; accepted: 1, and integers")
    ends = np.cumsum([0, 4 * sequences, 8 * sequences, 8 * documents]) + 34
    if opened.size < ends[-1]:
        raise ConfigError(f"{where}: {index.name} has {opened.size} bytes; accepted: at least {ends[-1]}")
    lengths, pointers, first = (
        np.frombuffer(opened.read(int(a), int(b)), kind)
        for a, b, kind in zip(ends, ends[1:], ("<i4", "<i8", "<i8"), strict=False)
    )
    width = np.dtype(dtype).itemsize
    begins = np.append(0, np.cumsum(lengths, dtype=np.int64))
    odd = (lengths < 0).any() or (pointers != begins[:-1] * width).any() or size != begins[-1] * width
    if odd or (np.diff(first, prepend=0, append=sequences) < 0).any() or (first[:1] != 0).any():
        raise ConfigError(
            f"{where} has {size} bytes, and {index.name} speaks of other tokens; accepted: those it lists"
        )
    starts = np.unique(begins[first])
    return Stream(
        _part(path, dtype, int(begins[-1]), 0, most, where),
        starts[starts < begins[-1]],
        _fingerprint(open_ranged(path), bytes(opened.read(0, opened.size))),
    )


def _fingerprint(opened: Any, index: bytes) -> str:
    digest = hashlib.sha256(f"{opened.size}".encode() + index)
    for number in range(_SAMPLES):
        begin = number * max(opened.size - 4096, 0) // (_SAMPLES - 1)
        digest.update(opened.read(begin, min(begin + 4096, opened.size)))
    return digest.hexdigest()


def stream_to_array(streams: list[Stream], separator: int, most: int, fail: Callable[[str], Exception]) -> Any:
    """The tokens of some files end to end as one array whose documents are opened by the separator.

    Args:
      streams: at least one.
      separator: id that opens a document.
      most: the largest id of the tokenizer.
      fail: problem -> the error to raise, as where there is no token.
    """
    parts = [stream.part for stream in streams if stream.part.length]
    raw = LazyArray(parts, "<u2" if most < 1 << 16 else "<u4")
    if not len(raw):
        raise fail("the files hold no tokens; accepted: at least one")
    documents = None if streams[0].documents is None else _documents(streams)
    if documents is not None and len(documents) > 1:
        sides = raw[np.append(documents[1:] - 1, len(raw) - 1)[[0, -1]]] == separator
        opens = raw[documents[[0, -1]]] == separator
        if sides[0] != sides[1] and not opens.all():
            raise fail("some documents end with the separator and some do not; accepted: all or none")
        if not sides.any() and not opens.any():
            return Separated(raw, documents, separator)
    front = [] if raw[0] == separator else [Part.of(np.array([separator], raw.dtype))]
    if front and raw[-1] == separator:
        parts[-1] = parts[-1].shortened()
    return LazyArray([*front, *parts], raw.dtype.str)


def _documents(streams: list[Stream]) -> np.ndarray:
    found, before = [], 0
    for stream in streams:
        assert stream.documents is not None
        found.append(stream.documents + before)
        before += stream.part.length
    return np.concatenate(found)


class _View:
    """Numbers of another array, not copied; indexed as a LazyArray is. A subclass says what `take` finds."""

    def __init__(self, dtype: np.dtype, length: int):
        self.dtype, self.shape, self.nbytes = dtype, (length,), length * dtype.itemsize

    def take(self, places: np.ndarray) -> np.ndarray:
        """The numbers at some places, none of them negative."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        places = np.arange(*index.indices(len(self))) if isinstance(index, slice) else np.asarray(index)
        return self.take(np.where(places < 0, places + len(self), places))[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(self.dtype if dtype is None else dtype)


class Separated(_View):
    """An array of tokens with a separator in front of each document."""

    def __init__(self, raw: LazyArray, documents: np.ndarray, separator: int):
        """`documents`: [d] int64, where each begins in `raw`; the first is 0."""
        super().__init__(raw.dtype, len(raw) + len(documents))
        self._raw, self._separator = raw, raw.dtype.type(separator)
        self.starts = documents + np.arange(len(documents))

    def take(self, places: np.ndarray) -> np.ndarray:
        """As said in `_View`."""
        document = np.searchsorted(self.starts, places, side="right")
        opens = self.starts[document - 1] == places
        return np.where(opens, self._separator, self._raw[np.where(opens, 0, places - document)])


class SeparatorPlaces:
    """Where the separators stand in an array of tokens; looked for, in all of it, when first asked for."""

    def __init__(self, tokens: Any, separator: int):
        """Looks at nothing yet."""
        self._tokens, self._separator = tokens, separator
        self._found: np.ndarray | None = None

    def __len__(self) -> int:
        return len(np.asarray(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self._found is None:
            step, found = 1 << 22, [np.zeros(0, np.int64)]
            for begin in range(0, len(self._tokens), step):
                found.append(begin + np.flatnonzero(self._tokens[begin : begin + step] == self._separator))
            self._found = np.concatenate(found)
        return self._found if dtype is None else self._found.astype(dtype)


class Portion(_View):
    """A contiguous part of an array."""

    def __init__(self, array: Any, begin: int, end: int):
        """From `begin` to `end` - 1."""
        super().__init__(array.dtype, end - begin)
        self._array, self._begin = array, begin

    def take(self, places: np.ndarray) -> np.ndarray:
        """As said in `_View`."""
        return self._array[places + self._begin]
