import glob
import gzip
import json
import lzma
import random
import sys
from pathlib import Path

import pytest

from jaxformer.data import text_files, unpacked_files
from jaxformer.errors import ConfigError


def zstd(content):
    return pytest.importorskip("zstandard", reason="the zstd extra; .ci/run has it").compress(content)


COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}
SETTINGS = {"separator": None, "text_field": "text", "field": "data.files"}


def read(path, **settings):
    return list(text_files.documents(path, **SETTINGS | settings))


def error_of(call):
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("compression", COMPRESS)
def test_text_is_read_through_every_compression(tmp_path, compression):
    path = tmp_path / f"a.txt{compression}"
    path.write_bytes(COMPRESS[compression]("één\r\n\ftwo\f\f \fthree\n".encode()))
    assert read(path) == ["één\r\n\ftwo\f\f \fthree\n"]
    assert read(path, separator="\f") == ["één\r\n", "two", "three\n"]


@pytest.mark.parametrize("compression", COMPRESS)
def test_json_lines_are_read_through_every_compression(tmp_path, compression):
    lines = [json.dumps({"body": text, "n": 1}) for text in ("één\n", "", "two\u2028lines")]
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(COMPRESS[compression]("\n\n".join(lines).encode()))
    assert read(path, text_field="body") == ["één\n", "two\u2028lines"]


def test_split_is_str_split_however_the_text_is_cut():
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices("ab-", k=rng.randrange(30)))
        separator = "".join(rng.choices("ab-", k=rng.randrange(1, 4)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(5)))
        blocks = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert list(text_files.split(iter(blocks), separator)) == text.split(separator)


def test_characters_and_separators_may_cross_blocks(tmp_path, monkeypatch):
    text = "aé漢|||bé漢" * 50
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for size in range(1, 8):
        monkeypatch.setattr(unpacked_files, "BLOCK_BYTES", size)
        assert read(tmp_path / "a.txt", separator="|||") == text.split("|||")


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffabc\ufeff".encode())
    assert read(tmp_path / "a.txt") == ["abc\ufeff"]


