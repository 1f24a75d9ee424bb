"""One split of a corpus: the tokens of its documents, and where each begins."""

from dataclasses import dataclass

import numpy as np

from jaxformer.data import checked_array
from jaxformer.data.lazy_array import LazyArray


@dataclass(frozen=True)
class Split:
    """The tokens of one split.

    Attributes:
      tokens: [n] uint16 or uint32 memory map; of more than AT_ONCE bytes a `CheckedArray`; of token shards a
        `LazyArray`.
      starts: [d] int64 memory map, of token shards a `LazyArray`: index of each document's separator in `tokens`;
        starts[0] is 0.
      num_bytes: UTF-8 bytes of the documents (separators stand for none).
      num_unknown: tokens that are [UNK]: characters that a "chars" vocabulary lacks.
      compressed: "gzip -9" and "xz -9" -> bytes that tool makes of the same documents end to end. Of the held-out
        split only, and empty if that is longer than ingest.COMPRESS_BYTES.
      num_skipped: lines and examples that cannot be read as text and are left out (data.on_error=skip).
    """

    tokens: np.ndarray | checked_array.CheckedArray | LazyArray
    starts: np.ndarray | LazyArray
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

    def unknown(self) -> list[str]:
        """A line about characters that the vocabulary lacks, if there are any: no bits per byte are given then."""
        number = self.num_unknown
        one = f"{number} character{'s' * (number != 1)} of the held-out text {'is' if number == 1 else 'are'}"
        return [f"{one} not in the vocabulary, so no bits per byte are given"] if number else []
