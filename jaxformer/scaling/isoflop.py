"""Chinchilla's first two approaches: the envelope of all runs, and a curve through each budget's runs.

Both take the compute-optimal size directly from the measured losses and then fit N ~ C^a, D ~ C^b. Neither needs a law
L(N, D); both see only the sizes that were tried. Chinchilla's curve is a parabola in log N, symmetric unlike the true
curve; here `valley` averages it with asymmetric forms.

>>> c = np.repeat([1e15, 2e15, 4e15], 5)
>>> n = np.sqrt(c / 120) * np.tile([0.25, 0.5, 1, 2, 4], 3)
>>> found = minima(Table.of(n=n, c=c, loss=2 + 0.05 * np.log(n / np.sqrt(c / 120)) ** 2))
>>> round(found["a"]["value"], 3), [round(budget["D/N"], 1) for budget in found["budgets"]]
(0.5, [20.0, 20.0, 20.0])
"""

from typing import Any

import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.scaling import bootstrap
from jaxformer.scaling.optimum import Price
from jaxformer.scaling.table import Floats, Table
from jaxformer.scaling.valley import Valleys

SIZES, BUDGETS = 4, 3  # fewest sizes at a budget, and fewest such budgets
_EQUAL = 1e-9


class NoMinimumError(ConfigError):
    """The parabola opens downward: these losses have no optimum."""


def budget_groups(c: Floats, tolerance: float = 0.05) -> list[Floats]:
    """Rows with the same budget: indices per group, ascending in C; [] if the budgets do not form groups.

    Sorted budgets closer than `tolerance` form a group. There are no groups if one is wider than three tolerances (the
    budgets are continuous), or if fewer than half of the rows are in groups of three or more (equality by chance).

    >>> [group.tolist() for group in budget_groups(np.array([1e15, 4e15, 1.01e15, 4.1e15, 1e15, 4e15]))]
    [[0, 4, 2], [1, 5, 3]]
    >>> budget_groups(np.geomspace(1.0, 10.0, 200))
    []
    """
    order = np.argsort(c, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(np.log(c[order])) > tolerance) + 1)
    if any(np.ptp(np.log(c[group])) > 3 * tolerance for group in groups):
        return []
    return groups if sum(len(group) for group in groups if len(group) >= 3) >= 0.5 * len(c) else []


def lowest(x: Floats, loss: Floats) -> Floats:
    """The Pareto frontier: rows such that no other row of the same or smaller x has a lower loss. Ascending in x.

    >>> lowest(np.array([1.0, 2.0, 2.0, 4.0]), np.array([3.0, 2.5, 2.0, 2.2])).tolist()
    [0, 2]
    """
    order = np.lexsort((loss, x))
    best = np.minimum.accumulate(loss[order])
    first = np.concatenate([[True], loss[order][1:] < best[:-1]])
    return order[first]


def opens_upward(log_n: Floats, loss: Floats, where: str) -> Floats:
    """Coefficients [c0, c1, c2] of the least-squares parabola c0 + c1 x + c2 x^2 in x = log N.

    Raises:
      ConfigError: fewer than four different sizes, or equal losses.
      NoMinimumError: the parabola opens downward.
    """
    if (sizes := len(np.unique(log_n))) < SIZES:
        raise ConfigError(f"{where}: {sizes} different size{'s' * (sizes != 1)}; a parabola needs at least {SIZES}")
    if np.ptp(loss) < _EQUAL:
        raise ConfigError(f"{where}: all of its losses are equal, so it has no minimum")
    coefficients = np.polynomial.polynomial.polyfit(log_n, loss, 2)
    if not coefficients[2] > 0:
        raise NoMinimumError(f"{where}: the parabola through its {len(loss)} runs opens downward, so it has no minimum")
    return coefficients


