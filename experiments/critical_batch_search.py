"""Which runs `experiments.critical_batch` trains, and when each of them has come down to which loss."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

BATCHES = (8, 32, 128, 512)  # rows of LENGTH tokens
LENGTH = 64
GOALS = (3.9, 3.6, 3.3)  # held-out losses, nats a token
RATE, EXPONENTS, FIRST = 2e-3, range(-5, 6), 0  # of the search: RATE * 2**exponent, and where it begins
MOST_TOKENS, WORSE = 12_000_000, 2.0  # a trial is given up after these, or so many times the best one's updates


class Trial(NamedTuple):
    """A run: with a batch size in rows and the rate RATE * 2**exponent."""

    rows: int
    exponent: int
    seed: int

    @property
    def name(self) -> str:
        """Of its record."""
        return f"rows={self.rows},exponent={self.exponent},seed={self.seed}"


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


def trials_of(found: Sequence[Mapping[str, Any]], rows: int, seed: int) -> list[Mapping[str, Any]]:
    """The records of the search of a seed with a batch size."""
    mine = [each for each in found if (each["rows"], each["seed"]) == (rows, seed)]
    return [each for each in mine if each["what"] == "updates"]


def updates_of(record: Mapping[str, Any], goal: float) -> float:
    """Those that a run needed to a goal; infinite: it was given up before."""
    updates = record["updates"][GOALS.index(goal)]
    return math.inf if updates is None else updates


def best_trial(found: Sequence[Mapping[str, Any]], rows: int, seed: int) -> Trial:
    """The one of a batch size that came to the last goal first."""
    mine = trials_of(found, rows, seed)
    return Trial(rows, min(mine, key=lambda each: updates_of(each, GOALS[-1]))["exponent"], seed)


def next_trial(found: Sequence[Mapping[str, Any]], seed: int) -> Trial | None:
    """The next run of a seed, given the records of those that have ended; None: all have.

    Batch sizes come in order. Of each the best rate is searched for every goal, the last one first, beginning with the
    best rate of the batch size before it.
    """
    first = FIRST
    for rows in BATCHES:
        mine = trials_of(found, rows, seed)
        for goal in reversed(GOALS):
            tried = {each["exponent"]: updates_of(each, goal) for each in mine}
            exponent = next_exponent(tried, first)
            if exponent is not None:
                return Trial(rows, exponent, seed)
        first = best_trial(found, rows, seed).exponent
    return None


def allowed(found: Sequence[Mapping[str, Any]], trial: Trial) -> float:
    """Updates after which a trial is given up."""
    same = [WORSE * updates_of(each, GOALS[-1]) for each in trials_of(found, trial.rows, trial.seed)]
    return min([MOST_TOKENS / (trial.rows * LENGTH), *same])


def updates_to(
    goals: Sequence[float],
    advance: Callable[[int, int], None],
    loss: Callable[[], float],
    most: float,
    watch: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """After how many updates a loss has fallen to each goal, between two evaluations on a straight line.

    Args:
      goals: the losses, largest first.
      advance: (first, count) -> makes these updates.
      loss: evaluates it.
      most: updates, after which the rest of the goals are infinitely far.
      watch: called with the updates made so far, at each evaluation: each time that they have grown by a twelfth.
    """
    found: list[float] = []
    curve = [(0, loss())]  # (updates, loss)
    watch(0)
    while True:
        step, now = curve[-1]
        for goal in [each for each in goals[len(found) :] if now <= each]:
            last, before = curve[-2] if step else (0, math.inf)
            share = (before - goal) / (before - now) if step else 1.0
            found.append(last + share * (step - last))
        if len(found) == len(goals) or step >= most or not math.isfinite(now):
            return found + [math.inf] * (len(goals) - len(found))
        count = max(1, step // 12)
        advance(step, count)
        curve.append((step + count, loss()))
        watch(step + count)
