"""The objective pairs: predict the target of each pair of sequences from its source.

A corpus holds a pair as `pair_text` says. Pairs that follow each other share a row as far as they fit both of its
sides; which share one is the same in every epoch, the order of the rows is not. Of a pair that is too long and cut, a
side loses its last tokens, the end token first.
"""

from collections.abc import Iterator

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.checked_array import indexable
from jaxformer.data.corpus import Split
from jaxformer.data.ragged import Ragged, pair_batch
from jaxformer.data.rows import Lengths
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.types import Batch

_AT_ONCE = 1 << 22  # tokens that are searched for the ends of sources


def shared_rows(sizes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[n + 1]: where each row begins among pairs in order, and their number: each row takes as many as fit.

    Args:
      sizes: [P, 2] tokens of the sides of each pair, each of which fits a row.
      lengths: [2] of a row.

    >>> shared_rows(np.array([[3, 1], [3, 1], [3, 5], [1, 4]]), np.array([6, 8])).tolist()
    [0, 2, 3, 4]
    """
    after = np.cumsum(sizes, axis=0)
    before = after - sizes
    following = [np.searchsorted(after[:, side], before[:, side] + lengths[side], "right") for side in (0, 1)]
    begin_of_next = np.minimum(*following).tolist()
    begins = [0]
    while begins[-1] < len(sizes):
        begins.append(begin_of_next[begins[-1]])
    return np.array(begins, np.int64)


class SequencePairs:
    """The rows of a split that holds pairs, as `rows.SplitRows`.

    Attributes:
      per_epoch: rows of one epoch, in which every pair is once.
      words: 0, no random words.
    """

    words = 0

    def __init__(self, split: Split, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool):
        """Finds the pairs, by reading the split once, and which of them share a row.

        Args:
          split, tokenizer, data, lengths, covering: as of `Objective.rows`.

        Raises:
          ConfigError: the model reads no source; a document is no pair; one is too long and data.long_pairs is stop;
            none is left.
        """
        if lengths.source is None:
            raise ConfigError(f"config.model.encoder: None; data.objective={data.objective} needs source_length")
        self._what = "held-out" if covering else "training"
        self._tokens = indexable(split.tokens)
        self._lengths, self._tokenizer = lengths, tokenizer
        begin = np.asarray(split.starts)
        end = np.append(begin[1:], len(self._tokens))
        middle = self._middles(begin)
        begins = np.stack([begin + 1, middle + 1], axis=1)
        sizes = np.stack([middle - begin, end - middle], axis=1)  # end tokens included
        room = np.array([lengths.source, lengths.target])
        long = (sizes > room).any(axis=1)
        if long.any() and data.long_pairs == "stop":
            raise self._too_long(sizes, room)
        self._total, self._long, self._how = len(sizes), int(long.sum()), data.long_pairs
        kept = np.flatnonzero(~long) if data.long_pairs == "skip" else np.arange(len(sizes))
        if not len(kept):
            raise ConfigError(
                f"config.data.long_pairs: {data.long_pairs}; each of the {len(sizes)} {self._what} pairs is longer "
                "than a row; accepted: cut, or longer rows"
            )
        self._begins, self._sizes = begins[kept], np.minimum(sizes[kept], room).astype(np.int32)
        self._whole = sizes[kept] <= room
        self._rows = shared_rows(self._sizes, room)
        self.per_epoch = len(self._rows) - 1

    def notes(self) -> list[str]:
        """A line about pairs that are too long, if there are any, and about rows that are less than half full."""
        notes = []
        if self._long:
            what = {"cut": "lose their ends", "skip": "are left out"}[self._how]
            notes.append(
                f"{self._long} of {self._total} {self._what} pairs are longer than a row and {what} "
                f"(data.long_pairs={self._how})"
            )
        for side, (field, length) in enumerate(
            (("model.encoder.source_length", self._lengths.source), ("model.context_length", self._lengths.target))
        ):
            share = self._sizes[:, side].sum() / (self.per_epoch * (length or 1))
            if share < 0.5:
                notes.append(f"pairs fill {share:.0%} of config.{field} {length}")
        return notes

    def batch(self, index: np.ndarray, seed: int, epoch: np.ndarray, bits: np.ndarray) -> Batch:
        """Some rows; they depend on neither seed nor epoch."""
        count = self._rows[index + 1] - self._rows[index]
        pairs = Ragged(np.arange(count.sum()), count)
        chosen = np.repeat(self._rows[index], count) + pairs.places
        sides = [self._side(chosen, side) for side in (0, 1)]
        return pair_batch(sides[0], sides[1], pairs.owner, len(index), self._lengths, self._tokenizer)

    def _side(self, chosen: np.ndarray, side: int) -> Ragged:
        """The sources (0) or targets (1) of some pairs, each with its end token unless that is cut off."""
        sizes = self._sizes[chosen, side]
        whole = self._whole[chosen, side]
        inside = Ragged(np.empty(sizes.sum(), np.int64), sizes)
        places = np.repeat(self._begins[chosen, side], sizes) + inside.places
        ends = (inside.begins + sizes - 1)[whole]
        places[ends] = 0  # of no text: replaced
        values = np.asarray(self._tokens[places]).astype(np.int32)
        values[ends] = self._tokenizer.end_id
        return Ragged(values, sizes)

    def _middles(self, begin: np.ndarray) -> np.ndarray:
        """[P] where the end token of each source is.

        Raises:
          ConfigError: a document has none, or several.
        """
        found = np.concatenate(list(self._ends()))
        document = np.searchsorted(begin, found, side="right") - 1
        if self._tokenizer.end_id == self._tokenizer.separator_id:  # as BERT's [SEP]: not those that open a document
            inside = begin[document] != found
            found, document = found[inside], document[inside]
        count = np.bincount(document, minlength=len(begin))
        if (count != 1).any():
            wrong = int(np.flatnonzero(count != 1)[0])
            raise ConfigError(
                f"config.data.objective: pairs; document {wrong + 1} of the {self._what} text is no pair; accepted: a "
                "source of pairs, as files with data.source_field and data.target_field"
            )
        return found

    def _ends(self) -> Iterator[np.ndarray]:
        for begin in range(0, len(self._tokens), _AT_ONCE):
            tokens = np.asarray(self._tokens[begin : begin + _AT_ONCE])
            yield begin + np.flatnonzero(tokens == self._tokenizer.end_id)

    def _too_long(self, sizes: np.ndarray, room: np.ndarray) -> ConfigError:
        pair, side = map(int, np.argwhere(sizes > room)[0])
        name, field = (("source", "model.encoder.source_length"), ("target", "model.context_length"))[side]
        return ConfigError(
            f"config.{field}: {room[side]}; the {name} of {self._what} pair {pair + 1} has {sizes[pair, side]} tokens, "
            f"its end token included, the longest {sizes[:, side].max()}; accepted: at least that, or "
            "data.long_pairs=cut or skip"
        )
