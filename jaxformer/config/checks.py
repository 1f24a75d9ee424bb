"""What a field accepts: the rules that sections name in `accepts`. A broken one gives one line."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxformer.config.fields import did_you_mean, shown
from jaxformer.errors import ConfigError

_SMALLEST = 2.0**-126  # of float32
Rule = Callable[[str, Any], None]  # (field, value) -> None; raises ConfigError


def at_least(low: float) -> Rule:
    """Finite numbers from `low` on."""
    finite = "a finite number, " if isinstance(low, float) else ""
    return _rule(lambda value: low <= value < math.inf, f"{finite}at least {low}")


def above(low: float) -> Rule:
    """Finite numbers larger than `low`; those that are 0 in float32 are not above 0."""
    return _rule(lambda value: max(low, _SMALLEST) < value < math.inf, f"a finite number above {low}")


def between(low: float, high: float) -> Rule:
    """Numbers from `low` to `high`, both included."""
    return _rule(lambda value: low <= value <= high, f"{low} to {high}")


def strictly_between(low: float, high: float) -> Rule:
    """Numbers from `low` to `high`, both excluded."""
    return _rule(lambda value: low < value < high, f"above {low:g}, below {high:g}")


def one_of(names: Mapping[str, Any]) -> Rule:
    """The names that the mapping has at the time of the check."""

    def check(where: str, value: Any) -> None:
        if value == "":
            raise ConfigError(f"{where}: '' is empty (an unset variable?); accepted: one of {', '.join(names)}")
        if not isinstance(value, str) or value not in names:
            raise ConfigError(f"{where}: {shown(value)} is not one of {', '.join(names)}{did_you_mean(value, names)}")

    return check


def each(rule: Rule) -> Rule:
    """Tuples whose entries the rule accepts, none of them twice."""

    def check(where: str, values: Any) -> None:
        for value in values:
            rule(where, value)
        if len(set(values)) < len(values):
            raise ConfigError(f"{where}: {shown(values)}; accepted: each once")

    return check


def first_and_last(where: str, values: Any) -> None:
    """Two counts from 1 on, the second not less than the first."""
    if len(values) != 2 or not 1 <= values[0] <= values[1]:
        raise ConfigError(f"{where}: {shown(values)}; accepted: the first and the last step, as 100,105")


def is_name(value: Any) -> bool:
    """Whether a value can be the name of a kind, a family, an objective or a source."""
    return isinstance(value, str) and bool(value)


def _rule(fits: Callable[[Any], bool], accepted: str) -> Rule:
    def check(where: str, value: Any) -> None:
        if not fits(value):
            raise ConfigError(f"{where}: {shown(value)}; accepted: {accepted}")

    return check
