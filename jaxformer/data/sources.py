"""THE table of sources: where text comes from. The standard library's own source, text files, a prepared TensorFlow
dataset, or a generated language.

A config file adds one of its own with one line, `SOURCES["mine"] = Source(documents)`.

>>> from jaxformer.config import DataConfig
>>> first = next(documents(DataConfig(source="stdlib"), "train"))
>>> type(first)
<class 'str'>
"""

import hashlib
import inspect
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxformer.config import DataConfig, registry
from jaxformer.config.registry import Registry
from jaxformer.data import languages, text_files, tfds_source
from jaxformer.data.faults import Faults
from jaxformer.errors import ConfigError

SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, SplitName] = ("train", "validation")

# Not the library's own: installed packages, tests, programs, and what differs from build to build.
_STDLIB_EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
)
# One file in twenty by the hash of its name. Of the twenty residues this one holds out 550-560 KB on 3.11, 3.12 and
# 3.13 with no file over 75 KB, so that no single file decides the held-out loss.
_HELD_OUT_MODULUS, _HELD_OUT_RESIDUE = 20, 13


def documents(
    data: DataConfig,
    split: SplitName,
    faults: Faults | None = None,
    open_file: text_files.OpenFile = text_files.open_file,
) -> Iterator[str]:
    """The documents of a split, one text at a time, always in the same order.

    Files and datasets are looked for at once, read as the iterator advances.

    Args:
      data: the source and its settings. The held-out part is chosen before `max_train_bytes` cuts the training text.
      split: "train" or "validation"; no document, and no part of one, is in both.
      faults: handles lines and examples of this split that cannot be read as text; None: by data.on_error.
      open_file: opens the files (not a dataset's), for reading their bytes.

    Returns:
      Iterator over non-blank texts.

    Raises:
      ConfigError: anything missing, empty, broken or not decodable; one line.
    """
    faults = Faults(data.on_error) if faults is None else faults
    texts = SOURCES[str(data.source)].documents(data, split, faults, open_file)
    if split == "train" and data.max_train_bytes is not None:
        texts = first_bytes(texts, data.max_train_bytes)
    return texts


class Input(NamedTuple):
    """A file that documents are read from, and what besides its content decides how."""

    path: Path
    label: str


class Source(NamedTuple):
    """One source of text.

    Attributes:
      documents: ``(data, split, faults, open_file) -> iterator over texts``, always the same ones in the same order;
        files are opened by `open_file`, which also compares them with their hash.
      inputs: ``data -> [Input]``: the files that it reads, none opened. When one of them changes, the corpus is
        rebuilt. None: the file in which `documents` is written, so that the corpus is rebuilt when it changes.
      settings: ``data -> dict``: what the texts depend on beside the inputs and the fields that every source reads.
      alphabet: ``data -> text`` of all its characters, where each is a token; None: `data.tokenizer` makes tokens.
      opens_files: False if a library opens its files itself: they are then hashed again after the last was read.
    """

    documents: Callable[[DataConfig, SplitName, Faults, text_files.OpenFile], Iterator[str]]
    inputs: Callable[[DataConfig], list[Input]] | None = None
    settings: Callable[[DataConfig], dict[str, Any]] = lambda data: {}
    alphabet: Callable[[DataConfig], str] | None = None
    opens_files: bool = True


def inputs(data: DataConfig) -> list[Input]:
    """Every file that the documents of both splits are read from, in order; none is opened.

    Raises:
      ConfigError: what the source names is not there, or it says no inputs and is written in no file.
    """
    source = SOURCES[str(data.source)]
    if source.inputs is not None:
        return source.inputs(data)
    try:
        return [Input(Path(inspect.getfile(source.documents)).resolve(strict=True), str(data.source))]
    except (TypeError, OSError):
        raise ConfigError(
            f"config.data.source: {data.source!r} is written in no file; accepted: a Source with inputs"
        ) from None


def _stdlib_inputs(data: DataConfig) -> list[Input]:
    root = _stdlib_root()
    return [Input(root / name, f"{split}/{name}") for split in SPLITS for name in stdlib_files(split)]


def _file_inputs(data: DataConfig) -> list[Input]:
    return [
        Input(path, f"{split}{text_files.kind(path)}{path.suffix}")
        for split, files in zip(SPLITS, _files(data), strict=True)
        for path in files
    ]


