"""The cache: hit, missed, raced for, killed in, damaged, full. Processes are real ones."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.data import build_cache, corpus, ingest
from jaxformer.data.corpus import open_corpus
from jaxformer.errors import ConfigError

TEXT = "".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(500))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    return DataConfig(
        source="files", files=(str(tmp_path / "a.txt"),), tokenizer_vocab=300, cache_dir=str(tmp_path / "cache")
    )


def error_of(data):
    with pytest.raises(ConfigError) as error:
        open_corpus(data, progress=False)
    assert "\n" not in str(error.value)
    return str(error.value)


def names(tmp_path):
    """What is in the cache folder besides locks and the index."""
    return sorted(p.name for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock" and p.name != "index")


CHILD = """
import json, os, sys, time
from jaxformer.config import DataConfig
from jaxformer.data import build_cache, corpus, ingest
from jaxformer.errors import ConfigError
data = DataConfig(**json.loads(sys.argv[1]))
build, builds = ingest.build, []
def counted(data, folder, *rest):
    builds.append(folder)
    {inside}
    return build(data, folder, *rest)
ingest.build = counted
{before}
try:
    made = corpus.open_corpus(data, progress={progress})
    print(json.dumps([made.fingerprint, len(builds), int(made.train.tokens.astype(int).sum())]))
except ConfigError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
"""


def start(data, *, inside="pass", before="pass", progress=False):
    """A process that opens the corpus: prints [fingerprint, number of builds, sum of tokens]."""
    settings = json.dumps({name: value for name, value in vars(data).items() if value is not None})
    code = CHILD.replace("{inside}", inside).replace("{before}", before).replace("{progress}", str(progress))
    return subprocess.Popen(
        [sys.executable, "-c", code, settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_a_second_start_reads_no_text(data, monkeypatch):
    first = open_corpus(data, progress=False)
    monkeypatch.setattr(ingest, "build", None)
    monkeypatch.setattr(corpus.contents, "Contents", None)
    second = open_corpus(data, progress=False)
    assert second.directory == first.directory and second.fingerprint == first.fingerprint
    np.testing.assert_array_equal(second.train.tokens, first.train.tokens)
    np.testing.assert_array_equal(second.validation.starts, first.validation.starts)
    assert second.validation.compressed == first.validation.compressed
    assert isinstance(second.train.tokens, np.memmap) and not second.train.tokens.flags.writeable


def test_the_same_text_elsewhere_or_later_is_not_tokenised_again(data, tmp_path, monkeypatch):
    first = open_corpus(data, progress=False)
    monkeypatch.setattr(ingest, "build", None)
    os.utime(tmp_path / "a.txt", (1, 1))
    assert open_corpus(data, progress=False).directory == first.directory
    shutil.copy(tmp_path / "a.txt", tmp_path / "b.txt")
    moved = replace(data, files=(str(tmp_path / "b.txt"),))
    assert open_corpus(moved, progress=False).directory == first.directory


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_vocab": 301},
        {"tokenizer": "bytes"},
        {"tokenizer": "chars"},
        {"validation_fraction": 0.2},
        {"separator": "\n"},
        {"max_train_bytes": 5000},
    ],
)
def test_other_settings_are_another_corpus(data, change):
    first, second = (open_corpus(each, progress=False) for each in (data, replace(data, **change)))
    assert first.directory != second.directory and first.fingerprint != second.fingerprint


@pytest.mark.parametrize(
    "change",
    [{"objective": "masked", "mask_rate": 0.3}, {"tfds_dir": "x"}, {"tokenizer": "bytes", "tokenizer_vocab": 9}],
)
def test_settings_of_other_things_are_not(data, change):
    if "tokenizer" in change:
        data = replace(data, tokenizer="bytes")
    first, second = (open_corpus(each, progress=False) for each in (data, replace(data, **change)))
    assert first.directory == second.directory


def test_changed_text_is_another_corpus(data, tmp_path):
    first = open_corpus(data, progress=False)
    (tmp_path / "a.txt").write_text(TEXT.replace("fox", "cat"))
    os.utime(tmp_path / "a.txt", (7, 7))
    assert open_corpus(data, progress=False).fingerprint != first.fingerprint


def test_the_fingerprint_says_nothing_of_the_place(data, tmp_path):
    first = open_corpus(data, progress=False)
    shutil.copy(tmp_path / "a.txt", tmp_path / "b.txt")
    moved = replace(data, files=(str(tmp_path / "b.txt"),), cache_dir=str(tmp_path / "other"))
    assert open_corpus(moved, progress=False).fingerprint == first.fingerprint


def test_a_given_tokenizer_is_used(data, tmp_path):
    first = open_corpus(data, progress=False)
    file = first.tokenizer.save(tmp_path)
    (tmp_path / "b.txt").write_text(TEXT[:9999])
    second = open_corpus(replace(data, tokenizer_file=str(file), files=(str(tmp_path / "b.txt"),)), progress=False)
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint
    assert error_of(replace(data, tokenizer_file=str(tmp_path / "none.json"))) == (
        f"config.data.tokenizer_file: {tmp_path / 'none.json'}: No such file or directory"
    )


def test_held_out_text_does_not_shape_the_vocabulary(data, tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 9000 + "zyzyzyzy" * 100)
    cut = replace(data, validation_fraction=800 / 18800)
    pieces = open_corpus(cut, progress=False).tokenizer.pieces
    assert b"abab" in pieces and b"zy" not in pieces


def test_the_default_folder(data, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    made = open_corpus(replace(data, cache_dir=None), progress=False)
    assert made.directory.parent == tmp_path / "xdg" / "jaxformer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build_cache.default_root() == tmp_path / "home" / ".cache" / "jaxformer"


@pytest.mark.slow
def test_two_processes_at_once_work_once(data, tmp_path):
    """The second to come says so, waits for the first, and takes what it made."""
    go = tmp_path / "go"
    first = start(data, inside=f"print('in', flush=True)\n    while not os.path.exists({str(go)!r}): time.sleep(0.01)")
    assert first.stdout.readline() == "in\n"
    second = start(data, progress=True)
    assert second.stderr.readline() == "another process is tokenising this corpus; waiting for it\n"
    go.touch()
    one, two = finish(first), finish(second)
    assert (one[1], two[1]) == (1, 0)
    assert (one[0], one[2]) == (two[0], two[2])
    assert len(names(tmp_path)) == 1


NO_LOCKS = """
import fcntl
def flock(*_):
    raise OSError(37, "No locks available")  # as on some network file systems
