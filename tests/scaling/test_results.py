"""From records to fits, figures and the report: nothing is lost, chosen wrongly or made up on the way."""

import json
import math
import re

import numpy as np
import pytest
from planted import TRUTH, loss_of

from jaxformer.errors import ConfigError
from jaxformer.scaling import figures, findings, results, run_figures, verdict
from jaxformer.scaling.fit import Settings

SETTINGS = Settings(replicates=100)


def study_records(sizes=5, budgets=4, seeds=2, rates=(0.5, 1.0, 2.0)):
    """Records as a study leaves them: trunks, branches, rates that lost, seeds at the smallest size."""
    rng = np.random.default_rng(0)
    out = []
    for size, n in enumerate(np.geomspace(1e6, 3e7, sizes)):
        for seed in range(seeds if size == 0 else 1):
            for rate in rates if seed == 0 else (1.0,):
                before = 0
                for place, tokens in enumerate(np.geomspace(2e7, 2e9, budgets)):
                    if rate != 1.0 and place > budgets // 2:
                        continue
                    steps = round(tokens / 1e5)
                    common = {"run": f"w{n:.0f}-n{steps}-lr{rate}-s{seed}", "trunk": f"{n:.0f}-{rate}-{seed}"}
                    loss = loss_of(n, tokens) * math.exp(0.003 * rng.standard_normal() + 0.02 * (rate != 1.0))
                    curve = {"kind": "train", "grad_norm": 1.0, "learning_rate": rate, "skipped": 0, "seconds": 0.0}
                    for step in np.linspace(before, steps, 5)[1:]:
                        out.append({**curve, **common, "step": int(step), "tokens": step * 1e5, "loss": loss})
                    out.append({
                        **common, "kind": "final", "step": steps, "tokens": steps * 100_000, "loss": loss,
                        "loss_stderr": 0.01, "params": round(n), "params_non_embedding": round(0.8 * n),
                        "flops": 7.0 * n * tokens, "role": "ladder" if rate == 1.0 else "learning rate",
                        "status": "finished", "width": round(n), "learning_rate": rate, "seed": seed,
                        "branched_at": round(0.8 * steps),
                    })  # fmt: skip
                    before = round(0.8 * steps)
    return out


@pytest.fixture(scope="module")
def found():
    return study_records()


def fitted(found, *kept):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "CONVENTIONS", {name: results.CONVENTIONS[name] for name in kept})
        fits = results.fit(found, SETTINGS)
    assert list(fits) == list(kept)
    return fits


@pytest.fixture(scope="module")
def fits(found):
    """By the first convention."""
    return fitted(found, next(iter(results.CONVENTIONS)))


@pytest.fixture(scope="module")
def both_fits(found, fits):
    """And by the last: between them the number of parameters differs, on which the laws depend."""
    return fits | fitted(found, list(results.CONVENTIONS)[-1])


@pytest.mark.slow
def test_only_finished_points_of_the_ladder_are_fitted(found, fits):
    chosen = results.points(found)
    assert len(chosen) == 4 * (5 + 1) and {r["role"] for r in chosen} == {"ladder"}
    assert all(fit["settings"]["rows"] == len(chosen) for fit in fits.values())
    diverged = [{**r, "status": "diverged", "loss": math.nan} if r.get("seed") == 1 else r for r in found]
    assert len(results.points(diverged)) == 4 * 5


def test_diverged_runs_are_named(found, monkeypatch):
    monkeypatch.setattr(results, "fit_table", lambda table, settings: {"warnings": []})  # which knows of no run
    name, *_ = results.CONVENTIONS
    diverged = [{**r, "status": "diverged"} if r["kind"] == "final" and r["seed"] == 1 else r for r in found]
    (line,) = [line for line in results.fit(diverged, SETTINGS)[name]["warnings"]
               if "diverged" in line]  # fmt: skip
    assert line.startswith("4 runs diverged: w1000000-")
    one = [{**r, "status": "diverged"} if r["run"] == "w1000000-n200-lr1.0-s1" else r for r in found]
    assert "1 run diverged: w1000000-n200-lr1.0-s1" in results.fit(one, SETTINGS)[name]["warnings"]


