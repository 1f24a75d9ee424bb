"""Docstrings for the API pages: doctests become blocks of code, which Markdown would take for quotations."""

import re

import griffe


class Doctests(griffe.Extension):
    """Rewrites the docstrings that griffe reads; the files stay as they are."""

    def on_object(self, *, obj, loader, **kwargs):
        """Of every module, class and function."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Each run of lines from `>>>` to a blank line as a fenced block.

    >>> print(fenced("Adds.\\n\\n>>> 1 + 1\\n2").replace("`" * 3, "'''"))
    Adds.
    <BLANKLINE>
    '''pycon
    >>> 1 + 1
    2
    '''
    """
    return re.sub(r"^>>> .*(?:\n.+)*", lambda block: f"```pycon\n{block[0]}\n```", text, flags=re.MULTILINE)
