"""Attention by locality-sensitive hashing as a kind of `model.attention`."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxformer.config.attention import AttentionConfigWithHeads
from jaxformer.config.checks import at_least, between
from jaxformer.errors import ConfigError

MOST_OF_ONE_HASH, MOST_BUCKETS = 128, 2**20


@dataclass(frozen=True)
class Lsh(
    AttentionConfigWithHeads,
    kind="lsh",
    accepts={
        **dict.fromkeys(("num_heads", "head_width", "rounds", "chunk"), at_least(1)),
        "dropout": between(0.0, 0.999),
        "seed": between(0, 2**31 - 1),
    },
    most={"head_width": 2**24, "rounds": 1024, "chunk": 2**20},
):
    """Reformer's attention, see `functional.lsh.lsh_attention`: queries that are the keys as well, and see those that
    a hash puts near them.

    Attributes:
      num_heads: heads.
      head_width: None: model.width / num_heads.
      rounds: of hashing, each with its own rotations.
      buckets: of a round, even, or even factors of their number, as 32,64: each has its own rotations, and what hashing
        costs grows with their sum. None: so many that one has about half a chunk of a row's tokens; if that is more
        than 128, of two factors.
      chunk: tokens that are sorted together; a query sees its own chunk and the one before.
      across_buckets: it sees all of them, not only those of its bucket. Cannot decode.
      duplicates: a key that several rounds find counts as often.
      dropout: of the attention weights.
      seed: of the rotations.
      redraw: other rotations at every update and in every layer; evaluation and decoding have those of the seed.
    """

    num_heads: int = 4
    head_width: int | None = None
    rounds: int = 2
    buckets: tuple[int, ...] | None = None
    chunk: int = 64
    across_buckets: bool = False
    duplicates: bool = False
    dropout: float = 0.0
    seed: int = 0
    redraw: bool = False
    num_kv_heads = None
    has_heads: ClassVar[bool] = False  # rotary positions or a bias do not enter
    has_implementations: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = True

    @property
    def cannot_decode(self) -> str | None:
        """Why there is no decoding: what an earlier token sees may depend on a later one's hash."""
        if not self.across_buckets:
            return None
        return (
            "config.model.attention.across_buckets: True; generating text needs chunks that no later token "
            "moves; accepted: false"
        )

    def factors(self, length: int) -> tuple[int, ...]:
        """Whose product is the number of buckets of a round, for rows of `length` tokens.

        >>> Lsh(chunk=64).factors(1024), Lsh(chunk=64).factors(65536), Lsh(buckets=8).factors(65536)
        ((32,), (46, 44), (8,))
        """
        if self.buckets is not None:
            return self.buckets
        number = max(2, 2 * round(length / self.chunk))
        if number <= MOST_OF_ONE_HASH:
            return (number,)
        first = 2 * round(math.sqrt(number) / 2)
        return first, 2 * round(number / first / 2)

    def num_buckets(self, length: int) -> int:
        """Buckets of a round for rows of `length` tokens."""
        return math.prod(self.factors(length))

    def summary(self) -> str:
        """Heads and rounds."""
        return f"{self.kind} of {self.num_heads} heads, {self.rounds} rounds"

    def check_data(self, data: Any) -> None:
        """Raises ConfigError: rows have prefixes, which all of their tokens would see."""
        if data.objective == "prefix_lm":
            raise ConfigError(
                f"config.data.objective: prefix_lm; model.attention.kind={self.kind} has no prefixes that every token "
                "sees; accepted: next_token"
            )

    def _check(self):
        super()._check()
        if self.buckets is None:
            return
        where = "config.model.attention.buckets"
        if not self.buckets:
            raise ConfigError(f"{where}: (); accepted: none, or an even number, or even factors of one")
        for each in self.buckets:
            at_least(2)(where, each)
            if each % 2:
                raise ConfigError(f"{where}: {each}; accepted: even")
        if (number := math.prod(self.buckets)) > MOST_BUCKETS:
            raise ConfigError(f"{where}: {number} in all; accepted: at most {MOST_BUCKETS}")