def test_two_minima_over_the_learning_rate_are_said():
    def tried(*losses):
        return [{"params": 5000, "learning_rate": 2.0**i, "loss": loss} for i, loss in enumerate(losses)]

    assert results.double_minima(tried(3.1, 3.0, 3.2)) == results.double_minima(tried(3.0, 3.1, "nan")) == []
    (line,) = results.double_minima(tried(3.1, 3.0, 3.25, 3.2, math.nan))
    assert line.startswith("N = 5k: the loss has 2 minima over the learning rate, at 2 and 8 (between them it is 0.05")


def test_every_convention_counts_as_it_says(found):
    (record,) = [r for r in results.points(found) if r["run"] == "w1000000-n200-lr1.0-s0"]
    counts = {name: count(record) for name, count in results.CONVENTIONS.items()}
    n, d = 1_000_000, 20_000_000
    assert counts == {
        "all parameters, exact FLOP": (n, 7.0 * n * d),
        "all parameters, C = 6ND": (n, 6.0 * n * d),
        "without embeddings, C = 6ND": (round(0.8 * n), 6.0 * round(0.8 * n) * d),
    }


@pytest.mark.slow
def test_the_planted_law_comes_back(fits):
    law = next(iter(fits.values()))["parametric"]
    for name in ("alpha", "beta"):
        assert law[name]["value"] == pytest.approx(TRUTH[name], rel=0.05)


@pytest.mark.slow
def test_another_way_of_counting_parameters_scales_their_factor_alone(both_fits, tmp_path):
    law, other = (fit["parametric"] for fit in both_fits.values())
    assert list(both_fits)[1] == "without embeddings, C = 6ND"
    assert other["alpha"]["value"] == pytest.approx(law["alpha"]["value"], rel=1e-3)
    written = json.loads(results.write_fits(tmp_path, both_fits).read_text())
    assert written["parametric"]["alpha"] == law["alpha"] and written["conventions"].keys() == both_fits.keys()


@pytest.mark.slow
def test_the_findings_are_rows_and_short_lines(fits):
    check_findings(fits)


@pytest.mark.slow
def test_the_findings_of_two_conventions_are_rows_and_short_lines(both_fits):
    check_findings(both_fits)


def check_findings(fits):
    rows = findings.table(fits)
    assert rows[0]["value"].startswith("the sum, residuals of ") and rows[1]["value"].startswith("Kaplan's law, ")
    found = {row["finding"]: row for row in rows}
    low, high = next(iter(fits.values()))["parametric"]["alpha"]["ci95"]
    assert found["alpha, exponent of N"]["95% interval"] == f"[{low:.3g}, {high:.3g}]"
    assert re.search(r"^error of predicting \d+ runs above \S+ FLOP, by the sum: \S+ % on average, \S+ % at most$",
                     "\n".join(findings.lines(rows)), re.M)  # fmt: skip
    # No budget is shared by four sizes: the row says so, and a line says what would do.
    curves = found["a by iso-FLOP curves"]
    assert curves["value"] == "not determined" and curves["not determined because"] and "skipped" not in str(curves)
    assert any(line.startswith("To determine a by iso-FLOP curves: at least 3 bud") for line in findings.lacking(rows))
    assert max(len(line.split()) for line in findings.lines(rows)) < 50
    first = next(iter(fits.values()))
    top = {"C": first["optimal"]["budgets"][0]["C"], "N": 5e6, "N_ci95": [4e6, 6e6]}
    iso = {"budgets": [top], "a": {"value": 0.5, "ci95": [0.4, 0.6]}}
    lines = findings.lines(findings.table({"all": {**first, "isoflop": iso}}))
    assert "a by iso-FLOP curves: 0.500 [0.400, 0.600]" in lines
    assert any(line.endswith(" FLOP, by iso-FLOP curves: 5M [4M, 6M]") for line in lines)


@pytest.mark.slow
def test_a_better_law_with_a_floor_is_the_one_that_speaks_of_the_floor(fits):
    first = next(iter(fits.values()))
    assert first["fits_best"] == "parametric" and findings.table(fits)[0]["value"].startswith("the sum")
    joined = first["kaplan_floor"] | {"E": {"value": 1.25, "ci95": [1.2, 1.3]}, "rms": 0.001, "aicc": -1e3}
    ranking = verdict.rank({**first, "kaplan_floor": joined}, 24)
    best = first["optimal"] | {"law": "kaplan_floor"}
    other = first | {"fits_best": "kaplan_floor", "kaplan_floor": joined, "ranking": ranking, "optimal": best}
    other = {"all": other}
    lines = findings.lines(findings.table(other))
    assert lines[0] == "law that fits best: Kaplan's law with a floor, residuals of 0.1 %" and "the sum" in lines[1]
    assert "E, irreducible loss, by Kaplan's law with a floor: 1.25 [1.2, 1.3]" in lines
    held, missed = (results.against_floor(other, nats) for nats in (1.21, 1.31))
    assert (
        "E 1.25 [1.2, 1.3] contains it, the interval's half width is 4 % of E. This E is by Kaplan's law with" in held
    )
    assert "does NOT contain it" in missed and "contains it" in results.against_floor(other, 1.31, standard_error=0.01)


