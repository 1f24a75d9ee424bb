"""Addresses behave as paths do, a store's lacks are made up for, and what goes wrong ends in one line, in time."""

import errno
import gc
import json
import os
import time
from pathlib import Path, PurePosixPath

import pytest

from jaxformer import records
from jaxformer.errors import RecordError, StoreError
from jaxformer.storage import files, object_store, scratch, spool
from jaxformer.storage.address import Address, addressed, is_address, place, unusable

EVENT = {"kind": "event", "step": 0, "event": "started"}
TRAIN = {"kind": "train", "step": 1, "tokens": 8, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "skipped": 0,
         "seconds": 0.1}  # fmt: skip


@pytest.fixture(params=["disk", "store"])
def folder(request, tmp_path):
    """An empty folder on disk, or in a store in memory."""
    return tmp_path if request.param == "disk" else place(f"memory://bucket/{tmp_path.name}")


@pytest.fixture
def address(tmp_path):
    return Address(f"memory://bucket/{tmp_path.name}")


@pytest.mark.parametrize(("name", "other"), [("run[1]", "run1"), ("run*", "run1"), ("run?", "run1"), ("[!a]", "b")])
def test_the_name_of_a_folder_is_no_pattern(folder, name, other):
    for run in (name, other):
        for step in ("5", "7") if run == name else ("9",):
            files.open_folder(folder / run / step)
            files.write_atomically(folder / run / step / "seal.json", run)
    assert sorted(files.folders(folder / name, "seal.json")) == [folder / name / "5", folder / name / "7"]
    assert list((folder / name).glob("*/seal.js*")) == [folder / name / each / "seal.json" for each in ("5", "7")]


@pytest.mark.parametrize("name", ["a", "a.txt.gz", "a/b/c.jsonl", ".hidden", "a//b/", "a/0115"])
def test_names_are_taken_apart_as_those_of_paths(name):
    ours, theirs = place(f"gs://bucket/{name}"), PurePosixPath("bucket") / name
    for part in ("name", "stem", "suffix"):
        assert getattr(ours, part) == getattr(theirs, part)
    for other in (theirs.parent, theirs / "x", theirs.with_name("y.z"), theirs.with_suffix(".txt")):
        assert is_address(f"gs://{other}")
    assert str(ours.parent) == f"gs://{theirs.parent}" and str(ours / "x") == f"gs://{theirs}/x"
    assert str(ours.with_name("y.z")) == f"gs://{theirs.with_name('y.z')}"
    assert str(ours.with_suffix(".txt")) == f"gs://{theirs.with_suffix('.txt')}"
    assert place(str(ours)) == ours and hash(place(str(ours))) == hash(ours) and ours < ours / "x"


