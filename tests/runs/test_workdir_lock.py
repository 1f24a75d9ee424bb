"""One run at a time in a directory: who holds it is said, who is gone does not hold it, on any kind of file system."""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from jaxformer.errors import ConfigError
from jaxformer.runs import workdir_lock
from jaxformer.runs.workdir_lock import WorkdirLock

QUICK = {"touch_seconds": 0.05, "dead_seconds": 0.5}


def held(folder, **changes):
    """Leaves a lock behind as a process that was killed does; `changes` say how it differs from this process's."""
    with tempfile.TemporaryDirectory() as elsewhere, WorkdirLock(elsewhere):
        told = json.loads((Path(elsewhere) / ".lock").read_text())
    told |= {"token": "another", "flock": True, **changes}
    (folder / ".lock").write_text(json.dumps(told))


def gone():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def aged(folder, seconds):
    past = time.time() - seconds
    os.utime(folder / ".lock", (past, past))


def test_it_is_there_while_held_and_gone_after(tmp_path):
    with WorkdirLock(tmp_path):
        told = json.loads((tmp_path / ".lock").read_text())
        assert told["process"] == os.getpid() and os.listdir(tmp_path) == [".lock"]
    assert os.listdir(tmp_path) == []
    with pytest.raises(KeyError), WorkdirLock(tmp_path):
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_the_second_is_told_who_holds_it(tmp_path):
    with WorkdirLock(tmp_path):
        since = json.loads((tmp_path / ".lock").read_text())["since"]
        with pytest.raises(ConfigError) as error, WorkdirLock(tmp_path):
            pass
        line = f"config.workdir: {tmp_path} is in use by process {os.getpid()} on {os.uname().nodename} since {since}"
        assert str(error.value) == line
        assert os.listdir(tmp_path) == [".lock"]
    with WorkdirLock(tmp_path):
        pass


def test_of_many_that_start_at_once_one_gets_it(tmp_path):
    for number in (None, gone()):  # into a free directory, and into one whose lock is stale
        if number is not None:
            held(tmp_path, process=number)
        won, lost, ready = [], [], threading.Barrier(8)

        def start(won=won, lost=lost, ready=ready):
            ready.wait()
            try:
                won.append(WorkdirLock(tmp_path).__enter__())
            except ConfigError as error:
                lost.append(str(error))

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and len(lost) == 7
        assert all("is in use by process" in line for line in lost), lost
        won[0].__exit__(None, None, None)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("case", ["killed", "number used again", "killed, no flock"])
def test_a_killed_process_of_this_machine_holds_nothing(tmp_path, case):
    changes = {"process": os.getpid(), "started": "1"} if "again" in case else {"process": gone()}
    held(tmp_path, **changes, **({"flock": False} if "flock" in case else {}))
    began = time.monotonic()
    with WorkdirLock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["process"] == os.getpid()
        assert time.monotonic() - began < 0.5


