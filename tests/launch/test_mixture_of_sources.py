"""A mixture on one process and on two, and after kills: the same rows in the same steps, the same held-out losses."""

import os
import signal

import numpy as np
import pytest

from jaxformer import records
from jaxformer.training.checkpoint.layout import list_steps
from tests.launch.test_local import CONFIG, STEPS, Job, close

pytestmark = pytest.mark.slow

MIXTURE = """{"mixture": {
    "code": {"weight": 0.7, "files": os.environ["TEXT"]},
    "prose": {"weight": 0.3, "files": os.environ["TEXT"].replace("text", "prose"), "separator": "."},
}, "tokenizer_vocab": 320}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    plain = '{"files": (os.environ.get("TEXT", "text.txt"),), "tokenizer": "bytes"}'
    assert plain in CONFIG
    (folder / "config.py").write_text(CONFIG.replace(plain, MIXTURE))
    (folder / "text.txt").write_text(" ".join(str(i * i) for i in range(2000)))
    (folder / "prose.txt").write_text("All happy families are alike; each unhappy one is unhappy in its own way." * 40)
    yield folder
    for process in Job.started:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def one(folder):
    return Job(folder, "one", 1, 1).finish()


@pytest.fixture(scope="module")
def two(folder):
    return Job(folder, "two", 2, 2, "--config.mesh.fsdp=2").finish()


def held_out(job):
    """(step, split) -> loss."""
    found = records.latest(records.load(job.workdir / "records.jsonl", "eval"))
    return {(r["step"], r["split"]): r["loss"] for r in found}


def test_two_processes_have_the_rows_of_one(one, two):
    close(two.losses(), one.losses())
    splits = ["validation", "validation/code", "validation/prose"]
    assert sorted(held_out(one)) == sorted((step, split) for step in (10, STEPS) for split in splits)
    close(held_out(two), held_out(one))
    for step in (10, STEPS):
        parts = {split: held_out(one)[step, split] for split in splits}
        mean = 0.7 * parts["validation/code"] + 0.3 * parts["validation/prose"]
        np.testing.assert_allclose(parts["validation"], mean, rtol=1e-12)
    assert "code 70 % (" in one.said() and "prose runs dry after step" in one.said()
    assert one.said().count("held out of ") == 2


def test_a_killed_process_changes_nothing(folder, two):
    job = Job(folder, "lost", 2, 2, "--config.mesh.fsdp=2")
    job.wait_for_checkpoint(above=4)
    os.kill(job.pids(1)[1], signal.SIGKILL)
    job.pids(2)
    assert list_steps(job.workdir / "checkpoints")[-1] < STEPS
    job.finish()
    assert job.losses() == two.losses() and held_out(job) == held_out(two)
    assert job.checksums() == two.checksums()


def test_a_run_of_one_killed_twice(folder, one):
    for above in (0, 8):
        job = Job(folder, "killed", 1, 1)
        job.wait_for_checkpoint(above=above)
        job.process.kill()
        job.process.wait()
    job = Job(folder, "killed", 1, 1).finish()
    assert job.losses() == one.losses() and held_out(job) == held_out(one) and job.checksums() == one.checksums()
