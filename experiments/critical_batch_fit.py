"""The critical batch of each point, fitted to the records of `experiments.critical_batch`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.critical_batch_search import LENGTH, next_trial

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
    """A point of training.

    Attributes:
      fit: of the geometric means over seeds.
      low, high: 95 % interval of the critical batch.
      seeds: that have ended.
    """

    fit: Fit
    low: float
    high: float
    seeds: int


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


def whole_seeds(found: Records, point: int) -> dict[int, dict[int, float]]:
    """Seed -> rows -> updates at the best rate, of the seeds whose searches have ended and have reached the loss."""
    out = {}
    for seed in sorted({each["seed"] for each in found if each["what"] == "noise" and each["point"] == point}):
        best: dict[int, float] = {}
        for each in found:
            if each["what"] == "branch" and (each["point"], each["seed"]) == (point, seed):
                best[each["rows"]] = min(each["updates"] or math.inf, best.get(each["rows"], math.inf))
        if next_trial(found, point, seed) is None and np.isfinite(list(best.values())).all():
            out[seed] = dict(sorted(best.items()))
    return out


def measured(found: Records, point: int) -> Measured | None:
    """The critical batch of a point. None: no seed has ended.

    The interval is a bootstrap: seeds are drawn again, and to what the fit gives each batch size are added residuals,
    drawn from those of all sizes and seeds and made larger for the two fitted numbers.
    """
    by = whole_seeds(found, point)
    if not by:
        return None
    rows = np.array(sorted(next(iter(by.values()))))
    logs = np.log([[mine[each] for each in rows] for mine in by.values()])  # [seeds, N]
    batches = rows * float(LENGTH)
    each = fit(batches, np.exp(logs))
    curves = np.log(each.updates[:, None] * (1 + each.batch[:, None] / batches))
    left = (logs - curves).ravel() * math.sqrt(len(rows) / max(len(rows) - 2, 1))
    rng = np.random.default_rng(0)
    chosen = rng.integers(len(logs), size=(REPLICATES, len(logs)))
    drawn = (curves[chosen] + rng.choice(left, (*chosen.shape, len(rows)))).mean(1)
    low, high = np.quantile(fit(batches, np.exp(drawn)).batch, (0.025, 0.975))
    of = Fit(*map(float, fit(batches, np.exp(logs.mean(0)))))
    return Measured(of, float(low), float(high), len(by))


def noise_scale(found: Records, point: int) -> float:
    """Predicted: variance and square of the gradient averaged over seeds, then divided."""
    mine = [each for each in found if each["what"] == "noise" and each["point"] == point]
    return sum(each["gradient_variance"] for each in mine) / sum(each["gradient_square"] for each in mine)


def results(found: Records) -> dict[int, Measured]:
    """By point, of those that at least one seed has ended."""
    every = sorted({each["point"] for each in found if each["what"] == "noise"})
    return {point: of for point in every if (of := measured(found, point)) is not None}
