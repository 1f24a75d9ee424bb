"""Which branches `experiments.critical_batch` trains from a point, and when each of them ends."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

BATCHES = (8, 32, 128, 512)  # rows of LENGTH tokens
LENGTH = 64
RATE, EXPONENTS, FIRST = 2e-3, range(-5, 5), 0  # of the search: RATE * 2**exponent, and where it begins
MOST_TOKENS, WORSE = 4_000_000, 2.0  # a trial is given up after these, or so many times the best one's updates


class Trial(NamedTuple):
    """A branch of training: from a point, with a batch size in rows and the rate RATE * 2**exponent."""

    point: int
    rows: int
    exponent: int
    seed: int

    @property
    def name(self) -> str:
        """Of its record."""
        return f"point={self.point},rows={self.rows},exponent={self.exponent},seed={self.seed}"


def next_exponent(tried: Mapping[int, float], first: int) -> int | None:
    """What a search for the best rate tries next.

    Args:
      tried: exponent -> updates that were needed, infinite if it was given up.
      first: where to begin.

    Returns:
      None: the best of them has been tried with both of its neighbours, or lies at an end of EXPONENTS.

    >>> next_exponent({}, -2), next_exponent({-2: 90.0}, -2), next_exponent({-2: 90.0, -1: 80.0}, -2)
    (-2, -1, 0)
    >>> next_exponent({-2: 90.0, -1: 95.0}, -2), next_exponent({-2: 90.0, -1: 95.0, -3: 99.0}, -2)
    (-3, None)
    """
    if not tried:
        return first
    best = min(tried, key=lambda exponent: (tried[exponent], abs(exponent - first)))
    near = (best + 1, best - 1)
    return next((each for each in near if each in EXPONENTS and each not in tried), None)


def next_trial(found: Sequence[Mapping[str, Any]], point: int, seed: int) -> Trial | None:
    """The next branch from a point, given the records of those that have ended; None: all have.

    Batch sizes come in order, and the search of each begins with the best rate of the one before it.
    """
    first = FIRST
    for rows in BATCHES:
        mine = [r for r in found if r["what"] == "branch" and (r["point"], r["rows"], r["seed"]) == (point, rows, seed)]
        tried = {each["exponent"]: each["updates"] or math.inf for each in mine}
        exponent = next_exponent(tried, first)
        if exponent is not None:
            return Trial(point, rows, exponent, seed)
        first = min(tried, key=lambda each: tried[each])
    return None


def updates_to(
    target: float,
    advance: Callable[[int, int], None],
    loss: Callable[[], float],
    most: float,
    capacity: int = 16,
) -> float:
    """After how many updates a loss has fallen to a target, between two evaluations on a straight line.

    Args:
      target: the loss.
      advance: (first, count) -> makes these updates.
      loss: evaluates it.
      most: updates, after which it is infinite.
      capacity: most updates between two evaluations, which are about a twelfth of those made so far.
    """
    step, before = 0, loss()
    while step < most:
        count = min(capacity, max(1, step // 12))
        advance(step, count)
        now = loss()
        if not math.isfinite(now):
            return math.inf
        if now <= target:
            share = 1.0 if before <= target else (before - target) / (before - now)
            return step + share * count
        step, before = step + count, now
    return math.inf


def allowed(found: Sequence[Mapping[str, Any]], trial: Trial) -> float:
    """Updates after which a trial is given up."""
    same = [r["updates"] for r in found if r["what"] == "branch" and r["updates"] is not None
            and trial._replace(exponent=r["exponent"]) == tuple(r[name] for name in Trial._fields)]  # fmt: skip
    return min([MOST_TOKENS / (trial.rows * LENGTH), *(WORSE * each for each in same)])
