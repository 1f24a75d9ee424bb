"""Several processes, each with a disk of its own, write one run into an object store (extra `services`)."""

import importlib.util
import os
import re
import shutil
import signal

import pytest
from object_stores import Proxy, environment, in_this_process, server
from test_local import CONFIG, STEPS, Job, close

from jaxformer import records
from jaxformer.storage.address import Address
from jaxformer.training.checkpoint.layout import list_steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sending a large body directly"),  # which gcsfs does with small files
    pytest.mark.skipif(not all(map(importlib.util.find_spec, ("gcsfs", "s3fs", "moto"))), reason="the services extra"),
]
MESH = "--config.mesh.fsdp=2"
PATIENT = {"seconds": 240, "every": 0.2}  # the servers answer one request at a time, ours among them


@pytest.fixture(params=["gs", "s3"])
def store(request):
    """(scheme, a slow proxy of a store), which the runs use; this process uses the store itself."""
    with server(request.param) as port, in_this_process(request.param, port):
        proxy = Proxy(port)
        proxy.delay = 0.01
        yield request.param, proxy
        end_all()
        proxy.close()


def end_all():
    """Ends what the scripts have started."""
    for process in Job.started:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bucket")
    (folder / "config.py").write_text(CONFIG)
    (folder / "text.txt").write_text(" ".join(str(i * i) for i in range(2000)))
    yield folder
    end_all()


@pytest.fixture(scope="module")
def two(folder):
    """On disk."""
    return Job(folder, "two", 2, 2, MESH).finish(seconds=400)


def start(folder, store, *flags: str, **more: str) -> Job:
    scheme, proxy = store
    own = environment(scheme, proxy.port) | {"XDG_CACHE_HOME": str(folder / "caches")} | more
    name = f"in_{scheme}{'_failing' if flags else ''}"  # of the log
    return Job(folder, name, 2, 2, MESH, *flags, at=f"{scheme}://bucket/run", **own)


def wait_for_half_a_checkpoint(job: Job) -> None:
    """One that is being uploaded."""
    where = job.workdir / "checkpoints"
    job.wait(lambda: {path.name for path in where.iterdir()} - set(map(str, list_steps(where))), **PATIENT)


def names(workdir) -> set[str]:
    """The files of the last checkpoint; random names are left out, and in which folders of one process they lie."""
    here = workdir / "checkpoints" / str(STEPS)
    found = here.objects() if isinstance(here, Address) else filter(os.path.isfile, here.rglob("*"))
    plain = (re.sub(r"_[0-9a-f]{8}\b", "", str(each).removeprefix(f"{here}/")) for each in found)
    return {re.sub(r"(/ocdbt.process_1)+", "/ocdbt.process_1", each) for each in plain if "/d/" not in each}


def test_a_process_that_dies_or_freezes_while_it_uploads_changes_nothing(store, folder, two):
    """In GCS process 1 freezes, in S3 process 0 is killed: the checkpoint does not count, and both start again, to the
    bits of a run on disk. A copy on this machine is what a disk would hold, and goes on, with one process."""
    job, (lost, how) = start(folder, store), {"gs": (1, signal.SIGSTOP), "s3": (0, signal.SIGKILL)}[store[0]]
    job.wait_for_checkpoint(above=0, **PATIENT)
    wait_for_half_a_checkpoint(job)
    os.kill(job.pids(1)[lost], how)
    job.finish(seconds=400)
    assert job.said().count("started processes") == 2
    assert (job.losses(), job.checksums(), names(job.workdir)) == (two.losses(), two.checksums(), names(two.workdir))
    assert list_steps(job.workdir / "checkpoints") == list_steps(two.workdir / "checkpoints")
    assert not list((folder / "caches" / "jaxformer" / "staging").glob("*/content/*"))
    fetched = [line for line in store[1].requests if line.startswith("GET ") and "ocdbt.process_0" in line]
    assert fetched and not [line for line in fetched if "manifest" in line]  # each fetched what it needs, not all
    if store[0] == "s3":
        return
    copy = folder / "on_one"
    for each, size in job.workdir.objects().items():
        each.download(copy / str(each).removeprefix(f"{job.workdir}/"), size)
    shutil.rmtree(copy / "checkpoints" / str(STEPS))
    again = Job(folder, copy.name, 1, 1).finish(seconds=400)
    assert f"going on from step {list_steps(two.workdir / 'checkpoints')[-2]}" in again.said()
    close(again.losses(), two.losses())


FAILING = """
if os.environ.get("JAX_PROCESS_ID") == "1":
    import errno
    from jaxformer.storage.address import Address

    def failing(self, path, real=Address.upload):
        if "/checkpoints/8/" in str(self):
            raise OSError(errno.ENOSPC, "no space")
        real(self, path)

    Address.upload = failing
"""


@pytest.mark.parametrize("store", ["gs"], indirect=True)
def test_an_upload_that_fails_in_one_process_ends_all(store, folder):
    """In one line and without a second start; what was there stays, and the checkpoint does not count."""
    (folder / "failing.py").write_text(CONFIG + FAILING)
    job = start(folder, store, f"--config={folder / 'failing.py'}", JAX_PROCESS_ID="0").finish(2, seconds=400)
    errors = [line for line in job.said().splitlines() if line.startswith("error:")]
    assert len(errors) == 1, errors
    assert errors[0] == (
        f"error: checkpoint of step 8 in {job.workdir}/checkpoints not written: process 1: no space left on the disk; "
        "older checkpoints are intact: 4"
    )
    assert list_steps(job.workdir / "checkpoints") == [4] and job.said().count("started processes") == 1
    assert {record["step"] for record in records.load(job.workdir / "records.jsonl", "train")} >= {1, 2, 3, 4}
