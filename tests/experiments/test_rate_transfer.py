"""Transfer of learning rates: what is planned, planted best rates, what the page says of them, and a tiny study."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import rate_transfer, rate_transfer_page
from experiments import rate_transfer_optima as optima
from experiments.rate_transfer import Point
from experiments.rate_transfer_optima import FACTORS
from jaxformer.config import DataConfig
from tests.quick_runs import quickly

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "transfer"
SEEDS = 3


def planted(slopes, depth_slopes=(0.0, 0.0), seeds=SEEDS, sizes=((64, 2), (128, 2), (256, 2), (64, 4), (64, 8))):
    """Parabolas whose minima move by `slopes` (standard, muP) grid steps for each doubling of the width."""
    for kind, by_width, by_depth in zip(("standard", "mup"), slopes, depth_slopes, strict=True):
        for width, layers in sizes:
            at = by_width * math.log2(width / 64) + by_depth * math.log2(layers / 2)
            for seed in range(seeds):
                for factor in FACTORS:
                    loss = 4 - layers / 100 + 0.1 * (math.log2(factor) - at) ** 2 + 0.01 * seed
                    point = Point(kind, width, layers, factor, seed)
                    yield rate_transfer.record(point, {
                        "loss": loss, "loss_stderr": 0.02, "status": "finished", "step": 128, "tokens": 131072,
                        "flops": 1e12, "params": 1, "learning_rate": 0.012 * factor, "seconds": 9.0,
                    })  # fmt: skip


def test_seeds_are_outermost_and_the_base_is_trained_once():
    planned = list(rate_transfer.groups(3))
    assert [group[0].seed for group in planned] == sorted(group[0].seed for group in planned)
    runs = [point for group in planned for point in group]
    assert len({point.name for point in runs}) == len(runs) == 3 * 2 * 6 * 5
    assert all(len({point._replace(factor=0) for point in group}) == 1 for group in planned)
    more = [point for group in rate_transfer.groups(3, ablations=True) for point in group][len(runs) :]
    assert {point.kind for point in more} == set(rate_transfer.ABLATIONS) and min(p.width for p in more) > 64


def test_sizes_differ_in_what_they_should_and_nothing_else():
    small, large = (rate_transfer.config(Point("mup", *size, 0.5, 1)) for size in ((64, 2), (384, 8)))
    model = replace(small.model, width=384, num_layers=8, attention=replace(small.model.attention, num_heads=12))
    assert replace(small, model=model) == large
    assert large.optimizer.learning_rate == pytest.approx(small.optimizer.learning_rate) == 0.006
    standard = rate_transfer.config(Point("standard", 64, 2, 0.5, 1))
    assert replace(small, model=replace(small.model, parametrization=standard.model.parametrization)) == standard


def test_a_sweep_is_asked_for_one_group_after_another():
    planned = [[Point("mup", 64, 2, factor, seed) for factor in (1.0, 2.0)] for seed in range(3)]
    names = [[point.name for point in group] for group in planned]

    def asked(known, found):
        return rate_transfer.asked(planned, known, lambda point: point.name, dict.fromkeys(found))

    assert asked([], []) == names[0]
    assert asked([], names[0][:1]) == names[0]
    assert asked([], names[0]) == names[0] + names[1]
    assert asked([*names[0], names[1][0]], []) == names[1][1:]
    every = [name for group in names for name in group]
    assert asked([], every) == every


def test_best_rates_are_the_planted_ones():
    found = list(planted((-0.7, 0.2)))
    of = optima.best(found, "standard", 256, 2)
    assert of.factor == 0.5
    assert of.log2.value == pytest.approx(-1.4) and of.log2.low == pytest.approx(-1.4) and not of.edge
    assert of.seeds == SEEDS and optima.best(found, "mup", 384, 2) is None
    drifts = {kind: optima.drift(found, kind, "width") for kind in ("standard", "mup")}
    assert drifts["standard"].steps == pytest.approx(-1.4) and drifts["mup"].steps == pytest.approx(0.4)
    assert drifts["mup"].size == (256, 2)
    assert drifts["standard"].cost.value == pytest.approx(0.1 * (1.4**2 - 0.4**2), abs=1e-5)  # factor 1, and 1/2


def test_an_edge_and_a_diverged_run_are_told():
    found = list(planted((-2.0, 0.0), sizes=((64, 2), (256, 2))))
    of = optima.best(found, "standard", 256, 2)
    assert of.edge and of.factor == FACTORS[0] and math.isnan(of.log2.value)
    assert optima.drift(found, "standard", "width").edge
    for each in found:
        if each["kind"] == "mup" and each["factor"] == 2 and each["width"] == 256:
            each |= {"loss": math.nan, "status": "diverged"}
    of = optima.best(found, "mup", 256, 2)
    assert (of.factor, of.log2.value, of.tied) == (1.0, 0.0, ())


def test_ties_are_those_that_seeds_cannot_tell():
    found = list(planted((0.0, 0.0)))
    noise = {0: 0.3, 1: -0.25, 2: 0.02}
    for each in found:
        if each["kind"] == "mup" and each["width"] == 128 and each["factor"] == 0.5:
            each["loss"] += noise[each["seed"]]
    assert optima.best(found, "mup", 128, 2).tied == (0.5,)
    assert optima.best(found, "mup", 256, 2).tied == ()


def test_the_page_says_what_the_records_do():
    found = list(planted((-0.7, 0.2), (-0.2, 0.0)))
    text = rate_transfer_page.page(found)
    assert "muP, width 64 to 256: the best factor moves by at most 0 steps of the grid, within one step;" in text
    assert "standard, width 64 to 256: the best factor moves by at most 1 step of the grid down, within one" in text
    assert "standard, depth 2 to 8: the best factor moves by at most 0 steps of the grid, within one step; the " in text
    assert "minima by -1.40" in text and "minima by +0.40" in text and "minima by -0.40" in text
    steep = rate_transfer_page.page(list(planted((-0.9, 0.2), (-1.0, -1.6), sizes=((64, 2), (256, 2), (64, 8)))))
    assert "standard, width 64 to 256: the best factor moves by at most 2 steps of the grid down, more than" in steep
    assert "muP, depth 2 to 8: the best factor moves by at most 3 steps of the grid down, more than one step" in steep
    assert "| muP | 256 | 2 | 3 | 1 | none | +0.40 [+0.40, +0.40] |" in text
    assert "at its best factor: +0.000 at width 64 and 2 layers" in text and "Means over 3 seeds" in text
    one = rate_transfer_page.page(list(planted((-0.7, 0.2), seeds=1)))
    assert "| muP | 256 | 2 | 1 | 1 | not known | +0.40 |" in one
    partial = [each for each in found if each["seed"] == 0 and each["width"] == 64 and each["kind"] == "standard"]
    text = rate_transfer_page.page(partial, planned=180)
    assert "muP, width" not in text and f"{len(partial)} of 180 runs have ended" in text


def test_the_committed_page_is_what_its_records_say():
    found = rate_transfer.read(RESULT)
    planned = sum(map(len, rate_transfer.groups(rate_transfer.SEEDS, any("_" in each["kind"] for each in found))))
    assert rate_transfer_page.page(found, planned) == (RESULT / "README.md").read_text(encoding="utf-8")
    assert len({each["run"] for each in found}) == len(found)


def test_the_figure_is_drawn_where_some_runs_are_missing():
    found = list(planted((-0.7, 0.2), seeds=1, sizes=((64, 2), (128, 2))))
    assert rate_transfer_page.figure(found[:-1]).startswith(b"<?xml")


@pytest.mark.slow
def test_a_tiny_study_goes_on_where_it_stopped(tmp_path, monkeypatch):
    def tiny(point, steps):
        made = config(point, steps)
        model = replace(made.model, context_length=16)
        data = DataConfig(source="markov", language_symbols=16, language_order=1, language_tokens=5000)
        return replace(made, model=model, data=data, train=replace(made.train, eval_rows=4, global_batch_size=2))

    config = rate_transfer.config
    monkeypatch.setattr(rate_transfer, "config", tiny)
    points = [Point("standard", 32, 1, factor, 0) for factor in FACTORS[:3]]
    monkeypatch.setattr(rate_transfer, "groups", lambda seeds, ablations: [points[:2], points[2:]])
    flags = [f"--out={tmp_path / 'out'}", f"--workdir={tmp_path / 'runs'}", "--stage=train", "--steps=8"]
    monkeypatch.setattr("sys.argv", ["x", *flags])
    (tmp_path / "out").mkdir()
    before = {"run": points[0].name, "loss": 9.0}
    rate_transfer.keep(tmp_path / "out", before)
    with quickly():
        rate_transfer.main()
    found = rate_transfer.read(tmp_path / "out")
    assert found[0] == before and [each["run"] for each in found] == [point.name for point in points]
    assert len({each["loss"] for each in found}) == 3 and np.isfinite([each["loss"] for each in found]).all()
    assert {each["status"] for each in found[1:]} == {"finished"}