@pytest.mark.slow
def test_fit_json_is_that_of_the_fit_program_and_all_conventions(fits, tmp_path):
    written = json.loads(results.write_fits(tmp_path, fits).read_text())
    assert written["parametric"]["alpha"] == fits["all parameters, exact FLOP"]["parametric"]["alpha"]
    assert written["conventions"].keys() == fits.keys()


def test_seed_spread(found):
    rows = results.seed_spread(results.points(found))
    assert [row["seeds"] for row in rows] == [2] * 4
    first = [r["loss"] for r in results.points(found) if r["width"] == 10**6 and r["step"] == 200]
    assert rows[0]["standard deviation"] == pytest.approx(abs(first[0] - first[1]) / math.sqrt(2))


class DrawnError(Exception):
    """Ends a report whose figures were given what they are to draw."""


def drawn(records, fits, folder):
    """What the report's figures of learning rates and of training are given."""
    given = []

    def last(curves):
        given.append(curves)
        raise DrawnError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(DrawnError):
        patch.setattr(figures, "draw", lambda *_: {})
        patch.setattr(run_figures, "learning_rate_curves", given.append)
        patch.setattr(run_figures, "training_curves", last)
        results.write_report(folder, "A study", records, fits)
    return given


@pytest.mark.slow
def test_learning_rates_are_compared_at_equal_tokens(found, fits, tmp_path):
    losses = {point["loss"] for point in drawn(found, fits, tmp_path)[0]}
    tried = [r for r in found if r["kind"] == "final" and r["loss"] in losses]
    assert len({r["width"] for r in tried}) == 5
    for width in {r["width"] for r in tried}:
        mine = [r for r in tried if r["width"] == width]
        assert len(mine) == 3 and len({r["tokens"] for r in mine}) == 1 and {r["seed"] for r in mine} == {0}


@pytest.mark.slow
def test_a_training_curve_is_the_trunk_and_the_last_decay(found, fits, tmp_path):
    curves = drawn(found, fits, tmp_path)[1]
    assert len(curves) == 5
    for curve in curves:
        assert curve["tokens"] == sorted(curve["tokens"]) and curve["tokens"][-1] == pytest.approx(2e9)
        assert curve["tokens"][0] < 2e7
    # Where shorter runs have another rate's points in the fits, the beginning is still in theirs.
    others = [{**r, "role": "learning rate"} if r["kind"] == "final" and r["tokens"] < 1.9e9 else r for r in found]
    assert drawn(others, fits, tmp_path)[1] == curves


@pytest.mark.slow
def test_the_report_is_one_page_and_figures(found, both_fits, tmp_path):
    page = results.write_report(
        tmp_path, "A study", found, both_fits, commands=["jaxformer scaling"], manifest={"seed": 0}
    )
    text = page.read_text(encoding="utf-8")
    for name in ("loss_compute", "optimum", "residuals", "holdout", "profile", "learning_rate", "training"):
        assert f'<figure id="{name}">' in text, name
        assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 5000
    assert "http://" not in re.sub(r'xmlns[^"]*"[^"]*"', "", text) and "<script" not in text
    assert "w1000000-n200-lr2.0-s0" in text and "standard deviation" in text and "exact FLOP" in text


@pytest.mark.parametrize(
    "change, line",
    [
        (lambda r: {k: v for k, v in r.items() if k != "flops"}, r"records: the final record of w\S+ lacks flops"),
        (lambda r: {**r, "status": "diverged"}, r"records: none of 54 runs is a finished point of the ladder"),
        (lambda r: {**r, "loss": math.nan}, r"accepted: a number above 0"),
    ],
)
def test_bad_records(found, change, line):
    with pytest.raises(ConfigError, match=line) as error:
        results.fit([change(r) if r["kind"] == "final" else r for r in found], SETTINGS)
    assert "\n" not in str(error.value)
