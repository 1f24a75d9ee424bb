"""What an architecture of another library is here: its config as ours, and where each parameter lies."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.interchange.pattern import Pattern
from jaxformer.interchange.task_heads import ForeignHead, names_of

LAYER = "{layer}"  # in the name of a tensor that every layer has
EXPERT = "{expert}"  # in the name of a tensor that every expert has


class Place(NamedTuple):
    """Where one of our parameters lies.

    Attributes:
      name: of the tensor; with LAYER in it, one of each layer; with EXPERT in it, one of each expert.
      pattern: how the tensor of one layer, or expert, lies beside ours.
    """

    name: str
    pattern: Pattern


def _no_zeros(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {}


class Foreign(NamedTuple):
    """One architecture.

    Attributes:
      family: ours.
      architecture: our config -> the class of transformers whose names these are.
      prefix: of all names but those in `outside`; a checkpoint of the bare model lacks it.
      outside: names that never have the prefix.
      read_config: (config.json, names of the tensors without prefix) -> the mapping of our `model` section.
      write_config: our config -> config.json, without what every one has.
      places: our config -> dotted path of our parameter -> its place.
      left_out: names (without prefix; LAYER stands for any number) that hold nothing that is learned.
      copies: name -> path of ours, of tensors that a checkpoint may hold once more; they have to be equal. Those that
        have places of their own are none.
      old_names: other names that a tensor may have (without prefix) -> those of `places`.
      heads: task -> its head.
      zeros: our config -> name and shape of tensors that a checkpoint may hold, which have to be zeros.
    """

    family: str
    architecture: Callable[[ModelConfig], str]
    prefix: str
    outside: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    places: Callable[[ModelConfig], dict[str, Place]]
    left_out: tuple[str, ...] = ()
    copies: Mapping[str, str] = MappingProxyType({})
    zeros: Callable[[ModelConfig], dict[str, tuple[int, ...]]] = _no_zeros
    old_names: Mapping[str, str] = MappingProxyType({})
    heads: Mapping[str, ForeignHead] = MappingProxyType({})

    def head_of(self, cfg: ModelConfig) -> ForeignHead | None:
        """That of a model's task; None: it has none. Raises ConfigError: there is no such head here."""
        if cfg.head is None:
            return None
        task = str(cfg.head.task)
        if task not in self.heads:
            accepted = ", ".join(self.heads) or "none"
            raise ConfigError(f"config.model.head: a head for {task}; accepted there: {accepted}")
        return self.heads[task]

    def all_places(self, cfg: ModelConfig) -> dict[str, Place]:
        """`places`, with those of the head of a task."""
        head = self.head_of(cfg)
        found = {} if head is None else {ours: Place(*each) for ours, each in names_of(head).items()}
        return {**self.places(cfg), **found}

    def class_of(self, cfg: ModelConfig) -> str:
        """The class of transformers."""
        head = self.head_of(cfg)
        return self.architecture(cfg) if head is None else head.architecture

    def full_name(self, name: str, cfg: ModelConfig) -> str:
        """The name of a tensor with its prefix."""
        head = self.head_of(cfg)
        outside = {*self.outside, *(() if head is None else (each for each, _ in names_of(head).values()))}
        return name if name in outside else self.prefix + name


def place(name: str, pattern: str, start: int | None = None) -> Place:
    """Shorthand."""
    return Place(name, Pattern(pattern, start))


VECTOR, TABLE, TRANSPOSED = "d -> d", "v d -> v d", "o i -> i o"


class Fields:
    """config.json, read field by field; what is asked for once and differs is refused in one line."""

    def __init__(self, found: Mapping[str, Any], file: str = "config.json"):
        self._found, self._file = found, file

    def number(self, name: str, default: Any = None) -> Any:
        """A number. Raises ConfigError: it is missing or none."""
        value = self._found.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self._file}: {name}: {value!r} is not a number")
        return value

    def rate(self, name: str, default: float) -> float:
        """As `number`, with `default` where it is absent or null."""
        return default if self.get(name) is None else float(self.number(name))

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or `default` where it is absent or null."""
        value = self._found.get(name)
        return default if value is None else value

    def given(self, name: str, absent: Any) -> Any:
        """A field, None where it is null, and `absent` where there is none."""
        return self._found.get(name, absent)

    def only(self, name: str, *accepted: Any) -> Any:
        """A field that has to have one of these values; absent or null, it has the first.

        Raises:
          ConfigError: it has another.
        """
        value = self.get(name, accepted[0])
        if value not in accepted:
            raise ConfigError(f"{self._file}: {name}: {value!r}; accepted: {', '.join(map(repr, accepted))}")
        return value
