"""Damage to a kept corpus, and text that changes while it is read: said, made again or refused, never used."""

import gzip
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.data import batches, build_cache, checked_array, contents, ingest, text_files
from jaxformer.data.corpus import open_corpus
from jaxformer.data.sources import Input
from jaxformer.errors import ConfigError
from jaxformer.storage import json_checksum

TEXT = "".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(500))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    return DataConfig(
        source="files", files=(str(tmp_path / "a.txt"),), separator="\n", tokenizer="bytes",
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip


@pytest.fixture
def lazy(monkeypatch):
    """Files are compared block by block, in use, as those of more than 67 MB are."""
    monkeypatch.setattr(checked_array, "AT_ONCE", 0)
    monkeypatch.setattr(checked_array, "BLOCK_BYTES", 1 << 12)


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def tokens_of(made) -> tuple[bytes, ...]:
    return tuple(np.asarray(split.tokens).tobytes() for split in (made.train, made.validation))


FILES = ("train.tokens", "validation.tokens", "train.starts", "validation.starts", "meta.json", "tokenizer.json")


@pytest.mark.parametrize(
    "file", [pytest.param(f, marks=() if f in ("train.tokens", "meta.json") else pytest.mark.slow) for f in FILES]
)
def test_no_flipped_bit_is_silent(data, file, capsys):
    """Whichever bit: the corpus is what it was, and one line says which file was wrong."""
    first = open_corpus(data, progress=False)
    was = tokens_of(first), first.validation.num_bytes, first.fingerprint
    chance = random.Random(file)
    for _ in range(12):
        size = (first.directory / file).stat().st_size
        flip(first.directory / file, chance.randrange(size), chance.randrange(8))
        again = open_corpus(data, progress=False)
        assert (tokens_of(again), again.validation.num_bytes, again.fingerprint) == was
        assert f"data.cache_dir: {first.directory}: {file} " in (said := capsys.readouterr().err)
        assert said.count("\n") == 1 and said.endswith("; it is rebuilt\n")


def test_doubled_bytes_are_noticed(data, capsys):
    first = open_corpus(data, progress=False)
    about = json.loads((first.directory / "meta.json").read_text())
    about["validation"]["num_bytes"] *= 2
    (first.directory / "meta.json").write_text(json.dumps(about))
    assert open_corpus(data, progress=False).validation.num_bytes == first.validation.num_bytes
    assert "meta.json is not what was written" in capsys.readouterr().err


def test_a_corpus_under_another_name_is_noticed(data, tmp_path, capsys):
    first, other = open_corpus(data, progress=False), open_corpus(replace(data, separator=" "), progress=False)
    first.directory.rename(tmp_path / "aside")
    other.directory.rename(first.directory)
    assert open_corpus(data, progress=False).fingerprint == first.fingerprint
    assert "holds another corpus" in capsys.readouterr().err


@pytest.mark.parametrize("place", [0, 1, 20])
def test_a_damaged_index_entry_makes_nothing_under_a_wrong_name(data, place):
    first = open_corpus(data, progress=False)
    (entry,) = (first.directory.parent / "index").iterdir()
    key = entry.read_text().index(first.directory.name)
    flip(entry, key if place == 0 else place)
    assert open_corpus(data, progress=False).directory == first.directory
    assert [p.name for p in first.directory.parent.iterdir() if p.is_dir() and p.name != "index"] == [
        first.directory.name
    ]


def test_index_entries_that_changed_places_are_not_believed(data, tmp_path):
    """Two texts, the same settings, each entry sound in itself."""
    (tmp_path / "b.txt").write_text(TEXT[:9999])
    other = replace(data, files=(str(tmp_path / "b.txt"),))
    first, second = open_corpus(data, progress=False), open_corpus(other, progress=False)
    one, two = (first.directory.parent / "index").iterdir()
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    assert open_corpus(data, progress=False).directory == first.directory
    assert open_corpus(other, progress=False).directory == second.directory


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_are_the_same_whether_compared_at_once_or_in_use(data, pairs, split, monkeypatch):
    data = replace(data, objective="masked", pairs=pairs)

    def rows():
        made = open_corpus(data, progress=False)
        common = {"rows": 4, "context_length": 64}
        if split == "train":
            found = batches.Batches(made.train, made.tokenizer, data, **common, seed=1)
            return made, [found[step] for step in range(6)]
        return made, list(batches.eval_batches(made.validation, made.tokenizer, data, **common))

    monkeypatch.setattr(checked_array, "BLOCK_BYTES", 1 << 12)
    _, at_once = rows()
    monkeypatch.setattr(checked_array, "AT_ONCE", 0)
    made, in_use = rows()
    assert isinstance(made.train.tokens, checked_array.CheckedArray)
    for one, two in zip(at_once, in_use, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, two)


def test_damage_found_in_use_is_one_line_and_the_next_start_makes_it_again(data, lazy, capsys):
    first = open_corpus(data, progress=False)
    was = tokens_of(first)
    flip(first.directory / "train.tokens", 9000)
    made = open_corpus(data, progress=False)
    assert (made.train.tokens[:2000] == np.frombuffer(was[0], "<u2")[:2000]).all()  # blocks 0: sound
    for _ in range(2):
        with pytest.raises(ConfigError) as error:
            made.train.tokens[[5000, 4500]]
        assert str(error.value) == (
            f"config.data.cache_dir: {first.directory}: train.tokens is damaged at bytes 8192 to 12287; start again: "
            "the text is tokenised again, and a run resumes from its newest checkpoint"
        )
    assert capsys.readouterr().err == ""
    assert tokens_of(open_corpus(data, progress=False)) == was
    assert "was found damaged when it was last used; it is rebuilt" in capsys.readouterr().err


def test_damage_found_in_a_cache_that_cannot_be_written(data, lazy, monkeypatch):
    first = open_corpus(data, progress=False)
    flip(first.directory / "train.tokens", 9000)
    monkeypatch.setattr(build_cache, "mark_damaged", lambda *_: False)
    with pytest.raises(ConfigError, match="remove this folder and start again"):
        np.asarray(open_corpus(data, progress=False).train.tokens)


def test_tokens_beyond_the_vocabulary_found_in_use(data, lazy):
    """Whoever wrote them wrote the right checksums as well."""
    first = open_corpus(data, progress=False)
    path = first.directory / "train.tokens"
    content = path.read_bytes()
    path.unlink()
    with checked_array.BlockWriter(path) as file:
        file.write(content[:10] + np.array(60_000, "<u2").tobytes() + content[12:])
    about = json.loads((first.directory / "meta.json").read_text())
    del about[json_checksum.FIELD]
    about["train"]["token_sums"] = file.sums
    (first.directory / "meta.json").write_text(json.dumps(json_checksum.add_checksum(about)))
    found = open_corpus(data, progress=False)
    most = found.tokenizer.vocab_size - 1
    with pytest.raises(ConfigError, match=rf"train\.tokens holds 60000 where at most {most} is possible"):
        found.train.tokens[5]


def test_verify_finds_what_its_checksums_do_not(data, capsys):
    """A corpus with right checksums throughout, but not of the tokens that its fingerprint was made from."""
    import zlib

    first = open_corpus(data, progress=False)
    path = first.directory / "train.tokens"
    flip(path, 2)
    about = json.loads((first.directory / "meta.json").read_text())
    del about[json_checksum.FIELD]
    about["train"]["token_sums"] = f"{zlib.crc32(path.read_bytes()):08x}"
    (first.directory / "meta.json").write_text(json.dumps(json_checksum.add_checksum(about)))
    assert tokens_of(open_corpus(data, progress=False))[0][2] == path.read_bytes()[2]
    assert capsys.readouterr().err == ""
    open_corpus(data, progress=False, verify=True)
    assert "does not have the fingerprint that it had; it is rebuilt" in capsys.readouterr().err


def test_verify_compares_every_block(data, lazy, capsys):
    first = open_corpus(data, progress=False)
    flip(first.directory / "train.tokens", 9000)
    open_corpus(data, progress=False)
    assert capsys.readouterr().err == ""
    open_corpus(data, progress=False, verify=True)
    assert "train.tokens is damaged at bytes 8192 to 12287; it is rebuilt" in capsys.readouterr().err


def test_verify_reads_text_that_looks_unchanged(data, tmp_path, monkeypatch):
    first = open_corpus(data, progress=False)
    monkeypatch.setattr(
        contents.files, "look", lambda path: [path.stat().st_size]
    )  # a file system whose times say nothing
    open_corpus(data, progress=False)
    (tmp_path / "a.txt").write_text(TEXT.replace("fox", "cat"))
    assert open_corpus(data, progress=False).fingerprint == first.fingerprint
    assert open_corpus(data, progress=False, verify=True).fingerprint != first.fingerprint


def test_same_size_and_time_but_other_content_is_noticed(data, tmp_path):
    """By the time of change of its entry, which nobody can set."""
    first = open_corpus(data, progress=False)
    about = (tmp_path / "a.txt").stat()
    time.sleep(0.02)
    (tmp_path / "a.txt").write_text(TEXT.replace("fox", "cat"))
    os.utime(tmp_path / "a.txt", ns=(about.st_atime_ns, about.st_mtime_ns))
    assert open_corpus(data, progress=False).fingerprint != first.fingerprint


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


CHANGES = {
    "appended": lambda path: append(path, "and more\n"),
    "appended after its end": lambda path: append(path, "x" * (3 << 20)),
    "one character": lambda path: path.write_text(TEXT.replace("line 499", "line 498")),
    "cut": lambda path: os.truncate(path, 1000),
    "emptied": lambda path: os.truncate(path, 0),
    "replaced": lambda path: (path.unlink(), path.write_text(TEXT.upper())),
    "gone": lambda path: path.unlink(),
    "a new file": lambda path: path.with_name("b.txt").write_text("new"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("moment", ["reading the train text", "making the chars tokenizer", "tokenising the train text",
                                    "tokenising the validation text"])  # fmt: skip
def test_text_that_changes_under_reading_is_refused_and_not_kept(data, tmp_path, monkeypatch, change, moment):
    data = replace(data, tokenizer="chars", files=(str(tmp_path / "*.txt"),))
    real = ingest.build

    def build(data, folder, bar, *rest):
        def changing(description, total):
            if description == moment:
                CHANGES[change](tmp_path / "a.txt")
            return bar(description, total)

        return real(data, folder, changing, *rest)

    monkeypatch.setattr(ingest, "build", build)
    with pytest.raises(ConfigError) as error:
        open_corpus(data, progress=False)
    assert "changed while it was read" in str(error.value) or (change == "gone" and "data.files" in str(error.value))
    assert "\n" not in str(error.value)
    left = [p.name for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"]
    assert left == []


def test_text_that_changes_between_two_looks(data, tmp_path, monkeypatch):
    real = contents.Contents.__init__

    def hash_and_change(self, inputs):
        real(self, inputs)
        append(tmp_path / "a.txt", "more")

    monkeypatch.setattr(contents.Contents, "__init__", hash_and_change)
    with pytest.raises(ConfigError, match="changed while it was read"):
        open_corpus(data, progress=False)


APPENDING = """
import sys, time
with open(sys.argv[1], "a") as file:
    while True:
        file.write("more of it\\n"); file.flush(); time.sleep(0.0005)
"""


@pytest.mark.slow
def test_a_text_that_grows_all_the_time(data, tmp_path):
    """Another process appends: refused, or kept under the hash of what was read."""
    writer = subprocess.Popen([sys.executable, "-c", APPENDING, str(tmp_path / "a.txt")])
    try:
        for _ in range(10):
            try:
                open_corpus(data, progress=False)
            except ConfigError as error:
                assert "changed while it was read" in str(error)
    finally:
        writer.kill()
        writer.wait()
    made = open_corpus(data, progress=False)
    assert made.fingerprint == open_corpus(replace(data, cache_dir=str(tmp_path / "fresh")), progress=False).fingerprint


@pytest.mark.parametrize("ending", [".txt.gz", *(pytest.param(x, marks=pytest.mark.slow) for x in (".txt", ".txt.xz"))])
def test_contents_are_read_whole_through_compression(tmp_path, ending):
    import lzma

    pack = {".txt": bytes, ".txt.gz": gzip.compress, ".txt.xz": lzma.compress}[ending]
    words = random.Random(0).randbytes(3 << 19).hex()
    path = tmp_path / f"a{ending}"
    path.write_bytes(pack(words.encode()))
    found = contents.Contents([Input(path, "x")])
    read = text_files.documents(path, separator=None, text_field="text", field="f", open_file=found.open)
    assert list(read) == [words]


def test_a_file_that_was_not_hashed_is_not_read(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"a\.txt changed while it was read"):
        contents.Contents([]).open(tmp_path / "a.txt")


@pytest.mark.parametrize("index", [0, -1, 4999, np.int64(7), slice(None), slice(10, 2000, 7), slice(-5, None),
                                   slice(4000, 10, -3), slice(5, 5), [1, 4000], [[1, 2], [-1, -5000]],
                                   np.arange(5000) % 3 == 0, Ellipsis, []])  # fmt: skip
def test_indexing_is_numpys(tmp_path, monkeypatch, index):
    monkeypatch.setattr(checked_array, "BLOCK_BYTES", 1 << 9)
    numbers = np.random.default_rng(0).integers(0, 300, 5000).astype("<u2")
    with checked_array.BlockWriter(tmp_path / "x") as file:
        for part in np.split(numbers, [3, 10, 700, 4000]):
            file.write(part.tobytes())
    array = checked_array.CheckedArray(tmp_path / "x", "<u2", file.sums, most=299, failed=RuntimeError)
    index = np.array(index, int) if isinstance(index, list) else index
    np.testing.assert_array_equal(array[index], numbers[index])
    assert type(array[index]) is type(numbers[index])
    with pytest.raises(IndexError):
        array[5000]
    for first in range(0, 10_000, 512):  # every block that holds one of these is compared before use
        flip(tmp_path / "x", first + 7)
        damaged = checked_array.CheckedArray(tmp_path / "x", "<u2", file.sums, most=299, failed=RuntimeError)
        if np.isin(np.arange(5000)[index], np.arange(first // 2, first // 2 + 256)).any():
            with pytest.raises(RuntimeError, match=f"x is damaged at bytes {first} to {min(first + 511, 9999)}"):
                damaged[index]
        assert len(damaged) == 5000 and damaged.dtype == numbers.dtype
        flip(tmp_path / "x", first + 7)


def test_what_is_kept_is_on_disk_before_and_after_it_has_its_name(data, monkeypatch):
    """Every file, the folder and the folder around it are synced, in this order around the rename."""
    done = []
    real_sync, real_rename = os.fsync, Path.rename

    def fsync(handle):
        name = Path(os.readlink(f"/proc/self/fd/{handle}")).name
        done.append(".building" if name.startswith(".building") else name)
        real_sync(handle)

    def rename(self, target):
        done.append("renamed")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    made = open_corpus(data, progress=False)
    names = {p.name for p in made.directory.iterdir()}
    before, after = done[: done.index("renamed")], done[done.index("renamed") + 1 :]
    assert names <= set(before) and before[-1] == ".building"
    assert after[0] == "cache" and after[-1] == "index"


def test_tfds_files_are_hashed_again_after_reading(tmp_path, monkeypatch):
    path = tmp_path / "x.array_record"
    path.write_bytes(b"abc")
    found = contents.Contents([Input(path, "x")])
    found.confirm([Input(path, "x")], hash_again=True)
    before = contents.look(path)
    path.write_bytes(b"abd")
    monkeypatch.setattr(contents, "look", lambda _: before)  # a file system whose times say nothing
    found.confirm([Input(path, "x")], hash_again=False)
    with pytest.raises(ConfigError, match="changed while it was read"):
        found.confirm([Input(path, "x")], hash_again=True)


@pytest.mark.parametrize("now", [[], ["a", "b"], ["b"]])
def test_other_files_than_before_are_a_change(tmp_path, now):
    for name in "ab":
        (tmp_path / name).write_text(name)
    found = contents.Contents([Input(tmp_path / "a", "x")])
    with pytest.raises(ConfigError, match="changed while it was read"):
        found.confirm([Input(tmp_path / name, "x") for name in now], hash_again=False)
