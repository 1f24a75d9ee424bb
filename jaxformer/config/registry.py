"""The families, objectives, sources and trackers that a config may name, and what it has to know of each.

Their functions are in tables of class `Registry` elsewhere. A new entry there adds its name here.
"""

import functools
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar

from jaxformer.config.checks import is_name
from jaxformer.config.denoising import sentinel_tokens
from jaxformer.config.fields import options, shown
from jaxformer.errors import ConfigError

V = TypeVar("V")


class FamilyTraits(NamedTuple):
    """What a config knows of a family of models.

    Attributes:
      causal: True if a token sees only those before it.
      objectives: what its models can be trained on.
      layer: the sublayers of each layer, in order; see `functional.sublayers`.
      reads_source: True if it reads a source beside its rows, and so needs the section `model.encoder`.
      memory: True if its rows go on from a memory, of the length model.memory.
      whole_rows: True if rows cannot be sharded over the mesh's context axis.
      positions: the kinds of positions that it can have; (): all.
      any_width: True if its specs go through `functional.multipliers.parametrized`, and its logits are the table
        times the hidden states of `backbone`, so that model.parametrization may be one of its own.
      stages: True if its layers can be split over the mesh's stage axis: `backbone.hidden_sharded` runs them, with the
        micro-batches of the run's `Execution`.
    """

    causal: bool
    objectives: tuple[str, ...]
    layer: tuple[str, ...] = ("attention", "mlp")
    reads_source: bool = False
    memory: bool = False
    whole_rows: bool = False
    positions: tuple[str, ...] = ()
    any_width: bool = False
    stages: bool = False


class ObjectiveTraits(NamedTuple):
    """What a config knows of an objective.

    Attributes:
      share: ``data config -> float``, the expected share of the positions whose logits are needed.
      families: that accept it, besides those whose traits list it.
      is_code: True if the loss is a code length, so that bits per byte make sense.
      tokens: ``data config -> names``: the special tokens that it needs beside those of every tokenizer, each a tuple
        of the names that it may have.
      labelled: True if its rows are made of examples with labels.
      head: True if a head of its own stands in place of the family's.
      metrics: fields of its evaluations that are better the larger they are.
      one_document: ``data config -> bool``: whether each row holds one document, and padding at most.
    """

    share: Callable[[Any], float] = lambda data: 1.0
    families: tuple[str, ...] = ()
    is_code: bool = False
    tokens: Callable[[Any], tuple[tuple[str, ...], ...]] = lambda data: ()
    labelled: bool = False
    head: bool = False
    metrics: tuple[str, ...] = ("accuracy",)
    one_document: Callable[[Any], bool] = lambda data: False


FAMILIES: dict[str, FamilyTraits] = {
    "gpt": FamilyTraits(True, ("next_token", "prefix_lm"), any_width=True, stages=True),
    "bert": FamilyTraits(False, ("masked",), stages=True),
    "xlnet": FamilyTraits(False, ("permutation",), whole_rows=True, positions=("relative", "disentangled", "rotary")),
    "transformer_xl": FamilyTraits(
        True,
        ("segment_recurrence",),
        memory=True,
        whole_rows=True,
        positions=("relative", "rotary", "alibi", "t5", "disentangled", "none"),
    ),
    "funnel": FamilyTraits(False, ("masked",)),
    "encoder_decoder": FamilyTraits(
        True, ("pairs", "span_corruption", "denoising", "mixture"), ("attention", "cross", "mlp"), reads_source=True
    ),
    "recurrent": FamilyTraits(True, ("next_token",), ("attention",)),
    "recurrent_seq2seq": FamilyTraits(
        True, ("pairs", "span_corruption", "denoising", "mixture"), ("attention",), reads_source=True
    ),
}
_TASK = ObjectiveTraits(
    families=("gpt", "bert", "recurrent"), labelled=True, head=True, metrics=("accuracy", "f1", "matthews")
)
OBJECTIVES: dict[str, ObjectiveTraits] = {
    "next_token": ObjectiveTraits(is_code=True),
    "masked": ObjectiveTraits(share=lambda data: data.mask_rate, one_document=lambda data: data.pairs),
    "prefix_lm": ObjectiveTraits(),
    "permutation": ObjectiveTraits(share=lambda data: 1 / data.permutation.predict),
    "segment_recurrence": ObjectiveTraits(is_code=True),
    "pairs": ObjectiveTraits(),
    "span_corruption": ObjectiveTraits(tokens=lambda data: sentinel_tokens(data.span_corruption.sentinels)),
    "denoising": ObjectiveTraits(),
    "mixture": ObjectiveTraits(tokens=lambda data: data.ul2.tokens()),
    "sequence_classification": _TASK,
    "token_classification": _TASK,
    "regression": _TASK._replace(metrics=("pearson", "spearman")),
    "extractive_qa": _TASK._replace(metrics=("exact_match", "f1", "accuracy")),
    "multiple_choice": _TASK._replace(
        families=("gpt", "recurrent"), metrics=("choice_accuracy", "per_byte_accuracy", "accuracy")
    ),
    "instructions": ObjectiveTraits(families=("gpt", "recurrent"), labelled=True),
}
TRACKERS: dict[str, None] = dict.fromkeys(("tensorboard", "wandb", "mlflow"))
SOURCES: dict[str, None] = dict.fromkeys(
    ("stdlib", "files", "tokens", "tfds", "huggingface", "markov", "hierarchy", "transduction", "mixture",
     "token_kinds", "exception_type", "wrong_operator", "name_roles")
)  # fmt: skip
# What the fields of an entry may be, by their annotation, and in words.
ACCEPTED: dict[Any, tuple[Callable[[Any], bool], str]] = {
    Callable: (callable, "a function"),
    tuple: (lambda value: isinstance(value, tuple) and all(map(is_name, value)), "a tuple of names"),
    int: (lambda value: type(value) is int and value >= 0, "an integer, at least 0"),
    bool: (lambda value: type(value) is bool, "True or False"),
    NoneType: (lambda value: value is None, "None"),
}


