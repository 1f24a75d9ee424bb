"""A corpus: text tokenised once, kept on disk under a hash of everything it depends on, memory-mapped when used.

Each document is the tokenizer's separator followed by the document's tokens; the documents lie end to end.

>>> import tempfile
>>> folder = Path(tempfile.mkdtemp())
>>> _ = (folder / "a.txt").write_text("to be or not to be, that is the question|" * 50)
>>> data = DataConfig(source="files", files=(str(folder / "a.txt"),), separator="|", tokenizer="bytes",
...                   cache_dir=str(folder / "cache"))
>>> corpus = open_corpus(data, progress=False)
>>> corpus.train.num_documents, corpus.validation.num_documents, corpus.validation.num_bytes
(45, 5, 200)
>>> corpus.tokenizer.decode(corpus.train.tokens[:10])
'to be or '
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.config.registry import special_tokens
from jaxformer.data import build_cache, checked_array, contents, ingest, labelled_text, metadata, sources, tokenizers
from jaxformer.data.corpus_split import Split
from jaxformer.data.progress_bars import Bar, bars, say
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError, DamagedCacheError
from jaxformer.storage import files, json_checksum

# The fields of DataConfig that decide what text there is; those of the tokenizer are in `text_settings`.
_TEXT_FIELDS = (
    "source", "validation_fraction", "separator", "text_field", "tfds_name", "tfds_train_split",
    "tfds_validation_split", "max_train_bytes",
)  # fmt: skip

T = TypeVar("T")


@dataclass(frozen=True)
class Corpus:
    """Both splits and the tokenizer that made them.

    Attributes:
      train, validation: the splits.
      tokenizer: as saved with them.
      fingerprint: 16 hex digits of all token ids and the tokenizer, whatever the source of the text.
      directory: where the files are.
    """

    train: Split
    validation: Split
    tokenizer: Tokenizer
    fingerprint: str
    directory: Path

    @property
    def sources(self) -> "dict[str, Corpus]":
        """The corpora of a mixture by name; of a corpus that is none itself, without a name."""
        return {"": self}

    @property
    def shares(self) -> dict[str, float]:
        """Name -> share of the rows; they add up to 1."""
        return {"": 1.0}

    @property
    def num_skipped(self) -> int:
        """Lines and examples left out of both splits, because they cannot be read."""
        return self.train.num_skipped + self.validation.num_skipped

    def notes(self) -> list[str]:
        """A line about what was left out, if anything was; about held-out characters that are no tokens."""
        skipped = (
            f"{self.train.num_skipped} training and {self.validation.num_skipped} held-out lines or examples cannot be "
            "read as text and are left out (data.on_error=skip)"
        )
        return [skipped] * bool(self.num_skipped) + self.validation.unknown()


def open_corpus(
    data: DataConfig, *, progress: bool = True, verify: bool = False, given: Tokenizer | None = None
) -> Corpus:
    """The corpus of a configuration: from the cache, or tokenised now and kept there.

    Nothing in the cache is trusted: `metadata` makes the checks. A damaged corpus is rebuilt, and one line on standard
    error says so.

    Args:
      data: source, tokenizer and cache folder.
      progress: show on standard error what is done, if anything needs to be done.
      verify: hash the text again, whatever its times of change say, and compare all that is kept with its checksums
        and the fingerprint.
      given: the tokenizer; None: by data.

    Raises:
      ConfigError: any fault of the text, the tokenizer or the cache folder; text that changes while it is read; one
        line. Also raised by a split of more than AT_ONCE bytes when damage is found as it is used.
    """
    tokens = sources.SOURCES[str(data.source)].tokens
    if tokens is not None:
        found = tokens(data, verify)
        train, validation = (Split(**found.splits[split]) for split in sources.SPLITS)
        tokenizer = found.tokenizer.with_tokens(special_tokens(data))
        return Corpus(train, validation, tokenizer, found.fingerprint, found.directory)
    if given is None and data.tokenizer_file is not None:
        given = Tokenizer.load(data.tokenizer_file)
    if given is not None:
        given = given.with_tokens(special_tokens(data))
    settings = text_settings(data, given)

    def build(folder: Path, key: str, hashed: contents.Contents, bar: Bar) -> None:
        about = ingest.build(data, folder, bar, hashed, given)
        metadata.write(folder, {"key": key, "settings": settings, **about})

    opened = functools.partial(_opened, settings=settings, verify=verify)
    return kept(data, sources.inputs(data), settings, build, opened, progress=progress, verify=verify)


def kept(
    data: DataConfig,
    inputs: list[sources.Input],
    settings: dict[str, Any],
    build: Callable[[Path, str, contents.Contents, Bar], None],
    opened: Callable[[Path], T],
    *,
    progress: bool,
    verify: bool,
) -> T:
    """What is made of some files: from the cache, or built now and kept there.

    Args:
      data: cache_dir.
      inputs: the files.
      settings: what it depends on besides.
      build: ``(folder, key, contents, bar)``: writes it into the folder, reading the files through `contents`.
      opened: opens the folder; raises DamagedCacheError if it is not what was written.
      progress, verify: as of `open_corpus`.

    Raises:
      ConfigError: whatever `build` raises; the cache cannot be used; the files change meanwhile.
    """
    root = Path(data.cache_dir).expanduser() if data.cache_dir is not None else build_cache.default_root()
    looks = [contents.look(each.path) for each in inputs]
    places = [[str(each.path.absolute()), each.label, *look] for each, look in zip(inputs, looks, strict=True)]
    seen = digest(settings, places)
    key = None if verify else _remembered(root, seen)
    if key is not None and build_cache.made_here(root / key, root):
        with contextlib.suppress(DamagedCacheError):
            return opened(root / key)
    hashed = contents.Contents(inputs)
    if hashed.looks != looks:
        raise ConfigError("config.data: the text changed while it was read; start again when nobody writes to it")
    key = digest(settings, hashed.hashes)

    with bars(progress) as bar:
        waiting = "another process is tokenising this corpus; waiting for it"
        made = build_cache.get_or_build(
            root,
            key,
            lambda folder: build(folder, key, hashed, bar),
            opened,
            waiting=lambda: say(waiting) if progress else None,
        )
    _remember(root, seen, key)
    return made


def text_settings(data: DataConfig, given: Tokenizer | None) -> dict[str, Any]:
    """What the corpus depends on besides the content of its inputs."""
    settings = {name: getattr(data, name) for name in _TEXT_FIELDS} | {"format": ingest.FORMAT}
    if data.on_error != "stop":  # a corpus in which nothing had to be left out keeps the key it always had
        settings["on_error"] = data.on_error
    if data.source_field is not None:
        settings |= {"source_field": data.source_field, "target_field": data.target_field}
    if data.labelled is not None:
        fields = data.labelled.label_field, data.labelled.second_field, data.labelled.template
        settings["labelled"] = [data.objective, *fields]
    source = sources.SOURCES[str(data.source)]
    settings |= source.settings(data)
    if (names := special_tokens(data)) and given is None:
        settings["special_tokens"] = [list(each) for each in names]
    if source.alphabet is not None:
        return settings
    if given is not None:
        return settings | {"tokenizer": given.fingerprint}
    if data.tokenizer == "bpe":
        tokenizers.check_vocab_size(data.tokenizer_vocab)
        return settings | {"tokenizer": "bpe", "vocab": data.tokenizer_vocab}
    return settings | {"tokenizer": data.tokenizer}


def digest(*values: Any) -> str:
    """16 hexadecimal digits of some JSON values."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _opened(folder: Path, settings: dict[str, Any], verify: bool) -> Corpus:
    """A kept corpus; raises DamagedCacheError if it is not what was written under this name."""
    if os.path.lexists(folder / build_cache.DAMAGED):
        raise DamagedCacheError("was found damaged when it was last used")
    about = metadata.read(folder)
    if (about.get("key"), about.get("settings")) != (folder.name, settings):
        raise DamagedCacheError("holds another corpus")
    tokenizer = metadata.read_tokenizer(folder, about)
    at_once = float("inf") if verify else checked_array.AT_ONCE
    splits: dict[sources.SplitName, Split] = {}
    for split in sources.SPLITS:
        tokens, starts = metadata.read_split(folder, split, about, tokenizer, at_once)
        if isinstance(tokens, checked_array.CheckedArray):
            tokens.failed = functools.partial(_damaged_in_use, folder)
        known = about[split]
        fields = known["num_bytes"], known["num_unknown"], known["compressed"], known["num_skipped"]
        if "labelled" in settings:
            covers, lines = labelled_text.read_split(folder, split, about)
            splits[split] = labelled_text.LabelledSplit(tokens, starts, *fields, covers, lines)
        else:
            splits[split] = Split(tokens, starts, *fields)
    if verify and about["fingerprint"] != _fingerprint(tokenizer, splits):
        raise DamagedCacheError("does not have the fingerprint that it had")
    return Corpus(splits["train"], splits["validation"], tokenizer, about["fingerprint"], folder)


