"""Rows of two spans, [CLS] A [SEP] B [SEP], where B follows A in its document or comes from another one.

The label must not be readable from anything but how A and B go together. Both kinds of row are therefore made of the
same two things: a stretch of some document cut in two at c tokens, and a second stretch that could have been cut at c
as well, drawn with the chance with which c is the cut of each. A is the first part of the first stretch; B is the
second part of the first or of the second, by a fair coin. So A with its length, and B with its place in the row, have
the same distribution under both labels. Where both stretches are of one document there is no label (-1), whichever way
the coin falls; otherwise a long document, which is rarely drawn as another one, would give the label away.

Source: Devlin et al. 2019, section 3.1, task 2. Spans are stretches of tokens, not sentences.
"""

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.checked_array import indexable
from jaxformer.data.corpus import Split
from jaxformer.data.masked_tokens import WORDS_PER_TOKEN, corrupt, masking
from jaxformer.data.rows import HostBatch
from jaxformer.data.shuffle import below, fractions, keys, noise
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.types import Batch

_OVERHEAD = 3  # [CLS], [SEP], [SEP]
_OFFSETS = 2  # stream of `shuffle.keys`
_SAMPLED = 4096  # rows that `notes` looks at


def cuts(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(fewest, most) tokens of the first part of stretches of [R] sizes, from a quarter to three; all equally likely.

    Both grow with the size: the stretches that can be cut at c are those of (4 * c + 3) // 3 to 4 * c + 3 tokens.

    >>> [tuple(map(int, cuts(np.array(size)))) for size in (2, 3, 8, 9)]
    [(1, 1), (1, 2), (2, 5), (2, 6)]
    """
    return np.maximum(sizes // 4, 1), (3 * sizes - 1) // 4


class PairRows:
    """The pair rows of a split.

    Documents are cut into stretches that fit a row; the last one is shorter, or left to the random offset that each
    epoch gives the stretches of a document.

    Attributes:
      per_epoch: rows of one epoch; `covering` of them together hold every document once (but for the last token of one
        that is a token longer than its rows).
      words: random 64-bit words a row takes.
    """

    def __init__(self, split: Split, tokenizer: Tokenizer, data: DataConfig, length: int, *, covering: bool):
        """Cuts the documents.

        Args:
          split: at least two documents of two tokens, of which two are near enough in length to be cut at one place.
          tokenizer: for the ids of [CLS], [SEP] and [PAD].
          data: the settings of the masked objective.
          length: tokens of a row.
          covering: cut the documents once, remainders included, for evaluation.

        Raises:
          ConfigError: rows too short, fewer than two documents, or none of like length.
        """
        self._room = length - _OVERHEAD
        if self._room < 2:
            raise ConfigError(f"config.model.context_length: {length}; data.pairs needs at least {_OVERHEAD + 2}")
        self._tokens = indexable(split.tokens)
        begin = np.asarray(split.starts) + 1
        sizes = np.append(begin[1:] - 1, len(self._tokens)) - begin
        begin, sizes = begin[sizes >= 2], sizes[sizes >= 2]
        if len(sizes) < 2:
            raise ConfigError(
                f"config.data.pairs: True needs at least 2 documents of 2 tokens in each split, one has {len(sizes)}; "
                "set data.separator, or give several files"
            )
        counts = (sizes - 2) // self._room + 1 if covering else np.maximum(sizes // self._room, 1)
        self._begin, self._sizes, self._counts = begin, sizes, counts
        self._first = np.cumsum(counts) - counts
        self._slack = np.maximum(sizes - counts * self._room, 0) * (not covering)
        self.per_epoch = int(counts.sum())
        self._tokenizer, self._settings, self._length = tokenizer, masking(tokenizer, data), length
        self.words = WORDS_PER_TOKEN * length + 4
        self._sort_by_size()

    def batch(self, index: np.ndarray, seed: int, epoch: np.ndarray, bits: np.ndarray) -> Batch:
        """The rows of some stretches.

        Args:
          index: [R] stretch that gives A.
          seed, epoch: [R] what the offsets depend on.
          bits: [R, words] random uint64.
        """
        tables, length = self._tokenizer, self._length
        mask_bits, (coin, *draws) = bits[:, :-4], bits[:, -4:].T
        document, start_a, size = self._stretch(index, seed, epoch)
        size_a, other = self._cut_and_other(size, draws)
        other_document, start_b, size_other = self._stretch(other, seed, epoch)
        unlabelled = other_document == document
        random = (coin >> np.uint64(63)).astype(bool) & ~unlabelled
        start_b = np.where(random, start_b, start_a) + size_a
        size_b = np.where(random, size_other, size) - size_a

        column = np.arange(length)[None, :]
        size_a, size_b, start_a, start_b = (x[:, None] for x in (size_a, size_b, start_a, start_b))
        end = size_a + size_b + _OVERHEAD
        in_b = column > size_a + 1
        source = np.where(in_b, start_b + column - size_a - 2, start_a + column - 1)
        tokens = self._tokens[np.clip(source, 0, len(self._tokens) - 1)].astype(np.int32)
        tokens[:, 0] = tables.cls_id
        tokens[(column == size_a + 1) | (column == end - 1)] = tables.sep_id
        real = column < end
        tokens[~real] = tables.pad_id
        corrupted, weights = corrupt(tokens, mask_bits, self._settings)
        return HostBatch(
            tokens=corrupted,
            targets=tokens,
            weights=weights,
            positions=np.where(real, column, 0).astype(np.int32),
            segments=real.astype(np.int32),
            inputs={
                "token_types": (in_b & real).astype(np.int32),
                "pair_labels": np.where(unlabelled, -1, random).astype(np.int32),
            },
        )

    def notes(self) -> list[str]:
        """Lines about what training leaves out, where it is a hundredth of the rows or more."""
        index, epoch = np.arange(_SAMPLED) * self.per_epoch // _SAMPLED, np.zeros(_SAMPLED, np.int64)
        document, _, size = self._stretch(index, 0, epoch)
        _, other = self._cut_and_other(size, noise(0, 0, _SAMPLED, 3).T)
        share = float(np.mean(document == self._stretch(other, 0, epoch)[0]))
        if share < 0.01:
            return []
        return [f"{share:.0%} of the rows have no next-sentence label: too few documents for a random span of another"]

    def _stretch(self, index: np.ndarray, seed: int, epoch: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(document, first token, number of tokens) of each stretch, [R] int64."""
        document = np.searchsorted(self._first, index, side="right") - 1
        offset = below(self._slack[document] + 1, keys(seed, _OFFSETS, epoch * len(self._sizes) + document))
        inside = offset + (index - self._first[document]) * self._room
        return document, self._begin[document] + inside, np.minimum(self._room, self._sizes[document] - inside)

    def _sort_by_size(self) -> None:
        """Finds how many stretches of each size there are, and which."""
        room = self._room
        last = np.minimum(self._sizes - (self._counts - 1) * room, room)  # size of each document's last stretch
        short = np.flatnonzero(last < room)
        short = short[np.argsort(last[short], kind="stable")]
        whole = self._counts - (last < room)  # stretches of each document that fill a row
        # Documents by the sizes of their stretches: neighbours of two documents can be cut at one place, or none can.
        documents = np.append(short, np.flatnonzero(whole))
        sizes = np.append(last[short], np.full(len(documents) - len(short), room))
        fewest, most = cuts(sizes)
        if not ((fewest[1:] <= most[:-1]) & (documents[1:] != documents[:-1])).any():
            raise ConfigError(
                "config.data.pairs: True needs two documents of like length in each split, so that a random span is "
                "not told by its length; give more documents"
            )
        self._short = (self._first + self._counts - 1)[short]
        self._whole_before = np.cumsum(whole) - whole
        self._many = np.bincount(last[short], minlength=room + 1)
        self._smaller = np.cumsum(self._many) - self._many
        self._many[room] = whole.sum()
        fewest, most = cuts(np.arange(room + 1))
        # Up to each size: the sum over stretches of the chance that a stretch is cut at one place of those it can be.
        self._chance_below = np.append(0.0, np.cumsum(self._many / np.maximum(most - fewest + 1, 1)))

    def _cut_and_other(self, size: np.ndarray, draws: np.ndarray | list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(where stretches of [R] sizes are cut, for each another stretch that could be cut there), [R] int64.

        The other is drawn with the chance that this is where it is cut, among all that can be, the first included.

        Args:
          size: [R].
          draws: three times [R] random uint64.
        """
        cut_bits, size_bits, which_bits = draws
        fewest, most = cuts(size)
        cut = fewest + below(most - fewest + 1, cut_bits)
        low = self._chance_below[(4 * cut + 3) // 3]
        high = self._chance_below[np.minimum(4 * cut + 3, self._room) + 1]
        at = np.minimum(low + (high - low) * fractions(size_bits), np.nextafter(high, 0.0))
        size = np.searchsorted(self._chance_below, at, side="right") - 1  # of the other
        number = below(self._many[size], which_bits)
        document = np.searchsorted(self._whole_before, number, side="right") - 1
        out = self._first[document] + number - self._whole_before[document]
        short = size < self._room
        out[short] = self._short[(self._smaller[size] + number)[short]]
        return cut, out
