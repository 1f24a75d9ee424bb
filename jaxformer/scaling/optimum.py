"""Compute-optimal size N and tokens D at C FLOPs, under a fitted law.

With the usual C = 6 N D there is a closed form: N = G (C/6)^a, D = (C/6)^b / G with a = beta / (alpha + beta),
b = alpha / (alpha + beta), G = (alpha A / (beta B))^(1 / (alpha + beta)) (Hoffmann et al. 2022, equation 4). In a table
that counts FLOPs exactly (attention and head included), C / (N D) varies with N; then FLOPs per token are interpolated
over log N and the minimum is searched along the budget.

>>> law = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}
>>> best = allocate({name: np.array([value]) for name, value in law.items()}, 5.76e23, Price.constant(6.0))
>>> f"{best['N'][0]:.1e} {best['D'][0]:.1e} {best['loss'][0]:.3f}"
'3.2e+10 3.0e+12 1.931'
"""

from dataclasses import dataclass

import numpy as np

from jaxformer.scaling.table import Floats, Table

_GRID_POINTS = 1200
_MOST_LOG = 200.0


@dataclass(frozen=True)
class Price:
    """FLOPs per training token as a function of N.

    Attributes:
      log_n, log_flops: [K] interpolation points, N ascending; a single one means `flops = constant * N`.
    """

    log_n: Floats
    log_flops: Floats

    @classmethod
    def constant(cls, flops_constant: float) -> "Price":
        """C = flops_constant * N * D."""
        return cls(np.zeros(1), np.log([flops_constant]))

    @classmethod
    def of(cls, table: Table) -> "Price":
        """The price in a table's own N, D and C; constant if C / (N D) varies by less than 1 %."""
        ratio, sizes = np.log(table.c / (table.n * table.d)), np.unique(table.n)
        if table.derived or np.ptp(ratio) < 0.01 or len(sizes) == 1:
            return cls.constant(float(np.exp(np.median(ratio))))
        return cls(np.log(sizes), np.array([np.median(np.log(table.c / table.d)[table.n == size]) for size in sizes]))

    @property
    def is_constant(self) -> bool:
        """True if C is a constant times N times D."""
        return len(self.log_n) == 1

    def per_token(self, log_n: Floats) -> Floats:
        """log FLOPs per token; extrapolates with the slope of the last two points."""
        if self.is_constant:
            return self.log_flops[0] + (log_n - self.log_n[0])
        slopes = np.diff(self.log_flops) / np.diff(self.log_n)
        inside = np.interp(log_n, self.log_n, self.log_flops)
        below = np.minimum(log_n - self.log_n[0], 0.0) * slopes[0]
        above = np.maximum(log_n - self.log_n[-1], 0.0) * slopes[-1]
        return inside + below + above


def allocate(law: dict[str, Floats], budget: float, price: Price) -> dict[str, Floats]:
    """Compute-optimal N, D, loss and tokens per parameter at `budget` FLOPs.

    Args:
      law: A, alpha, B, beta of the sum, or N_c, alpha_N, D_c, alpha_D of Kaplan's law, [R] each, and E if it has one.

    Returns:
      "N", "D", "loss", "D/N", [R] each.
    """
    # The law is E + (a / N^alpha + b / D^beta)^power.
    if "N_c" in law:
        power, alpha, beta = law["alpha_D"], law["alpha_N"] / law["alpha_D"], np.ones_like(law["alpha_D"])
        log_a, log_b = alpha * np.log(law["N_c"]), np.log(law["D_c"])
    else:
        power, alpha, beta = np.ones(1), law["alpha"], law["beta"]
        log_a, log_b = np.log(law["A"]), np.log(law["B"])
    if price.is_constant:
        spent = np.log(budget) - price.log_flops[0]
        log_n = (np.log(alpha / beta) + log_a - log_b + beta * spent) / (alpha + beta)
    else:
        log_n = _search((log_a, alpha, log_b, beta), budget, price)
    log_n = np.clip(log_n, -_MOST_LOG, _MOST_LOG)  # for exponents at their bound, N can be anything
    log_d = np.log(budget) - price.per_token(log_n)
    loss = law.get("E", 0.0) + np.exp(power * np.logaddexp(log_a - alpha * log_n, log_b - beta * log_d))
    return {"N": np.exp(log_n), "D": np.exp(log_d), "loss": loss, "D/N": np.exp(log_d - log_n)}


def exponents(alpha: Floats, beta: Floats) -> dict[str, Floats]:
    """a and b of N ~ C^a, D ~ C^b with C proportional to N D, from the exponents of N and of D, [R] each.

    They are the same for Chinchilla's sum and Kaplan's law: at the optimum the two terms have a constant ratio.
    """
    total = alpha + beta
    return {"a": beta / total, "b": alpha / total}


def _search(terms: tuple[Floats, Floats, Floats, Floats], budget: float, price: Price) -> Floats:
    """log N of the lowest loss on a grid along the budget, refined by a parabola through the three lowest points."""
    low = price.log_n[0] - 12.0
    grid = np.linspace(low, max(price.log_n[-1], np.log(budget) / 2) + 12.0, _GRID_POINTS)
    log_d = np.log(budget) - price.per_token(grid)
    out = np.empty(len(terms[0]))
    for i, (log_a, alpha, log_b, beta) in enumerate(zip(*terms, strict=True)):
        total = np.logaddexp(log_a - alpha * grid, log_b - beta * log_d)
        best = int(np.clip(total.argmin(), 1, len(grid) - 2))
        before, at, after = total[best - 1 : best + 2]
        bend = before - 2 * at + after
        shift = 0.5 * (before - after) / bend if bend > 0 else 0.0
        out[i] = grid[best] + shift * (grid[1] - grid[0])
    return out
