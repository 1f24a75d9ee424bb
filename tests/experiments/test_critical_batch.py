"""The critical batch: planted E_min and S_min are found, trials come in order, and what the page says."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import critical_batch, critical_batch_fit, critical_batch_page
from experiments import critical_batch_search as search
from experiments.critical_batch_search import BATCHES, GOALS, LENGTH, Trial
from experiments.transfer_runs import read
from jaxformer.config import DataConfig
from tests.quick_runs import quickly

IDEAL, NOISE = np.array([20.0, 20.0, 40.0]), np.array([2000.0, 6000.0, 14000.0])  # of the way to each goal
BATCH = dict(zip(GOALS, np.cumsum(IDEAL * NOISE) / np.cumsum(IDEAL), strict=True))


def planted(seeds=2, noise=0.0, scale=1.0, seed=0):
    """Searches that follow the theory at their best rate, beside noise scales `scale` times what they should be."""
    rng = np.random.default_rng(seed)
    for seed in range(seeds):
        for rows in BATCHES:
            ends = np.cumsum(IDEAL * (1 + NOISE / (rows * LENGTH)))
            least = [float(end * math.exp(noise * rng.normal())) for end in ends]
            trial, steps = (
                Trial(rows, 0, seed),
                [0, *np.repeat(ends[:2], 2) * np.tile([1 - 1e-9, 1 + 1e-9], 2), ends[2]],
            )
            seen = [[float(step), 3 * scale * each, 3.0] for step, each in zip(steps, np.repeat(NOISE, 2), strict=True)]
            yield {"run": f"noise,{trial.name}", "what": "noise", **trial._asdict(), "rate": 0.002, "noise": seen,
                   "seconds": 1.0}  # fmt: skip
            for exponent, worse in ((-1, 1.5), (0, 1.0), (1, None)):
                trial = Trial(rows, exponent, seed)
                updates = [None if worse is None else each * worse for each in least]
                yield {"run": f"updates,{trial.name}", "what": "updates", **trial._asdict(), "seconds": 1.0,
                       "rate": 0.002 * 2.0**exponent, "updates": updates}  # fmt: skip


def test_the_fit_finds_planted_numbers():
    batches = np.array([500.0, 2000.0, 8000.0, 32000.0])
    for batch in (300.0, 5000.0, 60000.0):
        found = critical_batch_fit.fit(batches, 25 * (1 + batch / batches))
        np.testing.assert_allclose(found, (25, 25 * batch, batch), rtol=0.005)
        updates, tokens = 25 * (1 + batch / batches), 25 * (batches + batch)
        np.testing.assert_allclose((updates / found.updates - 1) * (tokens / found.tokens - 1), 1, rtol=0.1)


def test_noise_is_averaged_over_updates():
    """Until a goal, on straight lines between measurements; not over measurements, which are dense at the beginning."""
    run = [[step, 10.0 * step, 2.0] for step in (0, 1, 2, 3, 10, 50)]
    for updates in (2, 7.5, 30, 50):
        assert critical_batch_fit.mean_noise(run, 1e12, updates) == pytest.approx(5 * updates / 2)
    assert critical_batch_fit.mean_noise([[0, 6.0, 2.0]], 10, 5) == pytest.approx(3)


@pytest.mark.parametrize("batch", [100.0, 1e4, 1e6])
def test_weighted_by_their_worth_all_batch_sizes_tell_of_the_same(batch):
    """A run that follows the theory, whose noise grows on the way: dS = (1 + noise / batch) ds."""
    ideal = np.linspace(0, 100, 4001)  # updates without noise
    scales = 500 + 40 * ideal**1.5
    steps = np.concatenate([[0], np.cumsum(np.diff(ideal) * (1 + (scales[1:] + scales[:-1]) / 2 / batch))])
    found = critical_batch_fit.mean_noise(np.stack([steps, scales, np.ones_like(scales)], 1), batch, steps[-1])
    assert found == pytest.approx(np.trapezoid(scales, ideal) / 100, rel=1e-3)


def test_intervals_hold_planted_batches_and_grow_with_the_noise():
    held, widths = [], {0.02: [], 0.2: []}
    for noise, mine in widths.items():
        for seed in range(4):
            found = list(planted(3, noise, seed=seed))
            for goal, batch in BATCH.items():
                of = critical_batch_fit.measured(found, goal)
                held.append(of.low < batch < of.high)
                mine.append(math.log(of.high / of.low))
    assert 0.85 <= np.mean(held) <= 1 and np.median(widths[0.2]) > 5 * np.median(widths[0.02])


def test_a_seed_counts_when_all_batch_sizes_have_ended():
    found = list(planted(2))
    assert list(critical_batch_fit.results(found)) == list(BATCH)
    part = [r for r in found if (r["seed"], r["rows"]) != (1, BATCHES[-1])]
    assert {len(of.noise) for of in critical_batch_fit.results(part).values()} == {1}
    part = [r for r in found if (r["what"], r["seed"], r["rows"]) != ("noise", 0, BATCHES[1])]
    assert {len(of.noise) for of in critical_batch_fit.results(part).values()} == {1}
    here = [r["rows"] == BATCHES[0] and r["what"] == "updates" for r in found]
    missed = [r | {"updates": [*r["updates"][:2], None]} if mine else r for r, mine in zip(found, here, strict=True)]
    for exponent in search.EXPONENTS:  # until the search for a rate that gets there is over
        more = {"what": "updates", **Trial(BATCHES[0], exponent, 0)._asdict(), "updates": [99.0, 99.0, None]}
        missed += [more, more | {"seed": 1}] if abs(exponent) > 1 else []
    assert list(critical_batch_fit.results(missed)) == list(GOALS[:2])


def test_the_search_ends_between_worse_rates_for_every_goal():
    """Here the last goal has its best rate a step below the first one's."""

    def needed(rows, exponent):
        best = {8: -2, 32: 0, 128: 2, 512: 4}[rows]
        return [50 + 10 * abs(exponent - best - shift) for shift in (1, 0, 0)]

    found, tried = [], {}
    while (trial := search.next_trial(found, 0)) is not None:
        updates = [None] * 3 if trial.exponent == 1 and trial.rows == 8 else needed(trial.rows, trial.exponent)
        tried.setdefault(trial.rows, []).append(trial.exponent)
        found.append({"what": "updates", **trial._asdict(), "updates": updates})
    assert tried == {8: [0, 1, -1, -2, -3], 32: [-2, -1, 0, 1, 2], 128: [0, 1, 2, 3, 4], 512: [2, 3, 4, 5]}
    assert search.next_trial(found, 1) == Trial(8, search.FIRST, 1)
    assert search.best_trial(found, 512, 0) == Trial(512, 4, 0)
    same = {"what": "updates", **Trial(8, 3, 0)._asdict(), "updates": [1.0, 2.0, 9.0]}
    assert search.allowed([*found, same], Trial(8, 1, 0)) == 9 * search.WORSE
    assert search.allowed([], Trial(8, 1, 0)) == search.MOST_TOKENS / 8 / LENGTH


