"""Intervals: they cover planted truths as often as they say, and admit when the data know nothing."""

import re

import numpy as np
import pytest
from planted import TRUTH, grid, iso_flop, loss_of, noisy, scattered

from jaxformer.errors import ConfigError
from jaxformer.scaling import bootstrap, fit, law_fit, laws
from jaxformer.scaling.profile import Profile
from jaxformer.scaling.table import Table

CHINCHILLA = laws.Law(("N", "D"))


def covered(tables, design, replicates, **changes):
    """How often the 95 % interval of each parameter holds the truth."""
    law = {**TRUTH, **changes}
    rng = np.random.default_rng(20)
    hits = dict.fromkeys([*TRUTH, "profile"], 0)
    for seed in range(tables):
        n, d = design(rng)
        table = Table.of(n=n, d=d, loss=noisy(rng, n, d, law=law))
        parameters = fit.fit_law(CHINCHILLA, table, fit.Settings(replicates=replicates, seed=seed))[2]
        for name, value in law.items():
            low, high = parameters[name]["ci95"]
            hits[name] += low <= value <= high
        low, high = parameters["profile"]["ci95"]
        hits["profile"] += low <= law["E"] <= high
    return hits


@pytest.mark.slow
@pytest.mark.parametrize(
    "design, tables, replicates, changes",
    [
        (lambda rng: grid(), 200, 600, {}),
        (lambda rng: iso_flop(sizes=5, budgets=6), 60, 300, {}),
        (lambda rng: scattered(rng), 60, 300, {}),
        (
            lambda rng: iso_flop(sizes=7, budgets=7),
            60,
            300,
            {"E": 1.2, "A": 60.0, "alpha": 0.25, "B": 900.0, "beta": 0.32},
        ),
    ],
    ids=["6 sizes x 8 token counts", "6 budgets x 5 sizes", "240 rows", "another law"],
)
def test_95_percent_intervals_cover_the_truth_in_90_to_99_percent_of_the_tables(design, tables, replicates, changes):
    """Of 400 further grids 96.9 % held beta and 97.3 % alpha: at 100 tables one in twenty would hold all of them."""
    hits = covered(tables, design, replicates, **changes)
    for name in ("alpha", "beta"):
        assert 0.90 <= hits[name] / tables <= 0.99, hits
    for name in ("E", "A", "B", "profile"):  # asked of alpha and beta; the others are held to one side
        assert hits[name] / tables >= 0.88, hits


@pytest.mark.slow
def test_intervals_cover_the_truth_in_most_of_a_few_tables():
    hits = covered(12, lambda rng: iso_flop(sizes=6, budgets=6), replicates=200)
    assert min(hits.values()) >= 9, hits


@pytest.mark.slow
def test_an_error_that_all_losses_share_is_in_the_interval_of_the_floor_alone():
    """As of the held-out rows that all were measured on: 12 tables, each moved as a whole. Without being told of it the
    intervals of E are too narrow; those of the exponents do not change."""
    rng = np.random.default_rng(5)
    held = {0.0: 0, 0.02: 0}
    for seed in range(12):
        n, d = iso_flop(sizes=6, budgets=6)
        loss = noisy(rng, n, d, noise=0.0005) + 0.02 * rng.standard_normal()
        found = []
        for common in held:
            table = Table.of(n=n, d=d, loss=loss, common_error=common)
            found.append(fit.fit_law(CHINCHILLA, table, fit.Settings(replicates=200, seed=seed))[2])
            low, high = found[-1]["E"]["ci95"]
            held[common] += low <= TRUTH["E"] <= high
        assert found[0]["alpha"] == found[1]["alpha"] and found[0]["beta"] == found[1]["beta"]
    assert held[0.02] >= 10 and held[0.0] <= 7, held


@pytest.mark.slow
def test_an_interval_narrows_as_the_root_of_the_rows():
    rng = np.random.default_rng(0)
    widths = []
    for sizes in (5, 20):
        spread = []
        for seed in range(4):
            n, d = iso_flop(sizes=sizes)
            table = Table.of(n=n, d=d, loss=noisy(rng, n, d))
            low, high = fit.fit_law(CHINCHILLA, table, fit.Settings(replicates=200, seed=seed))[2]["alpha"]["ci95"]
            spread.append(high - low)
        widths.append(np.median(spread))
    assert 1.5 < widths[0] / widths[1] < 2.9


