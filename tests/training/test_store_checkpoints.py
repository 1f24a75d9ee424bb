"""Checkpoints in an object store keep every promise that those on a disk keep."""

import errno
import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_checkpoint import KEEP_ALL, equal, one_device, shifted

from jaxformer import records
from jaxformer.config import CheckpointConfig
from jaxformer.errors import CheckpointError, StoreError
from jaxformer.storage import object_store, scratch
from jaxformer.storage.address import Address
from jaxformer.training.checkpoint import failures, staging
from jaxformer.training.checkpoint.layout import SEAL, list_steps
from jaxformer.training.checkpoint.manager import Checkpoints, restore_params

TRAIN = {"kind": "train", "step": 1, "tokens": 8, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "skipped": 0,
         "seconds": 0.1}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An address in memory; what is staged is below tmp_path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield Address(f"memory://bucket/{tmp_path.name}/checkpoints")
    assert not list((tmp_path / "cache").glob("jaxformer/staging/*"))


def save(directory, *steps, cfg=KEEP_ALL):
    state, abstract = one_device()
    store = Checkpoints(directory, cfg, "print")
    for step in steps:
        store.save(step, shifted(state, step))
    store.close()
    return state, abstract


def test_the_newest_comes_back_bit_for_bit_and_is_the_same_files(folder, tmp_path):
    state, abstract = save(folder, 1, 2)
    said = []
    restored, step = Checkpoints(folder, KEEP_ALL, "print", warn=said.append).restore(abstract)
    assert step == 2 and equal(restored, shifted(state, 2)) and not said
    average, _ = restore_params(folder, abstract.ema)
    assert equal(average, shifted(state, 2).ema)
    save(tmp_path / "disk", 1, 2)
    plain = {
        path.relative_to(tmp_path / "disk").as_posix() for path in (tmp_path / "disk").rglob("*") if path.is_file()
    }
    ours = {str(each).removeprefix(f"{folder}/") for each in folder.objects()}
    without_names = [{path for path in paths if "/d/" not in path} for paths in (plain, ours)]  # random ones
    assert without_names[0] == without_names[1]


def test_a_copy_on_the_other_side_goes_on(folder, tmp_path):
    """A folder copied from a disk into a store, or back, is the same run."""
    state, abstract = save(tmp_path / "disk", 1, 2)
    for path in filter(Path.is_file, (tmp_path / "disk").rglob("*")):
        (folder / path.relative_to(tmp_path / "disk").as_posix()).upload(path)
    restored, step = Checkpoints(folder, KEEP_ALL, "print").restore(abstract)
    assert step == 2 and equal(restored, shifted(state, 2))
    save(folder, 3)
    for each, size in folder.objects().items():
        each.download(tmp_path / "back" / str(each).removeprefix(f"{folder}/"), size)
    restored, step = Checkpoints(tmp_path / "back", KEEP_ALL, "print").restore(abstract)
    assert step == 3 and equal(restored, shifted(state, 3)) and list_steps(tmp_path / "back") == [1, 2, 3]


@pytest.mark.parametrize("cfg", [{"keep": 1}, {"keep": 2}, {"keep": 1, "keep_every_steps": 4}, {"keep": 9}])
def test_as_many_are_kept_as_orbax_keeps_on_disk(cfg, tmp_path):
    """orbax decides on disk; here its policies say what of the same steps they keep."""
    from orbax.checkpoint.checkpoint_managers import preservation_policy as keep

    cfg = CheckpointConfig(**cfg)
    policies = [keep.LatestN(cfg.keep)]
    if cfg.keep_every_steps is not None:
        policies.append(keep.EveryNSteps(cfg.keep_every_steps))
    steps = [2, 4, 6, 8, 9]
    infos = [type("Info", (), {"step": step, "metrics": None})() for step in steps]
    theirs = keep.AnyPreservationPolicy(policies).should_preserve(infos, context=keep.PreservationContext())
    assert staging.kept(steps, cfg) == set(itertools.compress(steps, theirs))


def test_old_ones_are_deleted_from_the_store(folder):
    save(folder, 1, 2, 3, cfg=CheckpointConfig(keep=2))
    assert list_steps(folder) == [2, 3] and not (folder / "1").objects()


@pytest.mark.slow
def test_an_upload_that_was_cut_off_does_not_count_and_is_removed(folder):
    """Without a word, as orbax does with its temporary folders."""
    state, abstract = save(folder, 1, 2)
    (folder / "2" / SEAL).unlink()
    for step in ("2", "7"):
        (folder / step / "params" / "part").write_atomically("half")
    said = []
    store = Checkpoints(folder, KEEP_ALL, "print", warn=said.append)
    assert store.steps() == [1]
    restored, step = store.restore(abstract)
    assert step == 1 and equal(restored, shifted(state, 1)) and not said
    store.save(2, shifted(state, 5))
    store.close()
    assert list_steps(folder) == [1, 2] and not (folder / "7").objects()
    assert not (folder / "2" / "params" / "part").exists()
    assert equal(Checkpoints(folder, KEEP_ALL, "print").restore(abstract)[0], shifted(state, 5))


