"""The masked objective: restore the selected tokens, most of them hidden, from those around them."""

from dataclasses import dataclass

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.rows import HostBatch, distance, documents
from jaxformer.data.shuffle import below, fractions
from jaxformer.data.token_roles import check_mask
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.types import Batch

WORDS_PER_TOKEN = 2  # random 64-bit words that `masked` takes for each position


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
    """The masked objective of a configuration. Raises ConfigError: the tokenizer has no mask."""
    check_mask(tokenizer, "masked")
    special = np.zeros(tokenizer.vocab_size, bool)
    special[tokenizer.special_ids] = True
    return Masking(tokenizer, data, special, np.flatnonzero(~special).astype(np.int32))


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


def word_heads(tokens: np.ndarray, settings: Masking) -> np.ndarray:
    """[R, T] int: the column in which the word of each token begins; a word ends at a special token at the latest."""
    opens = settings.tokenizer.word_starts[tokens]
    opens[:, 1:] |= (settings.tokenizer.word_ends | settings.special)[tokens[:, :-1]]
    opens[:, 0] = True
    return distance(opens)[0]
