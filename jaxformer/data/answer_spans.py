"""The objective extractive_qa: where in a context the answer to a question stands, if it stands there.

A row holds [question, a window of the context]; the windows of a long context overlap. The answer of a window that does
not hold it is the first token of the window, which stands for "no answer" (Devlin et al. 2019, section 4.3).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.labelled_rows import LabelledRows, TokenizedExample, Window, frame_of
from jaxformer.data.labelled_text import LabelledSplit
from jaxformer.data.rows import Lengths
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError


def rows(
    split: Any, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool
) -> LabelledRows:  # fmt: skip
    """The rows of a split; arguments and errors as of `Objective.rows`.

    `Batch.inputs`: starts and ends, 1 at first and last token of the answer; examples, the number of the example + 1,
    and places, the number of the token in its context + 1, both at the tokens of the context.
    """
    assert data.labelled is not None
    frame, types = frame_of(tokenizer, data, lengths), data.labelled.opening == "cls"
    overlap = lengths.target // 4 if data.labelled.stride is None else data.labelled.stride

    def windows(example: TokenizedExample) -> Iterator[Window]:
        asked, context = example.texts
        asked = asked[: max(1, frame.room(2) // 2)]
        room = frame.room(2) - len(asked)
        if overlap >= room:
            raise ConfigError(
                f"config.data.labelled.stride: {overlap}; windows of the context have {room} tokens in rows of "
                f"{frame.length}; accepted: fewer than that"
            )
        answers = [] if example.label is None else example.label["answers"]
        span = token_span(example.covers[1], answers[0][0], len(answers[0][1])) if answers else None
        for begin in range(0, max(len(context) - overlap, 1), room - overlap):
            part = context[begin : begin + room]
            tokens, owner = frame.around([asked, part])
            before = len(asked) + 2
            inside = span is not None and begin <= span[0] and span[1] < begin + len(part)
            start, end = (before + span[0] - begin, before + span[1] - begin) if inside and span else (0, 0)
            places = np.zeros(len(tokens), np.int32)
            places[before : before + len(part)] = np.arange(begin + 1, begin + 1 + len(part))
            inputs = {"starts": one_at(start, len(tokens)), "ends": one_at(end, len(tokens)), "places": places}
            inputs["examples"] = np.where(places > 0, example.number + 1, 0).astype(np.int32)
            if types:
                inputs["token_types"] = np.minimum(owner, 1).astype(np.int32)
            yield Window(tokens, np.zeros_like(tokens), one_at(0, len(tokens)), inputs)

    return LabelledRows(split, tokenizer, data, lengths, covering, windows)


def one_at(place: int, length: int) -> np.ndarray:
    """[length] int32, 1 at a place and 0 elsewhere."""
    out = np.zeros(length, np.int32)
    out[place] = 1
    return out


def token_span(covers: np.ndarray, begin: int, size: int) -> tuple[int, int]:
    """First and last token of some characters.

    Args:
      covers: [n, 2] characters that each token covers.
      begin, size: of the characters.

    >>> token_span(np.array([[0, 2], [2, 5], [5, 6]]), 1, 3)
    (0, 1)
    """
    first = int(np.searchsorted(covers[:, 1], begin, side="right"))
    return first, int(np.searchsorted(covers[:, 0], begin + size, side="left")) - 1


def best_answers(
    found: dict[str, np.ndarray], max_answer: int, null_threshold: float | None
) -> dict[int, tuple[int, int] | None]:
    """The answer to each question: example -> first and last token in its context; None: there is no answer.

    Of all windows of a context the span with the highest sum of both logits is taken, and of "no answer" the lowest.

    Args:
      found: start and end, [R, T] logits; examples, places, segments [R, T], as in a batch.
      max_answer, null_threshold: as of `config.Labelled`.
    """
    best: dict[int, tuple[float, tuple[int, int]]] = {}
    null: dict[int, float] = {}
    for row in np.flatnonzero((found["examples"] > 0).any(axis=1)).tolist():
        segments = found["segments"][row]
        for segment in np.unique(segments[segments > 0]).tolist():
            own = np.flatnonzero(segments == segment)
            context = own[found["places"][row][own] > 0]
            if not len(context):
                continue
            example = int(found["examples"][row][context[0]]) - 1
            start, end = found["start"][row], found["end"][row]
            null[example] = min(null.get(example, np.inf), float(start[own[0]] + end[own[0]]))
            scores = start[context][:, None] + end[context][None, :]
            length = np.arange(len(context))[None, :] - np.arange(len(context))[:, None]
            scores = np.where((length >= 0) & (length < max_answer), scores, -np.inf)
            first, last = divmod(int(scores.argmax()), len(context))
            score = float(scores[first, last])
            if example not in best or score > best[example][0]:
                places = found["places"][row][context]
                best[example] = score, (int(places[first]) - 1, int(places[last]) - 1)
    out: dict[int, tuple[int, int] | None] = {}
    for example, (score, span) in best.items():
        out[example] = None if null_threshold is not None and null[example] - score > null_threshold else span
    return out


def answer_text(split: LabelledSplit, example: int, span: tuple[int, int] | None) -> str:
    """The characters of the context that a span of tokens covers; "" of no span."""
    if span is None:
        return ""
    begins = np.append(np.asarray(split.starts), len(split.tokens))
    covers = np.asarray(split.covers).reshape(-1, 2)[begins[example] : begins[example + 1]]
    # The context follows the question and the token between the two, whose cover is empty.
    first = int(np.flatnonzero((covers[1:] == 0).all(axis=1))[0]) + 2
    begin, end = covers[first + span[0], 0], covers[first + span[1], 1]
    return split.labels[example]["context"][begin:end].strip()
