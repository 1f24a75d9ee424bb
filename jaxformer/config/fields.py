"""Fields of a configuration: what a value of each type may be, as a Python value or as text of a command line.

`Section` is the base of every frozen dataclass of a config. It checks all fields when an object is made, by their type
hints, so that every object holds what its annotations say.

>>> from dataclasses import dataclass
>>> from typing import Literal
>>> @dataclass(frozen=True)
... class Tea(Section, name="tea", most={"cups": 9}):
...     kind: Literal["green", "black"] = "green"
...     cups: int = 1
...     to: tuple[str, ...] = ()
>>> Tea(to=["ann", "bob"]).to
('ann', 'bob')
>>> Tea(kind="block")
Traceback (most recent call last):
...
jaxformer.errors.ConfigError: config.tea.kind: 'block' is not one of green, black; did you mean black?
>>> Tea(cups=10)
Traceback (most recent call last):
...
jaxformer.errors.ConfigError: config.tea.cups: 10; accepted: at most 9
"""

import dataclasses
import decimal
import functools
import math
import numbers
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxformer.config.suggestions import SYNONYMS, did_you_mean, nearest
from jaxformer.errors import ConfigError
from jaxformer.storage import credentials, files

# The largest number of an int32 counter, and about the largest float32; a section's `most` sets other limits.
MOST_INTEGER, MOST_NUMBER = 2**31 - 1, 3e38
MOST: dict[type, float] = {int: MOST_INTEGER, float: MOST_NUMBER}
# A float may be written as an integer; bool, which Python takes for an integer, is no number.
ACCEPTED: dict[Any, Any] = {int: numbers.Integral, float: numbers.Real, bool: (bool, np.bool_)}


class Section:
    """Base of the dataclasses of a config; a subclass says its own rules in `_check`, which runs on checked values.

    Class arguments:
      name: of the section, as in "config.NAME.field"; "": the whole config.
      accepts: field -> rule for its values that are not None, see `config.checks`.
      most: field -> largest number it may be, where that is not MOST_INTEGER or MOST_NUMBER.
      paths: fields that name files or folders, or tuples of them: a leading ~ is the home folder.
      addresses: those of `paths` that may be addresses of an object store.

    Raises:
      ConfigError: a value that the field's type does not allow, a number too large or not finite, an empty text.
    """

    # Without annotations, which would make them fields.
    _where = "config"
    _accepts = types.MappingProxyType[str, Callable[[str, Any], None]]({})
    _most = types.MappingProxyType[str, float]({})
    _paths, _addresses = tuple[str, ...](), tuple[str, ...]()
    _whole: typing.ClassVar[Any] = None  # the section that all others are in

    def __init_subclass__(
        cls,
        name: str | None = None,
        accepts: Mapping[str, Callable[[str, Any], None]] = types.MappingProxyType({}),
        most: Mapping[str, float] = types.MappingProxyType({}),
        paths: Sequence[str] = (),
        addresses: Sequence[str] = (),
        **rest: Any,
    ):
        super().__init_subclass__(**rest)
        if name is not None:
            cls._where = f"config.{name}" if name else "config"
        if name == "":
            Section._whole = cls
        cls._accepts = types.MappingProxyType({**cls._accepts, **accepts})
        cls._most, cls._paths = types.MappingProxyType({**cls._most, **most}), (*cls._paths, *paths)
        cls._addresses = (*cls._addresses, *addresses)

    def __post_init__(self):
        for name, kind in field_types(typing.cast(Any, type(self))).items():
            where = f"{self._where}.{name}"
            value = convert(getattr(self, name), kind, where)
            if name in self._paths and value is not None:
                value = at_home(value, where, addresses=name in self._addresses)
            if name in self._accepts and value is not None:
                self._accepts[name](where, value)
            _check_meaning(value, kind, where, self._most.get(name))
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        """The section's own rules."""

    @classmethod
    def refuse(cls, name: str, where: str, hint: str = "") -> typing.NoReturn:
        """Raises ConfigError: the section has no field `name`; says `hint`, or names the nearest."""
        known, inside = field_types(typing.cast(Any, cls)), _places(cls)
        # By this name, or by another library's, inside this section or another; else what is nearest, here or inside.
        named = {each: f"config.{path}" for each, path in (_places(Section._whole) | SYNONYMS).items()}
        near = inside.get(name) or nearest(name, known, 0.92) or named.get(name.lower(), "").removeprefix(f"{where}.")
        near = near or nearest(name, known, 0.8) or inside.get(nearest(name, inside, 0.8), "") or nearest(name, known)
        hint = hint or (f"did you mean {near}?" if near else f"accepted: {', '.join(known) or 'none'}")
        raise ConfigError(f"{where}.{name}: no such field; {hint}")

    @classmethod
    def described(cls) -> str:
        """What is accepted for this section, in words."""
        return "a section of fields"

    @classmethod
    def accept(cls, value: Any, where: str) -> Any:
        """A value as this section: an object of it, or a mapping of its fields; None if it is neither.

        Raises:
          ConfigError: the mapping has a field that the section lacks, or a value that is refused.
        """
        if isinstance(value, Mapping):
            return cls.of_fields(value, where)
        return value if isinstance(value, cls) else None

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any], where: str) -> Any:
        """The section with these fields. Raises ConfigError as `accept`."""
        for name in fields:
            cls.type_of(name, where)
        return cls(**fields)

    @classmethod
    def type_of(cls, name: str, where: str) -> Any:
        """The type of a field. Raises ConfigError: there is none of that name."""
        return field_types(typing.cast(Any, cls)).get(name) or cls.refuse(name, where)

    def by_name(self) -> dict[str, Any]:
        """Field -> value."""
        return dict(vars(self))


