"""The iso-FLOP curve, loss over size at equal compute: its form is unknown, so several are fitted and averaged.

At each budget log loss is a polynomial in log N. A parabola is symmetric, but the curves of Kaplan's and Chinchilla's
laws are not: if the sizes extend further to one side, a parabola's vertex shifts there. So other forms add cubic,
quartic and quintic terms around the minimum, shared by all budgets, because the five sizes of one budget could not
determine them. All budgets are fitted together.

    average      the forms weighted by exp(-Cp / 2), Mallows' Cp = RSS / s^2 + 2 P with s^2 of the most flexible form
                 (Akaike weights with estimated noise; Burnham & Anderson 2002, sections 2.5 and 4.2)
    replicates   of every form that is not refuted, in equal numbers: among forms that fit equally well the simplest is
                 not the most likely. Each replicate redraws the residuals, then adds the shift of its form's minimum
                 when one size, drawn at random, is left out.

>>> x = np.linspace(-1, 1, 7)
>>> noise = 0.001 * np.random.default_rng(0).normal(size=14)
>>> found = Valleys([x, x + 1], np.split(np.tile(0.1 * x**2 + 0.05 * x**3, 2) + noise, 2))
>>> abs(found.minima).round(2).tolist(), [name for name in found.forms if found.forms[name].refuted]
([0.0, 1.0], ['parabola'])
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Floats = np.ndarray

FORMS = {"parabola": 0, "cubic": 1, "quartic": 2, "quintic": 3}  # terms beyond the parabola
REFUTED = 10.0  # a form whose Cp is this much above the lowest has essentially no support
_DEGREE = 5
_GRID_POINTS = 201
_ROUNDS = 8  # iterations of fitting around the last fit's minimum
_LEAST_NOISE = 1e-7  # lower bound of the noise of log loss, for tables without noise
_LEFT_OVER = 2  # degrees of freedom that a form must leave


@dataclass(frozen=True)
class Form:
    """One form fitted to all budgets. Suffixes: B budget, I run (of all budgets), P parameter, K power of log N.

    Attributes:
      extra: its terms beyond the parabola.
      design: [I, P].
      solve: [P, I], log losses to parameters.
      middles: [B], log N at which the shared terms are centred.
      minima: [B], log N of its minimum.
      cp: Mallows' Cp.
      weight: in the average.
      refuted: True if its Cp is more than `REFUTED` above the lowest.
    """

    extra: int
    design: Floats
    solve: Floats
    middles: Floats
    minima: Floats
    cp: float = math.nan
    weight: float = 1.0
    refuted: bool = False


class Valleys:
    """The forms fitted to the runs of B budgets, and their average.

    Attributes:
      forms: name -> `Form`, those with a minimum within the sizes of every budget and enough degrees of freedom.
      coefficients: [B, K], log loss of the averaged curve in powers of log N - centre.
      centres: [B], mean log N.
      minima: [B], log N of the averaged curve's minimum.
      params: number of parameters of the most flexible form.
    """

    def __init__(self, xs: Sequence[Floats], ys: Sequence[Floats]):
        """Fits the forms.

        Args:
          xs: log N of each budget's runs, with at least four different sizes and a parabola that opens upward, with its
            vertex within them.
          ys: log loss of each.
        """
        self._xs, self._y = [np.asarray(x, np.float64) for x in xs], np.concatenate(ys)
        self._of = np.repeat(np.arange(len(self._xs)), [len(x) for x in self._xs])
        self.centres = np.array([x.mean() for x in self._xs])
        most_sizes = max(len(np.unique(x)) for x in self._xs)
        fitted = {}
        for name, extra in FORMS.items():
            spare = len(self._y) - 3 * len(self._xs) - extra
            possible = not extra or (most_sizes >= 3 + extra and spare >= _LEFT_OVER)
            if possible and (form := self._form(extra)) is not None:
                fitted[name] = form
        self.forms = self._weighted(fitted)
        self.params = max(form.design.shape[1] for form in self.forms.values())
        parts = [form.weight * self._expanded(form, form.solve @ self._y) for form in self.forms.values()]
        self.coefficients = np.sum(parts, 0)[0]
        self.minima = self._lowest(self.coefficients[None])[0]

    def log_loss(self, b: int, log_n: Floats | float) -> Floats:
        """Log loss of the averaged curve of budget b at log N, of any shape."""
        return np.polynomial.polynomial.polyval(log_n - self.centres[b], self.coefficients[b])

    def replicates(self, count: int, seed: int) -> Floats:
        """[count, B] log N of the minimum in each replicate; NaN if there is none within a budget's sizes."""
        rng = np.random.default_rng(seed)
        held = [form for form in self.forms.values() if not form.refuted]
        share = np.arange(count) % len(held)
        out = np.empty((count, len(self._xs)))
        for i, form in enumerate(held):
            mine = np.flatnonzero(share == i)
            fitted = form.design @ (form.solve @ self._y)
            leverage = np.einsum("ip,pi->i", form.design, form.solve)
            residuals = (self._y - fitted) / np.sqrt(np.maximum(1 - leverage, 0.05))
            redrawn = fitted + rng.choice(residuals, size=(len(mine), len(fitted)))
            out[mine] = self._lowest(self._expanded(form, redrawn @ form.solve.T))
            for b in range(len(self._xs)):
                out[mine, b] += rng.choice(self._left_out(form, b), size=len(mine))
        return out

    def _left_out(self, form: Form, b: int) -> Floats:
        """Shift of the form's minimum at budget b when one of its sizes is left out, for each size that can be."""
        x, kept = np.concatenate(self._xs), []
        for size in np.unique(self._xs[b]):
            rows = ~((self._of == b) & (x == size))
            theta, _, rank, _ = np.linalg.lstsq(form.design[rows], self._y[rows], rcond=1e-9)
            if rank == form.design.shape[1]:
                kept.append(theta)
        if not kept:
            return np.zeros(1)
        moved = self._lowest(self._expanded(form, np.array(kept)))[:, b] - form.minima[b]
        return moved[np.isfinite(moved)] if np.isfinite(moved).any() else np.zeros(1)

    def _form(self, extra: int) -> Form | None:
        """The form with its shared terms centred at its own minima; None if it has none within the sizes."""
        middles = self.centres
        for _ in range(_ROUNDS if extra else 1):
            design = self._design(middles, extra)
            if extra and np.linalg.matrix_rank(design, 1e-9 * np.linalg.norm(design, 2)) < design.shape[1]:
                return None
            form = Form(extra, design, np.linalg.pinv(design), middles, middles)
            minima = self._lowest(self._expanded(form, form.solve @ self._y))[0]
            if not np.isfinite(minima).all():
                return None
            form = dataclasses.replace(form, minima=minima)
            if np.abs(minima - middles).max() < 1e-3:
                break
            middles = minima
        return form

    def _weighted(self, fitted: dict[str, Form]) -> dict[str, Form]:
        """The forms with their Cp and weights."""
        rss = {
            name: float(((self._y - form.design @ (form.solve @ self._y)) ** 2).sum()) for name, form in fitted.items()
        }
        most = max(fitted, key=lambda name: fitted[name].extra)
        noise = max(rss[most] / (len(self._y) - fitted[most].design.shape[1]), _LEAST_NOISE**2)
        cp = {name: rss[name] / noise + 2 * form.design.shape[1] for name, form in fitted.items()}
        lowest = min(cp.values())
        weights = {name: math.exp(-0.5 * min(value - lowest, 1e3)) for name, value in cp.items()}
        total = sum(weights.values())
        return {
            name: dataclasses.replace(
                form, cp=cp[name], weight=weights[name] / total, refuted=cp[name] > lowest + REFUTED
            ) for name, form in fitted.items()
        }  # fmt: skip

    def _design(self, middles: Floats, extra: int) -> Floats:
        """[I, P]: three columns for each budget, then one for each shared term."""
        count = len(self._xs)
        x = np.concatenate(self._xs) - middles[self._of]
        out = np.zeros((len(x), 3 * count + extra))
        for power in range(3):
            out[np.arange(len(x)), 3 * self._of + power] = x**power
        for power in range(3, 3 + extra):
            out[:, 3 * count + power - 3] = x**power
        return out

    def _expanded(self, form: Form, theta: Floats) -> Floats:
        """[R, B, K] coefficients in powers of log N - centre, of parameters theta [R, P] (or [P])."""
        theta, count = np.atleast_2d(theta), len(self._xs)
        around = np.zeros((len(theta), count, _DEGREE + 1))
        around[:, :, :3] = theta[:, : 3 * count].reshape(-1, count, 3)
        around[:, :, 3 : 3 + form.extra] = theta[:, None, 3 * count :]
        shift = self.centres - form.middles
        out = np.zeros_like(around)
        for high in range(_DEGREE + 1):
            for low in range(high + 1):
                out[:, :, low] += math.comb(high, low) * around[:, :, high] * shift ** (high - low)
        return out

    def _lowest(self, coefficients: Floats) -> Floats:
        """[R, B] log N of the lowest point of coefficients [R, B, K] within each budget's sizes; NaN at an end."""
        out = np.empty(coefficients.shape[:2])
        for b, x in enumerate(self._xs):
            grid = np.linspace(x.min(), x.max(), _GRID_POINTS) - self.centres[b]
            values = coefficients[:, b] @ (grid[:, None] ** np.arange(_DEGREE + 1)).T
            best = values.argmin(1)
            inner = np.clip(best, 1, _GRID_POINTS - 2)
            before, at, after = (values[np.arange(len(values)), inner + step] for step in (-1, 0, 1))
            shift = np.clip(0.5 * (before - after) / np.maximum(before - 2 * at + after, 1e-300), -1.0, 1.0)
            found = self.centres[b] + grid[inner] + shift * (grid[1] - grid[0])
            out[:, b] = np.where((best == inner) | (np.abs(shift) < 1), found, np.nan)
        return out