@pytest.mark.slow
def test_resampling_of_clusters_sees_noise_that_rows_share():
    rng = np.random.default_rng(1)
    n, d = np.repeat(grid(sizes=4, tokens=5), 4, axis=1)
    shared = np.repeat(0.005 * rng.standard_normal(20), 4)  # four copies of each run, the same luck
    loss = loss_of(n, d) * np.exp(shared)
    labels = np.repeat(np.arange(20), 4)
    wide, narrow = (
        fit.fit_law(CHINCHILLA, Table.of(n=n, d=d, loss=loss, clusters=c), fit.Settings(replicates=300))[2]["beta"][
            "ci95"
        ]
        for c in (labels, None)
    )
    assert wide[1] - wide[0] > 1.4 * (narrow[1] - narrow[0])


def test_weights_of_a_cluster_are_equal_and_sum_to_the_rows():
    drawn = bootstrap.weights(6, 50, seed=0, clusters=["a", "a", "b", "b", "c", "c"])
    assert (drawn[:, 0::2] == drawn[:, 1::2]).all() and np.allclose(drawn.sum(1), 6)
    counts = bootstrap.weights(9, 50, seed=0, resampling="rows")
    assert (counts == counts.round()).all() and (counts.sum(1) == 9).all()
    with pytest.raises(ConfigError, match="2 different labels"):
        bootstrap.weights(4, 10, seed=0, clusters=["a", "a", "b", "b"])


@pytest.mark.slow
def test_data_that_cannot_pin_a_parameter_give_a_reason_instead_of_a_number():
    rng = np.random.default_rng(2)
    n, d = grid()
    table = Table.of(n=n * 1e4, d=d, loss=1.8 + 0 * n + noisy(rng, n, d, law={**TRUTH, "E": 0.0, "A": 1e-9}))
    result = fit.fit_table(table, fit.Settings(replicates=100, holdout=0))
    for name in ("A", "alpha"):
        assert result["parametric"][name]["value"] is None and result["parametric"][name]["why"], name
    low, high = result["parametric"]["beta"]["ci95"]
    assert low < TRUTH["beta"] < high and result["parametric"]["beta"]["value"] is not None
    assert result["optimal"]["budgets"][0]["N"]["value"] is None


@pytest.mark.slow
def test_an_irreducible_loss_of_zero_is_not_reported_as_one():
    rng = np.random.default_rng(3)
    n = np.geomspace(1e6, 1e9, 12)

    def parameters(floor):
        table = Table.of(n=n, loss=20 * n**-0.1 * np.exp(0.005 * rng.standard_normal(12)))
        return fit.fit_law(laws.Law(("N",), floor), table, fit.Settings())[2]

    found = parameters(floor=True)
    assert found["E"]["value"] is None and ("zero" in found["E"]["why"] or "factor" in found["E"]["why"])
    bare = parameters(floor=False)
    assert bare["alpha"]["value"] == pytest.approx(0.1, rel=0.03)


@pytest.mark.parametrize(
    "replicates, kwargs, why",
    [
        (np.geomspace(0.1, 1, 500), {"max_ratio": 3.0}, "wider than a factor of 3"),
        (np.linspace(0.1, 0.9, 500), {"max_width": 0.5}, "wider than 0.5"),
        (np.r_[np.full(100, np.nan), np.ones(400)], {}, "20% of the bootstrap replicates have none"),
        (np.linspace(1, 1.1, 500), {"at_bound": np.arange(500) < 50, "bound": "alpha = 5"}, "10% .* end at alpha = 5"),
        (np.linspace(1, 1.1, 500), {"doubt": "its profile is flat"}, "its profile is flat"),
        (np.r_[np.linspace(1, 1.1, 200), np.linspace(1.6, 1.7, 300)], {"max_ratio": 3.0}, "two groups, around 1"),
    ],
)
def test_verdicts(replicates, kwargs, why):
    found = bootstrap.quantity(0.5, replicates, **kwargs)
    assert found["value"] is None and re.search(why, found["why"]) and found["estimate"] == 0.5
    sound = bootstrap.quantity(1.0, np.random.default_rng(0).normal(1.0, 0.01, 500), max_ratio=3.0)
    assert sound["value"] == 1.0 and sound["stderr"] == pytest.approx(0.01, rel=0.15)


def test_two_peaks_are_not_seen_in_one():
    rng = np.random.default_rng(0)
    shapes = [rng.normal(size=1000), rng.exponential(size=1000), rng.uniform(size=1000), rng.standard_t(2, size=1000)]
    shallow = np.concatenate([rng.normal(size=4000), rng.normal(2.7, 1.0, 4000)])  # a valley of 0.8 of its hills
    assert [bootstrap.two_peaks(shape) for shape in [*shapes, shallow]] == [None] * 5


