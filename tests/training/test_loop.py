"""Laws of the loop: a killed run ends in the same bits, stops when it should, and says what it did."""

import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import ANY

import jax
import numpy as np
import pytest
from kills import kill_often
from quick_runs import FEW_OPTIMIZATIONS
from toy import T, ToyBatches, batch_sources, make_config, make_model

from jaxformer import records
from jaxformer.errors import ConfigError, RecordError, TrainingDiverged
from jaxformer.parallel.mesh import make_mesh
from jaxformer.training import evaluate, loop, step
from jaxformer.training.checkpoint.checksum import checksums
from jaxformer.training.checkpoint.manager import Checkpoints
from jaxformer.training.chunks import longest_chunk
from jaxformer.training.eval_step import eval_step
from jaxformer.training.loop import train
from jaxformer.training.progress import Progress
from jaxformer.training.reporter import Reporter


class CrashError(Exception):
    """What a test makes a run die of."""


@pytest.fixture(autouse=True)
def compile_once(monkeypatch):
    """Runs of one model, mesh and what decides an update share their compiled functions: most of a test would be
    compiling."""

    def cached(model, optimizer, mesh, config):
        key = (id(model), mesh, config.mesh, config.optimizer, config.execution, config.train.steps, config.seed)
        if key not in COMPILED:
            steps = step.compile_steps(model, optimizer, mesh, config)
            first = jax.tree.map(np.array, steps.init())
            where = jax.tree.map(lambda x: x.sharding, steps.abstract_state)
            COMPILED[key] = steps._replace(init=lambda: jax.tree.map(jax.device_put, first, where))
        room = functools.partial(step.place_chunk, mesh=mesh, capacity=longest_chunk(config))
        return COMPILED[key]._replace(place_chunk=room)

    monkeypatch.setattr(loop, "compile_steps", cached)
    monkeypatch.setattr(loop, "compile_ahead", lambda steps, *_: steps)


COMPILED: dict = {}
model_with = functools.cache(make_model)


class Crashing(ToyBatches):
    """Batches that die at a step."""

    def __init__(self, *args, at, **kwargs):
        super().__init__(*args, **kwargs)
        self.at = at

    def __getitem__(self, index):
        if index == self.at:
            raise CrashError(f"at {index}")
        return super().__getitem__(index)


def run(workdir, config=None, batches=None, lines=None, dropout=0.2, sample=None, devices=1, **options):
    config = config or make_config()
    mesh = make_mesh(config.mesh, jax.devices()[:devices])
    good, held_out = batch_sources(config, mesh)
    if sample is not None:
        held_out = {"": evaluate.HeldOut(held_out, 1.0, options.pop("bytes_per_token"), sample)}
    workdir.mkdir(exist_ok=True)
    log = (lambda text: None) if lines is None else lines.append
    model = model_with(dropout)
    return train(model, batches or good, held_out, config, workdir=workdir, mesh=mesh, log=log, bar=False, **options)


def load(workdir, kind=None):
    return records.load(workdir / "records.jsonl", kind)


# Chunks


@pytest.mark.parametrize(
    ("dispatch", "every_eval", "every_save"), [(3, 6, None), (10, 7, 4), (1, 50, 5), (64, 9, None)]
)
def test_chunks_end_in_the_same_places_wherever_a_run_begins(dispatch, every_eval, every_save):
    config = make_config(
        train={"steps": 50, "steps_per_dispatch": dispatch, "eval_every_steps": every_eval},
        checkpoint={"save_every_steps": every_save},
    )

    def ends(start):
        while start < 50:
            end = loop.next_boundary(start, config)
            assert start < end <= min(50, start + dispatch)
            yield (start := end)

    whole = list(ends(0))
    assert whole[-1] == 50
    assert longest_chunk(config) == max(end - start for start, end in itertools.pairwise([0, *whole]))
    for i, start in enumerate(whole):
        assert list(ends(start)) == whole[i + 1 :]
    for period in filter(None, (every_eval, every_save, dispatch)):
        assert set(range(period, 51, period)) <= set(whole)


