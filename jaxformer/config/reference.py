"""Every field of a config with its type, default and meaning, as the sections' own docstrings say; a config as a file.

>>> next(each for each in reference() if each.path == "train.steps")
Field(path='train.steps', accepted='an integer', default='1000', meaning='updates.')
"""

import dataclasses
import inspect
import pprint
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxformer.config.choice import Choice
from jaxformer.config.fields import Section, describe, field_types, is_section, options
from jaxformer.config.named import Named
from jaxformer.config.reading import to_dict
from jaxformer.config.run import Config


class Field(NamedTuple):
    """One field: where it is, what it accepts and its default, both in words, and what it means."""

    path: str
    accepted: str
    default: str
    meaning: str


def reference(cls: Any = Config, prefix: str = "") -> Iterator[Field]:
    """The fields of a section and of those inside it, in order; of a section that has kinds, those of every kind."""
    said = meanings(cls)
    for each in dataclasses.fields(cls):
        kind = field_types(cls)[each.name]
        path = f"{prefix}{each.name}"
        inside = next((option for option in options(kind) if is_section(option)), None)
        if inside is None:
            default = "needed" if each.default is dataclasses.MISSING else _text(each.default)
            yield Field(path, describe(kind), default, said.get(each.name, ""))
        elif issubclass(inside, Choice):
            yield Field(f"{path}.kind", f"one of {', '.join(inside.registered)}", inside.default, said[each.name])
            for name, one in inside.registered.items():
                for found in reference(one, f"{path}."):
                    yield found._replace(meaning=f"({name}) {found.meaning}")
        elif issubclass(inside, Named):
            yield Field(path, inside.described(), _text(each.default), said[each.name])
            yield from reference(inside.of, f"{path}.NAME.")
        else:
            yield from reference(inside, f"{path}.")


def meanings(cls: type) -> dict[str, str]:
    """Field -> what the docstrings of a section and its bases say under "Attributes:"."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, _, listed = (inspect.cleandoc(base.__doc__ or "")).partition("Attributes:\n")
        for name, text in re.findall(r"^ {2}(\w+): (.*(?:\n {4}.*)*)", listed, re.MULTILINE):
            found[name] = " ".join(text.split())
    return found


def help_text(cls: type[Section], width: int = 100) -> str:
    """All fields for `--help`: `--config.PATH=DEFAULT`, what is accepted, and the meaning. Those of a section that the
    user names and that are as in the section around it, as `data.mixture.NAME.files` is `data.files`, are one entry."""
    lines: list[str] = []
    every = list(reference(cls))
    fields = {field.path: field for field in every}
    alike = [path for path, field in fields.items() if _around(path) in fields
             and fields[_around(path)]._replace(path=path) == field]  # fmt: skip

    def tell(first: str, text: str) -> None:
        lines.append(f"  --config.{first}")
        lines.append(textwrap.fill(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6))

    for field, kinds in _joined(every):
        path = field.path
        if path not in alike:
            of_kinds = f"({', '.join(kinds)}) " if kinds else ""
            tell(f"{path}={field.default}   {field.accepted}", f"{of_kinds}{field.meaning}")
        if inside := [each for each in alike if each.startswith(f"{path}.NAME.")]:
            names = ", ".join(each.rpartition(".")[2] for each in inside)
            tell(f"{path}.NAME.FIELD   as --config.{_around(inside[0]).rpartition('.')[0]}.FIELD", f"each of {names}.")
    return "\n".join(lines)


def _joined(fields: list[Field]) -> list[tuple[Field, list[str]]]:
    """The fields without the kind that their meaning begins with, each once with the kinds that have it so."""
    found: dict[Field, list[str]] = {}
    for field in fields:
        kind = re.match(r"\((\w+)\) ", field.meaning)
        bare = field if kind is None else field._replace(meaning=field.meaning[kind.end() :])
        found.setdefault(bare, []).extend([] if kind is None else [kind[1]])
    return list(found.items())


def _around(path: str) -> str:
    """The field of the section around one that the user names: `data.files` for `data.mixture.NAME.files`; else ""."""
    head, named, name = path.partition(".NAME.")
    return f"{head.rpartition('.')[0]}.{name}" if named else ""


def as_file(config: Config, about: str, brings: str | None = None) -> str:
    """The text of a config file whose get_config returns this config.

    Args:
      config: any.
      about: the comment of its first line.
      brings: the config file that brings kinds of its own, which the new file then loads; None: there are none.
    """
    values = pprint.pformat(to_dict(config), width=100, sort_dicts=False)
    body = textwrap.indent(values, " " * len("    return ")).lstrip()
    loads = (
        f"from jaxformer.config import load\n\nload({brings!r})  # for the kinds that it brings\n\n\n" if brings else ""
    )
    return f"# {' '.join(about.split())}\n\n{loads}def get_config():\n    return {body}\n"


def _text(value: Any) -> str:
    """A default as it would be typed."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "()"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
