"""Rules that many fields share, each one line when broken."""

import math
from collections.abc import Callable

from jaxformer.errors import ConfigError


def at_least(name: str, value: float, low: float) -> None:
    """Raises ConfigError unless low <= value and value is finite. `name` is the field without "config."."""
    if not low <= value < math.inf:
        finite = "a finite number, " if isinstance(low, float) else ""
        raise ConfigError(f"config.{name}: {value}; accepted: {finite}at least {low}")


def above(name: str, value: float, low: float) -> None:
    """Raises ConfigError unless low < value and value is finite."""
    if not low < value < math.inf:
        raise ConfigError(f"config.{name}: {value}; accepted: a finite number above {low}")


def between(name: str, value: float, low: float, high: float) -> None:
    """Raises ConfigError unless low <= value <= high."""
    if not low <= value <= high:
        raise ConfigError(f"config.{name}: {value}; accepted: {low} to {high}")


def up_to(name: str, value: int, low: int, fits: Callable[[int], bool], symbols: int) -> None:
    """Raises ConfigError, with the largest value that fits, unless `fits(value)`."""
    if not fits(value):
        most = max(n for n in range(low, value) if fits(n))
        raise ConfigError(f"config.{name}: {value}; accepted with {symbols} symbols: {low} to {most}")
