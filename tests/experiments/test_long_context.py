"""Long rows: tasks whose answers are right, FAVOR's error, slopes of made-up records, what is resumed, and the page."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import long_context, long_context_favor, long_context_page, long_context_tasks, transfer_runs
from experiments.coordinates_page import slope
from experiments.long_context_tasks import PAIR, PAIRS, QUERY, VALUE, VALUES, Duplication, Needles
from jaxformer.errors import ProgramError

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "long_context"
OPTIONS = {"tokens": 4096, "mechanisms": "dense,linear", "pairs": 1, "seeds": 2}


def priced(mechanism, tokens, seconds, mib=1.0):
    about = {"threads": 2, "jax": "0", "load": 0.0}
    return {"part": "slopes", "mechanism": mechanism, "tokens": tokens, "seconds": [seconds], "mib": mib, **about}


def test_every_needle_has_the_value_that_is_asked_for_at_its_distance():
    batch = jax.device_get(jax.jit(Needles(4, 64).batch)(1, 2))
    for row in range(4):
        tokens = batch.tokens[row]
        pairs = {(t - PAIR) // VALUES: (place, (t - PAIR) % VALUES) for place, t in enumerate(tokens) if t >= PAIR}
        asked = np.flatnonzero(batch.weights[row])
        assert asked.tolist() == list(range(64 - PAIRS, 64)) and len(pairs) == PAIRS
        for number, place in enumerate(asked):
            where, value = pairs[tokens[place] - QUERY]
            assert batch.targets[row, place] == VALUE + value
            assert batch.inputs["distances"][row, number] == place - where
    assert (batch.tokens < VALUE).all() and not np.array_equal(batch.tokens[0], batch.tokens[1])


def test_the_second_word_is_the_first():
    batch = jax.device_get(Duplication(3, 5, 4).batch(0, 0))
    assert batch.tokens.shape == (3, 12) and batch.weights.sum(axis=1).tolist() == [5.0] * 3
    assert (batch.tokens[:, [0, 6]] == 0).all() and batch.tokens[:, 1:6].min() >= 1 and batch.tokens.max() <= 4
    np.testing.assert_array_equal(batch.targets[:, 6:11], batch.tokens[:, 1:6])
    assert (batch.weights[:, 6:11] == 1).all()


@pytest.mark.parametrize("task", [Needles(2, 32), Duplication(2, 5, 4)])
def test_batches_are_pure_functions_of_seed_and_step(task):
    batch = jax.jit(task.batch)
    first = batch(3, 7)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, first, batch(3, 7))))
    assert not any(np.array_equal(first.tokens, batch(*other).tokens) for other in ((4, 7), (3, 8)))


def test_a_model_learns_what_it_is_asked():
    task, cfg = Duplication(16, 3, 2), long_context_tasks.duplication_model("full", 3)
    params, about = long_context_tasks.train(task, cfg, seed=0, steps=100, rate=1e-2, each=50)
    found, batch = long_context_tasks.answers(params, 0, long_context_tasks.HELD_OUT, task=task, cfg=cfg)
    assert np.asarray(found)[np.asarray(batch.weights) > 0].mean() > 0.95
    assert len(about["losses"]) == 2 and about["losses"][1] < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("mixer", long_context_tasks.MIXERS)
def test_every_mixer_trains_and_is_counted(mixer, monkeypatch):
    monkeypatch.setattr(long_context_tasks, "TRIED", 2**15)
    found = long_context_tasks.needle(mixer, 0, steps=100, lengths=(64, 128))
    assert len(found["losses"]) == 1 and 2.0 < found["losses"][0] < 3.5
    for length in (64, 128):
        right, tried = (np.array(found[each][str(length)]) for each in ("right", "tried"))
        assert tried.sum() == PAIRS * 2**15 // length and (right <= tried).all() and right.sum() > 0


@pytest.mark.parametrize("kind", ["positive", "hyperbolic"])
def test_error_of_favor_falls_as_one_over_the_root_of_features(kind):
    points = []
    for features in (64, 1024):
        estimate = long_context_favor.Estimate(kind, "independent", 0.25, features)
        points.append((features, np.mean(long_context_favor.errors(estimate, draws=4, tokens=32))))
    assert -0.6 < slope(points) < -0.4 and points[-1][1] < 0.1


def test_slopes_and_ratios_are_those_of_made_up_records():
    found = [priced("dense", 1024 * 2**n, 4.0**n) for n in range(5)]
    found += [priced("linear", 1024 * 2**n, 0.5 * 2**n, mib=3.0 * 2**n) for n in range(7)]
    lines = long_context_page.page(found).splitlines()
    assert "| dense | 2.00 | 2.00 | 0.00 | 1,000, 1.02k | 256,000, 64 |  |  | 1 |" in lines
    row = "| linear | 1.00 | 1.00 | 1.00 | 500, 2.05k | 8,000, 2.05k | 32,000, 2.05k | 192 MiB | 32 |"
    assert row in lines
    assert any("Above 1.1: time of dense (2.00), time from 8k on of dense (2.00)." in line for line in lines)
    assert any("Not measured yet: dense in documents, " in line for line in lines)
    assert lines.count("Not measured yet.") == 3


def test_what_is_recorded_is_not_measured_again(tmp_path, monkeypatch):
    options, asked = SimpleNamespace(out=tmp_path, **OPTIONS), []

    def measure(point, options):
        asked.append((point["mechanism"], point["tokens"]))
        if asked[-1] == ("dense", 2048) and len(asked) < 6:
            raise ProgramError("out of memory")
        return {"seconds": [1.0], "mib": 1.0}

    part = long_context.PARTS["slopes"]._replace(measure=measure)
    monkeypatch.setitem(long_context.PARTS, "slopes", part)
    known = priced("linear", 1024, 9.0)
    (tmp_path / "records.jsonl").write_text(json.dumps(known) + "\n")
    long_context.run("slopes", options)
    assert asked == [("dense", 1024), ("dense", 2048), ("linear", 2048), ("dense", 4096), ("linear", 4096)]
    long_context.run("slopes", options)
    assert asked[5:] == [("dense", 2048)]
    found = transfer_runs.read(tmp_path)
    assert found[0] == known and len(found) == 6
    assert not list(long_context.missing("slopes", found, options))
    assert len(list(long_context.missing("duplication", found, options))) == 2 * len(long_context.TRAINED)


def test_the_page_is_what_the_records_say():
    found = transfer_runs.read(RESULT)
    assert (RESULT / "README.md").read_text(encoding="utf-8") == long_context_page.page(found)
    points = [json.dumps({k: each.get(k) for k in IDENTITY}, sort_keys=True) for each in found]
    assert len(set(points)) == len(points)


IDENTITY = (
    "part", "mechanism", "tokens", "mixer", "trained", "seed", "kind", "directions", "deviation", "features"
)  # fmt: skip
