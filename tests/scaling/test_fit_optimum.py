"""Chinchilla's first two approaches, and the split of a budget under the third."""

import numpy as np
import pytest
from planted import TRUTH, grid, iso_flop, loss_of, noisy
from scipy import optimize

from jaxformer.errors import ConfigError
from jaxformer.scaling import fit, isoflop, optimum
from jaxformer.scaling.table import Table

LAW = {name: np.array([value]) for name, value in TRUTH.items()}


def searched(budget, flops_per_token):
    """log N of the lowest loss along a budget, by scipy."""

    def along(log_n):
        return loss_of(np.exp(log_n), budget / flops_per_token(np.exp(log_n)))

    return optimize.minimize_scalar(along, bounds=(5, 35), method="bounded", options={"xatol": 1e-10}).x


@pytest.mark.parametrize("budget", [1e15, 1e20, 5.76e23])
def test_the_closed_form_is_the_lowest_loss_along_the_budget(budget):
    best = optimum.allocate(LAW, budget, optimum.Price.constant(6.0))
    assert np.log(best["N"][0]) == pytest.approx(searched(budget, lambda n: 6 * n), abs=1e-5)
    assert 6 * best["N"][0] * best["D"][0] == pytest.approx(budget)
    assert best["loss"][0] == pytest.approx(loss_of(best["N"][0], best["D"][0]))
    assert best["D/N"][0] == pytest.approx(best["D"][0] / best["N"][0])


def test_exponents_sum_to_one_and_are_the_slopes_of_the_closed_form():
    slopes = optimum.exponents(LAW["alpha"], LAW["beta"])
    assert slopes["a"][0] + slopes["b"][0] == pytest.approx(1)
    low, high = (optimum.allocate(LAW, budget, optimum.Price.constant(6.0)) for budget in (1e18, 1e22))
    assert np.log(high["N"][0] / low["N"][0]) / np.log(1e4) == pytest.approx(slopes["a"][0])
    assert np.log(high["D"][0] / low["D"][0]) / np.log(1e4) == pytest.approx(slopes["b"][0])


def test_exact_flops_move_the_optimum_to_where_a_search_finds_it():
    sizes = np.geomspace(1e6, 1e10, 30)

    def flops(n):
        return 6 * n + 4000 * n**0.55  # attention and head weigh more in small models

    n, d = (axis.ravel() for axis in np.meshgrid(sizes, np.geomspace(1e8, 1e11, 4)))
    price = optimum.Price.of(Table.of(n=n, d=d, c=flops(n) * d, loss=loss_of(n, d)))
    assert not price.is_constant
    for budget in (1e16, 1e18, 1e20):
        best = optimum.allocate(LAW, budget, price)
        assert np.log(best["N"][0]) == pytest.approx(searched(budget, flops), abs=0.03)
        assert np.exp(price.per_token(np.log(best["N"]))) * best["D"] == pytest.approx(budget)


def test_given_flops_of_6nd_are_the_constant_price():
    n, d = grid()
    price = optimum.Price.of(Table.of(n=n, d=d, c=6 * n * d, loss=loss_of(n, d)))
    assert price.is_constant and np.exp(price.log_flops[0]) == pytest.approx(6)


@pytest.mark.slow
def test_three_approaches_agree_on_a_planted_law():
    rng = np.random.default_rng(0)
    n, d = iso_flop(sizes=15, budgets=9, reach=4.0)
    table = Table.of(n=n, d=d, loss=noisy(rng, n, d, noise=0.001))
    result = fit.fit_table(table, fit.Settings(replicates=100, holdout=0))
    truth = TRUTH["beta"] / (TRUTH["alpha"] + TRUTH["beta"])
    for part, off in (("optimal", 0.01), ("isoflop", 0.02), ("envelope", 0.06)):
        low, high = result[part]["a"]["ci95"]
        assert abs(result[part]["a"]["value"] - truth) < off and low - off < truth < high + off, part
        assert result[part]["a"]["value"] + result[part]["b"]["value"] == pytest.approx(1)
    for budget in result["isoflop"]["budgets"]:
        best = optimum.allocate(LAW, budget["C"], optimum.Price.constant(6.0))
        assert budget["N"] == pytest.approx(best["N"][0], rel=0.15)
        assert budget["N_ci95"][0] < budget["N"] < budget["N_ci95"][1]
        assert budget["loss"] == pytest.approx(best["loss"][0], rel=0.005)


