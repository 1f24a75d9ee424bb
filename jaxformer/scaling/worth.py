"""A multiplier with its interval, in words and on other axes of cost.

>>> verdict(Interval(1.4, 1.3, 1.5), Interval(1.0, 0.9, 1.1), Interval(1.4, 1.2, 1.6))
'saves'
>>> verdict(Interval(1.4, 1.3, 1.5), Interval(0.8, 0.7, 0.9), Interval(1.9, 1.7, 2.2))
'saves, vanishes'
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jaxformer.scaling.arms import Arm

Floats = np.ndarray

NARROW = 1.25  # an interval of M around 1 within this factor either way shows that there is no difference to speak of


class Interval(NamedTuple):
    """A positive number with its 95 % interval; all nan if the runs do not determine it."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> "Interval":
        """Scaled."""
        return Interval(*(factor * end for end in self))

    @property
    def known(self) -> bool:
        """Whether the runs determine it at all."""
        return all(map(math.isfinite, self))

    def __str__(self) -> str:
        return "not determined" if not self.known else f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def interval(log_value: float, logs: Floats) -> Interval:
    """Of the logarithm of a number and its replicates; not known if 5 % of these are not finite."""
    finite = logs[np.isfinite(logs)]
    if len(finite) < 0.95 * len(logs) or not math.isfinite(log_value):
        return Interval(math.nan, math.nan, math.nan)
    low, high = np.quantile(finite, [0.025, 0.975])
    return Interval(*(float(np.exp(end)) for end in (log_value, min(low, log_value), max(high, log_value))))


def verdict(top: Interval, trend: Interval, first: Interval) -> str:
    """What M at the largest budget, its trend, and M at the smallest budget say.

    "saves" or "costs": the interval of M excludes 1; "no difference seen": it holds 1 and ends within a factor of
    NARROW; else "not resolved by these runs". "grows" or "vanishes": the trend's interval excludes 1, and the gain or
    cost (of the smallest budget, where there is none at the largest) rises or falls with compute.
    """
    level = _sign(top)
    if level > 0:
        word = "saves"
    elif level < 0:
        word = "costs"
    elif top.known and top.high <= NARROW and top.low >= 1 / NARROW:
        word = "no difference seen"
    else:
        word = "not resolved by these runs"
    change, before = _sign(trend), level or _sign(first) or (1 if first.value > 1 else -1)
    return word if change == 0 else f"{word}, {'grows' if change == before else 'vanishes'}"


def log_seconds_per_flop(n: Floats, c: Floats, seconds: Floats, log_n: float) -> float:
    """Log of the seconds that a FLOP takes at a size, interpolated between those tried; nan if not known."""
    known = np.isfinite(seconds)
    if not known.any():
        return math.nan
    sizes = np.unique(n[known])
    each = [np.median(np.log(seconds[known & (n == size)] / c[known & (n == size)])) for size in sizes]
    return float(np.interp(log_n, np.log(sizes), each))


def row_shifts(arms: "tuple[Arm, Arm]", count: int, rng: np.random.Generator) -> list[Floats]:
    """[count, I] for each ladder: how its log losses move when the held-out rows are other ones.

    Where both kept each row's loss, the rows get random weights (`bootstrap.weights`), the same for both ladders; else
    every ladder moves as a whole, by its own standard error.
    """
    b, v = arms
    if b.rows is None or v.rows is None or b.weights is None:
        errors = [float(np.median(each.stderr / each.loss)) for each in arms]
        return [np.repeat(rng.normal(0.0, error, (count, 1)), len(each.c), 1)
                for error, each in zip(errors, arms, strict=True)]  # fmt: skip
    drawn = rng.standard_exponential((count, b.rows.shape[1])) * b.weights
    drawn /= drawn.sum(1, keepdims=True)
    usual = b.weights / b.weights.sum()
    return [np.log(drawn @ each.rows.T / (each.rows @ usual)) for each in arms if each.rows is not None]


def _sign(of: Interval) -> int:
    """1 if a number's interval lies above 1, -1 if below, else 0."""
    return int(of.known and of.low > 1) - int(of.known and of.high < 1)
