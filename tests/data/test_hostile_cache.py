"""A cache that a stranger wrote: nothing outside it is read through, written to or removed, and it never hangs.

The whole file system around it is listed before and after.
"""

import json
import os
import shutil
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from jaxformer.config import DataConfig
from jaxformer.data import build_cache, corpus, metadata
from jaxformer.data.corpus import open_corpus
from jaxformer.errors import ConfigError
from jaxformer.storage import json_checksum

TEXT = "".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(300))
DEEP = "[" * 100_000


class Shared:
    """A cache with one corpus in it, a user's own folder elsewhere, and all that a stranger may do to the cache."""

    def __init__(self, place: Path):
        self.place, self.root, self.victim = place, place / "deep" / "down" / "cache", place / "victim"
        self.victim.mkdir()
        (self.victim / "thesis.tex").write_text("mine")
        (place / "a.txt").write_text(TEXT)
        self.data = DataConfig(
            source="files", files=(str(place / "a.txt"),), tokenizer="bytes", cache_dir=str(self.root)
        )
        self.first = open_corpus(self.data, progress=False)
        self.folder = self.first.directory
        (self.index,) = (self.root / "index").iterdir()

    def listing(self) -> dict[str, tuple]:
        """Everything in the place but for what lies in the cache itself."""
        found = {}
        for folder, folders, names in os.walk(self.place):
            folders[:] = [name for name in folders if Path(folder, name) != self.root]
            for path in (Path(folder, name) for name in [*folders, *names]):
                about = path.lstat()
                content = path.read_bytes() if stat.S_ISREG(about.st_mode) else about.st_mode
                found[str(path.relative_to(self.place))] = (about.st_mode, about.st_mtime_ns, about.st_size, content)
        return found

    def point_index_to(self, key: object) -> None:
        """Makes the index name another key, with a checksum that is right."""
        self.index.write_text(json.dumps(json_checksum.add_checksum({"seen": self.index.stem, "key": key})))

    def replace_by(self, path: Path, make) -> None:
        """Puts something else in the place of a file or folder."""
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    def forge(self, **changes) -> None:
        """Changes meta.json and gives it a checksum that is right."""
        about = json.loads((self.folder / metadata.META).read_text())
        del about[json_checksum.FIELD]
        about["validation"].update(changes)
        (self.folder / metadata.META).write_text(json.dumps(json_checksum.add_checksum(about)))


@pytest.fixture
def shared(tmp_path):
    return Shared(tmp_path)


def link_to(target: Path):
    return lambda path: path.symlink_to(target)


def refused(shared: Shared) -> str:
    with pytest.raises(ConfigError) as error:
        open_corpus(shared.data, progress=False)
    assert "\n" not in str(error.value)
    return str(error.value).replace(str(shared.root), "ROOT").replace(shared.folder.name, "KEY")


KEYS = {
    "traversal": "../../../victim",
    "absolute": None,
    "a folder beside": "index",
    "upper case": "0123456789ABCDEF",
    "nothing": "",
    "dot": ".",
    "a number": 7,
    "a list": ["../../../victim"],
    "no corpus": "0123456789abcdef",
}
HARMLESS = {
    **{f"key: {name}": (lambda s, key=key: s.point_index_to(key or str(s.victim))) for name, key in KEYS.items()},
    "key: as the last version wrote it": lambda s: s.index.write_text(json.dumps({"key": "../../../victim"})),
    "index entry deep": lambda s: s.index.write_text(DEEP),
    "index entry of 100 MB": lambda s: os.truncate(s.index, 100_000_000),
    "index entry a pipe": lambda s: s.replace_by(s.index, os.mkfifo),
    "index entry a link": lambda s: s.replace_by(s.index, link_to(s.victim / "thesis.tex")),
    "index a link": lambda s: s.replace_by(s.root / "index", link_to(s.victim)),
    "index a file": lambda s: s.replace_by(s.root / "index", Path.touch),
    "leftover a link": lambda s: (s.root / f".building-{s.folder.name}-1-01234567").symlink_to(s.victim),
    "leftover traversal": lambda s: (s.root / f".building-..{s.folder.name}").symlink_to(s.victim),
    "leftover not ours": lambda s: shutil.copytree(s.victim, s.root / f".building-{s.folder.name}-1-01234567"),
    "leftover's lock a link": lambda s: leftover_with_linked_lock(s),
}


