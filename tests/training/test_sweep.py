"""A member of a sweep is the run alone; branches, frozen members and kills change nothing."""

import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from quick_runs import FEW_OPTIMIZATIONS
from toy import ToyBatches, make_config, make_model

from jaxformer import records
from jaxformer.errors import ConfigError
from jaxformer.parallel.mesh import make_mesh
from jaxformer.training import loop
from jaxformer.training.chunks import longest_chunk
from jaxformer.training.sweep import scheduler, stacked_program
from jaxformer.training.sweep.run_files import finals, run_path, set_aside_damaged
from jaxformer.training.sweep.trunks import Member, shape_of, shapes, trunks

HERE = Path(__file__).parent
MODEL = make_model(dropout=0.2)
COMPILED: dict = {}


@pytest.fixture(autouse=True)
def compile_once(monkeypatch):
    """Sweeps of one shape share their program for so many members and devices: most of a test would be compiling."""
    compiled = stacked_program.StackedProgram

    def cached(model, config, count, batch):
        key = (id(model), shape_of(config), longest_chunk(config), count, tuple(jax.devices()))
        if key not in COMPILED:
            COMPILED[key] = compiled(model, config, count, batch)
        return COMPILED[key]

    monkeypatch.setattr(stacked_program, "StackedProgram", cached)


def member(name="a", steps=12, bad=(), **sections):
    """A member; `bad` are the steps whose weights are NaN, and travel in the data section's name of a split."""
    sections.setdefault("optimizer", {})
    config = make_config(train={"steps": steps, "max_bad_steps": 4}, **sections)
    config = replace(config, data=replace(config.data, tfds_train_split=",".join(map(str, bad)) or "none"))
    return Member(name, config, {"flops": 1e9 * steps, "params": 1, "params_non_embedding": 1})


def batches_of(config, delay=0.0):
    bad = tuple(int(step) for step in config.data.tfds_train_split.split(",") if step.isdigit())
    return ToyBatches(config.train.global_batch_size, seed=config.seed, bad=bad, delay=delay)


SOURCES = scheduler.Sources(
    model=lambda config: MODEL,
    batches=batches_of,
    held_out=lambda config: ToyBatches(config.train.global_batch_size, seed=7),
)


def swept(members, workdir, at_once=None, ask=None):
    return scheduler.run(
        ask or (lambda found: members), workdir, SOURCES, at_once=at_once, log=lambda line: None, bar=False
    )


def program_of(count):
    """What trains so many members of the toy's shape."""
    config = member().config
    return stacked_program.StackedProgram(MODEL, config, count, batches_of(config)[0])


@functools.cache
def alone(config):
    """Records of the run alone, on one device."""
    mesh = make_mesh(replace(config.mesh, data=1), jax.devices()[:1])
    batches, held_out = batches_of(config), ToyBatches(config.train.global_batch_size, seed=7)
    with tempfile.TemporaryDirectory() as workdir:
        loop.train(MODEL, batches, held_out, config, workdir=workdir, mesh=mesh, log=lambda line: None, bar=False)
        return records.latest(records.load(Path(workdir) / "records.jsonl"))


def check_alone(found, members, workdir, rtol=2e-5):
    """Every member's final record and curve are those of the run alone."""
    for mine in members:
        *curve, final = alone(mine.config)
        assert final["kind"] == "final"
        for field in ("loss", "loss_stderr", "accuracy"):
            np.testing.assert_allclose(found[mine.name][field], final[field], rtol=rtol, err_msg=mine.name)
        assert found[mine.name]["step"] == final["step"]
        losses = {r["step"]: r["loss"] for r in curve if r["kind"] == "train"}
        told = records.load(Path(workdir) / "runs" / f"{mine.name}.jsonl", "train")
        for record in told[1 if len(told) < len(losses) else 0 :]:  # the first one of a branch may be a part
            np.testing.assert_allclose(record["loss"], losses[record["step"]], rtol=rtol, err_msg=mine.name)


