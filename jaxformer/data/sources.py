"""THE table of sources: where text comes from. The standard library's own source, text files, a prepared TensorFlow
dataset, a saved Hugging Face one, or a generated language.

A config file adds one of its own with one line, `SOURCES["mine"] = Source(documents)`.

>>> from jaxformer.config import DataConfig
>>> first = next(documents(DataConfig(source="stdlib"), "train"))
>>> type(first)
<class 'str'>
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxformer.config import DataConfig, registry
from jaxformer.config.registry import Registry
from jaxformer.data import (
    arrow_records,
    hf_source,
    labelled_files,
    languages,
    python_tasks,
    text_files,
    tfds_source,
    token_source,
    transduction,
)
from jaxformer.data.faults import Faults
from jaxformer.data.labelled_text import Example
from jaxformer.data.pair_text import Pair
from jaxformer.data.shards import Tokenised
from jaxformer.data.stdlib_source import stdlib_files, stdlib_root, stdlib_texts
from jaxformer.errors import ConfigError

SplitName = Literal["train", "validation"]
SPLITS: tuple[SplitName, SplitName] = ("train", "validation")
FindFiles = Callable[[DataConfig], tuple[list[Path], list[Path]]]  # (training files, validation files)


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
    source = SOURCES[str(data.source)]
    if data.labelled is not None and source.examples is None:
        able = ", ".join(name for name, each in SOURCES.items() if each.examples is not None)
        raise ConfigError(
            f"config.data.source: {data.source}; data.objective={data.objective} needs examples with labels; accepted: "
            f"{able}"
        )
    read = source.documents if data.labelled is None or source.examples is None else source.examples
    texts = read(data, split, faults, open_file)
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
      examples: as `documents`, of `labelled_text.Example`, for objectives that learn from labels; None: it has none.
      class_names: ``data -> names`` of the labels' classes, in an order that the source gives them; []: it gives none.
      tokens: ``(data, verify) -> Tokenised``: of a source of tokens, which are used where they lie; `documents` is then
        not called. None: a source of text.
    """

    documents: Callable[[DataConfig, SplitName, Faults, text_files.OpenFile], Iterator[str]]
    inputs: Callable[[DataConfig], list[Input]] | None = None
    settings: Callable[[DataConfig], dict[str, Any]] = lambda data: {}
    alphabet: Callable[[DataConfig], str] | None = None
    opens_files: bool = True
    tokens: Callable[[DataConfig, bool], Tokenised] | None = None
    examples: Callable[[DataConfig, SplitName, Faults, text_files.OpenFile], Iterator[Example]] | None = None
    class_names: Callable[[DataConfig], list[str]] = lambda data: []


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
    return [Input(stdlib_root() / name, f"{split}/{name}") for split in SPLITS for name in stdlib_files(split)]


def _file_inputs(find: FindFiles, data: DataConfig) -> list[Input]:
    return [
        Input(path, f"{split}{text_files.kind(path)}{path.suffix}")
        for split, files in zip(SPLITS, find(data), strict=True)
        for path in files
    ]


def _files(data: DataConfig) -> tuple[list[Path], list[Path]]:
    """(training files, validation files); a file in both lists is held out."""
    endings = None if data.labelled is None else tuple(labelled_files.READERS)
    files = text_files.find(data.files, "data.files", endings)
    validation: list[Path] = []
    if data.validation_files:
        validation = text_files.find(data.validation_files, "data.validation_files", endings)
    held_out = {path.resolve() for path in validation}
    train = [path for path in files if path.resolve() not in held_out]
    if not train:
        raise ConfigError("config.data.files: every file is also in data.validation_files; nothing is left to train on")
    return train, validation


def _file_texts(
    find: FindFiles,
    fields: tuple[str, str],
    data: DataConfig,
    split: SplitName,
    faults: Faults,
    open_file: text_files.OpenFile,
) -> Iterator[str]:
    train, validation = find(data)

    def read(files: list[Path], field: str, faults: Faults) -> Iterator[str]:
        for path in files:
            if data.labelled is not None:
                yield from labelled_files.examples(path, data=data, field=field, faults=faults, open_file=open_file)
                continue
            yield from text_files.documents(
                path, separator=data.separator, text_field=data.text_fields, field=field, faults=faults,
                open_file=open_file,
            )  # fmt: skip

    if validation:
        of_split = (train, fields[0]) if split == "train" else (validation, fields[1])
        return read(*of_split, faults)
    return _cut(lambda faults: read(train, fields[0], faults), data.validation_fraction, split, faults)