def test_updates_are_counted_between_two_evaluations():
    made, seen = [], []

    def advance(first, count):
        assert first == sum(made)
        made.append(count)

    found = search.updates_to([3.5, 3.495, 2.0], advance, lambda: 4 - 0.01 * sum(made), 1000, watch=seen.append)
    assert found == pytest.approx([50, 50.5, 200]) and made[:24] == [1] * 24 and max(made) == 15
    assert seen == [0, *np.cumsum(made)]
    made.clear()
    assert search.updates_to([2.0], advance, lambda: 4.0, 30) == [math.inf] and 30 <= sum(made) < 34
    made.clear()
    assert search.updates_to([5.0, 2.0], advance, lambda: 4.0 if not made else math.nan, 30) == [0, math.inf]
    assert sum(made) == 1


@pytest.mark.slow
def test_the_page_says_what_the_records_do(monkeypatch):
    monkeypatch.setattr(critical_batch_fit, "REPLICATES", 50)
    found = list(planted())
    text = critical_batch_page.page(found)
    assert "at 3 of 3 losses; it is 1.00 to 1.00 times as large" in text
    assert "| 3.6 | 2 | 40 | 159,8" in text and "(4,00" in text and "| 1.00 |" in text
    assert "| 3.9 | 1 | 98 (0.002) |" in text
    assert "at 0 of 3 losses" in critical_batch_page.page(list(planted(scale=0.4)))
    assert "No seed has ended yet." in critical_batch_page.page(found[:5])
    assert critical_batch_page.figure(found).startswith(b"<?xml")
    assert critical_batch_page.figure(found[:5]).startswith(b"<?xml")


@pytest.mark.slow
def test_a_tiny_study_goes_on_where_it_stopped(tmp_path, monkeypatch):
    def tiny(*args):
        made = config(*args)
        model = replace(made.model, width=16, num_layers=1, attention=replace(made.model.attention, num_heads=1))
        data = DataConfig(source="markov", language_symbols=16, language_order=1, language_tokens=20_000)
        return replace(made, model=model, data=data, train=replace(made.train, eval_rows=4))

    config = critical_batch.config
    few = {
        critical_batch: {"config": tiny, "NOISE_BATCHES": 2, "NOISE_ROWS": 4, "NOISE_PARTS": 2, "HELD_OUT_ROWS": 4},
        search: {"EXPONENTS": range(2), "MOST_TOKENS": 40 * 2 * LENGTH},
    }  # fmt: skip
    for module, changes in few.items():
        for name, value in changes.items():
            monkeypatch.setattr(module, name, value)
    goals = (2.85, 2.8, 2.75)
    for module in (critical_batch, search):
        monkeypatch.setattr(module, "GOALS", goals)
        monkeypatch.setattr(module, "BATCHES", (2,))
    out, kept = tmp_path / "out", critical_batch.keep
    monkeypatch.setattr("sys.argv", ["x", f"--out={out}", "--seeds=1", "--stage=train"])

    def killed(*args):
        kept(*args)
        raise KeyboardInterrupt

    with quickly():
        made = critical_batch.Runs()
        monkeypatch.setattr(critical_batch, "Runs", lambda: made)  # compiles once
        monkeypatch.setattr(critical_batch, "keep", killed)
        with pytest.raises(KeyboardInterrupt):
            critical_batch.main()
        monkeypatch.setattr(critical_batch, "keep", kept)
        critical_batch.main()
    found = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert [(r["what"], r["rows"], r["exponent"]) for r in found[:2]] == [("updates", 2, 0), ("updates", 2, 1)]
    assert [(r["what"], r["rows"]) for r in found[2:]] == [("noise", 2)]
    assert any(r["updates"][0] for r in found[:2])
    assert found[2]["noise"][0][0] == 0 and all(variance > 0 for _, variance, _ in found[2]["noise"])


def test_the_committed_page_is_what_its_records_say():
    folder = Path(critical_batch.__file__).parent / "results" / "critical_batch"
    assert (folder / "README.md").read_text(encoding="utf-8") == critical_batch_page.page(read(folder))
