"""What is said of laws that fit worse: the best one first, and no E that it does not pin."""

import itertools
import json

import numpy as np
import pytest
from planted import TRUTH, iso_flop, noisy
from test_kaplan import STEEP, planted

from experiments import coverage
from jaxformer.programs import fit as program
from jaxformer.scaling import figures, findings, fit, laws, report, verdict
from jaxformer.scaling.table import Table


@pytest.fixture(scope="module")
def kaplans():
    """A table that follows Kaplan's law, whose E is 0, and its fit."""
    table = planted(0)
    return table, fit.fit_table(table, fit.Settings(replicates=100))


@pytest.mark.slow
def test_a_floor_that_the_better_law_denies_is_not_pinned(kaplans):
    """It said 2.255 [1.797, 2.546], with no warning."""
    result = kaplans[1]
    assert result["fits_best"] == "kaplan_floor"
    floor = result["parametric"]["E"]
    assert (
        floor["value"] is None and "Kaplan's law with a floor, which fits better, does not determine it" in floor["why"]
    )
    assert floor["ci95"][0] == 0.0 == result["kaplan_floor"]["E"]["ci95"][0] and floor["estimate"] > 1
    assert all(law["with_floor"]["E"]["value"] is None for law in result["power_laws"].values())
    rows = findings.table({"all": result})
    assert {"finding": "laws that these data reject", "value": "the sum"}.items() <= rows[1].items()


@pytest.mark.slow
def test_a_law_that_is_beaten_clearly_is_said_to_be_everywhere(kaplans, tmp_path, capsys):
    table, result = kaplans
    line = result["warnings"][0]
    assert line.startswith("the sum is beaten clearly by Kaplan's law") and "held out, missed by" in line
    path = tmp_path / "table.csv"
    text = "\n".join(f"{n:.9g},{d:.9g},{loss:.9g}" for n, d, loss in zip(table.n, table.d, table.loss, strict=True))
    path.write_text(f"n,d,loss\n{text}\n")
    flags = ["--n=n", "--d=d", "--loss=loss", "--bootstrap=100", "--no-figures", f"--out={tmp_path / 'out'}"]
    assert program.main([f"--csv={path}", *flags]) == 0
    out = capsys.readouterr().out
    assert "note: the sum is beaten clearly" in out and "beaten clearly by Kaplan's law: these data reject" in out
    # What fits best comes first: its formula before the sum's.
    assert 0 < out.index("fits best: Kaplan's law") < out.index("L = [(N_c") < out.index("L = E + A / N^alpha + B")
    assert "the sum is beaten clearly" in json.loads((tmp_path / "out" / "fit.json").read_text())["warnings"][0]
    page = report.page("title", {"all": result}, {})
    assert "The sum is beaten clearly" in page and "these data reject this law" in page
    assert page.index("Kaplan's law".replace("'", "&#x27;")) < page.index("The sum: ")


@pytest.mark.slow
def test_best_sizes_are_those_of_the_law_that_fits_best(kaplans):
    table, result = kaplans
    assert result["optimal"]["law"] == result["ranking"][0]["law"] == "kaplan"
    row = result["optimal"]["budgets"][0]
    sizes = np.geomspace(table.n.min() / 10, table.n.max() * 10, 100_001)
    natural = {name: result["kaplan"][name] for name in ("N_c", "alpha_N", "D_c", "alpha_D")}
    law = {name: each.get("estimate", each["value"]) for name, each in natural.items()}
    best = sizes[coverage.loss_of(law, sizes, row["C"] / 6 / sizes).argmin()]
    assert row["N"]["value"] == pytest.approx(best, rel=1e-3)


@pytest.mark.slow
def test_tables_of_the_sum_keep_its_floor():
    for seed in range(2):
        n, d = iso_flop(sizes=6, budgets=6)
        table = Table.of(n=n, d=d, loss=noisy(np.random.default_rng(seed), n, d))
        result = fit.fit_table(table, fit.Settings(replicates=100, holdout=0))
        assert result["ranking"][0]["law"] == result["optimal"]["law"] == "parametric"
        assert result["parametric"]["E"]["value"] == pytest.approx(TRUTH["E"], rel=0.1)
        assert [row["beaten"] for row in result["ranking"]] == [False, True, True]
        assert result["warnings"][0].startswith("Kaplan's law")


@pytest.mark.slow
def test_a_floor_that_the_better_law_pins_elsewhere_is_named():
    """By the sum this table has E = 1.296 [0.991, 1.561], it said; it has 1.5."""
    result = fit.fit_table(planted(2, noise=0.001, law=STEEP), fit.Settings(replicates=100, holdout=0))
    low, high = result["kaplan_floor"]["E"]["ci95"]
    assert low < STEEP["E"] < high and result["kaplan_floor"]["E"]["value"] is not None
    floor = result["parametric"]["E"]
    assert floor["value"] is None and "fits clearly better, has E = 1.5 [" in floor["why"]


