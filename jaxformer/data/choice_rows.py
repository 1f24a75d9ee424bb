"""The objective multiple_choice: which of some continuations of a prompt is right.

A language model says it by the probability of each continuation, summed over its tokens or for each of its bytes; it
learns from the right one alone. Every continuation has a window of its own, with the prompt before it; of a prompt that
is too long the beginning is left out.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.labelled_rows import LabelledRows, TokenizedExample, Window
from jaxformer.data.rows import Lengths
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError


def rows(split: Any, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool) -> LabelledRows:
    """The rows of a split; arguments and errors as of `Objective.rows`.

    `Batch.inputs`, where a token of a continuation is asked: examples, the number of the example + 1; choices, that of
    the continuation + 1; sizes, its bytes.
    """
    what, cut = ("held-out" if covering else "training"), []

    def windows(example: TokenizedExample) -> Iterator[Window]:
        prompt, *choices = example.texts
        for number, choice in enumerate(choices):
            right = number == example.label
            if not (right or covering):
                continue
            room = lengths.target - len(choice)
            if room < 1:
                raise ConfigError(
                    f"config.model.context_length: {lengths.target}; choice {number + 1} of {what} example "
                    f"{example.number + 1} has {len(choice)} tokens; accepted: more than that"
                )
            if len(prompt) > room:
                cut.append(example.number)
            kept = prompt[max(len(prompt) - room, 0) :]
            tokens = np.concatenate([[tokenizer.separator_id], kept, choice])
            asked = np.arange(len(tokens) - 1) >= len(kept)
            size = int(tokenizer.token_bytes[choice].sum())
            values = {"examples": example.number + 1, "choices": number + 1, "sizes": size}
            inputs = {name: np.where(asked, value, 0).astype(np.int32) for name, value in values.items()}
            yield Window(tokens[:-1], tokens[1:], asked * float(right), inputs)

    def notes() -> list[str]:
        number = len(set(cut))
        return [f"{number} prompts of {what} examples are longer than a row and lose their beginnings"] if cut else []

    return LabelledRows(split, tokenizer, data, lengths, covering, windows, notes)


def best_choices(found: dict[str, np.ndarray]) -> dict[int, tuple[int, int]]:
    """Example -> the continuation of the highest probability, and that of the highest one for each byte, from 0.

    Args:
      found: score, the log-probability of the continuation that a token is of, examples, choices, sizes: [R, T].
    """
    places = np.nonzero(found["examples"] > 0)
    scores: dict[int, dict[int, tuple[float, float]]] = {}
    parts = (found[name][places].tolist() for name in ("examples", "choices", "score", "sizes"))
    for example, choice, score, size in zip(*parts, strict=True):
        scores.setdefault(example - 1, {})[choice - 1] = score, score / max(size, 1)
    return {
        example: (max(each, key=lambda c: each[c][0]), max(each, key=lambda c: each[c][1]))
        for example, each in ((example, scores[example]) for example in sorted(scores))
    }
