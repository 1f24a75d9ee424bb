"""Kaplan's joint law, with and without a floor: found where it was planted, no worse than by a general minimiser."""

import numpy as np
import pytest
from scipy.optimize import minimize

from jaxformer.errors import ConfigError
from jaxformer.scaling import fit, forms, laws
from jaxformer.scaling.solver import huber
from jaxformer.scaling.table import Table

TRUTH = {"alpha_N": 0.11, "alpha_D": 0.14, "N_c": 5e9, "D_c": 8e9}
# Steep and nearly a product, as the hierarchies of `experiments/LOG.md` are.
STEEP = {"E": 1.5, "alpha_N": 1.2, "alpha_D": 1.6, "N_c": 3e5, "D_c": 6e6}


def loss_of(n, d, law=TRUTH):
    ratio = law["alpha_N"] / law["alpha_D"]
    return law.get("E", 0.0) + ((law["N_c"] / n) ** ratio + law["D_c"] / d) ** law["alpha_D"]


def planted(seed, noise=0.005, law=TRUTH):
    """Seven budgets, six sizes each, as a ladder of small models has them."""
    budget, size = (x.ravel() for x in np.meshgrid(np.geomspace(1e12, 1e14, 7), np.geomspace(0.3, 3, 6)))
    n = size * np.sqrt(budget / 6 / 20)
    d = budget / 6 / n
    loss = loss_of(n, d, law) * np.exp(noise * np.random.default_rng(seed).normal(size=len(n)))
    return Table.of(n=n, d=d, c=budget, loss=loss)


def fitted(table, law, replicates=100):
    return fit.fit_with_exponents(law, table, fit.Settings(replicates=replicates))[2]


@pytest.mark.parametrize("floor", [False, True])
def test_the_slopes_are_those_of_the_law(floor):
    rng = np.random.default_rng(0)
    law = forms.joined(rng.normal(size=9), rng.normal(size=9), floor)
    theta = np.concatenate([rng.normal(size=(5, int(floor))), rng.uniform(0.1, 3.0, (5, 4))], axis=1)
    for p, slope in enumerate(law(theta)[1]()):
        step = np.zeros(theta.shape[1])
        step[p] = 1e-6
        between = (law(theta + step)[0] - law(theta - step)[0]) / 2e-6
        np.testing.assert_allclose(slope, between, rtol=1e-6, atol=1e-8)


def test_one_exponent_of_one_is_the_sum_of_the_parameters_and_the_text():
    """With alpha_D = 1 the law is E + (N_c / N)^alpha_N + D_c / D, Chinchilla's with beta = 1."""
    log_n, log_d = np.random.default_rng(1).normal(size=(2, 7))
    theta = np.array([[0.3, -0.2, 0.7, -0.9, 1.0]])
    expected = np.exp(0.3) + np.exp(-0.2 - 0.7 * log_n) + np.exp(-0.9 - log_d)
    np.testing.assert_allclose(np.exp(forms.joined(log_n, log_d, True)(theta)[0][0]), expected, rtol=1e-14)


@pytest.mark.parametrize(("law", "truth"), [(laws.KAPLAN, TRUTH), (laws.KAPLAN_FLOOR, STEEP)])
def test_the_planted_law_is_found(law, truth):
    found = fitted(planted(0, noise=0.0, law=truth), law)
    for name, value in truth.items():
        assert found[name]["value"] == pytest.approx(value, rel=0.1 if name.endswith("_c") else 0.01)
    assert found["rms"] < 1e-4
    # The best size of each budget, by trying: it grows as C^a.
    budgets, sizes = np.geomspace(1e14, 1e16, 3), np.geomspace(1e4, 1e12, 100_001)
    best = [sizes[np.argmin(loss_of(sizes, budget / sizes, {**truth, "E": 0.0}))] for budget in budgets]
    slope = np.log(best[2] / best[0]) / np.log(budgets[2] / budgets[0])
    assert found["a"]["value"] == pytest.approx(slope, rel=0.005)
    assert found["a"]["value"] + found["b"]["value"] == pytest.approx(1)


@pytest.mark.parametrize(("law", "truth"), [(laws.KAPLAN, TRUTH), (laws.KAPLAN_FLOOR, STEEP)])
def test_no_general_minimiser_finds_a_lower_objective(law, truth):
    table = planted(1, law=truth)
    found = laws.estimate(law, [table.n, table.d], table.loss, delta=0.002)

    def objective(p):
        floor, (log_nc, log_dc), (alpha, beta) = np.exp(p[4]) * law.floor, p[:2], np.exp(p[2:4])
        with np.errstate(over="ignore"):
            inner = np.logaddexp(alpha / beta * (log_nc - np.log(table.n)), log_dc - np.log(table.d))
            return huber(np.log(table.loss) - np.log(floor + np.exp(beta * inner)), 0.002).sum()

    starts = [[np.log(truth["N_c"]) + i, np.log(truth["D_c"]) + j, np.log(truth["alpha_N"] * x), np.log(
        truth["alpha_D"] * x), np.log(0.8)] for i in (-1, 1) for j in (-1, 1) for x in (0.7, 1.4)]  # fmt: skip
    limits = {"maxiter": 8000, "maxfev": 8000}
    theirs = min(minimize(objective, start, method="Nelder-Mead", options=limits).fun for start in starts)
    assert found.value <= theirs * (1 + 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("law", "truth"), [(laws.KAPLAN, TRUTH), (laws.KAPLAN_FLOOR, STEEP)])
def test_95_percent_intervals_cover_the_planted_parameters(law, truth):
    held = {name: 0 for name in truth if not name.endswith("_c")}
    for seed in range(60):
        found = fitted(planted(seed, law=truth), law, replicates=200)
        for name in held:
            low, high = found[name]["ci95"]
            held[name] += low <= truth[name] <= high
    assert all(54 <= count <= 59 for count in held.values()), held


@pytest.mark.slow
def test_the_held_out_budget_and_the_fit_tell_the_laws_apart():
    settings = fit.Settings(replicates=100)
    table = planted(2, noise=0.001)
    held = fit.predict_largest(table, settings)
    assert held["kaplan"]["mean_abs_error"] < 0.002 < held["mean_abs_error"]
    table = planted(2, noise=0.001, law=STEEP)
    found = fit.fit_table(table, settings)
    assert found["fits_best"] == "kaplan_floor"
    low, high = found["kaplan_floor"]["E"]["ci95"]
    assert low < STEEP["E"] < high < 1.01 * low
    assert found["holdout"]["kaplan_floor"]["mean_abs_error"] < 0.002 < found["holdout"]["mean_abs_error"]
    assert found["holdout"]["fits_best"] == "kaplan_floor"
    additive = Table.of(n=table.n, d=table.d, c=table.c, loss=1.7 + 400 * table.n**-0.5 + 300 * table.d**-0.4)
    found = fit.fit_table(additive, settings)
    assert found["fits_best"] == "parametric"
    assert found["holdout"]["mean_abs_error"] < 0.0005 < found["holdout"]["kaplan"]["mean_abs_error"]


@pytest.mark.parametrize(("law", "needed"), [(laws.KAPLAN, 7), (laws.KAPLAN_FLOOR, 8)])
def test_too_little_is_one_line(law, needed):
    table = planted(0)
    with pytest.raises(ConfigError, match=rf"5 rows; .* needs at least {needed}"):
        fitted(table.take(np.arange(5)), law)
    same = Table.of(n=table.n, d=np.full(42, 1e9), c=table.c, loss=table.loss)
    with pytest.raises(ConfigError, match=r"1 different D; .* needs at least 3"):
        fitted(same, law)
