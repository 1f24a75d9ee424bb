"""Sections of which there are several kinds, each with its own fields: tagged unions.

A group is a class that derives from `Choice`; a kind is a frozen dataclass that derives from the group. In mappings,
overrides and manifests the field `kind` says which it is. A config file adds a kind by defining its class.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Tea(Choice, group="tea", default="green"):
...     pass
>>> @dataclass(frozen=True)
... class Green(Tea, kind="green"):
...     cups: int = 1
>>> @dataclass(frozen=True)
... class Black(Tea, kind="black"):
...     milk: bool = False
>>> Tea.accept({"kind": "black", "milk": True}, "config.tea"), Tea.accept("green", "config.tea")
(Black(milk=True), Green(cups=1))
>>> Tea.accept({"kind": "green", "milk": True}, "config.tea")
Traceback (most recent call last):
...
jaxformer.errors.ConfigError: config.tea.milk: no such field; accepted with config.tea.kind=black
>>> Tea.accept("blue", "config.tea")
Traceback (most recent call last):
...
jaxformer.errors.ConfigError: config.tea.kind: 'blue' is not one of green, black
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from jaxformer.config.checks import is_name, one_of
from jaxformer.config.fields import Section, field_types, shown
from jaxformer.errors import ConfigError

OR = " or "  # between several kinds, of which one is chosen before the section is made, see `settle_positions`


class Choice(Section):
    """Base of a group of kinds.

    Class arguments of a group:
      group: its place in the config, as in "model.attention".
      default: the kind that a mapping without `kind` means.
      reserved: names that no kind may have, because they mean something else in its place.

    Class argument of a kind:
      kind: its name in configs.

    Raises:
      ConfigError: two kinds of a group have the same name, or one has none.
    """

    kind: ClassVar[str]
    registered: ClassVar[dict[str, Any]]  # kind -> class
    default: ClassVar[str]
    reserved: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:  # a kind has fields that its group has not

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(
        cls,
        group: str | None = None,
        default: str = "",
        reserved: tuple[str, ...] = (),
        kind: str | None = None,
        **rest: Any,
    ):
        super().__init_subclass__(name=group, **rest)
        if group is not None:
            cls.registered, cls.default, cls.reserved = {}, default, reserved
        if kind is not None:
            if not is_name(kind) or kind in cls.reserved:
                but = f" other than {', '.join(cls.reserved)}" if cls.reserved else ""
                raise ConfigError(f"{cls._where}.kind: {shown(kind)} is the name of a kind; accepted: a text{but}")
            known = cls.registered.get(kind, cls)
            # A file that is read twice is no conflict.
            if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ConfigError(f"{cls._where}.kind: {kind!r} is taken by {known.__module__}.{known.__qualname__}")
            cls.kind = kind
            cls.registered[kind] = cls

    @classmethod
    def find(cls, kind: Any) -> Any:
        """The class of a kind. Raises ConfigError: there is none of that name."""
        one_of(cls.registered)(f"{cls._where}.kind", kind)
        return cls.registered[kind]

    @classmethod
    def described(cls) -> str:
        """What is accepted for this section, in words."""
        return f"one of {', '.join(cls.registered)}, or a section with its fields"

    @classmethod
    def accept(cls, value: Any, where: str) -> Any:
        """A value as one of the kinds: an object, the name of a kind, or a mapping of `kind` and its fields."""
        if not isinstance(value, str | Mapping):
            return value if isinstance(value, cls) else None
        fields = cls.spread(value)
        return cls.find(fields.pop("kind")).of_fields(fields, where)

    @classmethod
    def refuse(cls, name: str, where: str, hint: str = "") -> NoReturn:
        """Raises ConfigError: this kind has no field `name`; says which kinds have."""
        others = [each for each, other in cls.registered.items() if name in field_types(other)]
        super().refuse(name, where, f"accepted with {cls._where}.kind={' or '.join(others)}" if others else hint)

    @classmethod
    def spread(cls, value: Any) -> dict[str, Any]:
        """What a mapping may hold for this section, an object or the name of a kind or its fields, as a mapping with
        `kind`."""
        if isinstance(value, cls):
            return {"kind": value.kind, **vars(value)}
        fields = dict(value) if isinstance(value, Mapping) else {"kind": value} if value is not None else {}
        return {"kind": fields.pop("kind", cls.default), **fields}
