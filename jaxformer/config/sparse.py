"""Sparse attention as kinds of `model.attention`: each token sees the tokens that a pattern names."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxformer import patterns
from jaxformer.config.attention import AttentionConfigWithHeads
from jaxformer.config.checks import at_least
from jaxformer.errors import ConfigError
from jaxformer.patterns import MaskPattern


@dataclass(frozen=True)
class SparseAttention(AttentionConfigWithHeads):
    """Base of the sparse kinds.

    Attributes:
      num_heads: query heads.
      num_kv_heads: None: as many as num_heads; 1: multi-query.
      head_width: None: model.width / num_heads.
      soft_cap: scores become soft_cap * tanh(score / soft_cap); None: no cap.
      qk_norm: RMS norm of each head's queries and keys, before the rotation.
      dropout: of the attention weights.
      scale: of the scores; None: head_width ** -0.5.
    """

    num_heads: int = 4
    num_kv_heads: int | None = None
    head_width: int | None = None
    soft_cap: float | None = None
    qk_norm: bool = False
    dropout: float = 0.0
    scale: float | None = None
    whole_rows: ClassVar[bool] = True

    def summary(self) -> str:
        """The kind and how many heads."""
        return f"{self.kind}, {self.num_heads} heads"

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: the heads do not divide the width, or the model reads a source."""
        super().check_model(model)
        if model.encoder is not None:
            raise ConfigError(
                f"config.model.attention.kind: {self.kind}; accepted in models without an encoder, whose attention to "
                "the source sees all of it"
            )


def _block(length: int) -> int:
    """The largest divisor of a row's length that is at most its square root.

    Raises:
      ConfigError: it is less than half of the root; blocks of 1 would be no pattern at all.
    """
    found = next(each for each in range(math.isqrt(length), 0, -1) if length % each == 0)
    if 4 * found**2 < length:
        raise ConfigError(
            f"config.model.context_length: {length} has no divisor near its square root, which model.attention.block "
            "would be; accepted: another length, or a block that is given"
        )
    return found


def _divides_rows(kind: Any, model: Any) -> None:
    if model.context_length % kind.block:
        raise ConfigError(
            f"config.model.attention.block: {kind.block}; accepted: a divisor of model.context_length "
            f"{model.context_length}"
        )