class Registry(dict[str, V], Generic[V]):
    """name -> functions, for a field of a config. A config file adds an entry of its own by assignment.

    Raises:
      ConfigError: on assignment of a name that another entry has, and of what is not an entry of this table; on look-up
        of a name that has none.

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
        self._kind: Any = type(next(iter(entries.values())))

    def __setitem__(self, name: str, value: V) -> None:
        where = f"config.{self._field}"
        if not is_name(name):
            raise ConfigError(f"{where}: {shown(name)} is the name of an entry; accepted: a text that is not empty")
        _check(value, self._kind, f"{where}: {name!r}")
        known = self.get(name)
        if known is not None and _origin(known) != _origin(value):  # a file that is read twice is no conflict
            raise ConfigError(f"{where}: {name!r} is taken by {'.'.join(_named(next(_functions(known), known)))}")
        super().__setitem__(name, value)
        self._names[name] = getattr(value, "traits", None)
        _BROUGHT[self._field, name] = value

    update = MutableMapping.update  # type: ignore[assignment]  # by assignment, as the two below

    def setdefault(self, name: str, default: Any = None) -> V:
        """The entry of a name, which is `default` from now on if there is none."""
        if name not in self:
            self[name] = default
        return self[name]

    def __ior__(self, entries: Any) -> "Registry[V]":  # type: ignore[override, misc]
        self.update(entries)
        return self

    def __missing__(self, name: str) -> V:
        raise ConfigError(f"config.{self._field}: {name!r} has no functions; accepted: {', '.join(self)}")


def objectives_of(family: str) -> list[str]:
    """The objectives that models of a family can be trained on."""
    return [name for name, o in OBJECTIVES.items() if name in FAMILIES[family].objectives or family in o.families]


def special_tokens(data: Any) -> tuple[tuple[str, ...], ...]:
    """The special tokens that the objective of a `DataConfig` needs, as `ObjectiveTraits.tokens`."""
    return OBJECTIVES[data.objective].tokens(data)


def is_built_in(config: Any) -> bool:
    """False if a `Config` names a family, an objective, a source or a kind of layer that a config file brought."""
    return not any(_own_parts(config, {"data.source": part.source}) for part in config.data.parts().values())


def has_own_trackers(config: Any) -> bool:
    """Whether a `Config` names a tracker that a config file brought, which only a run of it needs."""
    return any(("tracking.trackers", name) in _BROUGHT for name in config.tracking.trackers)


def own_files(config: Any) -> list[str]:
    """The files in which the kinds of layers, the family and the objective of a config are written, as far as config
    files brought them."""
    modules = {sys.modules.get(_named(part)[0]) for part in _own_parts(config, {})}
    return sorted(file for file in (getattr(module, "__file__", None) for module in modules) if file)


def _own_parts(config: Any, more: Mapping[str, str]) -> list[Any]:
    """The classes and functions behind a config's names that are not written in this package; `more`: other fields."""
    model = config.model
    kinds = {"model.attention.kind": model.attention, "model.positions.kind": model.positions,
             "model.feed_forward.kind": model.feed_forward}  # fmt: skip
    named = {name: kind.kind for name, kind in kinds.items()}
    named |= {"model.family": model.family, "data.objective": config.data.objective, **more}
    parts = [*map(type, kinds.values()), *(f for each in named.items() for f in _functions(_BROUGHT.get(each)))]
    return [part for part in parts if not _named(part)[0].startswith("jaxformer.")]


_BROUGHT: dict[tuple[str, str], Any] = {}  # (field, name) -> entry that was assigned


def _check(entry: Any, kind: Any, where: str) -> None:
    """Raises ConfigError: an entry is not of the table's kind, or one of its fields is not what its annotation says."""
    if not isinstance(entry, kind):
        raise ConfigError(f"{where}: {shown(entry)}; accepted: {kind.__name__}")
    for name, hint in getattr(kind, "__annotations__", {}).items():
        value, place = getattr(entry, name), f"{where}: {name}"
        known = [ACCEPTED[each] for each in (typing.get_origin(o) or o for o in options(hint)) if each in ACCEPTED]
        if isinstance(hint, type) and not known:  # a tuple of fields itself
            _check(value, hint, place)
        elif known and not any(fits(value) for fits, _ in known):
            raise ConfigError(f"{place}: {shown(value)}; accepted: {' or '.join(words for _, words in known)}")


def _functions(entry: Any) -> Iterator[Any]:
    """The functions of an entry."""
    if isinstance(entry, tuple):
        for each in entry:
            yield from _functions(each)
    elif callable(entry):
        yield getattr(entry, "func", entry)  # of a functools.partial


def _named(function: Any) -> tuple[str, str]:
    """Module and name of a function or a class."""
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)


def _origin(value: Any) -> Any:
    """What tells an entry from others, and is the same where its file is read twice: of a function where its code
    stands and what it closes over."""
    if isinstance(value, functools.partial):
        value = (value.func, value.args, *sorted(value.keywords.items()))
    if isinstance(value, tuple):
        return tuple(map(_origin, value))
    code = getattr(value, "__code__", None)
    if code is not None:
        inside = [cell.cell_contents for cell in value.__closure__ or ()]
        found = [each if isinstance(each, bool | int | float | str) else _named(each) for each in inside]
        return code.co_filename, code.co_firstlineno, value.__qualname__, found
    return _named(value) if callable(value) else value
