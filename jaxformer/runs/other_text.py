"""Text that a run was not made with, to evaluate it on, in the tokens of the run's own tokenizer: files and saved
datasets, whole; of token shards what is held out in them."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.config import Config, DataConfig
from jaxformer.config.fields import unescaped
from jaxformer.config.registry import special_tokens
from jaxformer.config.text import TextConfig
from jaxformer.data import hf_source, labelled_files, shards, text_files, whole_text
from jaxformer.data.corpus import Corpus
from jaxformer.data.corpus_split import Split
from jaxformer.data.faults import Faults
from jaxformer.data.labelled_text import split_of
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.data.unpacked_files import open_file
from jaxformer.errors import ConfigError
from jaxformer.storage import scratch
from jaxformer.storage.address import place

COUNTED = ("num_documents", "num_bytes", "num_tokens", "num_skipped")


class OtherText(NamedTuple):
    """Files, and how they are read.

    Attributes:
      files: globs, as of `data.files`; saved datasets, each a folder; or one folder of token shards.
      separator, text_field, on_error: as of `data`; None: as the run's own text was read.
    """

    files: tuple[str, ...]
    separator: str | None = None
    text_field: str | None = None
    on_error: str | None = None


class Opened(NamedTuple):
    """Other text as a run's text.

    Attributes:
      config: of the run, as if this were its text.
      corpus: of which both splits are this text.
      words: what it is, in words.
      notes: lines about it.
      facts: the same for a program.
    """

    config: Config
    corpus: Corpus
    words: str
    notes: list[str]
    facts: dict[str, Any]


@contextlib.contextmanager
def opened(other: OtherText, config: Config, tokenizer: Tokenizer, *, progress: bool = True) -> Iterator[Opened]:
    """The text, tokenised into a folder that is removed in the end.

    Raises:
      ConfigError: a file cannot be found or read, or holds no text, or the tokens are another tokenizer's; names the
        flag.
    """
    with contextlib.ExitStack() as stack, _flags_named():
        if (folder := _shards_among(other)) is not None:
            yield _of_shards(folder, config, tokenizer)
            return
        chosen = {name: value for name, value in other._asdict().items() if value is not None}
        if other.separator is not None:
            chosen["separator"] = unescaped(other.separator, "--separator")
        defaults: dict[str, Any] = {each.name: each.default for each in dataclasses.fields(TextConfig)}
        kept = {name: getattr(config.data, name) for name in ("separator", "text_field", "on_error")}
        chosen["files"] = tuple(file for pattern in other.files for file in of_dataset(pattern))
        data = replace(config.data, mixture=None, **defaults | kept | {"source": "files"} | chosen)
        try:
            folder = stack.enter_context(scratch.folder())
            read = whole_text.read if data.labelled is None else _examples
            split, files = read(data, tokenizer, folder, progress=progress)
        except OSError as error:
            raise ConfigError(f"--files: their tokens cannot be kept ({error.strerror or error})") from None
        if 2 * split.num_unknown > split.num_tokens:
            raise ConfigError(
                f"--files: {split.num_unknown} of {split.num_tokens} tokens are characters that the run's vocabulary "
                "lacks; accepted: text in its characters"
            )
        corpus = Corpus(split, split, tokenizer, "", folder)
        words = f"on {len(files)} other file{'s' * (len(files) != 1)}"
        notes = split.unknown()
        if seen := _trained_on(config, files):
            are = "is" if seen == 1 else "are"
            notes.append(f"{seen} of these files {are} among those that the run was trained on")
        facts = {
            "files": [str(path) for path in files],
            **{name: getattr(split, name) for name in COUNTED},
        }
        yield Opened(replace(config, data=data), corpus, words, notes, facts)


def of_dataset(pattern: str) -> list[str]:
    """The files of a saved dataset, if this is the folder of one; else the pattern itself."""
    folder = place(pattern).expanduser()
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise ConfigError(
            f"--files: {folder} has the splits {', '.join(splits)}; accepted: one, as {folder}/{splits[0]}"
        )
    if not ((folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()):
        return [pattern]
    return [str(path) for path in hf_source.find(DataConfig(hf_dir=str(folder)))[0]]


def _shards_among(other: OtherText) -> Path | None:
    """The folder of token shards that the text is; None: it is not. Raises ConfigError: it is more than that."""
    folders = [place(file).expanduser() for file in other.files if not re.search(r"[*?\[]", file)]
    ours = [folder for folder in folders if (folder / shards.MANIFEST).is_file()]
    if not ours:
        return None
    if len(other.files) > 1:
        raise ConfigError(f"--files: {ours[0]} is token shards, and there is more; accepted: that folder alone")
    for name in ("separator", "text_field", "on_error"):
        if (value := getattr(other, name)) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: {value!r}; {ours[0]} is token shards, which are read already; accepted: none")
    return ours[0]


def _of_shards(folder: Path, config: Config, tokenizer: Tokenizer) -> Opened:
    """What is held out in token shards."""
    found = shards.read(folder)
    split, theirs = Split(**found.splits["validation"]), found.tokenizer.with_tokens(special_tokens(config.data))
    if theirs.fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"--files: {folder} was made by another tokenizer than the run's; accepted: shards that the run's made, or "
            "their text"
        )
    defaults: dict[str, Any] = {each.name: each.default for each in dataclasses.fields(TextConfig)}
    data = replace(config.data, mixture=None, **defaults | {"source": "tokens", "tokens": (str(folder),)})
    facts = {"files": [str(folder)], **{name: getattr(split, name) for name in COUNTED}}
    words = f"on what is held out in {folder}"
    return Opened(replace(config, data=data), Corpus(split, split, tokenizer, "", folder), words, [], facts)


def _examples(data: DataConfig, tokenizer: Tokenizer, folder: Path, progress: bool) -> tuple[Split, list[Path]]:
    """As `whole_text.read`, of examples with labels."""
    files = text_files.find(data.files, "data.files", tuple(labelled_files.READERS))
    fields: Any = {"data": data, "field": "data.files", "faults": Faults(data.on_error), "open_file": open_file}
    return split_of([each for path in files for each in labelled_files.examples(path, **fields)], tokenizer), files


def _trained_on(config: Config, files: list[Path]) -> int:
    """How many of these files the run's own text names and does not hold out as whole files."""
    own: set[Path] = set()
    for part in config.data.parts().values():
        with contextlib.suppress(ConfigError):  # they are no longer there
            held_out = text_files.find(part.validation_files, "data.validation_files")
            own |= {path.resolve() for path in text_files.find(part.files, "data.files") if path not in held_out}
    return sum(path.resolve() in own for path in files)


@contextlib.contextmanager
def _flags_named() -> Iterator[None]:
    """Errors that name fields of `data` name the program's flags."""
    try:
        yield
    except ConfigError as error:
        names = "|".join((*OtherText._fields, "hf_dir", "tokens"))

        def flag(found: re.Match) -> str:
            return "--files" if found[1] in ("hf_dir", "tokens") else f"--{found[1].replace('_', '-')}"

        raise ConfigError(re.sub(rf"\b(?:config\.)?data\.({names})\b", flag, str(error))) from None