def test_a_flat_profile_of_the_floor_is_a_doubt_about_it_and_about_what_it_drags_along():
    n = np.geomspace(1e6, 1e9, 12)
    found = laws.estimate(laws.Law(("N",)), [n], 1.8 + 480 * n**-0.35)
    theta = np.repeat(found.theta[None], 4, 0)
    theta[:, 2] = [0.1, 0.2, 0.35, 0.4]

    def doubt(name, *statistic):
        profile = Profile(np.linspace(0.1, 2.0, 4), np.array(statistic, float), 4.0, theta)
        return law_fit._doubt(name, found, profile)

    assert doubt("E", 2, 1, 0, 9) == "its profile is flat down to zero"
    assert doubt("E", 9, 1, 0, 2) == "its profile is flat up to the lowest loss"
    assert doubt("E", 9, 1, 0, 9) is None and doubt("alpha", 9, 1, 0, 9) is None
    assert doubt("alpha", 2, 1, 0, 9) == "it varies from 0.1 to 0.35 as E varies over its 95% interval"


@pytest.mark.slow
def test_likely_outliers_are_named_with_their_rows():
    rng = np.random.default_rng(5)
    n, d = iso_flop()
    loss = noisy(rng, n, d)
    loss[[7, 30]] *= [1.08, 0.96]
    result = fit.fit_table(Table.of(n=n, d=d, loss=loss), fit.Settings(replicates=100, holdout=0))
    assert sorted(outlier["row"] for outlier in result["outliers"]) == [8, 31]
    assert result["outliers"][0]["row"] == 8 and result["outliers"][0]["z"] > 0 > result["outliers"][1]["z"]


@pytest.mark.slow
def test_clean_tables_have_hardly_any_outliers():
    rng = np.random.default_rng(6)
    n, d = scattered(rng)
    found = []
    for _ in range(10):
        estimate = laws.estimate(CHINCHILLA, [n, d], loss := noisy(rng, n, d))
        residuals = np.log(loss / estimate.predict(estimate.theta[None], [n, d])[0])
        found.append(len(fit.find_outliers(residuals, 5)[0]))
    assert sum(found) <= 2, found


@pytest.mark.slow
def test_the_largest_budget_is_predicted_from_the_others():
    rng = np.random.default_rng(7)
    n, d = iso_flop()
    table = Table.of(n=n, d=d, loss=noisy(rng, n, d))
    held = fit.predict_largest(table, fit.Settings(replicates=200))
    assert len(held["rows"]) == 8 and held["fitted_rows"] == 48 and held["fitted_up_to"] < 0.6 * table.c.max()
    assert held["mean_abs_error"] < 0.01
    # a law that breaks at the top is noticed
    broken = np.where(table.c > 0.9 * table.c.max(), 1.05, 1.0)
    held = fit.predict_largest(Table.of(n=n, d=d, loss=loss_of(n, d) * broken), fit.Settings(replicates=200))
    assert held["mean_abs_error"] == pytest.approx(0.05 / 1.05, rel=0.05)
    with pytest.raises(ConfigError, match="7 budgets; holdout 7 leaves none"):
        fit.predict_largest(table, fit.Settings(holdout=7))


def test_the_profile_of_the_floor_is_lowest_at_the_estimate():
    rng = np.random.default_rng(8)
    n, d = iso_flop()
    table = Table.of(n=n, d=d, loss=noisy(rng, n, d))
    found = fit.fit_law(CHINCHILLA, table, fit.Settings(replicates=200))[2]
    floors, statistic = np.array(found["profile"]["E"]), np.array(found["profile"]["statistic"])
    assert floors[statistic.argmin()] == pytest.approx(found["E"]["value"], rel=1e-6)
    assert (np.diff(statistic[floors <= found["E"]["value"]]) < 1e-3).all()
    low, high = found["profile"]["ci95"]
    assert low < found["E"]["value"] < high


def test_two_groups_that_are_as_good_as_one_do_not_unpin_a_number():
    """The best size of the novels' top budget lay around 259k and 278k: "not pinned", it said."""
    rng = np.random.default_rng(0)
    near = 2.6e5 * np.exp(np.r_[rng.normal(0, 0.006, 400), rng.normal(0.07, 0.006, 400)])
    assert bootstrap.quantity(2.6e5, near, max_ratio=10.0)["value"] == 2.6e5
    assert "two groups" in bootstrap.quantity(2.6e5, 2.6e5 * (near / 2.6e5) ** 12, max_ratio=10.0)["why"]
