"""THE table of objectives: what a row of tokens asks of the model, the next token or the masked ones.

All pure functions of arrays. A config file adds an objective of its own with one line, `OBJECTIVES["mine"] = Objective`
and its functions.

>>> next_token(np.array([[0, 7, 8, 0, 9]]), separator_id=0).segments
array([[1, 1, 1, 2]], dtype=int32)
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxformer.config import DataConfig, registry
from jaxformer.config.registry import ObjectiveTraits, Registry
from jaxformer.data.shuffle import below, fractions
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.types import Batch

WORDS_PER_TOKEN = 2  # random 64-bit words that `masked` takes for each position
HostBatch: Callable[..., Batch] = Batch  # of numpy arrays; `Batch` names the type they have on a device


class Objective(NamedTuple):
    """One objective.

    Attributes:
      prepare: ``(tokenizer, data) -> function``, a pure function ``(windows [R, T + ahead], bits [R, words * T]) ->
        Batch`` of [R, T]: the rows made of stretches of a corpus, with random 64-bit words.
      ahead: tokens beyond a row that it needs: 1 if the last target is the token after the row.
      words: random 64-bit words it takes for each position.
      traits: what configs know of it.
    """

    prepare: Callable[[Tokenizer, DataConfig], Callable[[np.ndarray, np.ndarray], Batch]]
    ahead: int = 0
    words: int = 0
    traits: ObjectiveTraits = ObjectiveTraits()


@dataclass(frozen=True)
class Masking:
    """The settings of the masked objective, with the tables of the vocabulary it needs.

    Attributes:
      tokenizer: of the tokens.
      data: the rates of selection and replacement, and whether the tokens of a word are selected together.
      special: [V] bool, never selected.
      ordinary_ids: [n] int32, the others; random replacements come from these.
    """

    tokenizer: Tokenizer
    data: DataConfig
    special: np.ndarray
    ordinary_ids: np.ndarray


def masking(tokenizer: Tokenizer, data: DataConfig) -> Masking:
    """The masked objective of a configuration."""
    special = np.zeros(tokenizer.vocab_size, bool)
    special[tokenizer.special_ids] = True
    return Masking(tokenizer, data, special, np.flatnonzero(~special).astype(np.int32))


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


def masked(windows: np.ndarray, bits: np.ndarray, settings: Masking, *, separator_id: int) -> Batch:
    """Restore the selected tokens, most of them hidden, from those around them.

    Args:
      windows: [R, T] integers.
      bits: [R, 2 * T] random uint64.
      settings: from `masking`.
      separator_id: opens a document.

    Returns:
      Batch of [R, T]; targets are the windows, weights are 1 on the selected tokens.
    """
    targets = windows.astype(np.int32)
    segments, positions = documents(targets, separator_id)
    tokens, weights = corrupt(targets, bits, settings)
    return HostBatch(tokens, targets, weights, positions, segments)


def corrupt(tokens: np.ndarray, bits: np.ndarray, settings: Masking) -> tuple[np.ndarray, np.ndarray]:
    """BERT's noise: ([R, T] int32 corrupted tokens, [R, T] float32 weights, 1 on the selected).

    Each ordinary token (each word, with whole_word) is selected on its own with probability mask_rate, as in RoBERTa;
    the number selected in a row varies. Source: Devlin et al. 2019, section 3.1 and A.1.

    Args:
      tokens: [R, T] int32.
      bits: [R, 2 * T] random uint64; the first half selects, the second replaces.
      settings: from `masking`.
    """
    data, length = settings.data, tokens.shape[1]
    score = fractions(bits[:, :length])
    if data.whole_word:
        score = np.take_along_axis(score, word_heads(tokens, settings), axis=1)
    selected = (score < data.mask_rate) & ~settings.special[tokens]
    draw = bits[:, length : 2 * length][selected]
    action = (draw >> np.uint64(32)) * 2.0**-32
    replaced = settings.ordinary_ids[below(len(settings.ordinary_ids), draw)]
    hidden = action < data.mask_token_rate
    kept = action >= data.mask_token_rate + data.mask_random_rate
    corrupted = tokens.copy()
    corrupted[selected] = np.where(hidden, settings.tokenizer.mask_id, np.where(kept, tokens[selected], replaced))
    return corrupted, selected.astype(np.float32)


def documents(tokens: np.ndarray, separator_id: int) -> tuple[np.ndarray, np.ndarray]:
    """(segments, positions), [R, T] int32 each: documents of a row numbered from 1, and the place in each from 0.

    A row that begins inside a document begins at position 0 as well.
    """
    opens = tokens == separator_id
    opens[:, 0] = True
    segments = np.cumsum(opens, axis=1, dtype=np.int32)
    return segments, _distance(opens)[1]


def word_heads(tokens: np.ndarray, settings: Masking) -> np.ndarray:
    """[R, T] int: the column in which the word of each token begins; a word ends at a special token at the latest."""
    opens = settings.tokenizer.word_starts[tokens]
    opens[:, 1:] |= (settings.tokenizer.word_ends | settings.special)[tokens[:, :-1]]
    opens[:, 0] = True
    return _distance(opens)[0]


def _distance(opens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(column of the last True at or before each place, how far back it is), [R, T] int32; column 0 is True."""
    column = np.arange(opens.shape[1], dtype=np.int32)[None, :]
    last = np.maximum.accumulate(np.where(opens, column, 0), axis=1)
    return last, column - last


OBJECTIVES: Registry[Objective] = Registry("data.objective", registry.OBJECTIVES, {
    "next_token": Objective(
        lambda tokenizer, data: lambda windows, bits: next_token(windows, separator_id=tokenizer.separator_id),
        ahead=1, traits=registry.OBJECTIVES["next_token"],
    ),
    "masked": Objective(
        lambda tokenizer, data: functools.partial(
            masked, settings=masking(tokenizer, data), separator_id=tokenizer.separator_id
        ),
        words=WORDS_PER_TOKEN, traits=registry.OBJECTIVES["masked"],
    ),
})  # fmt: skip
