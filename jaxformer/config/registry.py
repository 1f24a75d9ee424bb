"""The families, objectives and sources that a config may name, and what it has to know of each.

Their functions are in tables of class `Registry` elsewhere. A new entry there adds its name here.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from jaxformer.errors import ConfigError

V = TypeVar("V")


class FamilyTraits(NamedTuple):
    """What a config knows of a family of models.

    Attributes:
      causal: True if a token sees only those before it.
      objectives: what its models can be trained on.
    """

    causal: bool
    objectives: tuple[str, ...]


class ObjectiveTraits(NamedTuple):
    """What a config knows of an objective.

    Attributes:
      share: ``data config -> float``, the expected share of the positions whose logits are needed.
      families: that can be trained on it beside those that say so themselves.
      is_code: True if the loss of a text is the length of a code for it, so that bits per byte mean something.
    """

    share: Callable[[Any], float] = lambda data: 1.0
    families: tuple[str, ...] = ()
    is_code: bool = False


FAMILIES: dict[str, FamilyTraits] = {
    "gpt": FamilyTraits(True, ("next_token",)),
    "bert": FamilyTraits(False, ("masked",)),
}
OBJECTIVES: dict[str, ObjectiveTraits] = {
    "next_token": ObjectiveTraits(is_code=True),
    "masked": ObjectiveTraits(share=lambda data: data.mask_rate),
}
SOURCES: dict[str, None] = dict.fromkeys(("stdlib", "files", "tfds", "markov", "hierarchy"))
_BUILT_IN = frozenset((*FAMILIES, *OBJECTIVES, *SOURCES))


class Registry(dict[str, V], Generic[V]):
    """name -> functions, for a field of a config. A config file adds an entry of its own by assignment.

    Raises:
      ConfigError: on assignment of a name that other functions have; on look-up of a name that has none.

    >>> known = dict.fromkeys(["a"])
    >>> table = Registry("data.objective", known, {"a": "functions of a"})
    >>> table["b"] = "functions of b"
    >>> list(known)
    ['a', 'b']
    """

    def __init__(self, field: str, names: dict[str, Any], entries: Mapping[str, V]):
        """`field` of the config; `names` that it accepts, to which new ones are added with the entry's `traits`."""
        super().__init__(entries)
        self._field, self._names = field, names

    def __setitem__(self, name: str, value: V) -> None:
        known = self.get(name)
        if known is not None and _origins(known) != _origins(value):  # a file that is read twice is no conflict
            raise ConfigError(f"config.{self._field}: {name!r} is taken by {_origins(known)[0]}")
        super().__setitem__(name, value)
        self._names[name] = getattr(value, "traits", None)

    def __missing__(self, name: str) -> V:
        raise ConfigError(f"config.{self._field}: {name!r} has no functions; accepted: {', '.join(self)}")


def objectives_of(family: str) -> list[str]:
    """The objectives that models of a family can be trained on."""
    return [name for name, o in OBJECTIVES.items() if name in FAMILIES[family].objectives or family in o.families]


def is_built_in(config: Any) -> bool:
    """False if a `Config` names a family, an objective, a source or a kind of layer that a config file brought."""
    model, data = config.model, config.data
    kinds = (model.attention, model.positions, model.feed_forward)
    return {model.family, data.objective, data.source} <= _BUILT_IN and all(
        type(kind).__module__.startswith("jaxformer.") for kind in kinds
    )


def _origins(entry: Any) -> list[str]:
    """Where each function of an entry is defined."""
    functions = [each for each in entry if callable(each)] if isinstance(entry, tuple) else [entry]
    return [f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', f)}" for f in functions]
