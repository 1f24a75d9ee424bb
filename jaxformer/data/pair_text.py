"""A source and its target as one document.

In a corpus it is the separator, the tokens of the source, the end token, and the tokens of the target: text never
becomes a special token, so the end token tells where the target begins.

>>> pair = Pair("to be", "sein")
>>> pair.source, pair.target, len(pair)
('to be', 'sein', 9)
"""

from collections.abc import Sequence
from typing import Any


class Pair(str):
    """The text of a source with that of its target behind it, which is what counts of bytes and tokenizers see.

    Attributes:
      source, target: of the pair.
    """

    source: str
    target: str

    def __new__(cls, source: str, target: str) -> "Pair":
        """Both are not empty."""
        made = super().__new__(cls, source + target)
        made.source, made.target = source, target
        return made

    def __getnewargs__(self) -> Any:
        return self.source, self.target  # of a copy, as pickle makes one


def joined(texts: Sequence[str]) -> str:
    """One text as it is, two as a pair; "" if all are blank.

    Raises:
      ValueError: one of a pair is blank.
    """
    blank = [not text or text.isspace() for text in texts]
    if all(blank):
        return ""
    if any(blank):
        raise ValueError(f"the {'source' if blank[0] else 'target'} is blank")
    return texts[0] if len(texts) == 1 else Pair(*texts)


def named(text_field: str | tuple[str, str]) -> dict[str, str]:
    """Name of a field or column -> the field of the config that names it: of one text, or of a source and a target."""
    if isinstance(text_field, str):
        return {text_field: "data.text_field"}
    return dict(zip(text_field, ("data.source_field", "data.target_field"), strict=True))
