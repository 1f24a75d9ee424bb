"""Profile likelihood of the irreducible loss E: how much worse a law fits with E fixed at each value."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxformer.scaling import laws, solver

Floats = np.ndarray

CHI2_95 = 3.8415  # 95th percentile of chi-squared with one degree of freedom
_POINTS = 44


class Profile(NamedTuple):
    """Profile of E: values of E (`floor`, [F]) from 1e-4 of the lowest loss to 5 % above it, the likelihood-ratio
    statistic [F] and the refitted parameters theta [F, P] there. The interval is where the statistic is below `cut`.
    """

    floor: Floats
    statistic: Floats
    cut: float
    theta: Floats


def profile_floor(
    found: laws.Estimate,
    xs: Sequence[Floats],
    loss: Floats,
    weights: Floats,
    thetas: Floats,
    levels: tuple[float, float] = (0.025, 0.975),
) -> Profile:
    """Profile of E: the likelihood-ratio statistic with E fixed and everything else refitted.

    The statistic is 2 (rho(E) - rho_min) E[psi'] / E[psi^2]. In large tables it is chi-squared with one degree of
    freedom for a Huber estimate, whatever the noise's scale (Ronchetti 1982); the expectations are those of Gaussian
    noise with the residuals' robust scale. In small tables the threshold 3.84 gives slightly too narrow intervals;
    `cut` is a percentile, 3.84 at least, of the same statistic over bootstrap replicates, whose true E is the estimate.

    Args:
      weights, thetas: [R, I] and [R, P], the replicates of `replicate`.
      levels: percentile levels of a 95 % interval.
    """
    curve, target, (lower, upper) = found.law.of(xs, found.centres), np.log(loss), found.law.bounds(loss)
    middle, low, high = np.exp(found.theta[0]), np.exp(lower[0]), np.exp(upper[0])
    near = np.geomspace(0.001, 0.2, 10)
    wide = np.linspace(low, high, _POINTS - 2 * len(near))
    floors = np.concatenate([wide, middle * (1 + near), [middle], middle / (1 + near)])
    floors = np.clip(np.sort(floors), low, high)
    path, value = laws.hold_floor(found, curve, target, floors, lower, upper)
    scale = _statistic_scale(laws.robust_scale(target - curve(found.theta[None])[0][0],
                                          len(found.theta)), found.delta)  # fmt: skip
    lower[0] = upper[0] = found.theta[0]
    free = solver.objective(curve, target, weights, thetas, found.delta)
    start = np.repeat(found.theta[None], len(weights), 0)
    _, held = solver.minimise(curve, target, weights, start, lower, upper, delta=found.delta)
    cut = max(CHI2_95, float(np.quantile(scale * (held - free), levels[1] - levels[0])))
    return Profile(floors, scale * np.maximum(value - found.value, 0.0), cut, path)


def _statistic_scale(sigma: float, delta: float) -> float:
    """2 E[psi'] / E[psi^2] for Gaussian residuals of standard deviation sigma."""
    edge = delta / max(sigma, 1e-9)
    inside = math.erf(edge / math.sqrt(2))
    tail = edge * math.exp(-0.5 * edge**2) * math.sqrt(2 / math.pi)
    # E[min(z, edge)^2]; for a small edge its series, because the difference would cancel
    power = inside - tail + edge**2 * (1 - inside) if edge > 1e-4 else edge**2
    return 2 * inside / (power * max(sigma, 1e-9) ** 2)
