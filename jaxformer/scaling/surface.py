"""The loss of a ladder as a smooth surface over size and compute: several forms of it, their frontiers and their noise.

Log loss is a polynomial in u = log N - centre(C) and t = log10 C - middle. Around the moving centre, the valley of best
sizes, its shape hardly changes with compute, so that few terms describe many budgets: a quadratic has 6. Runs far up
the valley's walls, where no polynomial is right, count less. The frontier is the lowest point over the sizes tried.

    FORMS      quadratic; with u^3 and u^2 t (the valley is lopsided, and its width changes); with u^4; with t^3
    Surface    one form fitted to the runs of one ladder

>>> t, x = (axis.ravel() for axis in np.meshgrid([-1.0, 0.0, 1.0], np.linspace(-2, 2, 5)))
>>> found = fitted("quadratic", Runs(x + t, t, 1.5 - 0.1 * t + 0.05 * x**2))
>>> loss, size = found.frontier(found.theta[None], np.array([-1.0, 0.5]))
>>> loss.round(4).tolist(), (size + 1e-9).round(2).tolist()
([[1.6, 1.45]], [[-1.0, 0.5]])
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Floats = np.ndarray
Power = tuple[int, int]  # of u, of t

_QUADRATIC: tuple[Power, ...] = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0))
_CUBIC: tuple[Power, ...] = (*_QUADRATIC, (3, 0), (2, 1))
FORMS: dict[str, tuple[Power, ...]] = {
    "quadratic": _QUADRATIC,
    "cubic": _CUBIC,
    "quartic": (*_CUBIC, (4, 0)),
    "cubic, frontier bends twice": (*_CUBIC, (0, 3)),
}
LEFT_OVER = 2  # fewest degrees of freedom that a form must leave
_HIGH = 0.05  # runs whose log loss is this much above their budget's lowest count half
_SIZE_POINTS = 41
_ROUNDS = 4  # of fitting around the last fit's valley


class Runs(NamedTuple):
    """The runs of a ladder, one entry each.

    Attributes:
      log_n: [I] log N.
      t: [I] log10 of compute, less that of the middle budget; equal for the runs of a budget.
      y: [I] log loss.
    """

    log_n: Floats
    t: Floats
    y: Floats

    def take(self, rows: Floats) -> "Runs":
        """Some of the runs."""
        return Runs(self.log_n[rows], self.t[rows], self.y[rows])


@dataclass(frozen=True)
class Surface:
    """One form fitted to the runs of one ladder. Suffixes: R replicate, T budget, P parameter, I run.

    Attributes:
      powers: of its terms.
      centre: [2], log N of the valley at t = 0, and its change with t.
      design: [I, P], divided by `spread`.
      solve: [P, I], log losses to parameters.
      root: [P, P] with root root' the parameters' covariance at noise 1.
      spread: [I] noise of each run in units of the noise at the valley's bottom.
      theta: [P].
      rss: sum of squares of the residuals over `spread`.
      ends: [3, K] t of the budgets, log N of their smallest size and of their largest.
    """

    powers: tuple[Power, ...]
    centre: Floats
    design: Floats
    solve: Floats
    root: Floats
    spread: Floats
    theta: Floats
    rss: float
    ends: Floats

    @property
    def freedom(self) -> int:
        """Degrees of freedom left."""
        return len(self.design) - len(self.powers)

    def frontier(self, theta: Floats, t: Floats) -> tuple[Floats, Floats]:
        """Log loss and log N of the lowest point at each t [T] for theta [R, P]; both [R, T]."""
        powers = np.arange(max(power for power, _ in self.powers) + 1)
        coefficients = np.zeros((len(t), len(theta), len(powers)))
        for p, (of_u, of_t) in enumerate(self.powers):
            coefficients[:, :, of_u] += theta[:, p] * t[:, None] ** of_t
        low, high = (np.interp(t, self.ends[0], end) for end in self.ends[1:])
        # Beyond the budgets the sizes go on as the valley does.
        beyond = self.centre[1] * (t - np.clip(t, self.ends[0, 0], self.ends[0, -1]))
        middle = self.centre[0] + self.centre[1] * t
        step = (high - low) / (_SIZE_POINTS - 1)
        u = (low + beyond - middle)[:, None] + step[:, None] * np.arange(_SIZE_POINTS)
        values = np.matmul(coefficients, u[:, None, :] ** powers[:, None])  # [T, R, U]
        best = np.clip(values.argmin(2), 1, _SIZE_POINTS - 2)[:, :, None]
        before, here, after = (np.take_along_axis(values, best + i, 2)[:, :, 0] for i in (-1, 0, 1))
        bend = before - 2 * here + after
        shift = np.clip(0.5 * (before - after) / np.where(bend > 0, bend, np.inf), -1, 1)
        lowest = np.minimum(np.minimum(before, after), here)
        vertex = np.minimum(lowest, here - 0.25 * (before - after) * shift)
        size = (middle + u[:, 0])[:, None] + step[:, None] * (best[:, :, 0] + shift)
        return np.where(np.abs(shift) < 1, vertex, lowest).T, size.T

    def inside(self, size: Floats, t: Floats) -> Floats:
        """[R, T] whether best sizes lie between the smallest and the largest size tried."""
        low, high = (np.interp(t, self.ends[0], end) for end in self.ends[1:])
        edge = 0.51 * (high - low) / (_SIZE_POINTS - 1)
        return (size > low + edge) & (size < high - edge)


def possible(runs: Runs) -> list[str]:
    """The forms that a ladder has enough sizes, budgets and runs for.

    >>> t, x = (axis.ravel() for axis in np.meshgrid([-1.0, 0.0, 1.0], np.linspace(-2, 2, 4)))
    >>> possible(Runs(x, t, x))
    ['quadratic', 'cubic']
    """
    budgets = len(np.unique(runs.t))
    sizes = max(len(np.unique(runs.log_n[runs.t == t])) for t in np.unique(runs.t))
    out = []
    for name, powers in FORMS.items():
        of_u, of_t = (max(power[axis] for power in powers) for axis in (0, 1))
        if sizes > of_u and budgets > of_t and len(runs.y) - len(powers) >= LEFT_OVER:
            out.append(name)
    return out


def fitted(name: str, runs: Runs) -> Surface | None:
    """A form fitted to a ladder's runs; None if they do not determine its parameters."""
    powers, at = FORMS[name], np.unique(runs.t)
    ends = np.array([[t, *_ends(runs.log_n[runs.t == t])] for t in at]).T
    lowest = np.array([runs.y[runs.t == t].min() for t in runs.t])
    spread = np.sqrt(1 + ((runs.y - lowest) / _HIGH) ** 2)
    best = np.array([runs.log_n[runs.t == t][runs.y[runs.t == t].argmin()] for t in at])
    centre = np.polynomial.polynomial.polyfit(at, best, 1)
    for _ in range(_ROUNDS):
        u = runs.log_n - centre[0] - centre[1] * runs.t
        design = np.stack([u**of_u * runs.t**of_t for of_u, of_t in powers], 1) / spread[:, None]
        scale = np.linalg.norm(design, axis=0)
        if np.any(scale == 0) or np.linalg.matrix_rank(design / scale, 1e-7) < len(powers):
            return None
        inverse = np.linalg.pinv(design / scale) / scale[:, None]
        theta = inverse @ (runs.y / spread)
        out = Surface(
            powers, centre, design, inverse / spread, inverse @ np.linalg.qr(design)[0], spread, theta,
            float(((runs.y / spread - design @ theta) ** 2).sum()), ends,
        )  # fmt: skip
        moved = np.polynomial.polynomial.polyfit(at, out.frontier(theta[None], at)[1][0], 1)
        if np.abs(moved - centre).max() < 1e-3:
            break
        centre = moved
    return out


def refitted(surface: Surface, y: Floats, weights: Floats) -> Floats:
    """[P] of the same form, around the same valley, fitted to log losses y [I] that count `weights` [I], none 0."""
    root = np.sqrt(weights)
    design = surface.design * root[:, None]
    scale = np.linalg.norm(design, axis=0)
    return np.linalg.lstsq(design / scale, y / surface.spread * root, rcond=1e-10)[0] / scale


def _ends(log_n: Floats) -> tuple[float, float]:
    return float(log_n.min()), float(log_n.max())
