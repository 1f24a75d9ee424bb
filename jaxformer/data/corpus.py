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
import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import ConfigError, DataConfig
from jaxformer.data import cache, ingest, languages, sources, tokenizers
from jaxformer.data.progress import bars, say
from jaxformer.data.tokenizers import Tokenizer

# The fields of DataConfig that decide what text there is; those of the tokenizer are in `_settings`.
_TEXT_FIELDS = (
    "source", "validation_fraction", "separator", "text_field", "tfds_name", "tfds_train_split",
    "tfds_validation_split", "max_train_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Split:
    """The tokens of one split.

    Attributes:
      tokens: [n] uint16 or uint32 memory map.
      starts: [d] int64 memory map, index of each document's separator in `tokens`; starts[0] is 0.
      num_bytes: UTF-8 bytes of the documents (separators stand for none).
      num_unknown: tokens that are [UNK]: characters that a "chars" vocabulary lacks.
      compressed: "gzip -9" and "xz -9" -> bytes that tool makes of the same documents end to end. Of the held-out
        split only, and empty if that is longer than ingest.COMPRESS_BYTES.
      num_skipped: lines and examples that cannot be read as text and are left out (data.on_error=skip).
    """

    tokens: np.ndarray
    starts: np.ndarray
    num_bytes: int
    num_unknown: int
    compressed: dict[str, int]
    num_skipped: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens, separators included."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Documents."""
        return len(self.starts)


@dataclass(frozen=True)
class Corpus:
    """Both splits and the tokenizer that made them.

    Attributes:
      train, validation: the splits.
      tokenizer: as saved with them.
      fingerprint: 16 hex digits of all token ids and the tokenizer; says nothing of where the text lay.
      directory: where the files are.
    """

    train: Split
    validation: Split
    tokenizer: Tokenizer
    fingerprint: str
    directory: Path

    @property
    def num_skipped(self) -> int:
        """Lines and examples left out of both splits, because they cannot be read."""
        return self.train.num_skipped + self.validation.num_skipped

    def notes(self) -> list[str]:
        """A line about what was left out, if anything was."""
        if not self.num_skipped:
            return []
        return [
            f"{self.train.num_skipped} training and {self.validation.num_skipped} held-out lines or examples cannot be "
            "read as text and are left out (data.on_error=skip)"
        ]


def open_corpus(data: DataConfig, *, progress: bool = True) -> Corpus:
    """The corpus of a configuration: from the cache, or tokenised now and kept there.

    Args:
      data: source, tokenizer and cache folder.
      progress: show on standard error what is done, if anything needs to be done.

    Raises:
      ConfigError: any fault of the text, the tokenizer or the cache folder; one line.
    """
    root = Path(data.cache_dir).expanduser() if data.cache_dir is not None else cache.default_root()
    inputs = sources.inputs(data)
    settings = _settings(data)
    looks = [[str(each.path.absolute()), each.label, *_stat(each.path)] for each in inputs]
    index = root / "index" / f"{_digest(settings, looks)}.json"
    key = _remembered(index) or _digest(settings, [[each.label, _content(each.path)] for each in inputs])
    with bars(progress) as bar:
        directory = cache.kept(
            root,
            key,
            build=lambda folder: ingest.build(data, folder, bar),
            sound=lambda folder: _meta(folder) is not None,
            waiting=lambda: say("another process is tokenising this corpus; waiting for it") if progress else None,
        )
    _remember(index, key)
    meta = _meta(directory)
    if meta is None:
        raise ConfigError(f"config.data.cache_dir: {directory} was removed while it was opened; start again")
    return Corpus(
        train=_split(directory, "train", meta),
        validation=_split(directory, "validation", meta),
        tokenizer=Tokenizer.load(directory),
        fingerprint=meta["fingerprint"],
        directory=directory,
    )


def _settings(data: DataConfig) -> dict[str, Any]:
    """What the corpus depends on besides the content of its inputs."""
    settings = {name: getattr(data, name) for name in _TEXT_FIELDS} | {"format": ingest.FORMAT}
    if data.on_error != "stop":  # a corpus in which nothing had to be left out keeps the key it always had
        settings["on_error"] = data.on_error
    if data.source in languages.SOURCES:
        fields = [field.name for field in dataclasses.fields(data) if field.name.startswith("language_")]
        return settings | {name: getattr(data, name) for name in fields}
    if data.tokenizer_file is not None:
        return settings | {"tokenizer": Tokenizer.load(data.tokenizer_file).fingerprint}
    if data.tokenizer == "bpe":
        tokenizers.check_vocab_size(data.tokenizer_vocab)
        return settings | {"tokenizer": "bpe", "vocab": data.tokenizer_vocab}
    return settings | {"tokenizer": data.tokenizer}


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _stat(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"config.data: {path}: {error.strerror}") from None


def _remembered(index: Path) -> str | None:
    """The key found for the same names, sizes and times of change before, so that contents are read only once."""
    try:
        return str(json.loads(index.read_text())["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(index: Path, key: str) -> None:
    if _remembered(index) == key:
        return
    half = index.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # only saves time: a cache that can no longer be written is no error
        index.parent.mkdir(parents=True, exist_ok=True)
        half.write_text(json.dumps({"key": key}))
        half.replace(index)


def _meta(directory: Path) -> dict[str, Any] | None:
    """The description of a kept corpus; None if it is not there or its files are not as long as it says."""
    try:
        meta = json.loads((directory / ingest.META).read_text())
        sizes = {directory / tokenizers.FILE_NAME: None}
        for split in sources.SPLITS:
            sizes[directory / f"{split}.tokens"] = meta[split]["num_tokens"] * np.dtype(meta["dtype"]).itemsize
            sizes[directory / f"{split}.starts"] = meta[split]["num_documents"] * 8
        whole = all(size in (None, path.stat().st_size) for path, size in sizes.items() if path.stat())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return meta if whole else None


def _split(directory: Path, split: sources.SplitName, meta: dict[str, Any]) -> Split:
    about = meta[split]
    return Split(
        tokens=np.memmap(directory / f"{split}.tokens", meta["dtype"], "r"),
        starts=np.memmap(directory / f"{split}.starts", "<i8", "r"),
        num_bytes=about["num_bytes"],
        num_unknown=about["num_unknown"],
        compressed=about["compressed"],
        num_skipped=about.get("num_skipped", 0),
    )