fcntl.flock = flock
"""


@pytest.mark.slow
def test_two_processes_at_once_without_locks_agree(data, tmp_path):
    """Both work; the first to finish wins, and the other takes what it made."""
    together = "while len(list(folder.parent.glob('.building-*'))) < 2: time.sleep(0.01)"
    processes = [start(data, inside=together, before=NO_LOCKS) for _ in range(2)]
    results = [finish(process) for process in processes]
    assert [builds for _, builds, _ in results] == [1, 1]
    assert len({(fingerprint, total) for fingerprint, _, total in results}) == 1
    (folder,) = names(tmp_path)
    assert not folder.startswith(".")


@pytest.mark.slow
def test_killed_half_way_leaves_nothing_that_counts(data, tmp_path):
    half = "(folder / 'train.tokens').write_bytes(b'half'); print('half', flush=True); time.sleep(60)"
    process = start(data, inside=half)
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (left,) = names(tmp_path)
    assert left.startswith(".building-")
    made = open_corpus(data, progress=False)
    assert names(tmp_path) == [made.directory.name]
    undisturbed = open_corpus(replace(data, cache_dir=str(tmp_path / "other")), progress=False)
    assert made.fingerprint == undisturbed.fingerprint


@pytest.mark.slow
def test_what_another_corpus_left_is_removed_too_but_not_while_it_is_made(data, tmp_path):
    other = replace(data, tokenizer="bytes")
    process = start(other, inside="print('half', flush=True); time.sleep(60)")
    process.stdout.readline()
    open_corpus(data, progress=False)
    assert sum(name.startswith(".building-") for name in names(tmp_path)) == 1
    process.kill()
    process.communicate()
    open_corpus(replace(data, tokenizer="chars"), progress=False)
    assert not any(name.startswith(".building-") for name in names(tmp_path))


@pytest.mark.parametrize("file", ["train.tokens", "validation.starts", "meta.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_corpus_is_made_again(data, file, damage):
    first = open_corpus(data, progress=False)
    tokens = np.array(first.train.tokens)
    path = first.directory / file
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2)
    again = open_corpus(data, progress=False)
    assert again.fingerprint == first.fingerprint
    np.testing.assert_array_equal(again.train.tokens, tokens)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_nothing(data, tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))"
    process = start(data, before=limit)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and out == ""
    root = tmp_path / "cache"
    assert err.splitlines() == [
        f"config.data.cache_dir: {root}: File too large; set data.cache_dir to a writable folder with free space"
    ]
    assert names(tmp_path) == []
    assert open_corpus(data, progress=False).train.num_bytes == len(TEXT) * 9 // 10


def test_an_unwritable_cache_folder(data, tmp_path):
    (tmp_path / "file").touch()
    root = tmp_path / "file" / "cache"
    assert error_of(replace(data, cache_dir=str(root))) == (
        f"config.data.cache_dir: {root}: Not a directory; set data.cache_dir to a writable folder with free space"
    )


def test_a_cache_that_can_only_be_read_serves_what_it_has(data, monkeypatch):
    first = open_corpus(data, progress=False)
    shutil.rmtree(first.directory.parent / "index")

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    assert open_corpus(data, progress=False).fingerprint == first.fingerprint


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"files": ("none*.txt",)}, "config.data.files: no file matches 'none*.txt'"),
        ({"tokenizer_vocab": 100}, "config.data.tokenizer_vocab: 100; byte-level BPE needs at least 262"),
        ({"validation_fraction": 0.0}, "config.data.validation_fraction: 0.0 holds nothing out"),
    ],
)
def test_bad_settings_leave_nothing(data, tmp_path, change, line):
    assert error_of(replace(data, **change)).startswith(line)
    assert not (tmp_path / "cache").exists() or names(tmp_path) == []


def test_a_training_text_cut_to_nothing(data, tmp_path):
    (tmp_path / "a.txt").write_text("é" * 100)
    assert error_of(replace(data, max_train_bytes=1)) == (
        "config.data: the train text is empty (data.max_train_bytes 1)"
    )


def test_progress_is_said_on_standard_error_and_only_when_there_is_work(data, capsys):
    open_corpus(data)
    first = capsys.readouterr()
    assert first.out == "" and "tokenising the train text" in first.err
    open_corpus(data)
    assert capsys.readouterr().err == ""


def test_progress_bars_on_a_terminal(data, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    open_corpus(data)
    assert "Traceback" not in capsys.readouterr().err


def test_a_second_start_is_quick(data):
    open_corpus(data, progress=False)
    begin = time.perf_counter()
    open_corpus(data, progress=False)
    assert time.perf_counter() - begin < 2  # takes a few milliseconds; this only tells it from work done again


def test_vocabulary_tables_fit_the_tokens(data):
    made = open_corpus(data, progress=False)
    assert made.train.tokens.max() < made.tokenizer.vocab_size == 300
    assert made.tokenizer.token_bytes[made.validation.tokens].sum() == made.validation.num_bytes
