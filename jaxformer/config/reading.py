"""A nested mapping and the overrides of a command line become a Config, and a Config becomes plain values again."""

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from jaxformer.config import aliases
from jaxformer.config.choice import OR, Choice
from jaxformer.config.data import settle_sources
from jaxformer.config.fields import Section, field_types, from_text, is_section, options, shown
from jaxformer.config.named import Named
from jaxformer.config.optimizer import settle_schedule
from jaxformer.config.positions import settle_positions
from jaxformer.config.run import Config
from jaxformer.config.train import TrainConfig
from jaxformer.errors import ConfigError

C = typing.TypeVar("C", bound=Config)


def from_mapping(
    mapping: Mapping[str, Any],
    overrides: Mapping[str, str] | None = None,
    cls: type[C] = Config,  # type: ignore[assignment]
) -> C:
    """The typed Config of a nested mapping or ml_collections ConfigDict. Names of earlier versions are understood.

    Args:
      mapping: nested, sections inside; fields that are not given take the defaults of the dataclasses.
      overrides: dotted field -> text as typed on a command line ("model.num_layers": "6"). Texts are read by the
        field's type: "none" is None where the field may be absent, tuples are separated by commas. An override of
        a `kind` comes first, whatever the order; fields that the new kind lacks are dropped from the mapping.
      cls: Config, or a dataclass that adds sections to it.

    Raises:
      ConfigError: an unknown field (names the nearest), a wrong type, a value out of range, an impossible combination.
    """
    tree = plain(mapping)
    aliases.modernize(tree)
    kinds, steps = set(_kinds(cls)), _steps(tree)
    named = aliases.renamed(overrides or {}, kinds, tree)
    for dotted in [each for each in named if each in kinds]:
        _place(tree, dotted, named[dotted], cls)
    settle_positions(tree.get("model"))
    for dotted in [each for each in named if each not in kinds]:
        _place(tree, dotted, named[dotted], cls)
    settle_sources(tree.get("data"), [dotted.removeprefix("data.") for dotted in named if dotted.startswith("data.")])
    if "train.steps" in named:
        settle_schedule(tree, steps, _steps(tree), named)
    return cls.accept(tree, "config")


def _steps(tree: Mapping[str, Any]) -> Any:
    train = tree.get("train")
    return train.get("steps", TrainConfig.steps) if isinstance(train, Mapping) else TrainConfig.steps


def to_dict(config: Any) -> dict[str, Any]:
    """Nested dict of plain JSON values (tuples become lists); kinds of a section have the field `kind`."""
    return json.loads(json.dumps(_values(config)))


def _values(section: Any) -> dict[str, Any]:
    return {name: _values(v) if isinstance(v, Section) else v for name, v in _fields(section).items()}


def _fields(section: Any) -> dict[str, Any]:
    """The fields of a section object, and its kind if it has one."""
    return ({"kind": section.kind} if isinstance(section, Choice) else {}) | section.by_name()


def diff(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lines "field: old -> new" for every leaf in which two nested dicts differ, sorted by field; of sections of
    different kinds only fields that both have. Of a mixture's source that one of them lacks only what is not a default.
    """
    lines = []
    other_kind = "kind" in old and "kind" in new and old["kind"] != new["kind"]
    for name in sorted(old.keys() & new.keys() if other_kind else old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, Mapping | None) and isinstance(b, Mapping | None) and a != b:
            defaults = _entry_defaults(f"{prefix}{name}") if a is None or b is None else {}
            defaults = {key: defaults[key] for key in (a or b or {}) if key in defaults}
            lines += diff(a or defaults, b or defaults, f"{prefix}{name}.")
        elif a != b:
            lines.append(f"{prefix}{name}: {a!r} -> {b!r}")
    return lines


def _entry_defaults(place: str) -> dict[str, Any]:
    """The defaults of an entry whose name the user chose, by its place ("data.mixture.code"); empty elsewhere."""
    section: Any = Config
    for name in place.split(".")[:-1]:
        section = None if section is None else _section_of(field_types(section).get(name))
    if section is None or not issubclass(section, Named):
        return {}
    return json.loads(json.dumps({each.name: each.default for each in dataclasses.fields(section.of)}))


def plain(mapping: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """A nested mapping, or ConfigDict, as dicts; sections that are objects as well. Arrays become lists.

    Raises:
      ConfigError: it is nested deeper than any config, as one that holds itself is.
    """
    if depth > 8:
        raise ConfigError("config: its sections are nested more than 8 deep; does one hold itself?")
    made = {name: _fields(v) if isinstance(v, Section) else v for name, v in mapping.items()}
    made = {name: v.tolist() if hasattr(v, "tolist") else v for name, v in made.items()}
    return {str(k): plain(v, depth + 1) if hasattr(v, "items") else v for k, v in made.items()}


def _section_of(kind: Any) -> Any:
    """The section that a field's type is, or may be beside None; else None."""
    return next((each for each in options(kind) if is_section(each)), None)


def _kinds(cls: Any, prefix: str = "") -> Iterator[str]:
    """The fields that choose a kind, in a section and those inside it: "model.positions.kind"."""
    for name, kind in field_types(cls).items():
        inside = _section_of(kind)
        if inside is not None and issubclass(inside, Choice):
            yield f"{prefix}{name}.kind"
        elif inside is not None:
            yield from _kinds(inside, f"{prefix}{name}.")


def _place(tree: dict[str, Any], dotted: str, text: str, cls: Any) -> None:
    """Puts one override into the nested dict, read by the type its field has. A new kind drops what it has no field
    for."""
    *sections, name = dotted.split(".")
    where = "config"
    for section in sections:
        kind = cls.type_of(section, where)
        inside = _section_of(kind)
        where += f".{section}"
        if inside is None:
            raise ConfigError(f"{where}: is a value, not a section; there is nothing inside it to set")
        if section not in tree or (tree[section] is None and kind is not inside):
            tree[section] = {}
        if not isinstance(tree[section], dict | str if issubclass(inside, Choice) else dict):
            raise ConfigError(f"{where}: {shown(tree[section])} is not {inside.described()}")
        if issubclass(inside, Choice):
            fields = inside.spread(tree[section])
            if name == "kind" and section == sections[-1]:
                known = {field for each in text.split(OR) for field in field_types(inside.find(each))}
                tree[section] = {"kind": text} | {each: value for each, value in fields.items() if each in known}
                return
            tree[section], cls = fields, inside.find(fields["kind"])
        else:
            cls = inside
        tree = tree[section]
    tree[name] = from_text(text, cls.type_of(name, where), f"{where}.{name}")