def damage_byte(path, size):
    content = bytearray(path.read_bytes(size))
    content[size // 2] ^= 1
    path.write_atomically(bytes(content))


def damage_truncate(path, size):
    path.write_atomically(path.read_bytes(size)[: size // 2])


def damage_delete(path, size):
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        pytest.param(damage_byte, "params", marks=pytest.mark.slow),
        pytest.param(damage_delete, "state", marks=pytest.mark.slow),
        (damage_truncate, SEAL),
    ],
)
def test_a_damaged_one_is_named_and_passed_over(folder, damage, where):
    state, abstract = save(folder, 1, 2)
    found = {path: size for path, size in folder.objects().items() if str(path).startswith(f"{folder}/2/{where}")}
    path = max(found, key=found.__getitem__)
    damage(path, found[path])
    said = []
    store = Checkpoints(folder, KEEP_ALL, "print", warn=said.append)
    restored, step = store.restore(abstract)
    assert step == 1 and equal(restored, shifted(state, 1))
    assert len(said) == 1 and said[0].startswith(f"checkpoint {folder}/2 is not valid: ")
    store.save(3, state)
    store.close()
    assert list_steps(folder) == [1, 3]


class Fails:
    """`object_store.request` that raises for some of the requests."""

    def __init__(self, monkeypatch, which):
        self.request, self.which = object_store.request, which
        monkeypatch.setattr(object_store, "request", self)

    def __call__(self, name, address, *args, **settings):
        if self.which(name, address):
            raise StoreError(errno.ETIMEDOUT, "the store does not answer", address)
        return self.request(name, address, *args, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("all_of_it", [False, True])
def test_a_store_that_fails_while_it_saves(folder, monkeypatch, all_of_it):
    """One line; the older checkpoint is intact, the newer one does not count."""
    state, abstract = save(folder, 1)
    store = Checkpoints(folder, KEEP_ALL, "print")
    fails = Fails(monkeypatch, lambda name, address: all_of_it or "/2/state/" in address)
    with pytest.raises(CheckpointError) as error:
        store.save(2, state)
        store.wait()
    rest = "older checkpoints are as they were" if all_of_it else "older checkpoints are intact: 1"
    assert str(error.value).startswith(f"checkpoint of step 2 in {folder} not written: {folder}/")
    assert str(error.value).endswith(f"the store does not answer; {rest}")
    store.close(failed=True)
    monkeypatch.setattr(object_store, "request", fails.request)
    restored, step = Checkpoints(folder, KEEP_ALL, "print").restore(abstract)
    assert step == 1 and equal(restored, shifted(state, 1))


@pytest.mark.slow
def test_a_store_that_fails_while_it_is_read_is_no_damage(folder, monkeypatch):
    """Or the next save would delete checkpoints that are sound."""
    _, abstract = save(folder, 1, 2)
    Fails(monkeypatch, lambda name, address: "/2/params/" in address)
    store = Checkpoints(folder, KEEP_ALL, "print")
    with pytest.raises(CheckpointError, match=f"checkpoint {folder}/2 cannot be read: .*the store does not answer"):
        store.restore(abstract)
    assert list_steps(folder) == [1, 2] and not store._invalid


@pytest.mark.slow
def test_no_space_to_download_is_no_damage(folder, monkeypatch):
    _, abstract = save(folder, 1)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Address, "download", full)
    with pytest.raises(CheckpointError, match="cannot be read: no space left on the disk"):
        Checkpoints(folder, KEEP_ALL, "print").restore(abstract)


@pytest.mark.slow
def test_a_full_disk_is_said_before_anything_is_staged(folder, monkeypatch):
    monkeypatch.setattr(failures.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))
    state, _ = one_device()
    store = Checkpoints(folder, KEEP_ALL)
    with pytest.raises(CheckpointError, match="no space left on the disk; there is no older one"):
        store.save(1, state)
    store.close(failed=True)
    assert not folder.objects()


def test_records_are_in_the_store_before_the_checkpoint_counts(folder, monkeypatch):
    """Or the steps before a checkpoint would have no records after a kill."""
    path, seen = folder.parent / "records.jsonl", []
    upload = Address.upload

    def watched(address, local):
        if str(address).endswith(SEAL):
            seen.append(records.load(path))
        upload(address, local)

    monkeypatch.setattr(Address, "upload", watched)
    records.append(path, {"kind": "event", "step": 0, "event": "started"})
    records.append(path, TRAIN)
    assert len(records.load(path)) == 1
    save(folder, 1)
    assert [len(each) for each in seen] == [2]


def test_what_is_put_last_is_deleted_first(folder, monkeypatch):
    """At every moment of a save and of a deletion, a checkpoint that counts is whole."""
    whole = {}
    request = object_store.request

    def watched(name, address, *args, **settings):
        found = request(name, address, *args, **settings)
        if name in ("put_file", "rm_file"):
            for step in list_steps(folder):
                count = len(list((folder / str(step)).objects()))
                assert whole.setdefault(step, count) == count
        return found

    monkeypatch.setattr(staging, "AT_ONCE", 1)
    monkeypatch.setattr(object_store, "request", watched)
    save(folder, 1, 2, 3, cfg=CheckpointConfig(keep=1))
    assert list_steps(folder) == [3] and set(whole) == {1, 2, 3}


def test_scratch_is_where_caches_are(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with scratch.folder() as made:
        assert made.is_relative_to(tmp_path / "jaxformer" / "staging")
    assert np.all([not path.is_dir() for path in (tmp_path / "jaxformer" / "staging").iterdir()])


def test_a_removal_that_was_killed_goes_on_at_the_next_start(tmp_path, monkeypatch):
    """Wherever it was killed: what is left is known as abandoned."""

    class Killed(BaseException):
        pass

    for before in range(4):
        (tmp_path / "abandoned" / "content").mkdir(parents=True)
        for name in (".lock", "content/a", "content/b", "content/c"):
            (tmp_path / "abandoned" / name).write_text("")
        left = [None] * before

        def killed(*args, left=left, unlink=os.unlink, **settings):
            if not left:
                raise Killed
            left.pop()
            unlink(*args, **settings)

        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(os, "unlink", killed)
            with scratch.folder(tmp_path):
                pass
        with scratch.folder(tmp_path):
            assert not (tmp_path / "abandoned").exists()
