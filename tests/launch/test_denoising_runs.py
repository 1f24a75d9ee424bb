"""UL2's denoisers on a mixture of sources: on two processes, and after a kill, the same rows in the same steps."""

import os
import signal

import pytest

from jaxformer import records
from jaxformer.training.checkpoint.layout import list_steps
from tests.launch.test_local import CONFIG, STEPS, Job, close

pytestmark = pytest.mark.slow

MIXTURE = """{"mixture": {
    "code": {"weight": 0.7, "files": os.environ["TEXT"]},
    "prose": {"weight": 0.3, "files": os.environ["TEXT"].replace("text", "prose"), "separator": "."},
}, "tokenizer_vocab": 320, "objective": "mixture"}"""
READS = '"model": {"family": "encoder_decoder", "encoder": {"source_length": 32}, '


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("denoising")
    plain, model = '{"files": (os.environ.get("TEXT", "text.txt"),), "tokenizer": "bytes"}', '"model": {'
    assert plain in CONFIG and model in CONFIG
    (folder / "config.py").write_text(CONFIG.replace(plain, MIXTURE).replace(model, READS))
    (folder / "text.txt").write_text(" ".join(str(i * i) for i in range(2000)))
    (folder / "prose.txt").write_text("All happy families are alike; each unhappy one is unhappy in its own way." * 40)
    yield folder
    for process in Job.started:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def one(folder):
    return Job(folder, "one", 1, 1).finish()


def held_out(job):
    found = records.latest(records.load(job.workdir / "records.jsonl", "eval"))
    return {(r["step"], r["split"]): r["loss"] for r in found}


def test_two_processes_have_the_rows_of_one(folder, one):
    two = Job(folder, "two", 2, 2, "--config.mesh.fsdp=2").finish()
    close(two.losses(), one.losses())
    assert sorted(held_out(one))[0][1] == "validation" and len(held_out(one)) == 6
    close(held_out(two), held_out(one))
    assert one.losses()[STEPS] < one.losses()[1] - 0.5


def test_a_kill_changes_nothing(folder, one):
    job = Job(folder, "killed", 1, 1)
    job.wait_for_checkpoint(above=4)
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    assert list_steps(job.workdir / "checkpoints")[-1] < STEPS
    job = Job(folder, "killed", 1, 1).finish()
    assert job.losses() == one.losses() and held_out(job) == held_out(one) and job.checksums() == one.checksums()
