"""THE table of objectives: what a row of tokens asks of the model, the next token or the masked ones.

All pure functions of arrays. A config file adds an objective of its own with one line, `OBJECTIVES["mine"] = Objective`
and its functions.

>>> next_token(np.array([[0, 7, 8, 0, 9]]), separator_id=0).segments
array([[1, 1, 1, 2]], dtype=int32)
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config import DataConfig, registry
from jaxformer.config.registry import ObjectiveTraits, Registry
from jaxformer.data import (
    answer_spans,
    choice_rows,
    denoising,
    instruction_rows,
    memory_rows,
    permuted_rows,
    prefix_lm,
    sequence_labels,
    span_corruption,
    token_labels,
)
from jaxformer.data.corpus import Split
from jaxformer.data.masked_tokens import WORDS_PER_TOKEN, corrupt, masked, masking, word_heads
from jaxformer.data.next_sentence import PairRows
from jaxformer.data.rows import HostBatch, Lengths, SplitRows, documents
from jaxformer.data.sequence_pairs import SequencePairs
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.data.windows import WindowRows, Windows
from jaxformer.errors import ConfigError
from jaxformer.types import Batch

__all__ = [
    "HostBatch", "OBJECTIVES", "Objective", "WORDS_PER_TOKEN", "corrupt", "documents", "masked", "masking",
    "next_token", "rows_of", "word_heads",
]  # fmt: skip


class Objective(NamedTuple):
    """One objective: of rows that are windows of text by `prepare`, of others by `rows`.

    Attributes:
      prepare: ``(tokenizer, data) -> function``, a pure function ``(windows [R, T + ahead], bits [R, words * T]) ->
        Batch`` of [R, T]: the rows made of stretches of a corpus, with random 64-bit words.
      ahead: tokens beyond a row that it needs: 1 if the last target is the token after the row.
      words: random 64-bit words it takes for each position.
      traits: what configs know of it.
      rows: ``(split, tokenizer, data, lengths, covering) -> SplitRows``: the rows of a split; covering: go over it
        once, in order, for evaluation. None: windows of T tokens that `prepare` is asked about.
      check: ``(data, lengths)``: raises ConfigError if no rows of these lengths can be made of any text; asked before
        text is read.
      labels: ``split -> how often`` each label is in a `labelled_text.LabelledSplit`, by name; None: it has no names.
    """

    prepare: Callable[[Tokenizer, DataConfig], Callable[[np.ndarray, np.ndarray], Batch]] | None = None
    ahead: int = 0
    words: int = 0
    traits: ObjectiveTraits = ObjectiveTraits()
    rows: Callable[[Split, Tokenizer, DataConfig, Lengths, bool], SplitRows] | None = None
    check: Callable[[DataConfig, Lengths], None] = lambda data, lengths: None
    labels: Callable[[Any], Counter[str]] | None = None


def rows_of(split: Split, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool) -> SplitRows:
    """The rows of a split under the objective of a configuration; arguments and errors as of `Objective.rows`."""
    objective = OBJECTIVES[data.objective]
    return (objective.rows or functools.partial(_windows, objective))(split, tokenizer, data, lengths, covering)


def _windows(
    objective: Objective, split: Split, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool
) -> SplitRows:
    if objective.prepare is None:
        raise ConfigError(
            f"config.data.objective: {data.objective} has neither prepare nor rows; accepted: one of them"
        )
    windows = Windows(split, lengths.target, ahead=objective.ahead, covering=covering)
    ask = objective.prepare(tokenizer, data)
    return WindowRows(windows, ask, tokenizer.pad_id, words=objective.words * lengths.target)


def next_token(windows: np.ndarray, *, separator_id: int) -> Batch:
    """Predict each token from those before it in its document.

    Args:
      windows: [R, T + 1] integers, stretches of a corpus.
      separator_id: opens a document. As a target it says "the document ends here".

    Returns:
      Batch of [R, T]; every weight is 1.
    """
    windows = windows.astype(np.int32)
    tokens, targets = windows[:, :-1], windows[:, 1:]
    segments, positions = documents(tokens, separator_id)
    return HostBatch(tokens, targets, np.ones(tokens.shape, np.float32), positions, segments)


def _masked_rows(split: Split, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool) -> SplitRows:
    if data.pairs:
        return PairRows(split, tokenizer, data, lengths.target, covering=covering)
    return _windows(OBJECTIVES["masked"], split, tokenizer, data, lengths, covering)


OBJECTIVES: Registry[Objective] = Registry("data.objective", registry.OBJECTIVES, {
    "next_token": Objective(
        lambda tokenizer, data: lambda windows, bits: next_token(windows, separator_id=tokenizer.separator_id),
        ahead=1, traits=registry.OBJECTIVES["next_token"],
    ),
    "masked": Objective(
        lambda tokenizer, data: functools.partial(
            masked, settings=masking(tokenizer, data), separator_id=tokenizer.separator_id
        ),
        words=WORDS_PER_TOKEN, traits=registry.OBJECTIVES["masked"], rows=_masked_rows,
    ),
    "prefix_lm": Objective(prefix_lm.prepare, ahead=1, words=1, traits=registry.OBJECTIVES["prefix_lm"]),
    "permutation": Objective(permuted_rows.prepare, words=1, traits=registry.OBJECTIVES["permutation"]),
    "segment_recurrence": Objective(
        rows=memory_rows.RecurrentRows, traits=registry.OBJECTIVES["segment_recurrence"]
    ),
    "pairs": Objective(rows=SequencePairs, traits=registry.OBJECTIVES["pairs"]),
    "span_corruption": Objective(
        rows=span_corruption.span_rows, traits=registry.OBJECTIVES["span_corruption"], check=span_corruption.check_spans
    ),
    "denoising": Objective(rows=denoising.text_rows, traits=registry.OBJECTIVES["denoising"]),
    "mixture": Objective(
        rows=span_corruption.ul2_rows, traits=registry.OBJECTIVES["mixture"], check=span_corruption.check_spans
    ),
    "sequence_classification": Objective(
        rows=sequence_labels.rows, traits=registry.OBJECTIVES["sequence_classification"], labels=sequence_labels.counts
    ),
    "token_classification": Objective(
        rows=token_labels.rows, traits=registry.OBJECTIVES["token_classification"], labels=token_labels.counts
    ),
    "regression": Objective(rows=sequence_labels.value_rows, traits=registry.OBJECTIVES["regression"]),
    "extractive_qa": Objective(rows=answer_spans.rows, traits=registry.OBJECTIVES["extractive_qa"]),
    "multiple_choice": Objective(rows=choice_rows.rows, traits=registry.OBJECTIVES["multiple_choice"]),
    "instructions": Objective(rows=instruction_rows.rows, traits=registry.OBJECTIVES["instructions"]),
})  # fmt: skip
