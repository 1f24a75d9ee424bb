"""Mixtures: several corpora under one tokenizer, and batches whose rows are of one or another of them.

Global row r is of the source, and the row of it, that `assignment` says: a pure function of (seed, r). Row n of a
source is row n of that source's own `Batches`, so each goes through its own epochs as it would alone.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data import ingest, metadata, sources, tokenizers
from jaxformer.data.assignment import Assignment
from jaxformer.data.batches import Batches, host_rows
from jaxformer.data.contents import Contents
from jaxformer.data.corpus import Corpus, digest, kept, open_corpus, text_settings
from jaxformer.data.faults import Faults
from jaxformer.data.progress_bars import Bar
from jaxformer.data.sources import Input
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError, DamagedCacheError
from jaxformer.storage import json_checksum
from jaxformer.types import Batch


@dataclass(frozen=True)
class MixedCorpus:
    """The corpora of a mixture.

    Attributes:
      sources: by name, in order.
      shares: name -> share of the rows; they add up to 1.
      tokenizer: of all.
      fingerprint: 16 hex digits of the names and the fingerprints of the corpora.
    """

    sources: dict[str, Corpus]
    shares: dict[str, float]
    tokenizer: Tokenizer
    fingerprint: str

    @property
    def num_skipped(self) -> int:
        """Lines and examples left out, because they cannot be read."""
        return sum(each.num_skipped for each in self.sources.values())

    def notes(self) -> list[str]:
        """A line for each source of which something was left out."""
        return [f"{name}: {line}" for name, each in self.sources.items() for line in each.notes()]


def open_text(data: DataConfig, *, progress: bool = True, verify: bool = False) -> Corpus | MixedCorpus:
    """The corpus of a configuration, or the corpora of its mixture. Arguments and errors as of `open_corpus`; errors
    about a source name it."""
    if data.mixture is None:
        return open_corpus(data, progress=progress, verify=verify)
    given = _tokenizer(data, progress, verify)
    found: dict[str, Corpus] = {}
    for name, part in data.parts().items():
        with data.naming(name):
            found[name] = open_corpus(part, progress=progress, verify=verify, given=given)
    first, *others = found
    tokenizer = found[first].tokenizer
    for name in others:
        if found[name].tokenizer.fingerprint != tokenizer.fingerprint:
            raise ConfigError(
                f"config.data.mixture.{name}.source: {data.mixture[name].source!r}; its tokens are not those of "
                f"data.mixture.{first}; accepted: sources that share a tokenizer"
            )
    fingerprint = digest({name: each.fingerprint for name, each in found.items()})
    return MixedCorpus(found, data.mixture.shares(), tokenizer, fingerprint)


class MixtureBatches:
    """The training batches of one host, as `Batches`, of which each row is of one source of a mixture.

    Attributes:
      tokens_per_epoch: tokens until the first source was read once.
    """

    def __init__(
        self,
        corpus: Corpus | MixedCorpus,
        data: DataConfig,
        *,
        rows: int,
        context_length: int,
        seed: int,
        source_length: int | None = None,
        host_row_indices: np.ndarray | None = None,
    ):
        """Looks only at sizes.

        Args:
          corpus: of `open_text`.
          data: the config that it was opened by.
          rows, context_length, seed, source_length, host_row_indices: as of `Batches`.

        Raises:
          ConfigError: a source is shorter than one row.
          ValueError: `host_row_indices` names a row that is not there.
        """
        self._shares, self._rows = corpus.shares, rows
        self._host_rows = host_rows(host_row_indices, rows)
        self._assignment = Assignment(list(self._shares.values()), seed)
        self._sources: dict[str, Batches] = {}
        for name, part in data.parts().items():
            split = corpus.sources[name].train
            with data.naming(name):
                self._sources[name] = Batches(
                    split, corpus.tokenizer, part, rows=rows, context_length=context_length, seed=seed,
                    source_length=source_length,
                )  # fmt: skip
        lasts = [each.rows_per_epoch / self._shares[name] for name, each in self._sources.items()]
        self.tokens_per_epoch = int(min(lasts)) * context_length

    def __getitem__(self, step: int) -> Batch:
        """The rows of this host in step `step` (from 0): numpy arrays as in `Batch`."""
        if step < 0:
            raise IndexError(f"step {step}; steps count from 0")
        source, number = self._assignment(step * self._rows + self._host_rows)
        of_each = [np.flatnonzero(source == index) for index in range(len(self._sources))]
        parts = [
            batches.rows(number[mine])
            for batches, mine in zip(self._sources.values(), of_each, strict=True)
            if len(mine)
        ]
        order = np.argsort(np.concatenate(of_each))

        def joined(*arrays: Any) -> Any:
            return np.concatenate(arrays)[order]

        fields = [part._asdict() for part in parts]
        inputs = [each.pop("inputs") for each in fields]
        together = {name: joined(*(each[name] for each in fields)) for name in fields[0]}
        if inputs[0] is not None:
            together["inputs"] = {name: joined(*(each[name] for each in inputs)) for name in inputs[0]}
        return parts[0]._replace(**together)

    def notes(self, steps: int | None = None) -> list[str]:
        """What the rows of each source leave out; which sources `steps` steps read more than once."""
        notes = [f"{name}: {line}" for name, each in self._sources.items() for line in each.notes()]
        for name, epochs in ({} if steps is None else self._epochs(steps)).items():
            if steps is not None and epochs > 1:
                notes.append(
                    f"{name} runs dry after step {int(steps / epochs)} and is read again, {epochs:.2f} times in all, "
                    "each time in a fresh order"
                )
        return notes

    def reading(self, steps: int) -> str:
        """What `steps` steps read of each source, in words."""
        each = (f"{name} {100 * self._shares[name]:.3g} % ({n:.2f} epochs)" for name, n in self._epochs(steps).items())
        return ", ".join(each)

    def _epochs(self, steps: int) -> dict[str, float]:
        read = {name: steps * self._rows * share for name, share in self._shares.items()}
        return {name: read[name] / each.rows_per_epoch for name, each in self._sources.items()}


def training_batches(
    corpus: Corpus | MixedCorpus, data: DataConfig, *, seed: int, **shape: Any
) -> Batches | MixtureBatches:
    """The training batches of what `open_text` opened; arguments as of `Batches`."""
    if isinstance(corpus, MixedCorpus):
        return MixtureBatches(corpus, data, seed=seed, **shape)
    return Batches(corpus.train, corpus.tokenizer, data, seed=seed, **shape)


def sample(sizes: dict[str, int], shares: dict[str, float], most: int) -> dict[str, int]:
    """Bytes of each source's training text for a tokenizer: by its share, at most `most` together. A source of fewer
    bytes is read several times, so that it weighs what its rows will.

    >>> sample({"code": 100, "prose": 1000}, {"code": 0.5, "prose": 0.5}, most=10_000)
    {'code': 1000, 'prose': 1000}
    """
    total = min(most, max(sizes[name] / share for name, share in shares.items()))
    return {name: max(1, int(total * share)) for name, share in shares.items()}


def _tokenizer(data: DataConfig, progress: bool, verify: bool) -> Tokenizer | None:
    """The tokenizer of a source that is tokens already, else one trained on the training texts, by weight; None where
    each source makes the same one alone."""
    parts = data.parts()
    for name, part in parts.items():
        if (tokens := sources.SOURCES[str(part.source)].tokens) is not None:  # the others are made by the same one
            with data.naming(name):
                return tokens(part, False).tokenizer
    alone = data.tokenizer_file is not None or data.tokenizer == "bytes"
    if alone or all(sources.SOURCES[str(part.source)].alphabet for part in parts.values()):
        return None
    assert data.mixture is not None
    shares = data.mixture.shares()
    settings = {"mixture": {name: [shares[name], text_settings(part, None)] for name, part in parts.items()}}
    inputs: dict[str, list[Input]] = {}
    for name, part in parts.items():
        with data.naming(name):
            inputs[name] = sources.inputs(part)

    def build(folder: Path, key: str, contents: Contents, bar: Bar) -> None:
        def texts(name: str) -> Iterator[str]:
            with data.naming(name):
                yield from sources.documents(parts[name], "train", Faults(parts[name].on_error), contents.open)

        advance = bar("reading the training texts", None)
        sizes = {name: sum(len(text.encode()) for text in ingest.watched(texts(name), advance)) for name in parts}
        wanted = sizes if data.tokenizer == "chars" else sample(sizes, shares, ingest.SAMPLE_BYTES)
        advance = bar(f"making the {data.tokenizer} tokenizer", sum(wanted.values()))

        def chosen(name: str) -> Iterator[str]:
            rounds, rest = divmod(wanted[name], sizes[name])
            for left in [*[sizes[name]] * rounds, rest]:
                if left:
                    pieces = itertools.chain.from_iterable(map(ingest.pieces, texts(name)))
                    yield from ingest.spread(pieces, sizes[name], left)

        read = itertools.chain.from_iterable(map(chosen, parts))
        made = tokenizers.train(data.tokenizer, ingest.watched(read, advance), data.tokenizer_vocab)
        made.save(folder)
        about = {"key": key, "settings": settings, "tokenizer": json_checksum.digest(made.content())}
        metadata.write(folder, about)

    opened = functools.partial(_kept_tokenizer, settings=settings)
    every = list(itertools.chain.from_iterable(inputs.values()))
    return kept(data, every, settings, build, opened, progress=progress, verify=verify)


def _kept_tokenizer(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    about = json_checksum.read_verified(folder / metadata.META, 1 << 20)
    if about is None or (about.get("key"), about.get("settings")) != (folder.name, settings):
        raise DamagedCacheError(f"{metadata.META} is not what was written")
    return metadata.read_tokenizer(folder, about)
