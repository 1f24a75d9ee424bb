"""Rows of texts that were made noisy and their restorations: the part that all such objectives share.

A row is a window of the corpus. Its documents are pairs of their own, which no other document's tokens reach. What a
document of l tokens makes of a row is known before any noise is drawn, so the window is as long as makes a row of one
document exactly full; of a row of several, whose end tokens take room as well, the last documents lose their ends.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.corpus import Split
from jaxformer.data.ragged import Ragged, framed, pair_batch
from jaxformer.data.rows import Lengths
from jaxformer.data.shuffle import fractions, noise
from jaxformer.data.span_sizes import Sizes, longest
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.data.windows import Windows
from jaxformer.errors import ConfigError
from jaxformer.types import Batch

_SAMPLED = 256  # rows that `notes` looks at


class Denoiser(NamedTuple):
    """One way to make text noisy.

    Attributes:
      noise: ``(text, bits [n, words]) -> (source, target)``, `Ragged` each, without end tokens.
      sizes: see `span_sizes.Sizes`.
      words: random 64-bit words it takes for each token of the text.
      share: of the rows.
      mode: token that the source begins with, or None.
    """

    noise: Callable[[Ragged, np.ndarray], tuple[Ragged, Ragged]]
    sizes: Sizes
    words: int
    share: float = 1.0
    mode: int | None = None


def text_length(sizes: list[Any], data: DataConfig, lengths: Lengths) -> int:
    """The most tokens of a text that fit a row by whichever of `sizes`. Raises ConfigError: none that can be hidden."""
    if lengths.source is None:
        raise ConfigError(f"config.model.encoder: None; data.objective={data.objective} needs source_length")
    found = longest(sizes, lengths)
    if found < 2:
        raise ConfigError(
            f"config.model.context_length: {lengths.target} and model.encoder.source_length {lengths.source} hold "
            f"no text; data.objective={data.objective} accepts longer rows"
        )
    return found


class DenoisedRows:
    """The rows of a split under one denoiser or several, as `rows.SplitRows`.

    Attributes:
      per_epoch: rows of one epoch.
      words: random 64-bit words a row takes.
      text_length: tokens of the text that a row is made of.
    """

    def __init__(
        self, split: Split, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool,
        denoisers: list[Denoiser],
    ):  # fmt: skip
        """Finds how long the windows are.

        Args:
          split, tokenizer, data, lengths, covering: as of `Objective.rows`.
          denoisers: at least one; their shares add up to 1.

        Raises:
          ConfigError: the model reads no source, its rows are too short, or the split is.
        """
        self.text_length = text_length([each.sizes for each in denoisers], data, lengths)
        self._windows = Windows(split, self.text_length, covering=covering)
        self._denoisers, self._lengths, self._tokenizer = denoisers, lengths, tokenizer
        self._words = max(each.words for each in denoisers)
        self.per_epoch, self.words = self._windows.per_epoch, self._words * self.text_length + 1
        sizes = np.arange(self.text_length + 1)
        self._sizes = [np.stack(each.sizes(sizes)) for each in denoisers]
        self._bounds = np.cumsum([each.share for each in denoisers])[:-1]

    def notes(self) -> list[str]:
        """Lines about what training leaves out, where that is much, and about rows that no text can fill."""
        notes = self._windows.notes()
        fields = ("model.encoder.source_length", self._lengths.source), ("model.context_length", self._lengths.target)
        for side, (field, length) in enumerate(fields):
            most = max(int(table[side, -1]) for table in self._sizes)
            if length is not None and most * 10 < length * 9:
                notes.append(f"no row uses more than {most} tokens of config.{field} {length}")
        index = np.arange(min(_SAMPLED, self.per_epoch)) * self.per_epoch // min(_SAMPLED, self.per_epoch)
        tokens, outside = self._windows.read(index, 0, np.zeros_like(index))
        drawn = self._drawn(noise(0, 0, len(index), 1)[:, 0])
        whole = int(np.count_nonzero((tokens != self._tokenizer.separator_id) & ~outside))
        lost = 1 - len(self._texts(tokens, outside, drawn)[0].values) / max(whole, 1)
        if lost > 0.05:
            notes.append(
                f"{lost:.0%} of the text fits no row, because documents are short and each ends with tokens of its "
                "own; a longer config.model.context_length, or model.encoder.source_length, holds more of it"
            )
        return notes

    def _drawn(self, bits: np.ndarray) -> np.ndarray:
        """[R] the denoiser of each row."""
        return np.searchsorted(self._bounds, fractions(bits), side="right")

    def batch(self, index: np.ndarray, seed: int, epoch: np.ndarray, bits: np.ndarray) -> Batch:
        """The rows of some windows."""
        tokens, outside = self._windows.read(index, seed, epoch)
        drawn = self._drawn(bits[:, 0])
        text, row, column = self._texts(tokens.astype(np.int32), outside, drawn)
        of_tokens = bits[:, 1:].reshape(len(index), self._words, self.text_length)
        text_bits = of_tokens[row[text.owner], :, column]
        parts: list[tuple[Any, ...]] = []
        for number, each in enumerate(self._denoisers):
            mine = np.flatnonzero(drawn[row] == number)
            if len(mine):
                here = np.isin(text.owner, mine) if len(self._denoisers) > 1 else np.ones(len(text.values), bool)
                source, target = each.noise(Ragged(text.values[here], text.sizes[mine]), text_bits[here])
                mode = None if each.mode is None else np.full(len(mine), each.mode, np.int32)
                end = self._tokenizer.end_id
                parts.append((mine, framed(source, mode, end), framed(target, None, end)))
        wheres, sources, targets = ([each[field] for each in parts] for field in range(3))
        source, target = (merged(wheres, sides, len(row)) for sides in (sources, targets))
        return pair_batch(source, target, row, len(index), self._lengths, self._tokenizer)

    def _texts(
        self, tokens: np.ndarray, outside: np.ndarray, drawn: np.ndarray
    ) -> tuple[Ragged, np.ndarray, np.ndarray]:
        """(the documents of some windows without their separators, cut to what fits, the row of each, the column of
        each of their tokens)."""
        inside = (tokens != self._tokenizer.separator_id) & ~outside
        opens = inside.copy()
        opens[:, 1:] &= ~inside[:, :-1]
        row = np.nonzero(opens)[0]
        owner = (np.cumsum(opens) - 1)[inside.ravel()]
        text = Ragged(tokens[inside], np.bincount(owner, minlength=len(row)))
        sizes = self._fitting(text.sizes, row, drawn[row])
        kept = text.places < sizes[owner]
        used = sizes > 0
        column = np.nonzero(inside)[1][kept]
        return Ragged(text.values[kept], sizes[used]), row[used], column

    def _fitting(self, sizes: np.ndarray, row: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """[P] how many tokens of each document of a row fit it after those before; 0 where nothing can be hidden."""
        tables, lengths = np.stack(self._sizes), np.array(self._lengths[::-1], np.int64)
        needed = tables[drawn, :, sizes]
        after = np.cumsum(needed, axis=0)
        first = np.searchsorted(row, row, side="left")  # the first document of the same row
        before = after - needed
        before -= before[first] if len(first) else 0
        room = lengths - before
        out = np.where((needed <= room).all(axis=1), sizes, 0)
        for place in np.flatnonzero((needed > room).any(axis=1) & (room > 0).all(axis=1)):  # at most one in each row
            out[place] = min(np.searchsorted(tables[drawn[place], side], room[place, side], "right") for side in (0, 1))
            out[place] -= 1
        return np.where(tables[drawn, 0, out] > 0, out, 0)


def merged(wheres: list[np.ndarray], parts: list[Ragged], count: int) -> Ragged:
    """`count` sequences, of which each part has those that its `wheres` names."""
    sizes = np.zeros(count, np.int64)
    for where, part in zip(wheres, parts, strict=True):
        sizes[where] = part.sizes
    out = Ragged(np.zeros(sizes.sum(), np.int32), sizes)
    for where, part in zip(wheres, parts, strict=True):
        out.values[np.repeat(out.begins[where], part.sizes) + part.places] = part.values
    return out