def _cut(read: Callable[[Faults], Iterator[str]], fraction: float, split: SplitName, faults: Faults) -> Iterator[str]:
    """The documents before (train) or after (validation) the cut; of a single document, its characters.

    The documents are counted first, by reading them once. `faults` handles those on this side of the cut alone.
    """
    check_held_out(fraction)
    elsewhere = Faults(faults.on_error)
    count = sum(1 for _ in read(elsewhere))
    if count > 1:
        train = train_documents(count, fraction)
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
    if isinstance(text, Pair | Example):
        what = "pair" if isinstance(text, Pair) else "example"
        raise ConfigError(f"config.data.validation_fraction: {fraction} of one {what}; accepted: at least two {what}s")
    train = int(len(text) * (1 - fraction))
    if not text[:train] or not text[train:]:
        raise ConfigError(
            f"config.data.validation_fraction: {fraction} of one document of {len(text)} characters leaves nothing "
            "in one of the splits"
        )
    yield text[:train] if split == "train" else text[train:]


def check_held_out(fraction: float) -> None:
    """Raises ConfigError if nothing is held out."""
    if fraction == 0:
        raise ConfigError(
            "config.data.validation_fraction: 0.0 holds nothing out; set it above 0, or set data.validation_files"
        )


def train_documents(count: int, fraction: float) -> int:
    """How many of at least two documents are trained on; the others, at least one, are held out.

    >>> train_documents(50, 0.1), train_documents(2, 0.9)
    (45, 1)
    """
    return count - min(max(1, round(count * fraction)), count - 1)


def first_bytes(texts: Iterator[str], limit: int) -> Iterator[str]:
    """The first `limit` bytes of UTF-8 of some texts; the last text is cut, never inside a character. Pairs stay whole.

    >>> list(first_bytes(iter(["abc", "déf", "ghi"]), 5))
    ['abc', 'd']
    """
    for text in texts:
        encoded = text.encode()
        whole = isinstance(text, Pair | Example)
        if len(encoded) > limit and whole:
            return
        if len(encoded) >= limit and not whole:
            if kept := encoded[:limit].decode(errors="ignore"):
                yield kept
            return
        yield text
        limit -= len(encoded)


def _of_files(find: FindFiles, fields: tuple[str, str]) -> Source:
    """The source whose files `find` finds; `fields` of the config to name in an error, for each split."""
    return Source(
        functools.partial(_file_texts, find, fields), functools.partial(_file_inputs, find),
        class_names=functools.partial(_class_names, find),
    )  # fmt: skip


def _class_names(find: FindFiles, data: DataConfig) -> list[str]:
    """Of the first training file, if that is a table."""
    assert data.labelled is not None
    first = find(data)[0][0]
    if text_files.kind(first) not in labelled_files.TABLES:
        return []
    return arrow_records.class_names(first, data.labelled.label_field, text_files.open_file)


def _labelled(source: Source) -> Source:
    """A source whose `documents` are examples where the objective learns from labels."""
    return source._replace(examples=source.documents)  # type: ignore[arg-type]


def _python_task(make: Callable[[str], Iterator[Example]]) -> Source:
    """The source of the examples that `make` finds in the text of a file of the standard library."""

    def read(data: DataConfig, split: SplitName, faults: Faults, open_file: text_files.OpenFile) -> Iterator[Example]:
        for text in stdlib_texts(split, open_file):
            yield from make(text)

    return Source(read, _stdlib_inputs, lambda data: {"rule": python_tasks.VERSION}, examples=read)


_LANGUAGE = Source(
    lambda data, split, faults, open_file: languages.documents(data, split),
    inputs=lambda data: [],
    settings=languages.settings,
    alphabet=lambda data: languages.alphabet(data.language_symbols),
)
SOURCES: Registry[Source] = Registry("data.source", registry.SOURCES, {
    "stdlib": Source(lambda data, split, faults, open_file: stdlib_texts(split, open_file), _stdlib_inputs),
    "files": _labelled(_of_files(_files, ("data.files", "data.validation_files"))),
    "huggingface": _labelled(_of_files(hf_source.find, ("data.hf_dir", "data.hf_dir"))),
    "tfds": Source(
        lambda data, split, faults, open_file: tfds_source.documents(data, split, faults),
        lambda data: [Input(path, path.name) for path in tfds_source.files(data)],
        opens_files=False,
        examples=lambda data, split, faults, open_file: tfds_source.examples(data, split, faults),
        class_names=tfds_source.class_names,
    ),
    "tokens": Source(
        token_source.documents, tokens=lambda data, verify: token_source.open_tokens(data, verify=verify)
    ),
    **{name: _python_task(make) for name, make in python_tasks.TASKS.items()},
    "markov": _LANGUAGE, "hierarchy": _LANGUAGE,
    "transduction": Source(
        lambda data, split, faults, open_file: transduction.documents(data, split),
        inputs=lambda data: [],
        settings=transduction.settings,
        alphabet=lambda data: languages.alphabet(transduction.language(data).alphabet),
    ),
})  # fmt: skip