def test_an_address_is_never_taken_for_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError):
        os.stat(Address("gs://bucket/run"))
    with pytest.raises(TypeError):
        Path(Address("gs://bucket/run"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("block", [3, 1 << 23])
def test_files_of_a_store_and_of_a_disk_do_the_same(folder, monkeypatch, block):
    """One sequence of operations, whose every result is the same."""
    monkeypatch.setattr(spool, "READ_BYTES", block)
    path = folder / "runs" / "a.txt"
    assert files.open_folder(folder / "runs") == [] and files.writable(folder)
    assert not path.exists() and not path.is_file() and not path.is_symlink()
    with pytest.raises(FileNotFoundError):
        files.read_bytes(path, 9)
    files.write_atomically(path, "naïve")
    before = files.look(path)
    assert files.read_bytes(path, 9) == "naïve".encode() and files.look(path) == before
    with pytest.raises(OSError, match="is longer than 2 bytes"):
        files.read_bytes(path, 2)
    files.write_atomically(path, b"other")
    after = files.look(path)
    files.write_atomically(path, b"OTHER")
    assert len({tuple(each) for each in (before, after, files.look(path))}) == 3
    files.write_atomically(path, b"other")
    with files.open_to_read(path) as file:
        assert (file.read(2), file.read(), file.read()) == (b"ot", b"her", b"")
    files.write_atomically(path, b"0123456789")
    with files.open_to_read(path) as file:
        assert (file.seek(-3, 2), file.read(2), file.seek(1), file.tell(), file.read()) == (
            7,
            b"78",
            1,
            1,
            b"123456789",
        )
    files.write_atomically(path, b"other")
    assert files.open_folder(folder / "runs") == ["a.txt"] and (folder / "runs").is_dir() and path.is_file()
    assert files.irregular(folder) is None and not (folder / "runs").is_file()
    moved = path.replace(path.with_suffix(".damaged"))
    assert files.read_bytes(moved, 9) == b"other" and not path.exists()
    inside = files.make_folder(folder / "figures")
    files.write_atomically(inside / "b", b"")
    with files.open_to_read(inside / "b") as file:
        assert file.read() == b"" == files.read_bytes(inside / "b", 9)
    assert [each.name for each in sorted(folder.glob("*/*"))] == ["b", "a.damaged"]
    with pytest.raises(OSError, match="does not lie in"):
        files.remove_folder(inside, folder / "runs")
    files.remove_folder(inside, folder)
    assert not inside.exists() and moved.exists()
    moved.unlink()
    moved.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        moved.unlink()


def test_records_are_appended_to_both_alike(folder):
    path = folder / "records.jsonl"
    records.append(path, EVENT)
    records.append(path, TRAIN)
    spool.sync_all(folder)
    assert [each["kind"] for each in records.load(path)] == ["event", "train"]
    files.write_atomically(path, files.read_bytes(path, 999) + b'{"kind": "tr')  # as a kill leaves it
    records.append(path, {**EVENT, "step": 1})
    assert [each["kind"] for each in records.load(path)] == ["event", "train", "event"]
    files.write_atomically(path, files.read_bytes(path, 999).replace(b'"step": 0', b'"step": 9'))
    assert "1 line is set aside" in records.set_aside(path)
    assert [each["kind"] for each in records.load(path)] == ["train", "event"]
    assert (folder / "records.damaged.jsonl").exists()
    records.append(path, EVENT)
    assert [each["kind"] for each in records.load(path)] == ["train", "event", "event"]


def test_what_is_not_synced_is_in_the_spool(address, monkeypatch):
    """Training records wait for the next of another kind, for a checkpoint, or for SPOOL_SECONDS."""
    path = address / "records.jsonl"
    records.append(path, EVENT)
    records.append(path, TRAIN)
    assert len(records.load(path)) == 1
    records.append(path, {**EVENT, "step": 1})
    assert len(records.load(path)) == 3
    records.append(path, TRAIN)
    spool.sync_all(address.parent / "other")
    assert len(records.load(path)) == 3
    spool.sync_all(address, end=True)
    assert len(records.load(path)) == 4
    monkeypatch.setattr(spool, "SPOOL_SECONDS", 0.0)
    records.append(path, TRAIN)
    assert len(records.load(path)) == 5


@pytest.mark.slow
def test_a_spool_that_is_dropped_is_never_put(address, monkeypatch):
    """Or what was appended to an object comes back after the object was written anew or deleted."""
    path = address / "records.jsonl"
    for anew in (lambda: path.write_atomically("anew"), path.unlink):
        records.append(path, EVENT)
        records.append(path, TRAIN)
        with monkeypatch.context() as patch:
            patch.setattr(spool, "SPOOL_SECONDS", 0.0)
            held = spool.of(str(path))
            anew()
            del held
            gc.collect()
        assert not path.exists() or path.read_bytes(99) == b"anew"
        path.unlink(missing_ok=True)


def test_a_function_of_paths_takes_texts_too(address):
    @addressed
    def read_bytes(path, most):
        return path, most

    address.write_atomically("to be")
    assert read_bytes(str(address), 9) == b"to be" and read_bytes("a/b", 9) == ("a/b", 9)


def test_patterns(address):
    for name in ("a.txt", "b.txt.gz", "deep/er/c.txt", "deep/d.jsonl"):
        (address / name).write_atomically("x")
    for pattern, expected in [
        ("*.txt", ["a.txt"]), ("**/*.txt", ["a.txt", "c.txt"]), ("[ab].*", ["a.txt", "b.txt.gz"]), ("a.txt", ["a.txt"]),
        ("*/*", ["d.jsonl"]), ("deep", []), ("no*", []),
    ]:  # fmt: skip
        assert sorted(each.name for each in (address / pattern).matching()) == expected, pattern


@pytest.mark.parametrize(
    ("text", "reason"),
    [("xs://b/r", "has the scheme xs"), ("gs://", "names no bucket"), ("gs:///r", "names no bucket"),
     ("s3://me:pw@b/r", "holds a user or a password"), ("file:///r", "is a path of this machine")],
)  # fmt: skip
def test_texts_that_are_no_address(text, reason):
    assert unusable(text).startswith(reason)


class Fails:
    """Raises these errors one after the other, then gives "done"."""

    def __init__(self, *errors):
        self.errors, self.calls = list(errors), 0

    def __call__(self):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


class HttpError(Exception):
    code = 401


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setenv("JAXFORMER_STORE_PATIENCE", "0.5")
    monkeypatch.setattr(object_store, "_gave_up", None)
    monkeypatch.setattr(object_store, "_answered", False)


def test_what_may_pass_is_tried_again(impatient):
    work = Fails(ConnectionResetError("reset"), TimeoutError())
    assert object_store.persist(work, "gs://b/r") == "done" and work.calls == 3
    work = Fails(json.JSONDecodeError("Expecting value", "<html>", 0))  # of somebody on the way
    assert object_store.persist(work, "gs://b/r") == "done" and work.calls == 2


def test_patience_ends(impatient):
    began, work = time.monotonic(), Fails(*[ConnectionResetError("reset by s3://me:pw@b/r?key=abc\n  peer")] * 99)
    with pytest.raises(StoreError) as error:
        object_store.persist(work, "gs://b/r")
    assert time.monotonic() - began < 2 and work.calls > 1 and error.value.errno == errno.ETIMEDOUT
    assert str(error.value).startswith(
        "gs://b/r: the store does not answer as it should (reset by s3://***@b/r?key=***"
    )
    work = Fails(*[ConnectionResetError("reset")] * 99)  # nobody waits as long again
    with pytest.raises(StoreError):
        object_store.persist(work, "gs://b/r")
    assert work.calls == 1
    assert object_store.persist(Fails(), "gs://b/r") == "done"
    work = Fails(ConnectionResetError("reset"))
    assert object_store.persist(work, "gs://b/r") == "done" and work.calls == 2


def test_credentials_that_have_served_are_given_time_to_be_renewed(impatient):
    work = Fails(HttpError("token expired"))
    with pytest.raises(StoreError):
        object_store.persist(work, "gs://b/r")
    assert object_store.persist(work, "gs://b/r") == "done" and work.calls == 2
    work = Fails(HttpError("token expired"))
    assert object_store.persist(work, "gs://b/r") == "done" and work.calls == 2
    with pytest.raises(StoreError, match="access is refused: token expired"):
        object_store.persist(Fails(*[HttpError("token expired")] * 99), "gs://b/r")


@pytest.mark.parametrize(
    ("raised", "expected", "text"),
    [(FileNotFoundError("b/o"), FileNotFoundError, "No such file"), (FileExistsError("b/o"), FileExistsError, "exists"),
     (PermissionError("AccessDenied"), StoreError, "access is refused: AccessDenied"),
     (HttpError("Invalid"), StoreError, "access is refused: Invalid"), (ValueError("odd"), StoreError, "odd"),
     (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OSError, "No space left")],
)  # fmt: skip
def test_what_will_not_pass_is_tried_once(impatient, raised, expected, text):
    work = Fails(*[raised] * 99)
    with pytest.raises(expected, match=text) as error:
        object_store.persist(work, "gs://b/r")
    assert work.calls == 1 and error.value.strerror


def test_a_put_that_names_the_version_it_replaces(address):
    path = str(address / "lock")
    object_store.put_if(path, b"first", None)
    with pytest.raises(FileExistsError):
        object_store.put_if(path, b"second", None)
    version = object_store.version_of(object_store.request("info", path))
    object_store.put_if(path, b"third", version)
    with pytest.raises(FileExistsError):
        object_store.put_if(path, b"fourth", version)
    assert object_store.request("cat_file", path) == b"third"


def test_folders_that_a_killed_process_left_are_removed(tmp_path):
    with scratch.folder(tmp_path) as mine:
        (mine / "part").write_text("half")
        with scratch.folder(tmp_path) as other:
            assert mine.is_dir() and other != mine
        abandoned, young = tmp_path / "abandoned", tmp_path / "young"
        abandoned.mkdir()
        young.mkdir()  # has no lock yet
        (abandoned / ".lock").write_text("")  # of a process that is gone
        with scratch.folder(tmp_path):
            assert not abandoned.exists() and young.exists() and mine.is_dir()
        os.utime(young, (0, 0))
        with scratch.folder(tmp_path):
            assert not young.exists()
    assert not list(tmp_path.iterdir())


def test_records_of_a_store_that_refuses(address, monkeypatch):
    def refuses(*args, **settings):
        raise StoreError(errno.EACCES, "access is refused", str(address))

    monkeypatch.setattr(object_store, "request", refuses)
    with pytest.raises(RecordError, match=r"records.jsonl: cannot be written \(access is refused\)"):
        records.append(address / "records.jsonl", EVENT)
