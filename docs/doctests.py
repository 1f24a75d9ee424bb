"""Docstrings for the API pages: doctests become blocks of code, which Markdown would take for quotations, and arguments
that are described together stay together."""

import re

import griffe


class Doctests(griffe.Extension):
    """Rewrites the docstrings that griffe reads; the files stay as they are."""

    def on_object(self, *, obj, loader, **kwargs):
        """Of every module, class and function."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = together(fenced(obj.docstring.value))


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