@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """Field -> type of a dataclass."""
    hints = typing.get_type_hints(cls)
    return {each.name: hints[each.name] for each in dataclasses.fields(cls)}


def _places(cls: Any) -> dict[str, str]:
    """Name -> dotted path of the fields of a section and of those inside it, of every kind they have."""
    inside: dict[str, str] = {}
    for name, kind in field_types(cls).items() if cls else ():
        for section in filter(is_section, options(kind)):
            for each in getattr(section, "registered", {"": section}).values():
                inside = {field: f"{name}.{path}" for field, path in _places(each).items()} | inside
    return inside | {name: name for name in (field_types(cls) if cls else ())}


def convert(value: Any, kind: Any, where: str) -> Any:
    """A Python value as one of a field's type: a list becomes a tuple, an integer a float where the field is a float, a
    NumPy number Python's. Text is not read as a number, and True is not an integer.

    Raises:
      ConfigError: the field's type does not allow it.
    """
    for option in options(kind):
        if typing.get_origin(option) is Literal:
            if isinstance(value, str) and value in typing.get_args(option):
                return value
        elif typing.get_origin(option) is tuple:
            each = typing.get_args(option)[0]
            if isinstance(value, list | tuple) and all(_is_a(v, each) for v in value):
                return tuple(_made(v, each, where) for v in value)
            if _is_a(value, each):
                return (_made(value, each, where),)
        elif is_section(option):
            made = option.accept(value, where)
            if made is not None:
                return made
        elif type(value) is option:
            return value
        elif _is_a(value, option):
            return _made(value, option, where)
    choices = [each for option in options(kind) if typing.get_origin(option) is Literal for each in option.__args__]
    raise ConfigError(f"{where}: {shown(value)} is not {describe(kind)}{did_you_mean(value, choices)}")


def from_text(text: str, kind: Any, where: str) -> Any:
    r"""What a text of the command line says, read by the field's type.

    "none" is None where the field may be absent; 1_000 and 1e3 are integers; a tuple is separated by commas, and a part
    that holds a comma or begins with a bracket or a quotation mark stands in quotation marks, as in CSV.

    Raises:
      ConfigError: the text says nothing of that type, or it is empty, or the type is a section.

    >>> from_text('"a,b.txt", c.txt', tuple[str, ...], "config.data.files")
    ('a,b.txt', 'c.txt')
    >>> from_text("1e6", int, "config.train.steps")
    1000000
    """
    if type(None) in options(kind) and text.lower() in ("none", "null"):
        return None
    for option in options(kind):
        try:
            if typing.get_origin(option) is tuple:
                if not text.strip():
                    raise ConfigError(
                        f"{where}: {text!r} is empty (an unset variable?); accepted: {describe(kind)}, or ()"
                    )
                each = typing.get_args(option)[0]
                return tuple(part if each is str else _number(part, each, where) for part in _parts(text, where))
            if option in (int, float):
                return _number(text, option, where)
        except ConfigError:
            raise
        except ValueError:  # not a number
            continue
        if option is bool:
            if text.lower() in ("true", "1", "yes", "false", "0", "no"):
                return text.lower() in ("true", "1", "yes")
        elif is_section(option):
            inside = ", ".join(field_types(option)) or "NAME.FIELD"
            raise ConfigError(f"{where}: {shown(text)} is not a section; set one of {inside} inside it")
        elif option is not type(None):
            return unescaped(text, where) if where.endswith(".separator") else text
    raise ConfigError(f"{where}: {shown(text)} is not {describe(kind)}")


