"""launch/local.sh for real: several processes are one, and losing one of them changes nothing.

One tiny model on several processes and devices; the undisturbed runs are made once and looked at by all tests.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from jaxformer import records
from jaxformer.storage import json_checksum
from jaxformer.storage.address import place
from jaxformer.training.checkpoint.layout import SEAL, list_steps

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
STEPS, HEARTBEAT = 20, 8
CONFIG = f"""
import os
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({{
        "model": {{"num_layers": 1, "width": 32, "num_heads": 4, "context_length": 32, "positions": "rotary"}},
        "data": {{"files": (os.environ.get("TEXT", "text.txt"),), "tokenizer": "bytes"}},
        "optimizer": {{"learning_rate": 1e-2, "warmup_steps": 2}},
        "train": {{"steps": {STEPS}, "batch_rows": 8, "steps_per_dispatch": 2, "eval_every_steps": 10,
                  "log_every_steps": 1}},
        "checkpoint": {{"save_every_steps": 4, "keep": 9}},
        "distributed": {{"heartbeat_timeout_seconds": {HEARTBEAT}}},
    }})
"""


class Job:
    """A command that trains, in the background; its output goes to a file beside its workdir."""

    started: ClassVar[list[subprocess.Popen]] = []

    def __init__(
        self,
        folder: Path,
        name: str,
        processes: int,
        devices: int,
        *flags: str,
        at: str | None = None,
        **environment: str,
    ):
        self.workdir, self.log = place(at or folder / name), folder / f"{name}.log"
        command = [f"--config={folder / 'config.py'}", f"--config.workdir={self.workdir}", *flags]
        command.append(f"--config.data.cache_dir={folder / 'cache'}")
        if processes == 1:
            command = [sys.executable, "-m", "jaxformer", "pretrain", *command]
        else:
            command = [str(ROOT / "launch" / "local.sh"), *command]
        own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "CPU_DEVICES": str(devices)}
        own["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # most of the time is XLA's
        own |= {
            "WAIT_SECONDS": str(HEARTBEAT + 4),
            "PROCESSES": str(processes),
            "PYTHON": sys.executable,
            "TEXT": str(folder / "text.txt"),
        }
        with self.log.open("a") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **own, **environment}, stdout=out, stderr=subprocess.STDOUT
            )
        self.started.append(self.process)

    def said(self) -> str:
        return self.log.read_text()

    def finish(self, code: int = 0, seconds: float = 150) -> "Job":
        assert self.process.wait(timeout=seconds) == code, self.said()[-4000:]
        return self

    def pids(self, start: int) -> list[int]:
        """Of the start-th start, from 1, once it is there."""
        self.wait(lambda: self.said().count("started processes") >= start)
        return [
            int(pid) for pid in re.findall(r"started processes.*?: ([\d ]+)$", self.said(), re.M)[start - 1].split()
        ]

    def wait_for_checkpoint(self, above: int, **how: float) -> None:
        self.wait(lambda: list_steps(self.workdir / "checkpoints")[-1:] > [above], **how)

    def wait(self, done, seconds: float = 90, every: float = 0.02) -> None:
        until = time.monotonic() + seconds
        while not done():
            assert self.process.poll() is None and time.monotonic() < until, self.said()[-4000:]
            time.sleep(every)

    def losses(self) -> dict[int, float]:
        return {r["step"]: r["loss"] for r in records.latest(records.load(self.workdir / "records.jsonl", "train"))}

    def checksums(self, step: int = STEPS) -> dict:
        return json_checksum.read(self.workdir / "checkpoints" / str(step) / SEAL)["leaves"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    (folder / "config.py").write_text(CONFIG)
    (folder / "text.txt").write_text(" ".join(str(i * i) for i in range(2000)))
    yield folder
    for process in Job.started:
        process.terminate()  # a script ends what it has started
        process.wait()


@pytest.fixture(scope="module")
def one(folder):
    return Job(folder, "one", 1, 1).finish()


@pytest.fixture(scope="module")
def two(folder):
    return Job(folder, "two", 2, 2, "--config.mesh.fsdp=2").finish()


def close(found: dict[int, float], expected: dict[int, float]) -> None:
    assert list(found) == list(expected)
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=2e-5)


def test_two_processes_are_one(one, two):
    assert list(one.losses()) == list(range(1, STEPS + 1))
    close(two.losses(), one.losses())
    assert "2 processes (environment), 4 devices" in two.said()
    assert two.said().count("finished at step") == 1  # process 0 alone speaks and writes
    written = records.load(two.workdir / "records.jsonl")
    assert len(written) == len(records.latest(written))
    assert json.loads((two.workdir / "manifest.json").read_text())["processes"] == 2


def test_four_processes_one_told_to_stop_go_on_as_one_and_as_two(folder, one):
    """SIGTERM to one of four: all save the same step. What they saved continues on 1 and on 2 with the same losses."""
    four = Job(folder, "four", 4, 1, "--config.mesh.fsdp=2")
    four.wait_for_checkpoint(above=0)
    os.kill(four.pids(1)[2], signal.SIGTERM)
    four.finish(75)
    said, step = four.said(), list_steps(four.workdir / "checkpoints")[-1]
    assert f"stopped at step {step} by another process, saved; go on with:" in said
    assert re.findall(r"ended with code (\d+)", said) == ["75"] * 4
    assert 4 <= step < STEPS and records.load(four.workdir / "records.jsonl")[-1]["event"] == "interrupted"
    assert max(four.losses()) == step
    close(four.losses(), {s: loss for s, loss in one.losses().items() if s <= step})
    for name, processes, devices, mesh in (("on_one", 1, 1, ()), ("on_two", 2, 1, ("--config.mesh.data=2",))):
        shutil.copytree(four.workdir, folder / name)
        again = Job(folder, name, processes, devices, *mesh).finish()
        assert f"going on from step {step}" in again.said()
        close(again.losses(), one.losses())


def test_a_lost_process_and_a_frozen_one_change_nothing(folder, two):
    """kill -9, later SIGSTOP of one: each time the other ends in time, both start again, and the bits are the same."""
    job = Job(folder, "lost", 2, 2, "--config.mesh.fsdp=2")
    job.wait_for_checkpoint(above=4)
    os.kill(job.pids(1)[1], signal.SIGKILL)
    job.pids(2)
    first = list_steps(job.workdir / "checkpoints")[-1]
    assert "process 1 ended with code 137" in job.said()
    # Whichever of the two the script saw first: they may end within one of its looks.
    codes = dict(re.findall(r"process (\d) ended with code (\d+)", job.said()))
    waits = [int(seconds) for seconds in re.findall(r"(\d+) s after the first", job.said())]
    assert codes["0"] != "0" and waits and max(waits) <= HEARTBEAT + 2 and "killing" not in job.said()
    job.wait_for_checkpoint(above=first)
    since, frozen = time.monotonic(), job.pids(2)[1]
    os.kill(frozen, signal.SIGSTOP)
    job.wait(lambda: job.said().count("process 0 ended with code") == 2)
    assert time.monotonic() - since <= HEARTBEAT + 3
    job.finish()
    said = job.said()
    assert "killing process 1, which has not ended by itself" in said and said.count("started processes") == 3
    assert job.losses() == two.losses()
    assert job.checksums() == two.checksums()


def test_what_one_process_finds_wrong_all_say_once(folder):
    """Process 1 lacks the text, then has another one: one line, exit code 2, nothing written, no second start."""
    config = folder / "own_text.py"
    config.write_text(
        CONFIG.replace(
            'os.environ.get("TEXT", "text.txt")', 'os.environ["TEXT"] + os.environ["JAX_PROCESS_ID"] + ".txt"'
        )
    )
    (folder / "own0.txt").write_text("all alike " * 500)
    flags = [f"--config={config}"]
    for name, line in (
        ("lacks", "process 1: config.data.files: no file matches"),
        ("other", "process 1 has another text"),
    ):
        job = Job(folder, name, 2, 1, *flags, TEXT=str(folder / "own"), JAX_PROCESS_ID="0").finish(2)
        errors = [each for each in job.said().splitlines() if each.startswith("error:")]
        assert len(errors) == 1 and errors[0].startswith(f"error: {line}")
        assert not (job.workdir / "manifest.json").exists() and job.said().count("started processes") == 1
        (folder / "own1.txt").write_text("all different " * 500)


FAILING = """
if os.environ.get("JAX_PROCESS_ID") == "1":
    from jaxformer.data import batches

    def failing(self, step, real=batches.Batches.__getitem__):
        if step == 8:
            raise OSError("stale file handle")
        return real(self, step)

    batches.Batches.__getitem__ = failing