def test_laws_that_fit_alike_are_not_called_beaten():
    fits = {
        "parametric": {"aicc": -100.0, "rms": 0.01, "objective": 2.0, "E": {"value": 1.0, "ci95": [0.9, 1.1]}},
        "kaplan_floor": {"aicc": -109.9, "rms": 0.01, "objective": 1.0, "E": {"value": 1.2, "ci95": [1.1, 1.3]}},
        "kaplan": {"skipped": "too few rows"},
    }
    assert [row["law"] for row in verdict.rank(fits, 20)] == ["kaplan_floor", "parametric"]
    assert not verdict.rank(fits, 20)[1]["beaten"] and verdict.settle_floor(fits, 20) == {}
    fits["kaplan_floor"]["aicc"] = -110.1
    assert verdict.rank(fits, 20)[1]["beaten"]
    assert "fits clearly better, has E = 1.2 [1.1, 1.3]" in verdict.settle_floor(fits, 20)["parametric"]["why"]
    assert not verdict.rank(fits, 13)[1]["beaten"] and verdict.settle_floor(fits, 13) == {}


def few_rows(count, seed):
    """A table of the sum, three budgets a factor of 4 apart, sizes a factor of 2 either way."""
    c = np.sort(np.geomspace(2.2e17, 8.8e17, 3)[np.arange(count) % 3])
    n = np.sqrt(c / 120) * np.concatenate([np.geomspace(0.5, 2, int((c == each).sum())) for each in np.unique(c)])
    return Table.of(n=n, d=c / 6 / n, c=c, loss=noisy(np.random.default_rng(seed), n, c / 6 / n))


@pytest.mark.slow
def test_few_runs_reject_no_law():
    """Of 9 runs it said that these data reject the two laws with E, whose residuals were no larger."""
    table = few_rows(9, 4)
    result = fit.fit_table(table, fit.Settings(replicates=100, budgets=(5.5e18,)))
    ranking = result["ranking"]
    assert ranking[0]["law"] == "kaplan" and max(row["behind"] for row in ranking) > verdict.CLEARLY
    assert not any(row["beaten"] for row in ranking)
    assert "9 runs are too few to compare laws; at least 14 are needed" in result["warnings"]
    rows = findings.table({"all": result})
    assert rows[0]["value"] == "not determined" and "too few" in rows[0]["not determined because"]
    page = report.page("title", {"all": result}, figures={}, found=rows)
    assert page.count("too few runs to compare<") == 3
    assert not [word for word in ("reject", "beaten", "higher") if word in page]
    assert "too few" in program.summary(result) and "fits best: " not in program.summary(result)
    # By the axes, whose ticks stood over each other, and by the legend: "C to the (not determined)".
    drawn = figures.draw(table, result)
    for name in ("loss_compute", "optimum"):
        drawn[name].draw_without_rendering()
        for axes in drawn[name].axes[: 1 if name == "loss_compute" else 2]:
            low, high = axes.get_xlim()
            ticks = [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
            ticks = [tick for tick in ticks if tick.get_text() and low <= tick.get_position()[0] <= high]
            boxes = sorted((tick.get_window_extent() for tick in ticks), key=lambda box: box.x0)
            assert len(boxes) > 1 and all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes)), name
    words = [text.get_text() for axes in drawn["optimum"].axes for text in axes.get_legend().get_texts()]
    assert not any("to the not" in word or "(not" in word for word in words)


@pytest.mark.slow
def test_few_runs_of_a_law_seldom_reject_it():
    """Of 8 and 11 rows, too few to compare laws, 80 and 0 of 80 tables of the sum rejected it; of 14 rows none."""
    rejected, count = 0, verdict.FEWEST
    for seed in range(20):
        table, fits = few_rows(count, seed), {}
        for key, law in fit.LAWS.items():
            found = laws.estimate(law, [table.n, table.d], table.loss)
            off = np.log(table.loss / found.predict(found.theta[None], [table.n, table.d])[0])
            fits[key] = {"aicc": verdict.aicc(off, len(law.names)), "rms": 0.0}
        rejected += next(row["beaten"] for row in verdict.rank(fits, count) if row["law"] == "parametric")
    assert rejected <= 1


@pytest.mark.slow
def test_no_table_of_kaplans_law_has_a_floor():
    """4 tables whose true E is 0 (of 40 the sum called one pinned in 39, and none of those held 0)."""
    found = coverage.law_coverage(coverage.KAPLAN, tables=4, replicates=150)
    assert found["sum_beaten"] == 4 and found["sum_E_pinned"] == found["best_E_pinned"] == 0
    assert found["best_E_holds"] >= 3 and found["best_a_holds"] >= 3, found