@pytest.mark.slow
def test_a_dispatch_has_room_for_the_longest_chunk_and_no_more(tmp_path):
    """Chunks were padded to steps_per_dispatch: 2,000,000 of them took for ever, 2**31 - 1 all memory."""
    many, few = (make_config(train={"steps_per_dispatch": number}) for number in (10_000, 6))
    mesh = make_mesh(many.mesh, jax.devices()[:1])
    optimizer = loop.make_optimizer(many.optimizer, many.train.steps, model_with(0.2).specs)
    chunk, count = step.compile_steps(model_with(0.2), optimizer, mesh, many).place_chunk([ToyBatches(8)[0]])
    assert (chunk.tokens.shape, int(count)) == ((6, 8, T), 1)
    got, wanted = (checksums(run(tmp_path / name, c).state.params) for name, c in (("many", many), ("few", few)))
    assert got == wanted


# Resuming


@pytest.mark.slow
@pytest.mark.parametrize("crash_at", [4, 7, 11])
def test_a_run_that_crashed_ends_in_the_same_bits(tmp_path, crash_at):
    config = make_config(
        checkpoint={"save_every_steps": 4}, optimizer={"ema_decay": 0.9, "name": "muon"}, train={"micro_batches": 2}
    )
    whole = run(tmp_path / "whole", config)
    with pytest.raises(CrashError):
        run(tmp_path / "broken", config, batches=Crashing(8, at=crash_at))
    assert max(Checkpoints(tmp_path / "broken" / "checkpoints", config.checkpoint).steps(), default=0) <= crash_at
    again = run(tmp_path / "broken", config)
    assert (again.status, again.step) == ("finished", 12)
    assert checksums(again.state) == checksums(whole.state)
    assert again.evaluation == whole.evaluation

    def last(workdir, *fields):
        return [[r.get(f) for f in fields] for r in records.latest(load(workdir)) if r["kind"] in ("eval", "final")]

    assert last(tmp_path / "broken", "step", "loss", "tokens") == last(tmp_path / "whole", "step", "loss", "tokens")


def start(workdir, config, delay=0.0, process=(), devices=1):
    """Runs toy.py in a process of its own."""
    workdir.mkdir(exist_ok=True)
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    env |= FEW_OPTIMIZATIONS
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    script = Path(__file__).parent / "toy.py"
    command = [sys.executable, "-W", "error", script, workdir, json.dumps(config), str(delay), *map(str, process)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, code=0):
    """(status, step, hashes) that toy.py printed, and everything it said."""
    out, err = process.communicate(timeout=180)
    assert process.returncode == code, err[-3000:]
    result = [line.split(maxsplit=3) for line in out.splitlines() if line.startswith("RESULT")]
    return (result[0][1:] if result else None), out + err


def steps_seen(workdir):
    path = workdir / "records.jsonl"
    return max((r["step"] for r in records.load(path, "train")), default=0) if path.exists() else 0


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.005)