def leftover_with_linked_lock(shared: Shared) -> None:
    other = "0123456789abcdef"
    (shared.root / f".building-{other}-1-01234567").mkdir()
    (shared.root / f".building-{other}-1-01234567" / build_cache.MARKER).write_text("x")
    (shared.root / f"{other}.lock").symlink_to(shared.place / "made")


@pytest.mark.parametrize("case", HARMLESS)
@pytest.mark.parametrize("there", [True, False])
def test_what_is_ignored(shared, case, there):
    """The corpus is served if it is there and made if not; what the stranger put down does nothing."""
    HARMLESS[case](shared)
    if not there:
        shutil.rmtree(shared.folder)
    before = shared.listing()
    assert open_corpus(shared.data, progress=False).fingerprint == shared.first.fingerprint
    assert shared.listing() == before


FOREIGN = {
    "folder a link": lambda s: s.replace_by(s.folder, link_to(s.victim)),
    "folder a link to a corpus": lambda s: (
        shutil.move(s.folder, s.victim / "moved"),
        s.folder.symlink_to(s.victim / "moved"),
    ),
    "folder a dangling link": lambda s: s.replace_by(s.folder, link_to(s.place / "none")),
    "folder a file": lambda s: s.replace_by(s.folder, Path.touch),
    "folder of somebody": lambda s: s.replace_by(s.folder, lambda path: shutil.copytree(s.victim, path)),
    "marker gone": lambda s: (s.folder / build_cache.MARKER).unlink(),
    "marker a link": lambda s: s.replace_by(s.folder / build_cache.MARKER, link_to(s.victim / "thesis.tex")),
    "marker a pipe": lambda s: s.replace_by(s.folder / build_cache.MARKER, os.mkfifo),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_folder_that_was_not_made_here_is_neither_used_nor_removed(shared, case):
    FOREIGN[case](shared)
    before, inside = shared.listing(), sorted(shared.root.rglob("*"))
    line = refused(shared)
    assert line.startswith("config.data.cache_dir: ROOT/KEY ")
    assert line.endswith("neither uses nor removes it; move it away, or set data.cache_dir "
                         "to another folder")  # fmt: skip
    assert shared.listing() == before and sorted(shared.root.rglob("*")) == inside


@pytest.mark.parametrize("make", [lambda s: link_to(s.victim / "thesis.tex"), lambda s: link_to(s.place / "made"),
                                  lambda s: os.mkfifo, lambda s: os.mkdir])  # fmt: skip
def test_a_lock_that_is_no_file_is_not_opened(shared, make):
    shutil.rmtree(shared.folder)
    shared.replace_by(shared.root / f"{shared.folder.name}.lock", make(shared))
    before = shared.listing()
    assert "ROOT/KEY.lock is " in (line := refused(shared)) and "did not make it and does not open it" in line
    assert shared.listing() == before and not shared.folder.exists()


def flood(path: Path) -> None:
    path.symlink_to("/dev/zero")


FILES = ("meta.json", "tokenizer.json", "train.tokens", "validation.starts")
INSIDE = {
    f"{file} {what}": (lambda s, file=file, make=make: s.replace_by(s.folder / file, make(s)))
    for file in FILES
    for what, make in {
        "a pipe": lambda s: os.mkfifo,
        "a folder": lambda s: os.mkdir,
        "endless": lambda s: flood,
        "a link": lambda s: link_to(s.victim / "thesis.tex"),
        "deep": lambda s: lambda path: path.write_text(DEEP),
        "empty": lambda s: Path.touch,
    }.items()
} | {
    "counts negative": lambda s: s.forge(num_bytes=-1),
    "counts huge": lambda s: s.forge(num_tokens=10**30),
    "counts text": lambda s: s.forge(num_documents="many"),
    "checksums no text": lambda s: s.forge(token_sums=7),
    "checksums no digits": lambda s: s.forge(token_sums="x" * 8),
    "checksums with spaces": lambda s: s.forge(token_sums="12      "),
    "compressed a list": lambda s: s.forge(compressed=[]),
    "a folder with links inside": lambda s: ((s.folder / "meta.json").unlink(), (s.folder / "x").symlink_to(s.victim)),
}


@pytest.mark.parametrize("case", INSIDE)
def test_a_corpus_of_ours_with_anything_inside_is_made_again_and_said(shared, case, capsys):
    INSIDE[case](shared)
    before = shared.listing()
    assert open_corpus(shared.data, progress=False).fingerprint == shared.first.fingerprint
    assert shared.listing() == before
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(f"data.cache_dir: {shared.folder}: ")
    assert said[0].endswith("; it is rebuilt")
    open_corpus(shared.data, progress=False)
    assert capsys.readouterr().err == ""


def test_ids_beyond_the_vocabulary_are_refused_though_the_checksums_are_right(shared, capsys):
    path = shared.folder / "validation.tokens"
    ids = bytearray(path.read_bytes())
    ids[10:12] = b"\xff\xff"
    path.write_bytes(ids)
    import zlib

    shared.forge(token_sums=f"{zlib.crc32(ids):08x}")
    open_corpus(shared.data, progress=False)
    assert "validation.tokens holds 65535 where at most 261 is possible; it is rebuilt" in capsys.readouterr().err


def test_folders_in_folders_end_in_one_line_or_are_removed(shared):
    (shared.folder / "meta.json").unlink()
    here = os.getcwd()
    try:
        os.chdir(shared.folder)
        for _ in range(3000):  # a path of this length cannot be named at once
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)
    before = shared.listing()
    try:
        assert open_corpus(shared.data, progress=False).fingerprint == shared.first.fingerprint
    except ConfigError as error:
        assert "\n" not in str(error)
    assert shared.listing() == before
    subprocess.run(["rm", "-rf", str(shared.root)], check=True)  # pytest's own cleaning recurses


