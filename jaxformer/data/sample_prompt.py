"""A few words of the validation text as a prompt to try a model with, whatever its corpus is.

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

_LOOK_AT = 512  # tokens searched for a line that is not blank
_LINE = 80  # characters used of it
_CHARACTERS = 24  # longest prompt of words; anything longer is text without spaces between words


def prompt(split: Split, tokenizer: Tokenizer) -> str:
    """The first words of the split, up to three; a few characters of text without words; "" if there is no text."""
    line = first_line(split, tokenizer)
    words = " ".join(line.split()[:3])
    return words if len(words) <= _CHARACTERS else line[:8].strip()


def with_mask(split: Split, tokenizer: Tokenizer, most_tokens: int = 12) -> str:
    """The first tokens of the split as text, with [MASK] in place of the middle one.

    Args:
      split: with the text.
      tokenizer: of the split.
      most_tokens: maximum number of tokens.
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
    """The beginning of the first line that is not blank, up to an unprintable or incomplete character; may be empty."""
    lines = tokenizer.decode(split.tokens[:_LOOK_AT]).splitlines()
    starts = ("".join(itertools.takewhile(lambda c: c.isprintable() and c != "\ufffd", x.strip())) for x in lines)
    return next((start[:_LINE].strip() for start in starts if start.strip()), "")
