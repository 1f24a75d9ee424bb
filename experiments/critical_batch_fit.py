"""The critical batch until each goal, fitted to the records of `experiments.critical_batch`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.critical_batch_search import BATCHES, GOALS, LENGTH, next_trial, trials_of, updates_of

Records = Sequence[Mapping[str, Any]]
GRID = np.geomspace(10, 1e7, 2001)  # critical batches that are tried, in tokens
REPLICATES = 1000


class Fit(NamedTuple):
    """(S / updates - 1) (E / tokens - 1) = 1 for the updates S and tokens E of each batch size.

    Attributes:
      updates: S_min.
      tokens: E_min.
      batch: the critical one, E_min / S_min tokens.
    """

    updates: Any
    tokens: Any
    batch: Any


class Measured(NamedTuple):
    """A goal.

    Attributes:
      fit: of the geometric means over seeds.
      low, high: 95 % interval of the critical batch.
      noise: its prediction by the noise scale, tokens, of each seed.
    """

    fit: Fit
    low: float
    high: float
    noise: tuple[float, ...]


def fit(batches: np.ndarray, updates: np.ndarray) -> Fit:
    """Least squares of log S = log(S_min (1 + B_crit / B)), which is the same hyperbola.

    Args:
      batches: [N] tokens.
      updates: [N] needed with them; or [R, N], for R fits.

    Returns:
      A number in each field, or [R].

    >>> found = fit(np.array([500.0, 2000, 8000]), 30 * (1 + 2000 / np.array([500.0, 2000, 8000])))
    >>> float(found.updates.round(1)), float(found.batch.round(-1))
    (30.0, 2000.0)
    """
    logs = np.log(updates)
    curves = np.log1p(GRID[:, None] / batches)  # [G, N]
    apart = curves - curves.mean(1, keepdims=True)
    best = np.argmin((apart**2).sum(1) - 2 * logs @ apart.T, axis=-1)  # of the squares left, what depends on G
    least, batch = np.exp((logs - curves[best]).mean(-1)), GRID[best]
    return Fit(least, least * batch, batch)


def best_updates(found: Records, goal: float) -> dict[int, dict[int, Mapping[str, Any]]]:
    """Seed -> rows -> the run at the best rate, of the seeds that have nothing left to train and reached the goal."""
    out = {}
    for seed in sorted({each["seed"] for each in found}):
        known = {each["rows"] for each in found if each["what"] == "noise" and each["seed"] == seed}
        if next_trial(found, seed) is None and known.issuperset(BATCHES):
            best = {}
            for rows in BATCHES:
                best[rows] = min(trials_of(found, rows, seed), key=lambda each: updates_of(each, goal))
            if all(math.isfinite(updates_of(each, goal)) for each in best.values()):
                out[seed] = best
    return out


def mean_noise(measured: Sequence[Sequence[float]], batch: float, updates: float) -> float:
    """The noise scale on average over the first so many updates of a run, each with the weight 1 / (1 + noise / batch),
    in tokens.

    Args:
      measured: (step, variance, square) each; between two of them, and after the last, on a straight line.
      batch: tokens of an update.
      updates: how many.

    >>> [round(mean_noise([[0, 100.0, 1.0], [10, 300.0, 1.0], [30, 300.0, 1.0]], batch, 20)) for batch in (1e9, 1.0)]
    [250, 227]
    """
    steps, variance, square = np.array(measured, float).T
    places = np.linspace(0, updates, 2001)
    scales = np.interp(places, steps, variance / square)
    worth = 1 / (1 + scales / batch)
    return float(np.trapezoid(worth * scales, places) / np.trapezoid(worth, places))


def predicted(found: Records, goal: float, seed: int) -> float:
    """The critical batch of a seed by the noise scale, tokens: the geometric mean over batch sizes."""
    mine = [each for each in found if each["what"] == "noise" and each["seed"] == seed]
    logs = []
    for each in mine:
        trial = next(run for run in trials_of(found, each["rows"], seed) if run["exponent"] == each["exponent"])
        logs.append(math.log(mean_noise(each["noise"], each["rows"] * LENGTH, updates_of(trial, goal))))
    return math.exp(sum(logs) / len(logs))


def measured(found: Records, goal: float) -> Measured | None:
    """The critical batch until a goal. None: no seed has ended.

    The interval is a bootstrap: seeds are drawn again, and to what the fit gives each batch size are added residuals,
    drawn from those of all sizes and seeds and made larger for the two fitted numbers.
    """
    by = best_updates(found, goal)
    if not by:
        return None
    batches = np.array(BATCHES) * float(LENGTH)
    logs = np.log([[updates_of(mine[rows], goal) for rows in BATCHES] for mine in by.values()])  # [seeds, N]
    each = fit(batches, np.exp(logs))
    curves = np.log(each.updates[:, None] * (1 + each.batch[:, None] / batches))
    left = (logs - curves).ravel() * math.sqrt(len(batches) / max(len(batches) - 2, 1))
    rng = np.random.default_rng(0)
    chosen = rng.integers(len(logs), size=(REPLICATES, len(logs)))
    drawn = (curves[chosen] + rng.choice(left, (*chosen.shape, len(batches)))).mean(1)
    low, high = np.quantile(fit(batches, np.exp(drawn)).batch, (0.025, 0.975))
    of = Fit(*map(float, fit(batches, np.exp(logs.mean(0)))))
    return Measured(of, float(low), float(high), tuple(predicted(found, goal, seed) for seed in by))


def results(found: Records) -> dict[float, Measured]:
    """By goal, of those that at least one seed has ended."""
    return {goal: of for goal in GOALS if (of := measured(found, goal)) is not None}
