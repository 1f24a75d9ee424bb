"""One run at a time in a folder of a store: who holds it is said, and who is gone does not hold it for long."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from jaxformer import records
from jaxformer.errors import ConfigError
from jaxformer.runs import store_lock
from jaxformer.runs.store_lock import StoreLock, lock_of
from jaxformer.runs.workdir_lock import WorkdirLock
from jaxformer.storage import object_store
from jaxformer.storage.address import Address

QUICK = {"touch_seconds": 0.05, "dead_seconds": 0.5}
OTHER = {"machine": "another", "host": "node7", "since": "2026-01-01 00:00:00 UTC", "process": 1}
TRAIN = {"kind": "train", "step": 1, "tokens": 8, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "skipped": 0,
         "seconds": 0.1}  # fmt: skip


@pytest.fixture
def workdir(tmp_path):
    return Address(f"memory://bucket/{tmp_path.name}")


def told(workdir):
    return json.loads((workdir / ".lock").read_bytes(9999))


def held(workdir, **changes):
    """Leaves a lock behind as a process that was killed does."""
    with StoreLock(workdir / "elsewhere"):
        about = told(workdir / "elsewhere")
    (workdir / ".lock").write_atomically(json.dumps({**about, "token": "another", **changes}))


def gone():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_lock_goes_by_the_place(tmp_path):
    assert isinstance(lock_of(str(tmp_path)), WorkdirLock) and isinstance(lock_of("memory://b/r"), StoreLock)


def test_it_is_there_while_held_and_the_second_is_told_by_whom(workdir):
    with StoreLock(workdir):
        assert told(workdir)["process"] == os.getpid()
        since = told(workdir)["since"]
        with pytest.raises(ConfigError) as error, StoreLock(workdir):
            pass
        line = f"config.workdir: {workdir} is in use by process {os.getpid()} on {os.uname().nodename} since {since}"
        assert str(error.value) == line
    with pytest.raises(KeyError), StoreLock(workdir):
        raise KeyError
    assert not (workdir / ".lock").exists()


@pytest.mark.parametrize("changes", ["killed", "number used again", "queued again"])
def test_who_is_known_to_be_gone_holds_nothing(workdir, changes):
    environment = {}
    if changes == "killed":
        held(workdir, process=gone())
    elif changes == "number used again":
        held(workdir, started="1")
    else:
        held(workdir, **OTHER, slurm_job="7", slurm_start=0)
        environment = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    began = time.monotonic()
    with StoreLock(workdir, environment):
        assert told(workdir)["process"] == os.getpid() and time.monotonic() - began < 0.5


def test_another_machine_that_lives_is_seen_to_live(workdir):
    held(workdir, **OTHER)
    stop = threading.Event()

    def live():
        for number in range(1000):
            if stop.wait(0.05):
                return
            (workdir / ".lock").write_atomically(json.dumps({**OTHER, "token": "another", "puts": number}))

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="in use by process 1 on node7 since 2026"), StoreLock(workdir, **QUICK):
            pass
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("content", [None, pytest.param("[]", marks=pytest.mark.slow)])
def test_another_machine_that_is_gone_holds_it_for_a_minute_at_most(workdir, content):
    held(workdir, **OTHER)
    if content is not None:
        (workdir / ".lock").write_atomically(content)
    began = time.monotonic()
    with StoreLock(workdir, **QUICK):
        assert 0.4 < time.monotonic() - began < 2.0 and told(workdir)["process"] == os.getpid()


def test_it_is_put_anew_while_held(workdir):
    with StoreLock(workdir, **QUICK):
        first = told(workdir)["puts"]
        time.sleep(0.3)
        assert told(workdir)["puts"] > first
        (workdir / ".lock").unlink()
        time.sleep(0.3)
        assert told(workdir)["process"] == os.getpid()


def test_who_was_cut_off_and_finds_it_taken_ends(workdir, monkeypatch, capfd):
    ended = threading.Event()
    monkeypatch.setattr(store_lock.coordination, "leave", lambda code: ended.set())
    with StoreLock(workdir, **QUICK):
        held(workdir, **OTHER)
        assert ended.wait(2)
    assert f"{workdir} was taken over by process 1 on node7" in capfd.readouterr().err
    assert told(workdir)["token"] == "another"


def test_a_put_whose_answer_was_lost_is_ones_own(workdir, monkeypatch):
    """Tried again, it is refused, because the first one had come through."""
    put_if = object_store.put_if

    def lost(address, content, version):
        put_if(address, content, version)
        raise FileExistsError

    monkeypatch.setattr(object_store, "put_if", lost)
    with StoreLock(workdir):
        assert told(workdir)["process"] == os.getpid()


def test_what_was_appended_is_put_in_the_end(workdir):
    with StoreLock(workdir):
        records.append(workdir / "records.jsonl", TRAIN)
        assert not (workdir / "records.jsonl").exists()
    assert len(records.load(workdir / "records.jsonl")) == 1


def test_a_store_that_refuses_the_lock(workdir, monkeypatch):
    def refuses(*args):
        raise object_store.StoreError(13, "access is refused", "x")

    monkeypatch.setattr(object_store, "put_if", refuses)
    with pytest.raises(ConfigError, match=r"config.workdir: .*/.lock cannot be written \(access is refused\)"):
        StoreLock(workdir).__enter__()
