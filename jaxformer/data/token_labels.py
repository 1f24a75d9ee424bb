"""The objective token_classification: a label for each labelled span of a text, asked at its first token.

A text that is longer than a row is read in several windows, one after the other; every label counts once. A token that
covers the beginnings of several spans has the label of the first of them.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.labelled_rows import LabelledRows, TokenizedExample, Window, frame_of, index_of
from jaxformer.data.labelled_text import LabelledSplit
from jaxformer.data.rows import Lengths
from jaxformer.data.tokenizers import Tokenizer


def rows(
    split: Any, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool
) -> LabelledRows:  # fmt: skip
    """The rows of a split; arguments and errors as of `Objective.rows`."""
    assert data.labelled is not None
    frame, known = frame_of(tokenizer, data, lengths), index_of(data, covering)
    room, types = frame.room(1), data.labelled.opening == "cls"

    def windows(example: TokenizedExample) -> Iterator[Window]:
        (text, *_), (covers, *_) = example.texts, example.covers
        asked, target = np.ones(len(text), np.float32), np.zeros(len(text), np.int64)  # to predict: every token
        if example.label is not None:
            begins, _, names = example.label
            token, of = first_tokens(covers, np.array(begins))
            asked[:] = 0
            asked[token] = 1
            target[token] = [known[names[i], example.number] for i in of.tolist()]
        for begin in range(0, len(text), room):
            part = slice(begin, begin + room)
            tokens, _ = frame.around([text[part]])
            outer = (1, len(tokens) - 1 - len(text[part]))  # special tokens before and after
            weights = np.pad(asked[part], outer)
            if not weights.any():
                continue
            inputs = {"examples": np.where(weights > 0, example.number + 1, 0).astype(np.int32)}
            if types:
                inputs["token_types"] = np.zeros(len(tokens), np.int32)
            yield Window(tokens, np.pad(target[part], outer), weights, inputs)

    return LabelledRows(split, tokenizer, data, lengths, covering, windows)


def first_tokens(covers: np.ndarray, begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(tokens that begin spans, which span each begins), [m] each.

    Args:
      covers: [n, 2] characters that each token covers.
      begins: [s] first characters of spans, rising.

    >>> token, span = first_tokens(np.array([[0, 2], [2, 5], [5, 6]]), np.array([1, 3, 4, 9]))
    >>> token.tolist(), span.tolist()
    ([0, 1], [0, 1])
    """
    token = np.searchsorted(covers[:, 1], begins, side="right")
    there, first = np.unique(token, return_index=True)
    inside = there < len(covers)
    return there[inside], first[inside]


def counts(split: LabelledSplit) -> Counter[str]:
    """How often each label is in a split."""
    return Counter(name for label in split.labels if label is not None for name in label[2])
