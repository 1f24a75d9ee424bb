"""Sections whose fields the user names: any number of sections of one kind.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Tea(Section, name="teas"):
...     cups: int = 1
>>> class Teas(Named, name="teas", of=Tea):
...     pass
>>> teas = Teas.accept({"green": {"cups": 2}, "black": {}}, "config.teas")
>>> teas["green"], list(teas.by_name())
(Tea(cups=2), ['black', 'green'])
>>> Teas.accept({"a/b": {}}, "config.teas")
Traceback (most recent call last):
...
jaxformer.errors.ConfigError: config.teas: 'a/b' is not a name; accepted: up to 64 letters, digits and _
>>> Teas.accept({"green": {"cups": "two"}}, "config.teas")
Traceback (most recent call last):
...
jaxformer.errors.ConfigError: config.teas.green.cups: 'two' is not an integer
"""

import contextlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxformer.config.fields import Section, field_types, shown
from jaxformer.errors import ConfigError


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Named(Section):
    """Base of such a section. Its entries are sorted by name, whatever order they are given in.

    Class argument:
      of: the section that every entry is.

    Raises:
      ConfigError: no entry at all; a name that is none; whatever an entry refuses, named by its place.
    """

    of: ClassVar[Any]

    def __init_subclass__(cls, of: type[Section] | None = None, **rest: Any):
        super().__init_subclass__(**rest)
        if of is not None:
            cls.of = of

    def __init__(self, **entries: Any):
        if not entries:
            raise ConfigError(f"{self._where}: {{}} is empty; accepted: {self.described()}")
        for name in sorted(entries):
            kind, where = self.type_of(name, self._where), f"{self._where}.{name}"
            with naming(self.of._where, where, field_types(self.of)):
                made = kind.accept(entries[name], where)
                if made is None:
                    raise ConfigError(f"{where}: {shown(entries[name])} is not {kind.described()}")
            vars(self)[name] = made

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).items()))

    def __repr__(self) -> str:
        return f"{{{', '.join(vars(self))}}}"

    @classmethod
    def type_of(cls, name: str, where: str) -> Any:
        """`of`. Raises ConfigError: that is no name, or one of a method."""
        if re.fullmatch(r"\w{1,64}", name) is None:
            raise ConfigError(f"{where}: {shown(name)} is not a name; accepted: up to 64 letters, digits and _")
        if hasattr(cls, name):  # entries are attributes
            raise ConfigError(f"{where}: {shown(name)} has a meaning of its own here; accepted: another name")
        return cls.of

    @classmethod
    def described(cls) -> str:
        """What is accepted for this section, in words."""
        return "a section of names, each with a section of fields"


@contextlib.contextmanager
def naming(old: str, new: str, fields: Collection[str]) -> Iterator[None]:
    """Errors that name fields of the section `old` name those of the section `new`, or end with its name.

    >>> with naming("config.data", "config.data.mixture.code", ("files", "on_error")):
    ...     raise ConfigError("config.data.files: a.txt; data.on_error=skip skips it")
    Traceback (most recent call last):
    ...
    jaxformer.errors.ConfigError: config.data.mixture.code.files: a.txt; data.mixture.code.on_error=skip skips it
    """
    try:
        yield
    except ConfigError as error:
        old, new = (each.removeprefix("config.") for each in (old, new))
        line = re.sub(rf"(?<![\w/]){re.escape(old)}\.(?=({'|'.join(fields)})\b)", f"{new}.", str(error))
        raise ConfigError(line if new in line else f"{line} ({new})") from None
