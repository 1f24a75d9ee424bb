"""The objective instructions: predict what the assistant says in a conversation, and nothing of what it was asked.

An example is a conversation, whose texts alternate between what is given and what is said (`example_forms`); what is
said ends with the end token, which is predicted too. It is the next-token objective with weight 0 on the rest.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.labelled_rows import LabelledRows, TokenizedExample, Window
from jaxformer.data.rows import Lengths
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError


def rows(
    split: Any, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool
) -> LabelledRows:  # fmt: skip
    """The rows of a split; arguments and errors as of `Objective.rows`."""
    assert data.labelled is not None
    what, cut = ("held-out" if covering else "training"), []
    stops, length = data.labelled.long == "stop", lengths.target

    def windows(example: TokenizedExample) -> Iterator[Window]:
        parts, said = [np.array([tokenizer.separator_id])], [np.zeros(1, np.float32)]
        for number, text in enumerate(example.texts):
            ends = number % 2
            parts.append(np.append(text, tokenizer.end_id) if ends else text)
            said.append(np.full(len(parts[-1]), float(ends), np.float32))
        tokens, weights = np.concatenate(parts), np.concatenate(said)
        if len(tokens) > length + 1:
            if stops:
                raise ConfigError(
                    f"config.model.context_length: {length}; {what} example {example.number + 1} has {len(tokens) - 1} "
                    "tokens; accepted: at least that, or data.labelled.long=cut"
                )
            cut.append(example.number)
        tokens, weights = tokens[: length + 1], weights[: length + 1]
        if weights[1:].any():
            yield Window(tokens[:-1], tokens[1:], weights[1:], {})

    def notes() -> list[str]:
        return [f"{len(cut)} {what} conversations are longer than a row and lose their ends"] if cut else []

    return LabelledRows(split, tokenizer, data, lengths, covering, windows, notes)