def _fingerprint(tokenizer: Tokenizer, splits: dict[sources.SplitName, Split]) -> str:
    """What `ingest.build` says of the same tokens."""
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    for split in sources.SPLITS:
        digest.update(np.asarray(splits[split].tokens).data)
        digest.update(getattr(splits[split], "lines", b""))
    return digest.hexdigest()[:16]


def _damaged_in_use(folder: Path, problem: str) -> ConfigError:
    first = "" if build_cache.mark_damaged(folder, folder.parent) else "remove this folder and "
    return ConfigError(
        f"config.data.cache_dir: {folder}: {problem}; {first}start again: the text is tokenised again, and a run "
        "resumes from its newest checkpoint"
    )


def _remembered(root: Path, seen: str) -> str | None:
    """The key found for the same names, sizes and times of change before, so that contents are read only once.

    Only a hint: the corpus under that key is checked by what it says of itself.
    """
    folder = root / "index"
    entry = None if folder.is_symlink() else json_checksum.read_verified(folder / f"{seen}.json", 1 << 16)
    if entry is None or entry.get("seen") != seen or not build_cache.is_key(entry.get("key")):
        return None
    return entry["key"]


def _remember(root: Path, seen: str, key: str) -> None:
    if _remembered(root, seen) == key:
        return
    with contextlib.suppress(OSError):  # only saves time: a cache that can no longer be written is no error
        (root / "index").mkdir(parents=True, exist_ok=True)
        if not (root / "index").is_symlink():
            entry = json_checksum.add_checksum({"seen": seen, "key": key})
            files.write_atomically(root / "index" / f"{seen}.json", json.dumps(entry))