def different():
    """Members of one shape that differ in all that they may."""
    return [
        member("usual"),
        member("rate", optimizer={"learning_rate": 3e-2}),
        member("seed", seed=5),
        member("decay", optimizer={"weight_decay": 0.7}),
        member("floor", optimizer={"final_fraction": 0.6, "warmup_steps": 4}),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 3])  # 5 below, over several numbers of devices
def test_a_member_is_the_run_alone(tmp_path, at_once):
    members = different()
    found = swept(members, tmp_path, at_once)
    assert list(found) == [m.name for m in members]
    check_alone(found, members, tmp_path)
    assert len({record["loss"] for record in found.values()}) == len(members)  # the ruler measures


@pytest.mark.slow
def test_a_dispatch_has_room_for_the_longest_chunk_and_no_more(tmp_path):
    members = []
    for one in (member("short", 6), member("long", 12)):
        config = replace(one.config, execution=replace(one.config.execution, steps_per_dispatch=10_000))
        members.append(Member(one.name, config, one.fields))
    config = members[0].config
    made = stacked_program.StackedProgram(MODEL, config, 1, batches_of(config)[0])
    assert made.place([[batches_of(config)[0]]])[0].tokens.shape[:2] == (1, 6)
    check_alone(swept(members, tmp_path, 1), members, tmp_path)


@pytest.mark.slow
def test_members_of_other_lengths_share_the_program(tmp_path):
    members = [member("short", steps=6), member("long", steps=12)]
    assert len(shapes(members)) == 1 and len(trunks(members)) == 2
    check_alone(swept(members, tmp_path, 2), members, tmp_path)


WSD = {"schedule": "wsd", "warmup_steps": 2, "learning_rate": 1e-2}


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2])
def test_a_branch_is_the_run_alone(tmp_path, at_once):
    members = [member(f"{seed}-{steps}", steps, optimizer=WSD, seed=seed) for seed in (0, 3) for steps in (6, 11, 20)]
    found = swept(members, tmp_path, at_once)
    check_alone(found, members, tmp_path)
    assert [found[f"0-{steps}"]["branched_at"] for steps in (6, 11, 20)] == [5, 9, 16]
    assert len({record["trunk"] for record in found.values()}) == len(members) // 3
    # No update of a trunk is told twice: a file goes on where the one before branched off.
    firsts = [records.load(tmp_path / "runs" / f"0-{steps}.jsonl", "train")[0]["step"] for steps in (6, 11, 20)]
    assert firsts == [3, 6, 12]


@pytest.mark.slow
def test_more_is_asked_for_when_some_have_finished(tmp_path):
    first = [member(f"rate-{rate}", 10, optimizer={**WSD, "learning_rate": rate}) for rate in (1e-3, 3e-2)]

    def ask(found):
        if any(m.name not in found for m in first):
            return first
        best = min(first, key=lambda m: found[m.name]["loss"])
        longer = make_config(train={"steps": 20, "max_bad_steps": 4}, optimizer={**WSD, "learning_rate": 3e-2})
        assert best.name == "rate-0.03"
        return [*first, Member("longer", replace(longer, data=best.config.data), best.fields)]

    found = swept(None, tmp_path, ask=ask)
    longer = ask(found)[-1]
    check_alone(found, [longer], tmp_path)
    # It went on from the trunk of the shorter one.
    assert records.load(tmp_path / "runs" / "longer.jsonl", "train")[0]["step"] > found["rate-0.03"]["branched_at"]


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 3])
def test_a_diverged_member_is_frozen_and_touches_nobody(tmp_path, at_once):
    shared = [member(name, seed=seed) for seed, name in enumerate(("good", "bad", "hiccup", "late"))]
    bad = {0: (), 1: tuple(range(4, 12)), 2: (4, 5), 3: (10, 11)}
    sources = SOURCES._replace(
        batches=lambda config: ToyBatches(config.train.global_batch_size, seed=config.seed, bad=bad[config.seed])
    )
    found = scheduler.run(lambda done: shared, tmp_path, sources, at_once=at_once, log=lambda line: None, bar=False)
    ends = {"good": "finished", "bad": "diverged", "hiccup": "finished", "late": "diverged"}
    assert {name: found[name]["status"] for name in found} == ends
    assert math.isnan(found["bad"]["loss"]) and math.isnan(found["late"]["loss"]) and found["hiccup"]["skipped"] == 2
    check_alone(found, [shared[0]], tmp_path)
    curve = records.load(tmp_path / "runs" / "bad.jsonl", "train")
    assert np.isfinite(curve[0]["loss"]) and math.isnan(curve[-1]["loss"])


