"""How long a sweep takes, by a trial: every update and every evaluation is counted once, at the speed measured."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from toy import ToyBatches, make_config, make_model

from jaxformer.training.sweep import scheduler, trial
from jaxformer.training.sweep.stacked_program import ExecutionPlan
from jaxformer.training.sweep.trunks import Member, trunks

MODEL = make_model(dropout=0.0)
SECONDS = 0.02


class Clock:
    """Stands still but for what waits."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(trial, "time", Clock())
    return trial.time


def member(steps, seed, rows=8):
    config = make_config(train={"steps": steps, "batch_rows": rows}, seed=seed)
    return Member(f"{steps}, {seed}, {rows}", config, {"flops": 1e9 * steps, "params": 1, "params_non_embedding": 1})


def test_all_updates_and_evaluations_are_counted(monkeypatch):
    """Three trunks of one shape train by two at once and then one; another shape is by itself."""
    by_two, alone, asked = SimpleNamespace(count=2), SimpleNamespace(count=1), []
    groups = scheduler._together

    def how(found, sources, at_once):
        asked.append(at_once)
        return groups(found), ExecutionPlan([by_two, alone] if len(found) == 3 else [alone], "")

    monkeypatch.setattr(trial, "how_to_train", how)
    speeds, rows = {2: 0.3, 1: 0.2}, {8: 5.0, 16: 7.0}
    monkeypatch.setattr(trial, "update_seconds", lambda program, *_: speeds[program.count])
    monkeypatch.setattr(trial, "evaluation_seconds", lambda _, config, sources: rows[config.train.global_batch_size])
    members = [member(12, seed) for seed in range(3)] + [member(30, 0, rows=16)]
    sources = SimpleNamespace(batches=lambda config: None)
    found = trial.estimate(members, sources, at_once=2)
    assert asked == [2, 2]
    assert all(trunk.steps == trunk.members[0].config.train.steps for trunk in trunks(members))
    assert found.updates == pytest.approx(12 * (0.3 + 0.2) + 30 * 0.2)
    assert found.evaluations == pytest.approx(3 * 5.0 + 7.0) and 0 <= found.compiling < 1
    assert trial.estimate([], sources) == (0, 0, 0)


class Slow:
    """A program of two members whose every update takes SECONDS, and a dispatch more at first."""

    count, capacity = 2, 25

    def __init__(self, clock):
        self.sizes, self.clock = [], clock

    def init(self, configs):
        return np.zeros(len(configs))

    def member(self, members, index):
        return SimpleNamespace(params=members[index], ema=None, frozen=None)

    def place(self, batches):
        return batches, len(batches[0])

    def train(self, members, configs, chunk):
        self.clock.now += SECONDS * chunk[1] + (0.5 if not self.sizes else 0)
        self.sizes.append(chunk[1])
        return members, None


def test_an_update_takes_what_it_takes_in_a_dispatch_of_many(clock):
    program = Slow(clock)
    with ThreadPoolExecutor(1) as feed:
        found = trial.update_seconds(program, member(100, 0).config, ToyBatches(4), feed)
    assert found == pytest.approx(SECONDS) and program.sizes == [1, 1, 25, 25, 25, 25]


def test_an_evaluation_is_of_all_batches(monkeypatch, clock):
    asked = []

    def evaluate(program, place, params, held_out, frozen):
        for part in held_out.values():
            asked.append(len([part.batches[i] for i in range(len(part.batches))]))
            clock.now += SECONDS * len(part.batches)

    monkeypatch.setattr(trial, "evaluate_sources", evaluate)
    monkeypatch.setattr(trial, "averaged", lambda state: state.params)
    program = Slow(clock)
    program.evaluate = None
    held_out = [np.zeros(2)] * 40
    sources = scheduler.Sources(model=None, batches=None, held_out=lambda config: held_out)
    found = trial.evaluation_seconds(program, member(12, 0).config, sources)
    assert found == pytest.approx(40 * SECONDS) and asked == [1, trial.BATCHES]


def test_a_trial_of_a_real_model_writes_nothing_and_ends_in_seconds():
    sources = scheduler.Sources(
        model=lambda config: MODEL,
        batches=lambda config: ToyBatches(config.train.global_batch_size, seed=config.seed),
        held_out=lambda config: ToyBatches(config.train.global_batch_size, seed=7),
    )
    found = trial.estimate([member(12, 0), member(12, 1)], sources)
    assert found.compiling > 0 and 0 < found.updates < 60 and 0 < found.evaluations < 60
