"""The time of a run over all its starts, by records written by hand and by a run that is killed."""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from kills import kill_often
from quick_runs import FEW_OPTIMIZATIONS

from jaxformer import records
from jaxformer.training.goodput import Goodput, goodput
from jaxformer.training.stopwatch import ASIDE


def event(step, name, total, **aside):
    return {"kind": "event", "event": name, "step": step, "spent": {"total": total, **aside}}


def trained(step, total, **aside):
    return {"kind": "train", "step": step, "spent": {"total": total, **aside}}


def test_a_run_that_nothing_stopped():
    compiled = {"startup": 1.0, "compilation": 4.0}
    found = goodput([
        event(0, "started", 5.0, **compiled),
        trained(10, 15.0, **compiled),
        {"kind": "eval", "step": 10, "spent": {"total": 18.0, **compiled, "evaluation": 3.0}},
        trained(20, 29.0, **compiled, evaluation=3.0, checkpoint=0.5, data=0.5),
        {"kind": "final", "step": 20,
         "spent": {"total": 32.0, **compiled, "evaluation": 6.0, "checkpoint": 0.5, "data": 0.5}},
    ])  # fmt: skip
    # 10 s to step 10, then 14 s of which 3 + 0.5 + 0.5 were something else.
    assert found == Goodput(20 / 32, 20.0, 32.0, 1.0, 4.0, 0.5, 6.0, 0.5, restarts=0, steps_redone=0)


def test_steps_that_a_kill_made_vain_count_as_time_but_not_as_productive():
    found = goodput([
        event(0, "started", 0.0), trained(10, 10.0), trained(20, 30.0),  # killed; its checkpoint is of step 15
        event(15, "resumed", 1.0, checkpoint=1.0), trained(20, 6.0, checkpoint=1.0),  # killed again at once: of step 15
        event(15, "resumed", 2.0, checkpoint=2.0), trained(20, 8.0, checkpoint=2.0), trained(30, 18.0, checkpoint=2.0),
    ])  # fmt: skip
    assert (found.wall_seconds, found.checkpoint_seconds) == (30.0 + 6.0 + 18.0, 3.0)
    assert found.productive_seconds == 10.0 + 20.0 / 2 + 0.0 + (6.0 + 10.0)
    assert (found.restarts, found.steps_redone) == (2, 5 + 5)


def test_a_later_start_from_an_older_checkpoint_makes_both_before_it_vain():
    """The second start's checkpoint was damaged."""
    found = goodput([
        event(0, "started", 0.0), trained(10, 10.0), event(10, "interrupted", 11.0),
        event(10, "resumed", 0.0), trained(20, 10.0),
        event(5, "resumed", 0.0), trained(10, 5.0), trained(20, 15.0),
    ])  # fmt: skip
    assert (found.productive_seconds, found.wall_seconds, found.steps_redone) == (5.0 + 0.0 + 15.0, 36.0, 5 + 10)


def test_a_start_killed_before_its_first_record_counts_with_what_is_known_of_it():
    made = {"compilation": 7.0}
    found = goodput([event(0, "started", 7.0, **made), event(0, "resumed", 7.0, **made), trained(4, 9.0, **made)])
    assert (found.productive_seconds, found.compilation_seconds, found.restarts, found.steps_redone) == (2, 14, 1, 0)


def test_records_of_versions_without_times():
    old = [{"kind": "event", "event": "started", "step": 0}, {"kind": "train", "step": 10}]
    assert goodput(old) is None and goodput([]) is None
    found = goodput([*old, event(10, "resumed", 1.0, startup=1.0), trained(20, 5.0, startup=1.0)])
    assert (found.productive_seconds, found.wall_seconds, found.restarts) == (4.0, 5.0, 0)


def test_parts_never_exceed_the_whole():
    """Whatever the records are that kills leave."""
    dice = random.Random(0)
    for _ in range(200):
        found, step = [], 0
        for start in range(dice.randint(1, 5)):
            clock = {"total": 0.0, **dict.fromkeys(ASIDE, 0.0)}
            begin = step = dice.randint(0, step)
            found.append(event(begin, "resumed" if start else "started", **clock))
            for _ in range(dice.randint(0, 6)):
                what, seconds = dice.choice([*ASIDE, "steps"]), dice.uniform(0, 3)
                clock["total"] += seconds
                if what == "steps":
                    step += dice.randint(1, 9)
                    found.append(trained(step, **clock))
                else:
                    clock[what] += seconds
        made = goodput(found)
        aside = sum(getattr(made, f"{name}_seconds") for name in ASIDE)
        assert 0 <= made.productive_seconds <= made.wall_seconds - aside + 1e-6 and made.steps_redone >= 0


@pytest.mark.slow
def test_a_run_that_is_killed(tmp_path):
    """Its times add up to what a clock beside it says, and every start is counted."""
    config = {
        "train": {"steps": 60, "eval_every_steps": 30, "log_every_steps": 3},
        "checkpoint": {"save_every_steps": 6},
    }
    words = [sys.executable, str(Path(__file__).with_name("toy.py")), str(tmp_path), json.dumps(config), "0.05"]

    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", **FEW_OPTIMIZATIONS}

    def start():
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)

    def reached():
        path = tmp_path / "records.jsonl"
        return max((r["step"] for r in records.load(path)), default=0) if path.exists() else 0

    kill_often(start, reached, random.Random(1), kills=3, ahead=12)
    process = start()
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    found = records.load(tmp_path / "records.jsonl")
    (final,) = [record for record in found if record["kind"] == "final"]
    starts = [record for record in found if record.get("event") in ("started", "resumed")]
    assert final["restarts"] == len(starts) - 1 >= 2
    assert final["steps_redone"] >= sum(
        before["step"] > after["step"] for before, after in itertools.pairwise(found) if after in starts
    )
    assert 0 < final["productive_seconds"] < final["wall_seconds"] and final["peak_host_bytes"] > 1e7
    # Every step waits 50 ms for its batch, and nothing else: it is data that it waits for.
    assert 60 * 0.05 * 0.5 < final["data_seconds"] < final["wall_seconds"]
