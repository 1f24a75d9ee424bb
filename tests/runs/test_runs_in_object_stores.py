"""Whole runs in object stores, against servers on this machine that speak the real protocols (extra `services`)."""

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from kills import kill_often
from object_stores import in_this_process, wait_for
from store_runs import MARKS, SHORT, STEPS, Runs, in_store, on_disk, proxy, result, store

from jaxformer import records
from jaxformer.config import CheckpointConfig
from jaxformer.errors import ConfigError
from jaxformer.runs.store_lock import StoreLock
from jaxformer.storage import object_store
from jaxformer.storage.address import Address, place
from jaxformer.storage.json_checksum import parse
from jaxformer.training.checkpoint.layout import list_steps
from jaxformer.training.checkpoint.manager import Checkpoints
from jaxformer.training.state import TrainState

__all__ = ["on_disk", "proxy", "store"]
pytestmark = MARKS


def test_kills_change_nothing_in_a_store(store, on_disk, tmp_path):
    """kill -9 at four random moments, text and run in the store: the same bits and records as undisturbed on disk."""
    scheme, port = store
    runs, text, workdir = Runs(tmp_path, scheme, port), in_store(f"{scheme}://bucket/text"), f"{scheme}://bucket/killed"

    def reached() -> int:
        path = place(workdir) / "records.jsonl"
        return max((r["step"] for r in records.load(path)), default=0) if path.exists() else 0

    kill_often(lambda: runs.start(workdir, text), reached, random.Random(scheme), kills=4, ahead=15)
    runs.finish(workdir, text)
    assert result(workdir) == on_disk[1]()
    assert not list((tmp_path / "cache" / "jaxformer" / "staging").glob("*/content/*"))


def test_a_slow_store_that_drops_connections_changes_nothing(store, proxy, on_disk, tmp_path):
    """Every answer 20 ms late, some of the connections dropped in the middle: the bits of a run on disk."""
    proxy.delay, proxy.drop = 0.02, 0.02
    runs, workdir = Runs(tmp_path, store[0], proxy.port), f"{store[0]}://bucket/run"
    runs.finish(workdir, in_store(f"{store[0]}://bucket/text"), *SHORT)
    assert result(workdir) == on_disk[1](*SHORT)
    assert len(proxy.requests) > 100


def test_a_store_that_goes_away(store, proxy, on_disk, tmp_path):
    """One line in bounded time, exit code 2, the older checkpoints intact; then the run goes on to the same bits."""
    runs, workdir = Runs(tmp_path, store[0], proxy.port), f"{store[0]}://bucket/run"
    runs.environment["JAXFORMER_STORE_PATIENCE"] = "3"
    text = on_disk[0] / "text"
    process, checkpoints = runs.start(workdir, text), place(workdir) / "checkpoints"
    wait_for(lambda: process.poll() is not None or bool(list_steps(checkpoints)), 120)
    proxy.down, since = True, time.monotonic()
    assert process.wait(timeout=240) == 2, runs.said()
    print(f"{store[0]}: ended {time.monotonic() - since:.0f} s after its store")
    errors = [line for line in runs.log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"{workdir}/" in errors[0], errors
    assert "Traceback" not in runs.log.read_text() and "S3CRET" not in runs.log.read_text()
    before = list_steps(checkpoints)
    assert before and before[-1] < STEPS
    proxy.down = False
    runs.finish(workdir, text)
    assert f"going on from step {before[-1]}" in runs.log.read_text()
    assert result(workdir) == on_disk[1]()


def test_locks_name_the_version_that_they_replace(store, proxy):
    """S3's server refuses the second; GCS's does not know preconditions, so what is sent is looked at."""
    with in_this_process(store[0], proxy.port):
        path = f"{store[0]}://bucket/run/.lock"
        object_store.put_if(path, b"first", None)
        version = object_store.version_of(object_store.request("info", path))
        object_store.put_if(path, b"second", version)
        assert object_store.request("cat_file", path) == b"second"
        if store[0] == "gs":
            posts = [line for line in proxy.requests if line.startswith("POST ") and "upload" in line]
            assert all(f"ifGenerationMatch={number}" in line for number, line in zip((0, version), posts, strict=True))
            return
        with pytest.raises(FileExistsError):
            object_store.put_if(path, b"third", version)
        with pytest.raises(FileExistsError):
            object_store.put_if(path, b"third", None)
        assert object_store.request("cat_file", path) == b"second"


def test_what_a_checkpoint_costs(store, proxy):
    """Requests of one save, in a run that keeps two: printed, and bounded for the page about stores."""
    tree = {f"w{i}": np.ones((8, 8), np.float32) for i in range(4)}
    with in_this_process(store[0], proxy.port):
        folder = place(f"{store[0]}://bucket/run/checkpoints")
        state = TrainState(*[None] * len(TrainState._fields))._replace(
            params=tree, step=np.int32(1), bad_steps=np.int32(0)
        )
        saves = Checkpoints(folder, CheckpointConfig(keep=2))
        for step in (1, 2, 3, 4):
            before = len(proxy.requests)
            saves.save(step, state)
            saves.wait()
        saves.close()
        sent = [line.split(" ")[0] for line in proxy.requests[before:]]
        objects = len(list((folder / "4").objects()))
        print(store[0], objects, "objects:", {name: sent.count(name) for name in sorted(set(sent))})
        assert len(sent) <= 8 * objects


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_that_start_at_once_one_gets_the_lock(store, stale):
    """In S3, whose server here knows preconditions; also where all of them find a lock whose process has ended."""
    if store[0] == "gs":
        pytest.skip("the emulator of GCS knows no preconditions")
    workdir = Address("s3://bucket/run")
    if stale:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        with StoreLock(workdir):
            about = parse((workdir / ".lock").read_bytes(9999))
        (workdir / ".lock").write_atomically(json.dumps({**about, "token": "another", "process": ended.pid}))
    won, lost, ready = [], [], threading.Barrier(8)

    def start() -> None:
        ready.wait()
        try:
            won.append(StoreLock(workdir).__enter__())
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
    assert not (workdir / ".lock").exists()


def test_a_run_that_moves_between_disk_and_store(store, on_disk, tmp_path):
    """Killed on disk, gone on with in the store, killed there, finished on disk, each time a copy of the folder."""
    runs, workdir, text = Runs(tmp_path, *store), place(f"{store[0]}://bucket/run"), on_disk[0] / "text"

    def killed_after(where: Path, steps: int) -> None:
        process = runs.start(where, text)
        wait_for(lambda: process.poll() is not None or max(list_steps(where / "checkpoints"), default=0) > steps, 200)
        process.kill()
        assert process.wait() == -9, runs.said()

    first, last = tmp_path / "first", tmp_path / "last"
    killed_after(first, 40)
    for path in filter(Path.is_file, first.rglob("*")):
        (workdir / path.relative_to(first).as_posix()).upload(path)
    killed_after(workdir, 90)
    for each, size in workdir.objects().items():
        each.download(last / str(each).removeprefix(f"{workdir}/"), size)
    runs.finish(last, text)
    assert result(last) == on_disk[1]()