def stdlib_files(split: SplitName | None = None) -> list[str]:
    """Paths of the standard library's sources relative to its root, with "/" between folders, sorted.

    Args:
      split: one split only; None: both. The split goes by a hash of the path, so it is the same on every machine.
    """
    root = _stdlib_root()
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_EXCLUDED and not name.startswith("config-")]
        relative = Path(folder).relative_to(root)
        found += [
            (relative / name).as_posix()
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not found:
        raise ConfigError(f"config.data.source: stdlib: no Python sources under {root}; set data.files instead")
    return sorted(name for name in found if split is None or (split == "validation") == _held_out(name))


def _held_out(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_MODULUS == _HELD_OUT_RESIDUE


def _stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _stdlib_texts(split: SplitName, open_file: text_files.OpenFile) -> Iterator[str]:
    root = _stdlib_root()
    for name in stdlib_files(split):
        try:
            with open_file(root / name) as file:
                text = file.read().decode()
        except (UnicodeDecodeError, OSError):  # an interpreter's file is not the user's mistake
            continue
        if text and not text.isspace():
            yield text


def _files(data: DataConfig) -> tuple[list[Path], list[Path]]:
    """(training files, validation files); a file in both lists is held out."""
    files = text_files.find(data.files, "data.files")
    validation = text_files.find(data.validation_files, "data.validation_files") if data.validation_files else []
    held_out = {path.resolve() for path in validation}
    train = [path for path in files if path.resolve() not in held_out]
    if not train:
        raise ConfigError("config.data.files: every file is also in data.validation_files; nothing is left to train on")
    return train, validation


def _file_texts(data: DataConfig, split: SplitName, faults: Faults, open_file: text_files.OpenFile) -> Iterator[str]:
    train, validation = _files(data)

    def read(files: list[Path], field: str, faults: Faults) -> Iterator[str]:
        for path in files:
            yield from text_files.documents(
                path, separator=data.separator, text_field=data.text_field, field=field, faults=faults,
                open_file=open_file,
            )  # fmt: skip

    if validation:
        of_split = (train, "data.files") if split == "train" else (validation, "data.validation_files")
        return read(*of_split, faults)
    return _cut(lambda faults: read(train, "data.files", faults), data.validation_fraction, split, faults)


def _cut(read: Callable[[Faults], Iterator[str]], fraction: float, split: SplitName, faults: Faults) -> Iterator[str]:
    """The documents before (train) or after (validation) the cut; of a single document, its characters.

    The documents are counted first, by reading them once. `faults` handles those on this side of the cut alone.
    """
    if fraction == 0:
        raise ConfigError(
            "config.data.validation_fraction: 0.0 holds nothing out; set it above 0, or set data.validation_files"
        )
    elsewhere = Faults(faults.on_error)
    count = sum(1 for _ in read(elsewhere))
    if count > 1:
        train = count - min(max(1, round(count * fraction)), count - 1)
        if split == "train":
            yield from itertools.islice(read(faults), train)
            return
        texts = read(faults)
        for _ in itertools.islice(texts, train):
            pass
        faults.clear()  # those met so far are in the training text
        yield from texts
        return
    (text,) = read(faults if split == "train" else elsewhere)
    train = int(len(text) * (1 - fraction))
    if not text[:train] or not text[train:]:
        raise ConfigError(
            f"config.data.validation_fraction: {fraction} of one document of {len(text)} characters leaves nothing "
            "in one of the splits"
        )
    yield text[:train] if split == "train" else text[train:]


def first_bytes(texts: Iterator[str], limit: int) -> Iterator[str]:
    """The first `limit` bytes of UTF-8 of some texts; the last text is cut, never inside a character.

    >>> list(first_bytes(iter(["abc", "déf", "ghi"]), 5))
    ['abc', 'd']
    """
    for text in texts:
        encoded = text.encode()
        if len(encoded) >= limit:
            if kept := encoded[:limit].decode(errors="ignore"):
                yield kept
            return
        yield text
        limit -= len(encoded)


_LANGUAGE = Source(
    lambda data, split, faults, open_file: languages.documents(data, split),
    inputs=lambda data: [],
    settings=languages.settings,
    alphabet=lambda data: languages.alphabet(data.language_symbols),
)
SOURCES: Registry[Source] = Registry("data.source", registry.SOURCES, {
    "stdlib": Source(lambda data, split, faults, open_file: _stdlib_texts(split, open_file), _stdlib_inputs),
    "files": Source(_file_texts, _file_inputs),
    "tfds": Source(
        lambda data, split, faults, open_file: tfds_source.documents(data, split, faults),
        lambda data: [Input(path, path.name) for path in tfds_source.files(data)],
        opens_files=False,
    ),
    "markov": _LANGUAGE, "hierarchy": _LANGUAGE,
})  # fmt: skip