def use_first(number, monkeypatch):
    """Leaves that many of the devices."""
    first = jax.devices()[:number]
    monkeypatch.setattr(jax, "devices", lambda: first)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "devices", "each"), [(5, 8, 1), (5, 4, 2), (5, 2, 3)])
def test_members_over_devices(tmp_path, monkeypatch, number, devices, each):
    """Whole members to a device, and no more places than that needs: 5 of 8 devices, 3 of 4, both of 2."""
    use_first(devices, monkeypatch)
    members = different()
    program = program_of(number)
    assert (program.each, program.count) == (each, -(-number // each) * each)
    check_alone(swept(members, tmp_path, at_once=number), members, tmp_path)


def test_devices_that_train_members_tell_each_other_nothing():
    program = program_of(8)
    text = program.compiled.as_text()
    assert program.each == 1 and not re.search(
        "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter", text
    )


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_trial_chooses_and_says_why(tmp_path, monkeypatch, devices):
    use_first(devices, monkeypatch)
    members = different()

    def first_line(name):
        (tmp_path / name).mkdir()
        lines = []
        scheduler.run(lambda found: members, tmp_path / name, SOURCES, log=lines.append, bar=False)
        return lines[0].split(": ", 1)[1]

    turns, ms = "a step of a member takes .* ms in turns", "[0-9.e+]+ ms with"
    costs = "would cost more than it can save"
    assert re.fullmatch(
        f"1 at once: {turns}, compiling for {5 if devices == 1 else 2} at once {costs}", first_line("a")
    )
    monkeypatch.setattr(stacked_program, "TRIAL_SHARE", 1e9)
    each = "" if devices == 1 else f", {ms} 2 at once, 1 on a device"
    together = f"{ms} 5 at once, {5 if devices == 1 else 3} on a device"
    assert re.fullmatch(f"[1256] at once: {turns}{each}, {together}", first_line("b"))
    monkeypatch.setattr(stacked_program, "free_memory", lambda: 1.0)
    assert re.fullmatch(f"1 at once: {turns}, memory for one at a time .*", first_line("c"))


def test_how_members_are_split_among_programs():
    one, few, several = (SimpleNamespace(count=count) for count in (1, 2, 8))
    way = stacked_program.ExecutionPlan([several, few, one], "")
    assert list(way.split(15)) == [(several, 8), (several, 7)]
    assert list(way.split(11)) == [(several, 8), (few, 2), (one, 1)]
    # With nothing smaller, places stay empty.
    assert list(stacked_program.ExecutionPlan([several], "").split(3)) == [(several, 3)]


def test_a_finished_sweep_of_many_rounds_is_not_run_again(tmp_path):
    """Each round is asked for only when the one before is known; all have finished in an earlier start."""
    (tmp_path / "runs").mkdir()
    members = [member(name, seed=seed) for seed, name in enumerate("abcd")]
    final = {"kind": "final", "step": 1, "tokens": 1, "loss": 1.0, "loss_stderr": 0.1, **members[0].fields}
    for each in members:
        records.write(run_path(tmp_path, each.name), [{**final, "run": each.name}])

    def ask(found):
        return members[: 1 + sum(m.name in found for m in members)]

    nothing = scheduler.Sources(model=None, batches=None, held_out=None)
    assert list(scheduler.run(ask, tmp_path, nothing, log=lambda line: None, bar=False)) == ["a", "b", "c", "d"]


def test_two_of_one_name(tmp_path):
    with pytest.raises(ConfigError, match="two members have the same name"):
        swept([member("a"), member("a", seed=1)], tmp_path)


SCRIPT = """
import sys
sys.path[:0] = [{here!r}, {above!r}]
from test_sweep import *
members = [member(f"{{seed}}-{{steps}}", steps, optimizer=WSD, seed=seed) for seed in (0, 3) for steps in (6, 30, 60)]
sources = SOURCES._replace(batches=functools.partial(batches_of, delay={delay}))
print("READY", flush=True)
log = lambda line: print(line, flush=True)
scheduler.run(lambda found: members, {workdir!r}, sources, at_once=1, log=log, bar=False)
print("DONE", flush=True)
"""


def start(workdir, delay=0.0):
    code = SCRIPT.format(here=str(HERE), above=str(HERE.parent), workdir=str(workdir), delay=delay)
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **FEW_OPTIMIZATIONS}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip


def told(workdir):
    """name -> the lines of its file, without what the clock says, and the checksum of that."""
    out = {}
    for path in sorted((Path(workdir) / "runs").glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        out[path.stem] = [{k: v for k, v in line.items() if k not in ("seconds", "crc")} for line in lines]
    return out


@pytest.mark.slow
def test_kills_change_nothing_and_nothing_is_repeated(tmp_path):
    """Neither do SIGTERMs, which say so."""
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir(), killed.mkdir()
    process = start(undisturbed)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-2000:]
    finished: dict[str, float] = {}
    for wait, number in ((0.3, signal.SIGKILL), (1.0, signal.SIGTERM), (0.6, signal.SIGKILL)):
        process = start(killed, delay=0.02)
        assert process.stdout.readline() == "READY\n"
        for line in process.stdout:  # until it trains
            if "in turns" in line or "at once" in line:
                break
        time.sleep(wait)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
        assert process.returncode != 0 and ("Interrupted: SIGTERM" in err) == (number == signal.SIGTERM), err[-2000:]
        for name, at in finished.items():
            assert (killed / "runs" / f"{name}.jsonl").stat().st_mtime == at, f"{name} was repeated"
        finished = {path.stem: path.stat().st_mtime for path in (killed / "runs").glob("*.jsonl")}
    process = start(killed)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "DONE" in out, err[-2000:]
    assert len(told(killed)) == 6 and told(killed) == told(undisturbed)


DAMAGES = {
    "empty": lambda path: path.write_text(""),
    "no final record": lambda path: path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1])),
    "garbage": lambda path: path.write_bytes(b"\x00\x00\n" + path.read_bytes()),
    "its neighbour's": lambda path: path.write_bytes(path.with_name("whole.jsonl").read_bytes()),
    "another study's": lambda path: records.write(
        path, [{**record, "fingerprint": "another"} for record in records.load(path)]
    ),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_file_counts_as_not_yet_run(tmp_path, damage):
    lines = []
    (tmp_path / "runs").mkdir()
    train = {"kind": "train", "step": 1, "tokens": 1, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "skipped": 0}
    final = {"kind": "final", "step": 1, "tokens": 1, "loss": 1.0, "loss_stderr": 0.0, "params": 1, "flops": 1}
    members = [Member(name, make_config(), {"flops": 1}) for name in ("whole", "damaged")]
    for member in members:
        mine = [{**train, "seconds": 0.0}, {**final, "params_non_embedding": 1, "fingerprint": "mine"}]
        records.write(run_path(tmp_path, member.name), [{**record, "run": member.name} for record in mine])
    path = run_path(tmp_path, "damaged")
    DAMAGES[damage](path)
    assert list(finals(tmp_path, members, "mine")) == ["whole"]
    set_aside_damaged(tmp_path, lines.append, "mine")
    assert lines == [f"note: {path} is damaged, has no final record or is another run's; set aside as damaged.damaged"]
    assert not path.exists() and path.with_suffix(".damaged").exists()
    set_aside_damaged(tmp_path, lines.append, "mine")
    assert len(lines) == 1 and list(finals(tmp_path, members, "mine")) == ["whole"]