def minima(
    table: Table, tolerance: float = 0.05, replicates: int = 1000, seed: int = 0, price: Price | None = None
) -> dict[str, Any]:
    """Approach 2: the minimum of a curve through each budget's runs (`valley`), then power laws through the minima.

    Rows are not resampled, because the design is small and not random. The intervals include the noise, the uncertainty
    about the curve's form, and the effect of leaving out one size. `experiments.coverage` measures their coverage.

    Returns:
      {"budgets": [{"C", "N", "D", "D/N", "loss", "N_ci95", "log_loss", "centre", "rows"}], "a", "b",
      "forms": name -> {"N" at each budget, "cp", "weight", "refuted"}, "left_out": [lines]};
      log loss = sum_k log_loss[k] x^k at x = log N - centre.

    Raises:
      ConfigError: no groups of equal budgets, or fewer than 3 budgets with a minimum within the sizes tried.
      NoMinimumError: the parabola of every budget opens downward.
    """
    groups = budget_groups(table.c, tolerance)
    if not groups:
        raise ConfigError(f"{table.source}: the budgets do not fall into groups within {100 * tolerance:g}%; "
                          "iso-FLOP curves need runs of several sizes at the same C")  # fmt: skip
    price = price or Price.of(table)
    kept, left_out, downward = [], [], 0
    for group in groups:
        budget = float(np.median(table.c[group]))
        where = f"budget {budget:.3g} FLOPs"
        log_n, loss = np.log(table.n[group]), np.log(table.loss[group])
        centre = float(log_n.mean())
        try:
            coefficients = opens_upward(log_n - centre, loss, where)
            vertex = centre - 0.5 * coefficients[1] / coefficients[2]
            if not log_n.min() < vertex < log_n.max():
                side = "smaller" if vertex <= log_n.min() else "larger"
                raise ConfigError(f"{where}: its minimum lies outside the sizes tried; add {side} ones")
            kept.append((budget, group))
        except ConfigError as error:
            left_out.append(str(error))
            downward += isinstance(error, NoMinimumError)
    if len(kept) < BUDGETS:
        others = f" (and {len(left_out) - 1} more left out)" if len(left_out) > 1 else ""
        if downward == len(groups):
            raise NoMinimumError(f"{table.source}: {left_out[0]}{'; so do those of the others' * (downward > 1)}")
        raise ConfigError(
            f"{table.source}: {len(kept)} of {len(groups)} budgets have a minimum inside the sizes tried; approach 2 "
            f"needs at least {BUDGETS}" + (f"; {left_out[0]}{others}" if left_out else "")
        )
    found = Valleys(*zip(*((np.log(table.n[group]), np.log(table.loss[group])) for _, group in kept), strict=True))
    drawn = found.replicates(replicates, seed)
    levels = bootstrap.tails(sum(len(group) for _, group in kept), found.params)
    budgets = []
    for b, (budget, group) in enumerate(kept):
        best, inside = found.minima[b], drawn[np.isfinite(drawn[:, b]), b]
        tokens = float(np.log(budget) - price.per_token(best))
        ends = np.exp(np.quantile(inside, levels)) if len(inside) else (np.nan, np.nan)
        budgets.append({
            "C": budget, "N": float(np.exp(best)), "D": float(np.exp(tokens)), "D/N": float(np.exp(tokens - best)),
            "loss": float(np.exp(found.log_loss(b, best))), "N_ci95": [float(end) for end in ends],
            "log_loss": found.coefficients[b].tolist(), "centre": float(found.centres[b]),
            "rows": [int(row) for row in table.rows[group]],
        })  # fmt: skip
    log_c = np.log([budget for budget, _ in kept])
    values, spread = _exponents(log_c, found.minima, price), _exponents(log_c, drawn, price)
    exponents = {
        key: bootstrap.quantity(float(value), replicated, levels=levels, max_width=0.5)
        for key, value, replicated in zip("ab", values, spread, strict=True)
    }
    return {
        "budgets": budgets,
        **exponents,
        "forms": {
            name: {"N": np.exp(form.minima).tolist(), "cp": form.cp, "weight": form.weight, "refuted": form.refuted}
            for name, form in found.forms.items()
        },
        "left_out": left_out,
    }


def envelope(
    table: Table, tolerance: float = 0.05, replicates: int = 1000, seed: int = 0, price: Price | None = None
) -> dict[str, Any]:
    """Approach 1: the run of lowest loss at each budget (without groups: the runs on the frontier), then power laws.

    A budget at which its smallest or largest size has the lowest loss is left out: its optimum may lie outside.

    Intervals come from resampling rows and recomputing the envelope. They include that another size might have had the
    lowest loss, but not the sizes between those tried.

    Returns:
      {"budgets": [{"C", "N", "D", "D/N", "loss", "rows"}], "a", "b", "note": a line or None}.

    Raises:
      ConfigError: fewer than three runs on the envelope, or all of one size.
    """
    price = price or Price.of(table)
    groups = budget_groups(table.c, tolerance)
    budget_of, inner = table.c.copy(), np.ones(len(table), bool)
    for group in groups:
        budget_of[group] = np.median(table.c[group])
        inner[group] = (table.n[group] > table.n[group].min()) & (table.n[group] < table.n[group].max())

    def winners(present: Floats) -> Floats:
        if not groups:
            return present[lowest(budget_of[present], table.loss[present])]
        order = present[np.lexsort((table.loss[present], budget_of[present]))]
        first = order[np.concatenate([[True], np.diff(budget_of[order]) > 0])]
        return first[inner[first]]

    best = winners(np.arange(len(table)))
    if len(best) < BUDGETS:
        raise ConfigError(
            f"{table.source}: at {len(best)} budgets a size between others won; approach 1 needs at least {BUDGETS}"
        )
    if len(np.unique(table.n[best])) < 2:
        raise ConfigError(f"{table.source}: every run on the envelope has N = {table.n[best[0]]:.4g}; "
                          "approach 1 needs budgets at which different sizes win")  # fmt: skip
    counts = bootstrap.weights(len(table), replicates, seed=seed, clusters=table.clusters, resampling="rows")
    a, b = np.full(replicates, np.nan), np.full(replicates, np.nan)
    log_n, log_c = np.log(table.n), np.log(budget_of)
    for r in range(replicates):
        chosen = winners(np.flatnonzero(counts[r]))
        if len(chosen) > 1:
            a[r], b[r] = _exponents(log_c[chosen], log_n[chosen], price)
    best_a, best_b = _exponents(log_c[best], log_n[best], price)
    note = "without runs of equal C the envelope follows the edges of the grid of sizes and tokens"
    return {
        "budgets": [
            {"C": float(budget_of[i]), "N": float(table.n[i]), "D": float(table.d[i]), "loss": float(table.loss[i]),
             "D/N": float(table.d[i] / table.n[i]), "rows": [int(table.rows[i])]} for i in best
        ],
        "a": bootstrap.quantity(float(best_a), a, max_width=0.5),
        "b": bootstrap.quantity(float(best_b), b, max_width=0.5),
        "note": None if groups else note,
    }  # fmt: skip


def _exponents(log_c: Floats, log_n: Floats, price: Price) -> tuple[Floats, Floats]:
    """Least-squares slopes of log N and of log D over log C; log_n: [..., budgets]."""
    x = log_c - log_c.mean()
    log_d = log_c - price.per_token(log_n)
    return log_n @ x / (x @ x), log_d @ x / (x @ x)
