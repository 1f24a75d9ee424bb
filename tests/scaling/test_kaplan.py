"""Kaplan's joint law: found where it was planted, no better than a general minimiser finds it, and told apart."""

import numpy as np
import pytest
from scipy.optimize import minimize

from jaxformer.config import ConfigError
from jaxformer.scaling import fit, kaplan
from jaxformer.scaling.solver import huber
from jaxformer.scaling.table import Table

TRUTH = {"alpha_N": 0.11, "alpha_D": 0.14, "N_c": 5e9, "D_c": 8e9}


def loss_of(n, d):
    ratio = TRUTH["alpha_N"] / TRUTH["alpha_D"]
    return ((TRUTH["N_c"] / n) ** ratio + TRUTH["D_c"] / d) ** TRUTH["alpha_D"]


def planted(seed, noise=0.005):
    """Seven budgets, six sizes each, as a ladder of small models has them."""
    budget, size = (x.ravel() for x in np.meshgrid(np.geomspace(1e12, 1e14, 7), np.geomspace(0.3, 3, 6)))
    n = size * np.sqrt(budget / 6 / 20)
    d = budget / 6 / n
    loss = loss_of(n, d) * np.exp(noise * np.random.default_rng(seed).normal(size=len(n)))
    return Table.of(n=n, d=d, c=budget, loss=loss)


def test_the_planted_law_is_found():
    table = planted(0, noise=0.0)
    found = kaplan.fit(table, fit.Settings(replicates=100))
    for name, value in TRUTH.items():
        assert found[name]["value"] == pytest.approx(value, rel=0.01 if name.startswith("alpha") else 0.1)
    assert found["rms"] < 1e-4
    # The best size of each budget, by trying: it grows as C^a.
    budgets, sizes = np.geomspace(1e14, 1e16, 3), np.geomspace(1e4, 1e12, 100_001)
    best = [sizes[np.argmin(loss_of(sizes, budget / sizes))] for budget in budgets]
    slope = np.log(best[2] / best[0]) / np.log(budgets[2] / budgets[0])
    assert found["a"]["value"] == pytest.approx(slope, rel=0.005)
    assert found["a"]["value"] + found["b"]["value"] == pytest.approx(1)


def test_no_general_minimiser_finds_a_lower_objective():
    table = planted(1)
    theta = kaplan.estimate(table.n, table.d, table.loss, delta=0.002)

    def objective(p):
        ratio, outer = np.exp(p[1]), np.exp(p[3])
        with np.errstate(over="ignore"):
            inner = np.logaddexp(ratio * (p[0] - np.log(table.n)), p[2] - np.log(table.d))
        return huber(np.log(table.loss) - outer * inner, 0.002).sum()

    at = {k: v[0] for k, v in kaplan.natural(theta[None], table.n, table.d).items()}
    ours = objective(
        [np.log(at["N_c"]), np.log(at["alpha_N"] / at["alpha_D"]), np.log(at["D_c"]), np.log(at["alpha_D"])]
    )
    starts = [[np.log(nc), np.log(r), np.log(dc), np.log(a)] for nc in (1e8, 1e11) for dc in (1e8, 1e11)
              for r in (0.5, 1.5) for a in (0.07, 0.3)]  # fmt: skip
    theirs = min(
        minimize(objective, s, method="Nelder-Mead", options={"maxiter": 8000, "maxfev": 8000}).fun for s in starts
    )
    assert ours <= theirs * (1 + 1e-3)


@pytest.mark.slow
def test_95_percent_intervals_cover_the_planted_exponents():
    held = {"alpha_N": 0, "alpha_D": 0}
    for seed in range(100):
        found = kaplan.fit(planted(seed), fit.Settings(replicates=200))
        for name in held:
            low, high = found[name]["ci95"]
            held[name] += low <= TRUTH[name] <= high
    assert all(88 <= count <= 100 for count in held.values()), held


def test_the_held_out_budget_tells_the_laws_apart():
    table = planted(2, noise=0.001)
    held = fit.predict_largest(table, fit.Settings(replicates=100))
    assert held["kaplan"]["mean_abs_error"] < 0.002 < held["mean_abs_error"]
    additive = Table.of(n=table.n, d=table.d, c=table.c, loss=1.7 + 400 * table.n**-0.5 + 300 * table.d**-0.4)
    held = fit.predict_largest(additive, fit.Settings(replicates=100))
    assert held["mean_abs_error"] < 0.0005 < held["kaplan"]["mean_abs_error"]


def test_too_little_is_one_line():
    table = planted(0)
    with pytest.raises(ConfigError, match=r"5 rows; .* needs at least 7"):
        kaplan.fit(table.take(np.arange(5)), fit.Settings())
    same = Table.of(n=table.n, d=np.full(42, 1e9), c=table.c, loss=table.loss)
    with pytest.raises(ConfigError, match=r"1 different D; .* needs at least 3"):
        kaplan.fit(same, fit.Settings())