def test_find_takes_patterns_in_order_and_each_file_once(tmp_path, monkeypatch):
    for name in ("b.txt", "a.txt", "deep/c.jsonl.gz", "deep/er/d.txt.xz", "odd[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def found(*patterns):
        return [path.name for path in text_files.find(patterns, "data.files")]

    assert found("*.txt") == ["a.txt", "b.txt", "odd[1].txt"]
    assert found("deep/**/*.*", "b.txt") == ["c.jsonl.gz", "d.txt.xz", "b.txt"]
    assert found("odd[1].txt", "~/a.txt") == ["odd[1].txt", "a.txt"]
    assert found("b.txt", "b.txt") == ["b.txt"]


def test_bad_patterns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv.gz").touch()
    (tmp_path / "folder.txt").mkdir()
    assert error_of(lambda: text_files.find(("no*.txt",), "data.files")) == (
        f"config.data.files: no file matches 'no*.txt' (looked in {Path.cwd()})"
    )
    assert "no file matches 'folder.txt'" in error_of(lambda: text_files.find(("folder.txt",), "data.files"))
    assert error_of(lambda: text_files.find(("*.gz",), "data.validation_files")) == (
        "config.data.validation_files: a.csv.gz is of no kind that is read; "
        "accepted: .txt .jsonl .tsv .parquet .arrow .feather, and of .txt .jsonl .tsv also .gz .xz .zst"
    )


@pytest.mark.parametrize("content", ["", " \n\f ", "\ufeff"])
def test_a_file_without_text(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_text(content, encoding="utf-8")
    assert error_of(lambda: read(path)) == f"config.data.files: {path} holds no text"
    assert error_of(lambda: read(path, separator="\f")) == f"config.data.files: {path} holds no text"


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
@pytest.mark.parametrize("compression", COMPRESS)
def test_an_undecodable_file_is_told_with_the_byte(tmp_path, monkeypatch, block, compression):
    monkeypatch.setattr(unpacked_files, "BLOCK_BYTES", block)
    path = tmp_path / f"a.txt{compression}"
    inside = " of the decompressed text" if compression else ""
    for content, offset in (
        ("né".encode() + b"\xff" + b"abc", 3),
        (b"ab" + "漢".encode()[:2] + b"c", 2),
        (b"a\xe6", 1),
    ):
        path.write_bytes(COMPRESS[compression](content))
        assert error_of(lambda: read(path)) == f"config.data.files: {path}: byte {offset}{inside} is not UTF-8 text"


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_broken_compression(tmp_path, compression):
    path = tmp_path / f"a.txt{compression}"
    whole = COMPRESS[compression](random.Random(0).randbytes(5000).hex().encode())
    for broken in (b"not compressed at all", whole[: len(whole) // 2], whole[:-1], whole[:1]):
        path.write_bytes(broken)
        assert error_of(lambda: read(path)).startswith(f"config.data.files: {path}: cannot be read (")


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_compressed_files_may_be_several_end_to_end(tmp_path, monkeypatch, compression):
    path = tmp_path / f"a.txt{compression}"
    path.write_bytes(
        COMPRESS[compression](b"one ") + COMPRESS[compression](b"two " * 1000) + COMPRESS[compression](b"")
    )
    for block in (1, 7, 1 << 20):
        monkeypatch.setattr(unpacked_files, "BLOCK_BYTES", block)
        assert read(path) == ["one " + "two " * 1000]


def test_a_missing_file(tmp_path):
    path = tmp_path / "a.txt"
    assert error_of(lambda: read(path)) == f"config.data.files: {path}: No such file or directory"


def test_broken_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"\n')
    assert error_of(lambda: read(path)) == (
        f"config.data.files: {path}:3: not JSON (Expecting ',' delimiter: line 1 column 13 (char 12)); "
        "data.on_error=skip skips it"
    )
    path.write_text('{"text": "a"}\n{"body": "b", "n": 1}')
    assert error_of(lambda: read(path)) == (
        f"config.data.text_field: {path}:2: no field 'text' holding text; the line has the fields body, n; "
        "data.on_error=skip skips it"
    )
    path.write_text('{"text": 3}')
    assert "no field 'text' holding text" in error_of(lambda: read(path))
    path.write_text('["text"]')
    assert error_of(lambda: read(path)).endswith("the line has a list; data.on_error=skip skips it")


def test_zst_without_the_extra(tmp_path, monkeypatch):
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"not looked at")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert error_of(lambda: read(path)) == (
        f"config.data.files: {path} needs the zstd extra: pip install 'jaxformer[zstd]'"
    )


def test_each_folder_is_entered_once_however_many_links_lead_to_it(tmp_path, monkeypatch):
    """Through one link to a folder above, glob finds a file 41 times; through two it does not end."""
    for name in ("a/b/1.txt", "a/2.txt", "3.txt", ".hidden/4.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    patterns = ["**/*.txt", "**", "a/**/*.txt", "*/**/b/*.txt", "**/b/**/1.txt", "**/**/2.txt"]
    before = [glob.glob(str(tmp_path / pattern), recursive=True) for pattern in patterns]
    expected = [sorted({Path(name) for name in names if Path(name).is_file()}) for names in before]
    for link in ("up", "again"):
        (tmp_path / link).symlink_to(".")
    found = [sorted(text_files.find((str(tmp_path / pattern),), "data.files")) for pattern in patterns]
    real = [sorted({path.resolve() for path in paths}) for paths in found]
    assert real == expected and [len(paths) for paths in found] == [len(paths) for paths in expected]
    (tmp_path / "a" / "up").symlink_to("..")
    assert len(text_files.find((str(tmp_path / "a/**/*.txt"),), "data.files")) == 3
    monkeypatch.chdir(tmp_path)
    assert sorted(path.resolve() for path in text_files.find(("**/*.txt",), "data.files")) == expected[0]


@pytest.mark.parametrize("rest", [b"garbage", b"\0\0\0\0" + b"\xfd7zXy", lzma.compress(b"second")[1:]])
def test_what_follows_a_whole_xz_stream_is_read_or_refused(tmp_path, rest):
    path = tmp_path / "a.txt.xz"
    path.write_bytes(lzma.compress(b"first") + rest)
    with pytest.raises(ConfigError, match=r"a.txt.xz: cannot be read \("):
        list(text_files.documents(path, separator=None, text_field="text", field="data.files"))
    path.write_bytes(lzma.compress(b"first") + b"\0\0\0\0" + lzma.compress(b" second") + b"\0\0\0\0")
    assert list(text_files.documents(path, separator=None, text_field="text", field="data.files")) == ["first second"]