@pytest.mark.slow
def test_kill_minus_nine_and_a_start_at_once(tmp_path):
    program = f"""
import sys, time
from jaxformer.runs.workdir_lock import WorkdirLock
with WorkdirLock({str(tmp_path)!r}):
    print("in", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "in\n"
    with pytest.raises(ConfigError, match=f"in use by process {process.pid} on"), WorkdirLock(tmp_path):
        pass
    process.kill()  # not yet waited for: a zombie has ended as well
    time.sleep(0.2)
    began = time.monotonic()
    with WorkdirLock(tmp_path):
        assert time.monotonic() - began < 0.5
    process.communicate()


def test_another_container_of_this_machine_is_known_by_its_flock(tmp_path):
    elsewhere = {"processes": "pid:[1]", "process": 1}
    held(tmp_path, **elsewhere)
    with open(tmp_path / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(ConfigError, match="in use by process 1 on"), WorkdirLock(tmp_path):
            pass
    with WorkdirLock(tmp_path):  # it let go
        pass


OTHER = {"machine": "another", "host": "node7", "since": "2026-01-01 00:00:00 UTC", "process": 1}


def test_another_machine_that_lives_is_seen_to_live(tmp_path, capsys):
    held(tmp_path, **OTHER)
    stop = threading.Event()

    def live():
        while not stop.wait(0.05):
            os.utime(tmp_path / ".lock")

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with (
            pytest.raises(ConfigError, match=r"in use by process 1 on node7 since 2026-01-01 00:00:00 UTC$"),
            WorkdirLock(tmp_path, **QUICK),
        ):
            pass
    finally:
        stop.set()
        thread.join()


# The last: a clock that was set back.
@pytest.mark.parametrize("age", [pytest.param(0, marks=pytest.mark.slow), 0.3, 1000, -1000])
def test_another_machine_that_is_gone_holds_it_for_a_minute_at_most(tmp_path, age):
    held(tmp_path, **OTHER)
    aged(tmp_path, age)
    began = time.monotonic()
    with WorkdirLock(tmp_path, **QUICK):
        assert time.monotonic() - began < (0.2 if age == 1000 else 1.5)
        assert json.loads((tmp_path / ".lock").read_text())["process"] == os.getpid()


def test_a_slurm_job_queued_again_waits_for_nothing(tmp_path):
    first, again = {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    other = {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}
    began = time.monotonic()
    held(tmp_path, **OTHER, slurm_job="7", slurm_start=0)
    with WorkdirLock(tmp_path, again):
        assert time.monotonic() - began < 0.5
    for environment in (first, other):
        held(tmp_path, **OTHER, slurm_job="7", slurm_start=0)
        began = time.monotonic()
        with WorkdirLock(tmp_path, environment, **QUICK):
            assert time.monotonic() - began > 0.3


@pytest.mark.parametrize("content", [
    b"", *(pytest.param(x, marks=pytest.mark.slow) for x in (b"\x00" * 100, b"[" * 9000, b"[]", b"3")),
    b'{"machine": {"a": []}}',
])  # fmt: skip
def test_a_lock_that_says_nothing_is_one_by_its_age(tmp_path, content):
    (tmp_path / ".lock").write_bytes(content)
    with WorkdirLock(tmp_path, **QUICK):
        assert json.loads((tmp_path / ".lock").read_text())["process"] == os.getpid()


@pytest.mark.parametrize("make", [lambda p: p.symlink_to(p.parent / "victim"), os.mkfifo, os.mkdir])
def test_what_is_no_lock_is_left_alone(tmp_path, make):
    (tmp_path / "victim").write_text("mine")
    make(tmp_path / ".lock")
    with pytest.raises(ConfigError, match=r"config.workdir: .*\.lock cannot be written"), WorkdirLock(tmp_path):
        pass
    assert sorted(os.listdir(tmp_path)) == [".lock", "victim"] and (tmp_path / "victim").read_text() == "mine"


def test_a_file_system_without_links_and_flock(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with WorkdirLock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["flock"] is False
        with pytest.raises(ConfigError, match="in use by process"), WorkdirLock(tmp_path):
            pass
    assert os.listdir(tmp_path) == []


def test_the_lock_is_touched_while_held(tmp_path):
    with WorkdirLock(tmp_path, **QUICK):
        aged(tmp_path, 100)
        time.sleep(0.3)
        assert time.time() - os.stat(tmp_path / ".lock").st_mtime < 5


def test_who_wakes_up_and_finds_it_taken_ends(tmp_path, monkeypatch, capfd):
    ended = threading.Event()
    monkeypatch.setattr(workdir_lock.coordination, "leave", lambda code: ended.set())
    with WorkdirLock(tmp_path, **QUICK):
        held(tmp_path, **OTHER)
        assert ended.wait(2)
    assert "was taken over by process 1 on node7" in capfd.readouterr().err
    assert (tmp_path / ".lock").exists()  # the other's