def test_an_index_that_is_a_link_is_not_read(shared, monkeypatch):
    (shared.root / "index").rename(shared.place / "moved")
    (shared.root / "index").symlink_to(shared.place / "moved")
    hashed = []
    real = corpus.contents.Contents
    monkeypatch.setattr(corpus.contents, "Contents", lambda inputs: (hashed.append(1), real(inputs))[1])
    open_corpus(shared.data, progress=False)
    assert hashed == [1]


def test_a_root_that_the_user_made_a_link_is_fine(shared):
    link = shared.place / "link"
    link.symlink_to(shared.root)
    data = replace(shared.data, cache_dir=str(link))
    assert open_corpus(data, progress=False).fingerprint == shared.first.fingerprint
    (shared.folder / "meta.json").unlink()
    assert open_corpus(data, progress=False).fingerprint == shared.first.fingerprint
    assert link.is_symlink()


def test_an_interrupted_removal_leaves_what_is_known_for_ours(shared, monkeypatch):
    """Killed after any of its steps, the next start removes the rest."""
    (shared.folder / "meta.json").unlink()
    real = Path.unlink
    for steps in range(1, 6):
        left = iter(range(steps))

        def unlink(self, *args, _left=left, **kwargs):
            if self.parent.name.startswith(".building-") and next(_left, None) is None:
                raise KeyboardInterrupt
            real(self, *args, **kwargs)

        monkeypatch.setattr(Path, "unlink", unlink)
        try:
            open_corpus(shared.data, progress=False)
        except KeyboardInterrupt:
            monkeypatch.setattr(Path, "unlink", real)
            assert open_corpus(shared.data, progress=False).fingerprint == shared.first.fingerprint
        monkeypatch.setattr(Path, "unlink", real)
        assert sorted(p.name for p in shared.root.iterdir() if p.suffix != ".lock") == [shared.folder.name, "index"]
        (shared.folder / "meta.json").unlink()


def test_caches_of_the_last_version_are_left_alone(shared):
    """They have no marker; their names come from another FORMAT, so nobody looks at them."""
    old = shared.root / "0123456789abcdef"
    shutil.copytree(shared.folder, old)
    (old / build_cache.MARKER).unlink()
    shutil.rmtree(shared.folder)
    inside = sorted(old.iterdir())
    open_corpus(shared.data, progress=False)
    assert sorted(old.iterdir()) == inside


def test_keys_are_checked_where_they_are_used(tmp_path):
    for key in ("../victim", "/victim", "", "0123456789abcdeg"):
        with pytest.raises(ValueError, match="16 hexadecimal digits"):
            build_cache.get_or_build(tmp_path, key, lambda folder: None, lambda folder: folder)
    assert corpus.build_cache.is_key("0123456789abcdef")