KILLED = {"train": {"steps": 200, "eval_every_steps": 8}, "checkpoint": {"save_every_steps": 5, "keep": 3}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What toy.py prints of KILLED when nothing stops it."""
    return finish(start(tmp_path_factory.mktemp("undisturbed"), KILLED))[0]


@pytest.mark.slow
def test_killed_five_times_and_started_again_it_ends_in_the_same_bits(tmp_path, undisturbed):
    workdir = tmp_path / "killed"
    kill_often(lambda: start(workdir, KILLED, delay=0.02), lambda: steps_seen(workdir), random.Random(2), 5, 6)
    again, said = finish(start(workdir, KILLED))
    assert again == undisturbed
    assert "going on from step" in said or "not valid" not in said


@pytest.mark.slow
def test_after_falling_back_a_run_overwrites_what_was_damaged(tmp_path, capfd):
    config = make_config(checkpoint={"save_every_steps": 3, "keep": 5})
    whole = run(tmp_path / "a", config)
    for name in ("12", "9"):
        (tmp_path / "a" / "checkpoints" / name / "meta" / "metadata").write_text("{}")
    capfd.readouterr()
    lines = []
    again = run(tmp_path / "a", config, lines=lines)
    assert "going on from step 6" in lines
    assert checksums(again.state) == checksums(whole.state)
    err = capfd.readouterr().err
    assert err.count("is not valid") == 2 and err.count("deleting the invalid checkpoint") == 2
    assert Checkpoints(tmp_path / "a" / "checkpoints", config.checkpoint).steps() == [3, 6, 9, 12]


def test_a_finished_run_started_again_does_not_train(tmp_path):
    first = run(tmp_path / "a")
    trained = load(tmp_path / "a", "train")
    second = run(tmp_path / "a", batches=Crashing(8, at=1))
    assert (second.status, second.step, second.evaluation) == ("finished", 12, first.evaluation)
    assert load(tmp_path / "a", "train") == trained


# Signals


@pytest.mark.slow
def test_sigterm_saves_and_the_run_goes_on_where_it_stopped(tmp_path, undisturbed):
    process = start(tmp_path / "stopped", KILLED, delay=0.05)
    wait_for(lambda: steps_seen(tmp_path / "stopped") >= 6, process)
    process.terminate()
    (status, step, _), said = finish(process)
    assert status == "interrupted" and 6 <= int(step) < 200
    assert f"stopped at step {step} by SIGTERM, saved; go on with: make resume" in said
    assert (tmp_path / "stopped" / "checkpoints" / step).is_dir()
    assert load(tmp_path / "stopped")[-1] == {"kind": "event", "step": int(step), "event": "interrupted", "spent": ANY}
    again, said = finish(start(tmp_path / "stopped", KILLED))
    assert again == undisturbed and f"going on from step {step}" in said


@pytest.mark.slow
def test_a_signal_while_compiling_ends_the_run_cleanly(tmp_path):
    process = start(tmp_path / "a", KILLED)
    assert process.stdout.readline() == "READY\n"
    process.terminate()
    (status, step, _), said = finish(process)
    assert (status, step) == ("interrupted", "0")
    assert "stopped at step 0 by SIGTERM, nothing to save; go on with: make resume" in said


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_even_inside_a_dispatch(tmp_path):
    process = start(tmp_path / "a", KILLED, delay=30)  # the first batch alone takes longer than the test may
    wait_for(lambda: (tmp_path / "a" / "records.jsonl").exists(), process)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "READY\n"
    said = process.stdout.readline()
    assert "SIGINT: finishing this dispatch, then saving (Ctrl-C now: exit at once)" in said
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 130
    process.communicate()


def test_signals_are_handed_back_and_other_threads_left_alone(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    run(tmp_path / "a")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    found = []
    thread = threading.Thread(target=lambda: found.append(run(tmp_path / "b").status))
    thread.start()
    thread.join()
    assert found == ["finished"]


@pytest.mark.slow
def test_an_evaluation_that_a_signal_cut_off_is_made_up_for(tmp_path, monkeypatch):
    config = make_config(train={"early_stop_evals": 9})
    asked = loop._Run.asked
    monkeypatch.setattr(loop._Run, "asked", lambda self, step, saved: (step == 6, False))
    assert run(tmp_path / "a", config).status == "interrupted"
    assert load(tmp_path / "a", "eval") == []
    monkeypatch.setattr(loop._Run, "asked", asked)
    run(tmp_path / "a", config)
    assert [r["step"] for r in load(tmp_path / "a", "eval")] == [6, 12]


# Stopping


@pytest.mark.slow
def test_early_stopping_survives_a_resume(tmp_path):
    config = make_config(
        optimizer={"learning_rate": 1e-20},
        train={"steps": 30, "eval_every_steps": 3, "early_stop_evals": 2},
        checkpoint={"save_every_steps": 3},
    )
    lines = []
    whole = run(tmp_path / "whole", config, lines=lines)
    # the first evaluation is the best, two more are no better
    assert (whole.status, whole.step) == ("stopped_early", 9)
    assert "stopped at step 9: no better evaluation in 2" in lines
    assert load(tmp_path / "whole", "final")[0]["status"] == "stopped_early"
    with pytest.raises(CrashError):
        run(tmp_path / "broken", config, batches=Crashing(8, at=7))
    again = run(tmp_path / "broken", config)
    assert (again.status, again.step) == ("stopped_early", 9)
    third = run(tmp_path / "broken", config, batches=Crashing(8, at=9))  # trains no step more
    assert (third.status, third.step) == ("stopped_early", 9)
    assert run(tmp_path / "learning", make_config(train={"early_stop_evals": 1})).status == "finished"


def test_no_better_evaluation():
    assert not evaluate.stops_early([1.0, 1.0, 1.0], None)
    assert evaluate.stops_early([1.0, 1.0], 1) and not evaluate.stops_early([1.0], 1)
    assert evaluate.stops_early([1.0, float("nan"), float("nan")], 2)
    assert not evaluate.stops_early([float("nan"), 1.0], 1)


@pytest.mark.slow
def test_bad_steps_in_a_row_end_the_run_with_one_line(tmp_path):
    config = make_config(train={"max_bad_steps": 3}, checkpoint={"save_every_steps": 3})
    with pytest.raises(TrainingDiverged) as error:
        run(tmp_path / "a", config, batches=ToyBatches(8, bad=(2, 4, 5, 6, 7)))
    assert str(error.value).startswith("step 7: 3 steps in a row were not finite (loss nan, gradient norm nan)")
    assert "\n" not in str(error.value)
    assert load(tmp_path / "a")[-1] == {"kind": "event", "step": 7, "event": "diverged", "spent": ANY}
    by_step = {r["step"]: r for r in load(tmp_path / "a", "train")}
    assert [by_step[s]["skipped"] for s in (3, 6)] == [1, 3]
    assert all(np.isfinite(by_step[s]["loss"]) for s in (3, 6))
    assert Checkpoints(tmp_path / "a" / "checkpoints", config.checkpoint).steps() == [3, 6]


def test_bad_steps_now_and_then_are_skipped(tmp_path):
    config = make_config(train={"max_bad_steps": 2})
    result = run(tmp_path / "a", config, batches=ToyBatches(8, bad=(1, 3, 8)))
    assert result.status == "finished" and int(result.state.skipped) == 3
    assert np.isfinite(result.evaluation["loss"])


@pytest.mark.parametrize("bad", [(10, 11), range(12)], ids=["the last", "all"])
def test_a_run_whose_last_steps_were_skipped_has_diverged(tmp_path, bad):
    """Fewer than max_bad_steps in a row, because the run ended: "finished", with the loss of older weights."""
    for _ in range(2):  # so it is when it is started again
        with pytest.raises(TrainingDiverged) as error:
            run(tmp_path / "a", make_config(), batches=ToyBatches(8, bad=tuple(bad)))
        assert str(error.value) == (
            f"step 12: the last steps were not finite and were skipped ({len(bad)} in a row); try a lower "
            "optimizer.learning_rate"
        )
    found = load(tmp_path / "a")
    assert found[-1] == {"kind": "event", "step": 12, "event": "diverged", "spent": ANY}
    assert len([r for r in found if r["kind"] == "train"]) == 4 and not [r for r in found if r["kind"] == "final"]


@pytest.mark.slow
def test_a_skipped_step_at_the_end_of_a_long_run_is_one_of_many(tmp_path):
    result = run(tmp_path / "a", make_config(train={"steps": 40}), batches=ToyBatches(8, bad=(38, 39)))
    assert result.status == "finished" and int(result.state.bad_steps) == 2
    assert load(tmp_path / "a", "final")[-1]["step"] == 40


@pytest.mark.slow
def test_a_final_loss_that_is_not_finite_has_diverged(tmp_path):
    """Every step was finite, but the last one's update was not small."""
    config = make_config(train={"steps": 1}, optimizer={"learning_rate": 1e38, "warmup_steps": 0})
    with pytest.raises(TrainingDiverged, match=r"^step 1: the held-out loss is not finite \((nan|inf)\); try a lower"):
        run(tmp_path / "a", config)
    assert load(tmp_path / "a")[-1]["event"] == "diverged"


def test_what_cannot_work_fails_before_it_compiles(tmp_path):
    with pytest.raises(ConfigError, match=r"global_batch_size: 8 .* does not divide over 8 devices"):
        step.check_batch(8, 2, make_mesh(make_config(mesh={"data": 8}).mesh))
    mesh = make_mesh(make_config().mesh)
    with pytest.raises(ConfigError, match=r"config\.train\.global_batch_size: 6"):
        config = make_config(train={"batch_rows": 6})
        train(make_model(), ToyBatches(6), ToyBatches(6), config, workdir=tmp_path, mesh=mesh)
    assert os.listdir(tmp_path) == []


def test_an_empty_held_out_split_is_one_line(tmp_path):
    mesh = make_mesh(make_config().mesh, jax.devices()[:1])
    with pytest.raises(ConfigError, match="the held-out split holds no row"):
        train(make_model(), ToyBatches(8), ToyBatches(8, length=0), make_config(), workdir=tmp_path, mesh=mesh)


@pytest.mark.slow
def test_what_the_batches_raise_comes_out(tmp_path):
    with pytest.raises(CrashError, match="at 2"):
        run(tmp_path / "a", batches=Crashing(8, at=2))


# Telling


def test_records(tmp_path):
    config = make_config(train={"log_every_steps": 5, "steps": 14})
    lines = []
    result = run(
        tmp_path / "a",
        config,
        lines=lines,
        sample=ToyBatches(8, length=1),
        flops_per_token=100.0,
        bytes_per_token=2.0,
        final_fields={"params_non_embedding": 7, "note": "x"},
    )
    trained, evals = load(tmp_path / "a", "train"), load(tmp_path / "a", "eval")
    assert [r["step"] for r in trained] == [5, 10, 14]
    assert [r["tokens"] for r in trained] == [8 * T * s for s in (5, 10, 14)]
    assert [(r["step"], r["split"], r["rows"]) for r in evals][:2] == [(6, "validation", 7), (12, "validation", 7)]
    assert [r["rows"] for r in evals][2:] == [20]  # at the end all three batches; the first row has no weight
    assert trained[0]["seconds"] < trained[2]["seconds"] and trained[2]["tokens_per_second"] > 0
    (final,) = load(tmp_path / "a", "final")
    assert final["flops"] == 100.0 * 14 * 8 * T and final["params_non_embedding"] == 7 and final["note"] == "x"
    assert final["loss"] == result.evaluation["loss"] and final["params"] == 16 * 8 + 2 * (8 * 16 * 2 + 16)
    assert result.evaluation["bits_per_byte"] == pytest.approx(final["loss"] / 2 / np.log(2))
    assert load(tmp_path / "a", "event") == [{"kind": "event", "step": 0, "event": "started", "spent": ANY}]
    assert any(line.startswith("step 14 validation: loss") and "bits per byte" in line for line in lines)
    assert any(line.startswith("step 5 of 14: loss") for line in lines)


def test_every_window_has_a_length_whichever_dispatches_return_when_they_are_done(tmp_path, monkeypatch):
    """The end of one that returned before is seen late: that of the next is not to be seen earlier."""
    answers = itertools.cycle([False, False, True, False, True, True])
    whole = loop._Run.returned_done

    class Metrics:
        class loss:  # noqa: N801
            @staticmethod
            def is_ready():
                return next(answers)

    monkeypatch.setattr(loop._Run, "returned_done", lambda self, new: whole(self, Metrics))
    train = {"log_every_steps": 1, "steps": 30, "eval_every_steps": 9, "steps_per_dispatch": 1}
    run(tmp_path / "a", make_config(train=train))
    assert ["tokens_per_second" in r for r in load(tmp_path / "a", "train")] == [False] + [True] * 29


def test_the_last_window_is_as_fast_as_the_others_where_a_dispatch_returns_when_it_is_done(tmp_path, monkeypatch):
    """As on GPUs, whose host leads the loop over the updates."""
    whole = loop.StepTrace.__call__

    def slow(self, *arguments):
        out = jax.block_until_ready(whole(self, *arguments))
        time.sleep(0.05)
        return out

    monkeypatch.setattr(loop.StepTrace, "__call__", slow)
    train = {"log_every_steps": 5, "steps": 11, "eval_every_steps": 100, "steps_per_dispatch": 1}
    run(tmp_path / "a", make_config(train=train))
    first, second, last = (r["tokens_per_second"] for r in load(tmp_path / "a", "train"))
    assert last < 8 * T / 0.05 and second < 8 * T / 0.05 and first < 8 * T / 0.05


@pytest.mark.slow
def test_a_train_record_is_the_mean_over_its_tokens(tmp_path):
    run(tmp_path / "a", make_config(optimizer={"learning_rate": 1e-20}), dropout=0.0)
    config = make_config()
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    batches, _ = batch_sources(config, mesh)
    params = make_model().init(jax.random.split(jax.random.key(0))[0])
    sums = [eval_step(params, batches[i], model=make_model()) for i in range(3)]
    total = sum(float(s["loss"][0].sum()) for s in sums) / sum(float(s["loss"][1].sum()) for s in sums)
    assert load(tmp_path / "a", "train")[0]["loss"] == pytest.approx(total, rel=1e-5)


@pytest.mark.slow
def test_evaluation_uses_the_average_where_there_is_one(tmp_path):
    config = make_config(optimizer={"ema_decay": 0.5})
    result = run(tmp_path / "a", config)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    _, held_out = batch_sources(config, mesh)
    compiled = step.compile_eval(make_model(), mesh)

    def loss(params):
        return evaluate.evaluate(compiled, lambda b: step.device_put_batch(b, mesh), params, held_out)["loss"].mean

    assert result.evaluation["loss"] == loss(result.state.ema) != loss(result.state.params)


@pytest.mark.slow
def test_saving_by_the_clock(tmp_path):
    config = make_config(checkpoint={"save_every_minutes": 1e-6, "keep": 9})
    run(tmp_path / "a", config)
    assert Checkpoints(tmp_path / "a" / "checkpoints", config.checkpoint).steps() == [3, 6, 9, 12]
    never = make_config(checkpoint={"save_every_minutes": None})
    run(tmp_path / "b", never)
    assert Checkpoints(tmp_path / "b" / "checkpoints", never.checkpoint).steps() == [12]


@pytest.mark.slow
def test_tensorboard(tmp_path):
    run(tmp_path / "a", make_config(tensorboard=True))
    assert list((tmp_path / "a" / "tensorboard").glob("events.*"))


def test_tensorboard_missing_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        ConfigError, match=r"trackers: tensorboard needs the tensorboard extra: pip install 'jaxformer\[tensorboard\]'"
    ):
        run(tmp_path / "a", make_config(tensorboard=True))