@pytest.mark.slow
def test_intervals_of_the_parabolas_cover_the_vertices_of_planted_parabolas():
    c = np.repeat(np.geomspace(1e17, 1e19, 6), 7)
    best = (c / 120) ** 0.52 * 3
    n = best * np.tile(np.geomspace(0.2, 5, 7), 6)
    rng, hits = np.random.default_rng(0), 0
    for seed in range(200):
        loss = (3 * (c / 1e17) ** -0.05 + 0.06 * np.log(n / best) ** 2) * np.exp(0.005 * rng.standard_normal(len(c)))
        low, high = isoflop.minima(Table.of(n=n, c=c, loss=loss), replicates=500, seed=seed)["a"]["ci95"]
        hits += low <= 0.52 <= high
    assert 180 <= hits <= 199, hits


def curved(c, offset, curvature):
    """Losses of five sizes at each budget, around an optimum `offset` times where the sizes are centred."""
    n = np.sqrt(c / 120) * np.tile(np.geomspace(0.25, 4, 5), len(c) // 5)
    return Table.of(n=n, c=c, loss=3 + curvature * np.log(n / np.sqrt(c / 120) / offset) ** 2)


def test_parabolas_that_all_open_downward_are_one_clear_line():
    table = curved(np.repeat([1e15, 2e15, 4e15], 5), np.ones(15), -0.1)
    with pytest.raises(isoflop.NoMinimumError, match=r"budget 1e\+15 FLOPs: the parabola .* opens downward") as error:
        isoflop.minima(table)
    assert "\n" not in str(error.value)
    with pytest.raises(isoflop.NoMinimumError):  # and nothing else is fitted to them either
        fit.fit_table(table)


def test_one_bad_budget_is_left_out_and_named():
    c = np.repeat([1e15, 2e15, 4e15, 8e15, 1.6e16], 5)
    found = isoflop.minima(curved(c, np.where(c == 8e15, 30.0, 1.0), np.where(c == 2e15, -0.1, 0.1)), replicates=100)
    assert [budget["C"] for budget in found["budgets"]] == [1e15, 4e15, 1.6e16]
    assert len(found["left_out"]) == 2 and "opens downward" in found["left_out"][0]
    assert "lies outside the sizes tried; add larger ones" in found["left_out"][1]
    assert found["a"]["value"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "c, says",
    [
        (np.repeat([1e15, 2e15], 5), "2 of 2 budgets have a minimum .* needs at least 3"),
        (np.geomspace(1e15, 1e17, 40), "do not fall into groups within 5%"),
    ],
)
def test_too_few_budgets_say_how_many_are_needed(c, says):
    with pytest.raises(ConfigError, match=says):
        isoflop.minima(curved(c, np.ones(len(c)), 0.1))
    with pytest.raises(ConfigError, match="3 different sizes; a parabola needs at least 4"):
        isoflop.opens_upward(np.log([1e6, 2e6, 4e6]), np.array([3.0, 2.9, 3.0]), "budget 1e15")


def test_the_envelope_leaves_out_budgets_won_by_the_edge_of_their_sizes():
    c = np.repeat([1e15, 2e15, 4e15, 8e15], 5)
    table = curved(c, np.where(c == 8e15, 30.0, 1.0), 0.1)
    found = isoflop.envelope(table, replicates=100)
    assert [budget["C"] for budget in found["budgets"]] == [1e15, 2e15, 4e15] and found["note"] is None


def test_budgets_group_only_where_they_are_meant_to():
    jitter = np.exp(0.01 * np.random.default_rng(0).standard_normal(20))
    groups = isoflop.budget_groups(np.repeat([1e15, 2e15, 4e15, 8e15], 5) * jitter)
    assert [sorted(group.tolist()) for group in groups] == [list(range(5 * k, 5 * k + 5)) for k in range(4)]
    n, d = grid()
    assert isoflop.budget_groups(6 * n * d) == []


@pytest.mark.slow
def test_exponents_at_their_bound_pin_no_optimum():
    """Equal losses have no best size: what exponents that ran to their bound say of it is that bound."""
    n, d = iso_flop()
    found = fit.fit_table(Table.of(n=n, d=d, loss=np.full(len(n), 3.0)), fit.Settings(replicates=100, holdout=0))
    for law in fit.LAWS:
        assert found[law]["a"]["value"] is None and found[law]["b"]["value"] is None
    for row in found["optimal"]["budgets"]:
        assert all(row[key]["value"] is None for key in ("N", "D", "D/N"))
        assert "0.005 or 5.0" in row["N"]["why"] and row["loss"]["value"] == pytest.approx(3.0)
