"""What a trained model reads and writes as text: how prompts and sources begin and end, as in training.

A decoder-only model's documents begin with the separator, which also ends them, unless its tokenizer came with a model
and has a token for that. A model that reads a source begins its
target with the start token; sources and targets end with the end token. Tokens that an objective brings, such as the
sentinels of hidden spans, may be typed in a source by their names, and are written in a target by them.
"""

import re
from typing import NamedTuple

import numpy as np
import tokenizers as hf

from jaxformer.config import Config, registry
from jaxformer.data.tokenizers import Tokenizer


class DecodingText(NamedTuple):
    """How a run's texts become tokens, and its tokens text.

    Attributes:
      tokenizer: the run's.
      start: what comes before a prompt.
      end: the token that ends what is generated, and a source.
      named: name -> id of the special tokens that may stand in a source by their names.
      suppress: ids that are never generated.
      pieces: [V] the bytes that each id stands for.
    """

    tokenizer: Tokenizer
    start: int
    end: int
    named: dict[str, int]
    suppress: list[int]
    pieces: list[bytes]

    def prompt(self, text: str) -> list[int]:
        """The ids of a prompt. Raises ConfigError: a character outside the vocabulary."""
        return [self.start, *self.tokenizer.encode(text, strict=True).tolist()]

    def source(self, text: str) -> list[int]:
        """The ids of a source. Raises ConfigError: a character outside the vocabulary."""
        if not self.named:
            return [*self.tokenizer.source_start, *self.tokenizer.encode(text, strict=True).tolist(), self.end]
        names = "|".join(re.escape(name) for name in sorted(self.named, key=len, reverse=True))
        space = " ?" if any(len(piece) > 1 and piece.startswith(b" ") for piece in self.pieces) else ""
        parts = re.split(f"{space}({names})", text)  # a space before it belongs to the hidden tokens
        ids = [
            [self.named[part]] if i % 2 else self.tokenizer.encode(part, strict=True).tolist()
            for i, part in enumerate(parts)
        ]
        return [*self.tokenizer.source_start, *(each for part in ids for each in part), self.end]


def decoding_text(tokenizer: Tokenizer, config: Config) -> DecodingText:
    """That of a run.

    Args:
      tokenizer: the run's.
      config: the run's, vocabulary size filled in.
    """
    special = set(tokenizer.special_ids.tolist())
    beyond = set(range(tokenizer.vocab_size, config.model.vocab_size or 0))
    if config.model.encoder is None:
        start, end = tokenizer.separator_id, tokenizer.stop_id
        return DecodingText(tokenizer, start, end, {}, sorted((special | beyond) - {end}), tokenizer.pieces)
    names = registry.special_tokens(config.data)
    ids = tokenizer.ids_of(names).tolist()
    brought = {name: each for every, each in zip(names, ids, strict=True) for name in every}
    pieces = list(tokenizer.pieces)
    for every, each in zip(names, ids, strict=True):
        pieces[each] = every[0].encode()
    masks = config.data.objective != "pairs" and tokenizer.has("mask")
    named = {**brought, "[MASK]": tokenizer.mask_id} if masks else brought
    never = sorted((special | beyond) - {tokenizer.end_id, *ids})
    return DecodingText(tokenizer, tokenizer.start_id, tokenizer.end_id, named, never, pieces)


def text_of(pieces: list[bytes], ids: np.ndarray) -> str:
    """The text of some ids; bytes that form no character become U+FFFD."""
    return b"".join(pieces[each] for each in ids).decode("utf-8", "replace")


def template_start(tokenizer: Tokenizer) -> list[int]:
    """The ids that a tokenizer's own template puts before a text, as that of Llama does; mostly none."""
    backend = hf.Tokenizer.from_str(tokenizer.content(plain=True).decode())
    plain, whole = (backend.encode("a", add_special_tokens=each).ids for each in (False, True))
    return next((whole[:n] for n in range(len(whole)) if whole[n : n + len(plain)] == plain), [])