"""


def test_a_process_that_fails_alone_does_not_keep_the_others(folder):
    """An error that only one process meets, in the middle of training and of a save: all end in the time configured."""
    failing = folder / "failing.py"
    failing.write_text(CONFIG + FAILING)
    job = Job(folder, "failing", 2, 1, f"--config={failing}", RESTARTS="0")
    assert job.process.wait(timeout=120) not in (0, 75)
    assert "OSError: stale file handle" in job.said() and "process 1 ended with code 1" in job.said()
    ends = re.findall(r"process \d ended with code \d+(?: (\d+) s after the first)?", job.said())
    assert len(ends) == 2 and int(max(ends) or 0) <= HEARTBEAT + 2 and "killing" not in job.said()


def test_crashes_without_progress_are_not_repeated_for_ever(folder):
    """A process that dies before its first checkpoint, whatever is tried: so many restarts, then its code."""
    crash = folder / "crash.py"
    crash.write_text(CONFIG + "\nif 'JAX_NUM_PROCESSES' in os.environ: os._exit(9)\n")
    job = Job(folder, "crash", 2, 1, f"--config={crash}", RESTARTS="1").finish(9)
    assert job.said().count("started processes") == 2
    assert "crashed 2 times without a checkpoint newer than step 0: giving up" in job.said()