@dataclass(frozen=True)
class Longformer(
    SparseAttention,
    kind="longformer",
    accepts={"attention_window": at_least(2), "global_tokens": at_least(0)},
    most={"attention_window": 2**30, "global_tokens": 2**30},
):
    """A window, and global tokens with projections of their own (Beltagy et al. 2020), see `functional.longformer`.

    Attributes:
      attention_window: half of it is what a token sees on each side of itself, as in the library transformers; even.
        None: an eighth of model.context_length, 512 at the published 4096.
      global_tokens: the first so many of each document see all of it, and all of it sees them.
    """

    attention_window: int | None = None
    global_tokens: int = 1

    def fitted(self, length: int) -> "Longformer":
        """With an eighth of the row as its window, if it is not given."""
        return replace(self, attention_window=self.attention_window or max(2, length // 16 * 2))

    def patterns(self, length: int, causal: bool) -> tuple[MaskPattern, ...]:
        """The window."""
        assert self.attention_window is not None  # as of all that `fitted` returns
        return (patterns.local(self.attention_window // 2 + 1),)

    def global_ends(self, causal: bool) -> tuple[int, int]:
        """The first tokens."""
        return self.global_tokens, 0

    def _check(self):
        super()._check()
        if self.attention_window is not None and self.attention_window % 2:
            raise ConfigError(
                f"config.model.attention.attention_window: {self.attention_window}; accepted: even numbers"
            )


@functools.lru_cache(16)
def _random_blocks(block: int, blocks: int, count: int, seed: int, heads: int, causal: bool, ends: int) -> MaskPattern:
    table = patterns.random_table(blocks, count, seed=seed, heads=heads, causal=causal, ends=ends)
    return patterns.random_blocks(block, table)


@dataclass(frozen=True)
class BigBird(
    SparseAttention,
    kind="bigbird",
    accepts={"block": at_least(1), **dict.fromkeys(("random_blocks", "global_blocks", "seed"), at_least(0))},
    most={"block": 2**24, "random_blocks": 2**16, "global_blocks": 2**16, "seed": 2**31 - 1},
):
    """Blocks of tokens: neighbours, random ones and global ones (Zaheer et al. 2020).

    Attributes:
      block: tokens of a block, a divisor of model.context_length; each sees its own and one on each side. None: the
        largest divisor up to the square root, 64 at the published 4096.
      random_blocks: that each block sees besides, of each head, the same in all layers.
      global_blocks: the first and the last so many blocks' tokens of each document see all of it, and all of it sees
        them; in a causal model the first alone, as it does not know the end.
      seed: of the random blocks.
    """

    block: int | None = None
    random_blocks: int = 3
    global_blocks: int = 1
    seed: int = 0

    def fitted(self, length: int) -> "BigBird":
        """With blocks of about the square root of the row, if their size is not given."""
        return replace(self, block=self.block or _block(length))

    def patterns(self, length: int, causal: bool) -> tuple[MaskPattern, ...]:
        """Neighbours and random blocks."""
        assert self.block is not None
        found: tuple[MaskPattern, ...] = (patterns.neighbours(self.block),)
        if self.random_blocks:
            blocks = math.ceil(length / self.block)
            of = blocks, self.random_blocks, self.seed, self.num_heads, causal, self.global_blocks
            found += (_random_blocks(self.block, *of),)
        return found

    def global_ends(self, causal: bool) -> tuple[int, int]:
        """The tokens of the first and of the last blocks."""
        assert self.block is not None
        count = self.global_blocks * self.block
        return count, 0 if causal else count

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: blocks that do not divide a row."""
        super().check_model(model)
        _divides_rows(self, model)


@dataclass(frozen=True)
class Strided(SparseAttention, kind="strided", accepts={"stride": at_least(1)}, most={"stride": 2**30}):
    """The last tokens, and every so many before them (Child et al. 2019, section 4.2).

    Attributes:
      stride: a token sees those fewer than so many away, and those a multiple of it away. None: the square root of
        model.context_length, rounded down.
    """

    stride: int | None = None

    def fitted(self, length: int) -> "Strided":
        """With the square root of the row as its stride, if it is not given."""
        return replace(self, stride=self.stride or math.isqrt(length))

    def patterns(self, length: int, causal: bool) -> tuple[MaskPattern, ...]:
        """The window and the columns."""
        assert self.stride is not None
        return patterns.strided(min(self.stride, length))


@dataclass(frozen=True)
class Fixed(
    SparseAttention, kind="fixed", accepts=dict.fromkeys(("block", "last"), at_least(1)), most={"block": 2**30}
):
    """The token's own block, and the last tokens of every block (Child et al. 2019, section 4.2).

    Attributes:
      block: tokens of a block, a divisor of model.context_length. None: the largest divisor up to the square root, 128
        at 16384.
      last: tokens of each block that all see; at most block. None: block / 16, at least 1.
    """

    block: int | None = None
    last: int | None = None

    def fitted(self, length: int) -> "Fixed":
        """With blocks of about the square root of the row, and a sixteenth of one that all see, where not given."""
        block = self.block or _block(length)
        return replace(self, block=block, last=self.last or max(1, block // 16))

    def patterns(self, length: int, causal: bool) -> tuple[MaskPattern, ...]:
        """The block and the columns."""
        assert self.block is not None and self.last is not None
        return patterns.fixed(self.block, self.last)

    def check_model(self, model: Any) -> None:
        """Raises ConfigError: blocks that do not divide a row."""
        super().check_model(model)
        _divides_rows(self, model)

    def _check(self):
        super()._check()
        if self.block is not None and self.last is not None and self.last > self.block:
            raise ConfigError(
                f"config.model.attention.last: {self.last}; accepted: 1 to model.attention.block {self.block}"
            )


@dataclass(frozen=True)
class Dilated(
    SparseAttention,
    kind="dilated",
    accepts=dict.fromkeys(("size", "step"), at_least(1)),
    most={"size": 2**30, "step": 2**30},
):
    """A window with gaps (Beltagy et al. 2020, section 3.1).

    Attributes:
      size: keys that a token sees on each side, itself included. None: so many that they reach a quarter of
        model.context_length.
      step: from one to the next.
    """

    size: int | None = None
    step: int = 4

    def fitted(self, length: int) -> "Dilated":
        """With a window that reaches a quarter of the row to each side, if its size is not given."""
        return replace(self, size=self.size or max(1, length // (4 * self.step)))

    def patterns(self, length: int, causal: bool) -> tuple[MaskPattern, ...]:
        """The window with gaps."""
        assert self.size is not None
        return (patterns.dilated(self.size, min(self.step, length)),)
