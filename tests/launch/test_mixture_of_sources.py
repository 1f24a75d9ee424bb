"""A mixture on one process and on two, one of them killed: the same rows in the same steps, the same held-out losses.

That nothing changes after kills of a run of one, to the bit, `test_denoising_runs.py` says of a mixture too.
"""

import os
import re
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
    """Process 1 is killed on the way, and both start again."""
    job = Job(folder, "two", 2, 2, "--config.mesh.fsdp=2")
    job.wait_for_checkpoint(above=4)
    os.kill(job.pids(1)[1], signal.SIGKILL)
    job.pids(2)
    assert list_steps(job.workdir / "checkpoints")[-1] < STEPS
    return job.finish()


def held_out(job):
    """(step, split) -> loss."""
    found = records.latest(records.load(job.workdir / "records.jsonl", "eval"))
    return {(r["step"], r["split"]): r["loss"] for r in found}


def test_two_processes_have_the_rows_of_one(one, two):
    close(two.losses(), one.losses())
    assert int(re.search(r"going on from step (\d+)", two.said())[1]) > 4
    splits = ["validation", "validation/code", "validation/prose"]
    assert sorted(held_out(one)) == sorted((step, split) for step in (10, STEPS) for split in splits)
    close(held_out(two), held_out(one))
    for step in (10, STEPS):
        parts = {split: held_out(one)[step, split] for split in splits}
        mean = 0.7 * parts["validation/code"] + 0.3 * parts["validation/prose"]
        np.testing.assert_allclose(parts["validation"], mean, rtol=1e-12)
    assert "code 70 % (" in one.said() and "prose runs dry after step" in one.said()
    assert one.said().count("held out of ") == 2