def at_home(value: Any, where: str, *, addresses: bool = False) -> Any:
    """A path (with `addresses` also an object store's), or a tuple, with ~ and ~user replaced by the home folder.
    Raises ConfigError: no such user (a name that begins with ~ is written ./~name), or no file can have that name."""
    if not isinstance(value, str):
        return tuple(at_home(one, where, addresses=addresses) for one in value)
    if wrong := files.unusable(value, addresses=addresses):
        raise ConfigError(f"{where}: {shown(credentials.mask_text(value))} {wrong}")
    if not _tilde(value):
        return value
    found = os.path.expanduser(value)
    if found == value and not os.path.lexists(value):
        name = value.split("/")[0]
        line = f"{value!r}: no home folder is known for {name}; accepted: a path, ./{name} if it is a name"
        raise ConfigError(f"{where}: {line}")
    return found


def shown(value: Any) -> str:
    """`repr` of a value, cut in the middle where it is longer than a line should be."""
    short = reprlib.Repr()
    short.maxstring = short.maxlong = short.maxother = 120
    short.maxlist = short.maxtuple = short.maxdict = 12
    try:
        return " ".join(short.repr(value).split("\n"))
    except Exception:  # integers of more than 4300 digits, and whatever a user's class does
        return f"a {type(value).__name__}"


def is_section(kind: Any) -> bool:
    """Whether a field's type is a section of fields."""
    return isinstance(kind, type) and issubclass(kind, Section)


def options(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the type alone."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def describe(kind: Any) -> str:
    """A type in words."""
    names = []
    for option in options(kind):
        if typing.get_origin(option) is Literal:
            names.append("one of " + ", ".join(typing.get_args(option)))
        elif typing.get_origin(option) is tuple:
            each = typing.get_args(option)[0]
            names.append("a comma-separated list" + {int: " of integers", float: " of numbers"}.get(each, ""))
        elif is_section(option):
            names.append(option.described())
        else:
            names.append({int: "an integer", float: "a number", bool: "true or false", str: "text"}.get(option, "none"))
    return " or ".join(names)


def unescaped(text: str, where: str) -> str:
    r"""`text` with escapes such as \n read, which are hard to type on a command line."""
    try:
        return text.encode("raw_unicode_escape").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: {text!r} has a broken escape ({error.reason})") from None


def _is_a(value: Any, kind: Any) -> bool:
    return isinstance(value, ACCEPTED.get(kind, kind)) and not (kind in MOST and isinstance(value, bool))


def _made(value: Any, kind: Any, where: str) -> Any:
    try:
        return kind(value)
    except OverflowError:
        raise ConfigError(f"{where}: {shown(value)}; accepted: at most {MOST_NUMBER:g}") from None


def _number(text: str, kind: type, where: str) -> Any:
    """A number as typed. ValueError: it is none; ConfigError: an integer of too many digits to write out."""
    text = text.replace("_", "").strip()
    if kind is float:
        return float(text)
    if not re.fullmatch(r"[+-]?(\d+|\d+(\.\d+)?[eE][+]?\d+)", text):
        raise ValueError
    try:
        number = decimal.Decimal(text)
    except decimal.InvalidOperation:
        raise ConfigError(f"{where}: {shown(text)} has too many digits; accepted: at most 40") from None
    if number.adjusted() >= 40:
        raise ConfigError(f"{where}: {shown(text)} has {number.adjusted() + 1} digits; accepted: at most 40")
    if number != number.to_integral_value():
        raise ValueError
    return int(number)


def _parts(text: str, where: str) -> list[str]:
    """The parts of a comma-separated text, one pair of brackets around all of it left out, quotation marks read."""
    rest = text.strip()
    if (rest[0], rest[-1]) in (("(", ")"), ("[", "]")):
        rest = rest[1:-1].strip()
    parts = []
    while rest:
        found = re.match(r"""(?s)(["'])((?:(?!\1).|\1\1)*)\1\s*(?:,|$)|((?:[^"',][^,]*)?)(?:,|$)""", rest)
        if found is None:
            raise ConfigError(f"{where}: {shown(rest)} has a quotation mark that nothing closes; accepted: "
                              "\"a,b\",c as in CSV")  # fmt: skip
        mark, quoted, plain = found.groups()
        parts.append(quoted.replace(2 * mark, mark) if mark else plain.strip())
        rest = rest[found.end() :].lstrip()
    return [part for part in parts if part]


def _tilde(text: Any) -> bool:
    return isinstance(text, str) and text.startswith("~")


def _check_meaning(value: Any, kind: Any, where: str, most: float | None) -> None:
    """Refuses what no field can mean: an empty text, a number that is not finite or too large for any counter."""
    for each in value if type(value) is tuple else (value,):
        if type(each) is str and not each:
            raise ConfigError(f"{where}: '' is empty (an unset variable?); accepted: {describe(kind)}")
        if type(each) in MOST:
            low, high = -MOST[type(each)], most or MOST[type(each)]
            if not low <= each <= high:
                bound = f"at least {low}" if type(each) is int else "a finite number"
                bound = f"at most {high}" if high < each < math.inf else bound
                raise ConfigError(f"{where}: {shown(each)}; accepted: {bound}")
