"""The objectives sequence_classification and regression: one label for each example, asked at its first token.

The head of a bidirectional model reads that token's state, and that of a causal one the state of the example's last
token, which has seen all of it (`models.sequence_head`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.labelled_rows import LabelledRows, TokenizedExample, Window, frame_of, index_of
from jaxformer.data.labelled_text import LabelledSplit
from jaxformer.data.rows import Lengths
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError

LARGEST = float(np.finfo(np.float32).max)
Ask = Callable[[Any, int], tuple[int, dict[str, float]]]  # (label, example) -> target, and inputs at the first token


def rows(
    split: Any, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool
) -> LabelledRows:  # fmt: skip
    """The rows of a split for sequence_classification; arguments and errors as of `Objective.rows`."""
    known = index_of(data, covering)
    return rows_asking(lambda label, number: (known[str(label), number], {}), split, tokenizer, data, lengths, covering)


def value_rows(
    split: Any, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool
) -> LabelledRows:  # fmt: skip
    """The same for regression, whose labels are numbers."""

    def ask(label: Any, number: int) -> tuple[int, dict[str, float]]:
        try:
            value = float(label)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not abs(value) <= LARGEST:
            what = "held-out" if covering else "training"
            raise ConfigError(
                f"config.data.objective: regression; {what} example {number + 1} has the label {label!r}; accepted: a "
                "finite number that a float32 can be"
            )
        return 0, {"values": value}

    return rows_asking(ask, split, tokenizer, data, lengths, covering)


def rows_asking(
    ask: Ask, split: Any, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool
) -> LabelledRows:  # fmt: skip
    """Rows that ask something at the first token of each example."""
    assert data.labelled is not None
    frame = frame_of(tokenizer, data, lengths)
    what, cut = ("held-out" if covering else "training"), []
    stops, types = data.labelled.long == "stop", data.labelled.opening == "cls"
    nothing = {"values": 0.0} if data.objective == "regression" else {}

    def windows(example: TokenizedExample) -> Iterator[Window]:
        room, sizes = frame.room(len(example.texts)), [len(text) for text in example.texts]
        if sum(sizes) > room:
            if stops:
                raise ConfigError(
                    f"config.model.context_length: {frame.length}; {what} example {example.number + 1} has {sum(sizes)}"
                    f" tokens beside the special ones, which leave room for {room}; accepted: more, or "
                    "data.labelled.long=cut"
                )
            cut.append(example.number)
        kept = shortened(sizes, room)
        tokens, owner = frame.around([text[:size] for text, size in zip(example.texts, kept, strict=True)])
        first = np.zeros(len(tokens), np.int32)
        first[0] = 1
        target, more = (0, nothing) if example.label is None else ask(example.label, example.number)
        inputs = {"examples": first * np.int32(example.number + 1)}
        inputs |= {name: (first * np.float32(value)).astype(np.float32) for name, value in more.items()}
        if types:
            inputs["token_types"] = np.minimum(owner, 1).astype(np.int32)
        yield Window(tokens, first * target, first, inputs)

    def notes() -> list[str]:
        return [f"{len(cut)} {what} examples are longer than a row and lose their ends"] if cut else []

    return LabelledRows(split, tokenizer, data, lengths, covering, windows, notes)


def shortened(sizes: list[int], room: int) -> list[int]:
    """Tokens that are kept of each text, the longer ones being cut first.

    >>> shortened([3, 9], 8), shortened([7, 9], 8), shortened([3, 4], 8)
    ([3, 5], [4, 4], [3, 4])
    """
    kept, left = list(sizes), room
    for number, index in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        kept[index] = min(sizes[index], left // (len(sizes) - number))
        left -= kept[index]
    return kept


def counts(split: LabelledSplit) -> Counter[str]:
    """How often each label is in a split."""
    return Counter(str(label) for label in split.labels if label is not None)
