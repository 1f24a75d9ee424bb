"""Docstrings for the API pages: doctests become blocks of code, which Markdown would take for quotations, and arguments
that are described together stay together, and a colon in what is returned does not end a type."""

import re

import griffe


class Doctests(griffe.Extension):
    """Rewrites the docstrings that griffe reads; the files stay as they are."""

    def on_object(self, *, obj, loader, **kwargs):
        """Of every module, class and function."""
        if not obj.is_alias and obj.docstring is not None:
            returns = getattr(obj, "returns", None)  # None of modules and classes
            obj.docstring.value = typed(together(fenced(obj.docstring.value)), str(returns or ""))


def fenced(text: str) -> str:
    r"""Each run of lines from `>>>` to a blank line as a fenced block.

    >>> fenced("Adds.\n\n>>> 1 + 1\n2\n\nMore.")
    'Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore.'
    """
    return re.sub(r"^>>> .*(?:\n.+)*", lambda block: f"```pycon\n{block[0]}\n```", text, flags=re.MULTILINE)


def together(text: str) -> str:
    r"""`a, b: both` of a list of arguments, with a space that does not end the name.

    >>> together("Args:\n  a, b: both, or none: see c")
    'Args:\n  a,\xa0b: both, or none: see c'
    """
    return re.sub(r"^ +\w+(?:, \w+)+(?=:)", lambda names: names[0].replace(", ", ",\u00a0"), text, flags=re.MULTILINE)


def typed(text: str, returns: str) -> str:
    r"""`Returns:` with the type of the signature in front where the description has a colon: what stands before the
    first colon would be taken for the type.

    >>> typed("Adds.\n\nReturns:\n  Two arrays: sums, counts.", "Pair")
    'Adds.\n\nReturns:\n  Pair: Two arrays: sums, counts.'
    >>> typed("Yields:\n  One block: some tokens.", "Iterator[Block]")
    'Yields:\n  Block: One block: some tokens.'
    """
    if not returns:
        return text
    item = re.fullmatch(r"(?:Iterator|Generator|Iterable)\[(\w+).*\]", returns)
    types = {"Returns": returns, "Yields": item[1] if item else returns}
    return re.sub(
        r"^(Returns|Yields):\n( +)(?=(?:.+\n)*?.*:)",
        lambda start: f"{start[1]}:\n{start[2]}{types[start[1]]}: ",
        text,
        flags=re.MULTILINE,
    )