@pytest.mark.parametrize("what", ["pipe", "link", "broken link", "folder"])
def test_records_that_are_no_file_of_their_own_are_one_line(tmp_path, what):
    """A pipe was waited for, for ever; what a link led to was cut."""
    path, elsewhere = tmp_path / "records.jsonl", tmp_path / "elsewhere"
    elsewhere.write_bytes(b"somebody's")
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(elsewhere if what == "link" else tmp_path / "not there")
    options = {"every": 1, "total": 1, "tokens_per_step": 1, "max_bad_steps": 1, "mesh": None}
    with pytest.raises(RecordError, match=r"records.jsonl: cannot be (read|written) \(.*\)$"):
        Reporter(path, progress=Progress(1, print, show=False), **options).event(0, "started")
    assert elsewhere.read_bytes() == b"somebody's" and not (tmp_path / "not there").exists()


def test_a_bar_on_a_terminal(tmp_path, capfd):
    config = make_config()
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    train(model_with(0.2), *batch_sources(config, mesh), config, workdir=tmp_path, mesh=mesh, bar=True)
    assert "step 12 validation" in capfd.readouterr().err


# Several hosts


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 4, "fsdp": 2}, {"data": 1, "tensor": 8}])  # the second: each brings all rows
def test_two_processes_are_one(tmp_path, mesh):
    config = {"mesh": mesh, "checkpoint": {"save_every_steps": 3}, "train": {"steps": 40}}
    port = random.randint(20000, 40000)
    both = [start(tmp_path / "two", config, 0.05, (i, port), devices=4) for i in range(2)]
    wait_for(lambda: steps_seen(tmp_path / "two") >= 6, both[0])
    both[1].terminate()  # only one of them is told
    first = [finish(p)[0] for p in both]
    assert first[0] == first[1] and first[0][0] == "interrupted"
    port += 1
    second = [finish(p)[0] for p in [start(tmp_path / "two", config, 0, (i, port), devices=4) for i in range(2)]]
    assert second[0] == second[1] and second[0][:2] == ["finished", "40"]
    alone = run(tmp_path / "one", make_config(**config), devices=8)
    assert (alone.status, alone.step) == ("finished", 40)
    losses = [[r["loss"] for r in records.latest(load(tmp_path / d, "eval"))] for d in ("one", "two")]
    np.testing.assert_allclose(*losses, rtol=1e-5)
