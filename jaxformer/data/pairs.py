"""Rows of two spans, [CLS] A [SEP] B [SEP], where B follows A in its document or comes from another one.

Source: Devlin et al. 2019, section 3.1, task 2. Spans are stretches of tokens, not sentences.
"""

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.data.corpus import Split
from jaxformer.data.objectives import WORDS_PER_TOKEN, HostBatch, Masking, corrupt
from jaxformer.data.shuffle import below, fractions, keys
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.types import Batch

_OVERHEAD = 3  # [CLS], [SEP], [SEP]
_OFFSETS = 2  # stream of `shuffle.keys`


class PairRows:
    """The pair rows of a split.

    Documents are cut into stretches that fit a row; the last one is shorter, or left to the random offset that each
    epoch gives the stretches of a document.

    Attributes:
      per_epoch: rows of one epoch; `covering` of them together hold every document once.
      words: random 64-bit words a row takes.
    """

    def __init__(self, split: Split, tokenizer: Tokenizer, settings: Masking, length: int, *, covering: bool):
        """Cuts the documents.

        Args:
          split: at least two documents of two tokens.
          tokenizer: for the ids of [CLS], [SEP] and [PAD].
          settings: the masked objective.
          length: tokens of a row.
          covering: cut the documents once, remainders included, for evaluation.

        Raises:
          ConfigError: rows too short, or fewer than two documents.
        """
        self._room = length - _OVERHEAD
        if self._room < 2:
            raise ConfigError(f"config.model.context_length: {length}; data.pairs needs at least {_OVERHEAD + 2}")
        self._tokens = np.asarray(split.tokens)
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
        self._slack = np.maximum(sizes - counts * self._room, 0)  # 0 where covering
        self.per_epoch = int(counts.sum())
        self._tokenizer, self._settings, self._length = tokenizer, settings, length
        self.words = WORDS_PER_TOKEN * length + 4

    def batch(self, index: np.ndarray, seed: int, epoch: np.ndarray, bits: np.ndarray) -> Batch:
        """The rows of some stretches.

        Args:
          index: [R] stretch that gives A.
          seed, epoch: [R] what the offsets depend on.
          bits: [R, words] random uint64.
        """
        tables, length = self._tokenizer, self._length
        mask_bits, (lengths, label, other, _) = bits[:, :-4], bits[:, -4:].T
        document, start_a, size = self._stretch(index, seed, epoch)
        size_a = np.clip((size * (0.25 + 0.5 * fractions(lengths))).astype(np.int64), 1, size - 1)
        random = (label >> np.uint64(63)).astype(bool)
        # A stretch of any other document, each equally likely: skip those of A's own, which are consecutive.
        elsewhere = below(self.per_epoch - self._counts[document], other)
        elsewhere += np.where(elsewhere >= self._first[document], self._counts[document], 0)
        _, start_other, size_other = self._stretch(elsewhere, seed, epoch)
        start_b = np.where(random, start_other, start_a + size_a)
        size_b = np.where(random, np.minimum(size - size_a, size_other), size - size_a)

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
            token_types=(in_b & real).astype(np.int32),
            pair_labels=random.astype(np.int32),
        )

    def _stretch(self, index: np.ndarray, seed: int, epoch: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(document, first token, number of tokens) of each stretch, [R] int64."""
        document = np.searchsorted(self._first, index, side="right") - 1
        offset = below(self._slack[document] + 1, keys(seed, _OFFSETS, epoch * len(self._sizes) + document))
        inside = offset + (index - self._first[document]) * self._room
        return document, self._begin[document] + inside, np.minimum(self._room, self._sizes[document] - inside)
