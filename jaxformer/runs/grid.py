"""The runs of a sweep: every combination of the values that some fields of a config are to have."""

import csv
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.config import Choice, Config, diff, from_mapping, load, to_dict
from jaxformer.config.aliases import ALIASES
from jaxformer.config.fields import shown
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import Parsed
from jaxformer.scaling.comparison_table import value_text
from jaxformer.storage import files

MOST_RUNS = 10_000
RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


class Axis(NamedTuple):
    """A field and the values that it takes in turn, as texts of a command line."""

    field: str
    texts: tuple[str, ...]


class GridRun(NamedTuple):
    """One run of a sweep.

    Attributes:
      name: of its folder: the last part of each field and its value.
      values: field -> its value, plain.
      parsed: as if a command line had asked for this run alone.
    """

    name: str
    values: dict[str, Any]
    parsed: Parsed


def read_axis(text: str) -> Axis:
    """FIELD=VALUE,VALUE,... or FIELD=FIRST..LAST, integers with both ends; quotation marks as in CSV.

    Raises:
      ConfigError: it is neither, or says a value twice.

    >>> read_axis("optimizer.weight_decay=0,0.01,0.1")
    Axis(field='optimizer.weight_decay', texts=('0', '0.01', '0.1'))
    >>> read_axis("seed=0..4").texts
    ('0', '1', '2', '3', '4')
    >>> read_axis('data.files="a.txt,b.txt",c.txt').texts
    ('a.txt,b.txt', 'c.txt')
    """
    field, equals, values = text.partition("=")
    field = field.removeprefix("--").removeprefix("config.")
    if not equals or not field or not values:
        raise ConfigError(f"--over: {shown(text)}; accepted: FIELD=VALUE,VALUE,... or FIELD=FIRST..LAST")
    texts: list[str] = []
    for part in next(csv.reader([values], skipinitialspace=True)):
        ends = RANGE.fullmatch(part)
        if ends and (count := int(ends[2]) - int(ends[1]) + 1) not in range(1, MOST_RUNS + 1):
            wrong = (
                f"is {count} values; accepted: 1 to {MOST_RUNS}" if count > 0 else "counts down; accepted: FIRST..LAST"
            )
            raise ConfigError(f"--over: {field}: {part} {wrong}")
        texts += map(str, range(int(ends[1]), int(ends[2]) + 1)) if ends else [part]
    if twice := sorted({each for each in texts if texts.count(each) > 1}):
        raise ConfigError(f"--over: {field}: {shown(twice[0])} is given twice; accepted: each value once")
    return Axis(field, tuple(texts))


def grid(parsed: Parsed, axes: Sequence[Axis], folder: Path) -> list[GridRun]:
    """All runs, the last axis changing first; each has been checked as a command line of its own.

    Args:
      parsed: the command line without the axes.
      axes: of the sweep.
      folder: of the sweep; a run's is inside.

    Raises:
      ConfigError: a value that its field refuses, a field given twice, values that mean the same, too many runs.
    """
    fields = [ALIASES.get(axis.field, axis.field) for axis in axes]
    given = {ALIASES.get(each, each) for each in parsed.given}
    for number, field in enumerate(fields):
        if field in fields[:number] or field in given or field == "workdir":
            where = "is what the runs' folders are" if field == "workdir" else "is given twice"
            raise ConfigError(f"--over: {field} {where}; accepted: each field once, other than workdir")
    count = 1
    for axis in axes:
        count *= len(axis.texts)
    if count > MOST_RUNS:
        raise ConfigError(f"--over: {count} runs; accepted: at most {MOST_RUNS}")
    mapping, base = load(parsed.source), to_dict(parsed.config)
    runs: dict[str, GridRun] = {}
    for texts in itertools.product(*(axis.texts for axis in axes)):
        overrides = parsed.given | dict(zip((axis.field for axis in axes), texts, strict=True))
        config: Config = from_mapping(mapping, overrides)
        config.model.attention.summary()
        values = {field: value_of(config, field) for field in fields}
        name = ",".join(f"{_short(field, fields)}={_text(value)}" for field, value in values.items())
        if name in runs or (wrong := files.unusable(name)):
            why = f"two runs would be {name}" if name in runs else f"{name} {wrong}"
            raise ConfigError(f"--over: {why}; accepted: values that give each run a folder's name of its own")
        workdir = str(folder / name)
        config = replace(config, workdir=workdir)
        changed = parsed.overrides + diff(base, to_dict(replace(config, workdir=parsed.config.workdir)))
        one = Parsed(config, changed, parsed.source, {**overrides, "workdir": workdir}, parsed.options)
        runs[name] = GridRun(name, values, one)
    return list(runs.values())


def value_of(config: Config, field: str) -> Any:
    """The value of a field as plain data; of a section that has kinds, its kind.

    >>> value_of(from_mapping({}), "model.positions"), value_of(from_mapping({}), "train.steps")
    ('learned', 1000)
    """
    value: Any = config
    for name in field.split("."):
        value = getattr(value, name)
    return value.kind if isinstance(value, Choice) else list(value) if isinstance(value, tuple) else value


def _short(field: str, fields: Sequence[str]) -> str:
    """The last part of a field's name, or all of it if another ends alike."""
    last = field.removesuffix(".kind").rpartition(".")[2]
    return field if sum(each.removesuffix(".kind").rpartition(".")[2] == last for each in fields) > 1 else last


def _text(value: Any) -> str:
    """A value in a folder's name: characters that names cannot have, or that a shell reads, become _."""
    return re.sub(r"[^\w.+-]", "_", value_text(value).replace(",", "+"))
