"""A few words of a held-out split, to try a model on: something its corpus could say, whatever corpus it is.

>>> import numpy as np
>>> from jaxformer.data import tokenizers
>>> tokenizer = tokenizers.train("bytes", [], None)
>>> ids = np.concatenate([[tokenizer.separator_id], tokenizer.encode("\\n  To be, or not to be, that is the question")])
>>> split = Split(ids, np.array([0]), 46, 0, {})
>>> prompt(split, tokenizer), with_mask(split, tokenizer, 9)
('To be, or', 'To b[MASK], or')
"""

import itertools

from jaxformer.data.corpus import Split
from jaxformer.data.tokenizers import Tokenizer

_LOOK_AT = 512  # tokens in which a line with something in it is looked for
_LINE = 80  # characters of it that are looked at
_CHARACTERS = 24  # more than this without a space is not a word


def prompt(split: Split, tokenizer: Tokenizer) -> str:
    """The first words of the split, up to three; a few characters where there are none; "" where nothing is."""
    line = first_line(split, tokenizer)
    words = " ".join(line.split()[:3])
    return words if len(words) <= _CHARACTERS else line[:8].strip()


def with_mask(split: Split, tokenizer: Tokenizer, most_tokens: int = 12) -> str:
    """The first tokens of the split, as text in which the one in the middle is [MASK].

    Args:
      split: where from.
      tokenizer: what made it.
      most_tokens: how many, at most.
    """
    ids = tokenizer.encode(first_line(split, tokenizer))[:most_tokens]
    texts = [tokenizer.decode([token]) for token in ids]
    whole = [i for i, text in enumerate(texts) if text.strip() and "\ufffd" not in text]
    if not whole:
        return "[MASK]"
    middle = min(whole, key=lambda i: abs(i - len(ids) // 2))
    space = " " if middle and texts[middle].startswith(" ") else ""
    end = tokenizer.decode(ids[middle + 1 :]).split("\ufffd")[0]
    return f"{tokenizer.decode(ids[:middle])}{space}[MASK]{end}"


def first_line(split: Split, tokenizer: Tokenizer) -> str:
    """The beginning of the first line with anything in it: whole characters that can be printed; may be empty."""
    text = tokenizer.decode(split.tokens[:_LOOK_AT])
    for line in text.splitlines():
        start = "".join(itertools.takewhile(lambda sign: sign.isprintable() and sign != "\ufffd", line.strip()))
        if start.strip():
            return start[:_LINE].strip()
    return ""
