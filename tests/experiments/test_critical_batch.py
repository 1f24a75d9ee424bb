"""The critical batch: planted E_min and S_min are found, trials come in order, and what the page says."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import critical_batch, critical_batch_fit, critical_batch_page
from experiments import critical_batch_search as search
from experiments.critical_batch_search import BATCHES, LENGTH, Trial
from experiments.transfer_runs import read
from jaxformer.config import DataConfig
from tests.quick_runs import quickly

BATCH, UPDATES = {25: 2000.0, 75: 8000.0, 225: 20000.0}, 40.0


def planted(seeds=2, noise=0.0, scale=1.2, seed=0):
    """Searches that take UPDATES (1 + BATCH / B) at their best rate, beside noise scales `scale` times the batch."""
    rng = np.random.default_rng(seed)
    for point, batch in BATCH.items():
        for seed in range(seeds):
            variance = scale * batch * (1 + 0.5 * (-1) ** seed)
            yield {
                "run": f"noise,{point},{seed}", "what": "noise", "point": point, "seed": seed, "loss": 4.0,
                "target": 3.7, "gradient_variance": variance, "gradient_square": 1.0, "seconds": 1.0,
            }  # fmt: skip
            for rows in BATCHES:
                least = UPDATES * (1 + batch / (rows * LENGTH)) * math.exp(noise * rng.normal())
                for exponent, worse in ((-1, 1.5), (0, 1.0), (1, None)):
                    trial = Trial(point, rows, exponent, seed)
                    updates = None if worse is None else least * worse
                    tokens = None if updates is None else updates * rows * LENGTH
                    yield {"run": trial.name, "what": "branch", **trial._asdict(), "rate": 0.002 * 2.0**exponent,
                           "updates": updates, "tokens": tokens, "seconds": 1.0}  # fmt: skip


def test_the_fit_finds_planted_numbers():
    batches = np.array([500.0, 2000.0, 8000.0, 32000.0])
    for batch in (300.0, 5000.0, 60000.0):
        found = critical_batch_fit.fit(batches, 25 * (1 + batch / batches))
        np.testing.assert_allclose(found, (25, 25 * batch, batch), rtol=0.005)
        updates, tokens = 25 * (1 + batch / batches), 25 * (batches + batch)
        np.testing.assert_allclose((updates / found.updates - 1) * (tokens / found.tokens - 1), 1, rtol=0.1)


def test_intervals_hold_planted_batches_and_grow_with_the_noise():
    held, widths = [], {0.02: [], 0.2: []}
    for noise, mine in widths.items():
        for seed in range(4):
            found = list(planted(3, noise, seed=seed))
            for point, batch in BATCH.items():
                of = critical_batch_fit.measured(found, point)
                held.append(of.low < batch < of.high)
                mine.append(math.log(of.high / of.low))
    assert 0.85 <= np.mean(held) <= 1 and np.median(widths[0.2]) > 5 * np.median(widths[0.02])


def test_a_seed_counts_when_all_batch_sizes_have_ended():
    found = list(planted(2))
    assert list(critical_batch_fit.results(found)) == list(BATCH)
    part = [r for r in found if (r["point"], r["seed"], r.get("rows")) != (75, 1, BATCHES[-1])]
    assert critical_batch_fit.measured(part, 75).seeds == 1 and critical_batch_fit.measured(part, 25).seeds == 2
    none = [r for r in found if (r["point"], r.get("rows")) != (75, BATCHES[0])]
    assert list(critical_batch_fit.results(none)) == [25, 225]


def test_the_search_ends_between_worse_rates():
    def needed(rows, exponent):
        return 50 + 10 * abs(exponent - {8: -2, 32: 0, 128: 2, 512: 4}[rows])

    found, tried = [], {}
    while (trial := search.next_trial(found, 25, 0)) is not None:
        updates = None if trial.exponent == 1 and trial.rows == 8 else needed(trial.rows, trial.exponent)
        tried.setdefault(trial.rows, []).append(trial.exponent)
        found.append({"what": "branch", **trial._asdict(), "updates": updates})
    assert tried == {8: [0, 1, -1, -2, -3], 32: [-2, -1, 0, 1], 128: [0, 1, 2, 3], 512: [2, 3, 4]}
    assert search.next_trial(found, 25, 1) == Trial(25, 8, search.FIRST, 1)
    same = {"what": "branch", **Trial(25, 8, 3, 0)._asdict(), "updates": 9.0}
    assert search.allowed([*found, same], Trial(25, 8, 1, 0)) == 9 * search.WORSE
    assert search.allowed([], Trial(25, 8, 1, 0)) == search.MOST_TOKENS / 8 / LENGTH


def test_updates_are_counted_between_two_evaluations():
    made = []

    def advance(first, count):
        assert first == sum(made)
        made.append(count)

    found = search.updates_to(2.0, advance, lambda: 4 - 0.01 * sum(made), 1000)
    assert found == pytest.approx(200) and made[:12] == [1] * 12 and max(made) == 15
    made.clear()
    assert search.updates_to(2.0, advance, lambda: 4.0, 30) == math.inf and 30 <= sum(made) < 34
    made.clear()
    assert search.updates_to(2.0, advance, lambda: math.nan, 30) == math.inf and sum(made) == 1


@pytest.mark.slow
def test_the_page_says_what_the_records_do(monkeypatch):
    monkeypatch.setattr(critical_batch_fit, "REPLICATES", 50)
    found = list(planted())
    text = critical_batch_page.page(found)
    assert "at 3 of 3 points; it is 1.2 to 1.2 times as large" in text
    assert "| 75 | 2 | 4.00 | 3.70 | 40 | 3" in text and "| 1.2 |" in text
    assert "| 25 | 1 | 196 (0.002) |" in text
    assert "at 0 of 3 points" in critical_batch_page.page(list(planted(scale=0.4)))
    assert "No point has ended yet." in critical_batch_page.page(found[:5])
    assert critical_batch_page.figure(found).startswith(b"<?xml")


@pytest.mark.slow
def test_a_tiny_study_goes_on_where_it_stopped(tmp_path, monkeypatch):
    def tiny(*args):
        made = config(*args)
        model = replace(made.model, width=16, num_layers=1, attention=replace(made.model.attention, num_heads=1))
        data = DataConfig(source="markov", language_symbols=16, language_order=1, language_tokens=20_000)
        return replace(made, model=model, data=data, train=replace(made.train, eval_rows=4))

    config = critical_batch.config
    few = {
        critical_batch: {"config": tiny, "DROPS": {3: 0.02}, "POINT_ROWS": 2, "NOISE_BATCHES": 2, "NOISE_ROWS": 4,
                         "NOISE_PARTS": 2, "HELD_OUT_ROWS": 4},
        search: {"BATCHES": (2,), "EXPONENTS": range(2)},
    }  # fmt: skip
    for module, changes in few.items():
        for name, value in changes.items():
            monkeypatch.setattr(module, name, value)
    out, kept = tmp_path / "out", critical_batch.keep
    monkeypatch.setattr("sys.argv", ["x", f"--out={out}", f"--workdir={tmp_path}", "--seeds=1", "--stage=train"])

    def killed(*args):
        found = kept(*args)
        if len(found) == 2:
            raise KeyboardInterrupt
        return found

    with quickly():
        made = critical_batch.Branches(tmp_path)
        monkeypatch.setattr(critical_batch, "Branches", lambda workdir: made)  # compiles once
        monkeypatch.setattr(critical_batch, "keep", killed)
        with pytest.raises(KeyboardInterrupt):
            critical_batch.main()
        monkeypatch.setattr(critical_batch, "keep", kept)
        made.point.cache_clear()
        critical_batch.main()
    found = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert [r["what"] for r in found] == ["noise"] + ["branch"] * 2
    assert found[0]["target"] == pytest.approx(found[0]["loss"] - 0.02)
    assert {(r["rows"], r["exponent"]) for r in found[1:]} == {(2, 0), (2, 1)}
    assert any(r["updates"] for r in found[1:])


def test_the_committed_page_is_what_its_records_say():
    folder = Path(critical_batch.__file__).parent / "results" / "critical_batch"
    assert (folder / "README.md").read_text(encoding="utf-8") == critical_batch_page.page(read(folder))
