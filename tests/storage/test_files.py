"""Files: whole or not at all; links, pipes and folders elsewhere are left alone."""

import errno
import os

import pytest

from jaxformer.storage import files


def test_a_write_replaces_the_whole_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old content, longer than the new")
    files.write_atomically(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["a.json"]


def test_a_write_that_fails_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("old")

    def full(_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        files.write_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]


def test_a_write_replaces_a_link_and_not_what_it_points_to(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("mine")
    link.symlink_to(victim)
    files.write_atomically(link, "new")
    assert victim.read_text() == "mine" and link.read_text() == "new" and not link.is_symlink()


def test_a_write_is_on_disk_before_and_after_its_rename(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), fsync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace(a, b))[1])
    files.write_atomically(tmp_path / "a", b"x")
    assert done == ["sync", "rename", "sync"]


@pytest.mark.parametrize("make", [lambda p: p.symlink_to(p.parent / "none"), os.mkfifo, os.mkdir])
def test_only_regular_files_are_appended_to(tmp_path, make):
    make(tmp_path / "records.jsonl")
    with pytest.raises(OSError):
        files.open_to_append(tmp_path / "records.jsonl")
    assert not (tmp_path / "none").exists()


def test_appending(tmp_path):
    for word in (b"a", b"b"):
        with files.open_to_append(tmp_path / "x") as file:
            file.write(word)
    assert (tmp_path / "x").read_bytes() == b"ab"


@pytest.mark.parametrize("name", ["../victim", "deep/down", ".", "..", "link"])
def test_nothing_outside_is_removed(tmp_path, name):
    root, victim = tmp_path / "root", tmp_path / "victim"
    (root / "deep" / "down").mkdir(parents=True)
    victim.mkdir()
    (root / "link").symlink_to(victim)
    with pytest.raises(OSError):
        files.remove_folder(root / name, root)
    assert victim.is_dir() and (root / "deep" / "down").is_dir()
    with pytest.raises(OSError):
        files.remove_folder(victim, root)


@pytest.mark.parametrize("make", [lambda p: p.symlink_to(p.parent / "none"), lambda p: p.symlink_to(p.parent / "there"),
                                  lambda p: p.symlink_to("/dev/zero"), os.mkfifo, os.mkdir])  # fmt: skip
def test_only_regular_files_are_read(tmp_path, make):
    (tmp_path / "there").write_bytes(b"abc")
    make(tmp_path / "x")
    with pytest.raises(OSError):
        files.open_to_read(tmp_path / "x")
    assert files.read_bytes(tmp_path / "there", 3) == b"abc"
    with pytest.raises(OSError, match="longer than 2 bytes"):
        files.read_bytes(tmp_path / "there", 2)


def test_links_are_read_through_where_the_user_names_them(tmp_path):
    (tmp_path / "there").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "endless").symlink_to("/dev/zero")
    assert files.read_bytes(tmp_path / "link", 9, follow=True) == b"abc"
    with pytest.raises(OSError, match="not a regular file"):
        files.read_bytes(tmp_path / "endless", 9, follow=True)


def test_a_folder_is_made_once_and_never_through_a_link(tmp_path):
    assert files.make_folder(files.make_folder(tmp_path / "a")).is_dir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    (tmp_path / "file").touch()
    for name in ("link", "dangling", "file"):
        with pytest.raises(OSError):
            files.make_folder(tmp_path / name)
    assert not (tmp_path / "none").exists()


def test_a_folder_is_removed_with_its_links_and_not_what_they_point_to(tmp_path):
    root, victim = tmp_path / "root", tmp_path / "victim"
    (root / "mine").mkdir(parents=True)
    victim.mkdir()
    (root / "mine" / "link").symlink_to(victim)
    files.remove_folder(root / "mine", root)
    files.remove_folder(root / "mine", root)  # not there: nothing happens
    assert victim.is_dir() and not (root / "mine").exists()
