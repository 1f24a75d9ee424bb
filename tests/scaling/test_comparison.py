"""What a sweep's table says, against scipy's own tests and against numbers written out."""

import math

import numpy as np
import pytest

from jaxformer.scaling import plotting
from jaxformer.scaling.comparison import RunEnd, compare, lowest
from jaxformer.scaling.comparison_figure import figure
from jaxformer.scaling.comparison_table import best, differences, table, unfinished

stats = pytest.importorskip("scipy.stats")


def end(loss=None, status="finished", stderr=0.004, **values):
    return RunEnd("name", values, status, loss=math.nan if loss is None else loss, stderr=stderr)


def draws(seeds, shift=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return {s: 3 + 0.05 * rng.normal() + shift for s in seeds}


def test_a_paired_difference_is_student_s():
    first, other = draws(range(5)), draws(range(5), shift=0.1, seed=1)
    rows = compare([end(loss, a=a, seed=s) for a, found in ((1, first), (2, other)) for s, loss in found.items()])
    wanted = stats.ttest_rel(list(other.values()), list(first.values())).confidence_interval(0.95)
    assert (rows[1].low, rows[1].high) == pytest.approx((wanted.low, wanted.high))
    assert rows[1].basis == "5 pairs of seeds" and rows[0].basis == "" and math.isnan(rows[0].difference)
    assert rows[0].stderr == pytest.approx(stats.sem(list(first.values())))
    assert (len(rows[0].losses), rows[0].loss) == (5, pytest.approx(np.mean(list(first.values()))))


def test_pairs_are_by_seed_and_not_by_order():
    ends = [end(3.0 + s, a=1, seed=s) for s in range(3)] + [end(3.5 + s, a=2, seed=s) for s in (2, 0, 1)]
    row = compare(ends)[1]
    assert (row.difference, row.low, row.high) == pytest.approx((0.5, 0.5, 0.5))


def test_only_shared_seeds_are_paired():
    ends = [end(3.0, a=1, seed=0), end(3.2, a=1, seed=1), end(9.0, a=1, seed=2)]
    row = compare([*ends, end(3.1, a=2, seed=0), end(3.3, a=2, seed=1)])[1]
    assert row.difference == pytest.approx(0.1) and row.basis == "2 pairs of seeds"


def test_seeds_that_no_two_runs_share_are_welch_s():
    first, other = draws(range(4)), draws(range(4, 10), shift=0.1, seed=1)
    row = compare([end(loss, a=a, seed=s) for a, found in ((1, first), (2, other)) for s, loss in found.items()])[1]
    wanted = stats.ttest_ind(list(other.values()), list(first.values()), equal_var=False).confidence_interval(0.95)
    assert (row.low, row.high) == pytest.approx((wanted.low, wanted.high))


def test_an_interval_covers_as_often_as_it_says():
    """Seeds that shift all values alike are no obstacle to a paired interval."""
    rng, hits = np.random.default_rng(0), 0
    for _ in range(400):
        shared = rng.normal(0, 1.0, 4)
        ends = [end(3 + shared[s] + rng.normal(0, 0.1) + 0.2 * a, a=a, seed=s) for a in (0, 1) for s in range(4)]
        row = compare(ends)[1]
        hits += row.low <= 0.2 <= row.high
    assert 0.92 < hits / 400 < 0.98


def test_with_one_run_each_the_evaluation_is_all_that_is_known():
    row = compare([end(3.0, a=1), end(3.1, a=2, stderr=0.003)])[1]
    assert (row.difference, row.high - row.low) == pytest.approx((0.1, 2 * 1.96 * 0.005))
    assert row.basis == "one seed: the evaluation's error alone"


def test_the_first_value_is_compared_with_at_equal_other_values():
    rows = compare([end(3 + a + 10 * b, a=a, b=b, seed=s) for a in (0, 1, 2) for b in (5, 6) for s in (0, 1)])
    assert [row.difference for row in rows][2:] == pytest.approx([1, 1, 2, 2])
    assert [row.basis for row in rows[:2]] == ["", ""]


def test_every_field_is_compared_along():
    ends = [end(3 + a + 10 * b, a=a, b=b, seed=s) for a in (0, 1, 2) for b in (5, 6) for s in (0, 1)]
    rows = compare(ends, "b")
    assert [row.difference for row in rows if row.basis] == pytest.approx([10, 10, 10])
    heads, _, *lines = differences(rows, "b")
    assert heads.split()[1:6:2] == ["a", "b", "difference"] and len(lines) == 3
    assert [cell.strip() for cell in lines[0].split("|")][1:4] == ["0", "6", "+10.0000"]
    assert not differences([row for row in rows if not row.basis], "b")


def test_the_lowest_is_named_with_those_that_chance_could_put_before_it():
    """Three values, of which seeds tell the last alone from the lowest."""
    losses = {"x": (3.0, 3.2), "y": (3.02, 3.24), "z": (3.1, 3.0), "w": (9.0, 9.21)}
    ends = [end(loss, k=k, seed=s) for k, found in losses.items() for s, loss in enumerate(found)]
    found = lowest(ends)
    assert found.row.values == {"k": "z"} and [row.values["k"] for row in found.alike] == ["x", "y"]
    low = stats.ttest_rel(losses["w"], losses["z"]).confidence_interval(0.95).low
    assert low > 0 > stats.ttest_rel(losses["y"], losses["z"]).confidence_interval(0.95).low
    assert best(found) == ["", "Lowest: k=z, 3.0500. These runs do not tell it from k=x; k=y."]
    alone = lowest([end(3.0, k="x"), end(4.0, k="y")])
    assert best(alone)[1:] == [
        "Lowest: k=x, 3.0000. Lower than every other, by its 95 % interval (by the evaluation's error alone)."
    ]
    assert lowest([end(3.0, k="x"), end(status="failed", k="y")]) is None and best(None) == []


def test_runs_that_did_not_finish_are_listed_and_not_counted():
    bad = RunEnd("a=2,seed=1", {"a": 2, "seed": 1}, "diverged", why="at step 7")
    gone = RunEnd("a=3,seed=0", {"a": 3, "seed": 0}, "failed", why="no memory")
    rows = compare([end(3.0, a=1, seed=0), end(3.1, a=1, seed=1), end(3.2, a=2, seed=0), bad, gone])
    assert [len(row.losses) for row in rows] == [2, 1, 0] and math.isnan(rows[2].loss)
    lines = table(rows)
    assert len({len(line) for line in lines[:5]}) == 1 and lines[4].startswith("| 3 | 0    |")
    assert unfinished(rows) == ["- a=2,seed=1: diverged at step 7", "- a=3,seed=0: failed: no memory"]


@pytest.mark.parametrize(("ends", "scale", "lines"), [
    ([end(3 + a, a=a, seed=s) for a in (0, 0.01, 0.1) for s in (0, 1)], "symlog", 1),
    ([end(3 + a, a=a, b=b, seed=s) for a in (1e-4, 1e-2) for b in ("x", "y") for s in (0, 1)], "log", 2),
    ([end(3 + a, a=a) for a in (1, 2)], "linear", 1),
    ([end(3.0, a="x"), end(3.1, a="y")], "linear", 1),
    ([end(3 + s, seed=s) for s in range(3)], "linear", 1),
    ([end(3.0, a=1), end(status="diverged", a=2), end(3.1, a=3)], "linear", 1),
])  # fmt: skip
def test_the_figure_shows_every_run(ends, scale, lines):
    drawn = figure(compare(ends))
    (axes,) = drawn.axes
    assert axes.get_xscale() == scale and len(axes.containers) == lines
    low, high = axes.get_ylim()
    assert all(low < each.loss < high for each in ends if each.status == "finished")
    assert (axes.get_legend() is not None) == (lines > 1 or any(each.status == "diverged" for each in ends))
    assert plotting.encoded(drawn, "png")
