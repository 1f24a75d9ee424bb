"""Lines and examples that cannot be read as text: named, or left out and counted, down to the corpus."""

import json
import os
import sys
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.data import sources, text_files, tokenizers, unpacked_files
from jaxformer.data.corpus import open_corpus
from jaxformer.data.faults import Faults
from jaxformer.errors import ConfigError
from tests.data.test_text_files import COMPRESS, error_of, read

BROKEN = {
    "lone surrogate": (rb'{"text": "ab\ud800c"}', "files", "the text has a lone surrogate, '\\ud800', at character 2"),
    "low surrogate": (rb'{"text": "\uDFFF"}', "files", "the text has a lone surrogate, '\\udfff', at character 0"),
    "deep list": (b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "files", "nested too deeply"),
    "deep object": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "files", "nested too deeply"),
    "deep and open": (b"[" * 1_000_000, "files", "nested too deeply"),
    "not UTF-8": (b'{"text": "caf\xe9"}', "files", "byte 13 of the line is not UTF-8 text"),
    "surrogate in UTF-8": (b'{"text": "\xed\xa0\x80"}', "files", "byte 10 of the line is not UTF-8 text"),
    "not JSON": (b"text", "files", "not JSON (Expecting value: line 1 column 1 (char 0))"),
    "zeros": (b"\0" * 100, "files", "not JSON (Expecting value"),
    "a mark inside": ('\ufeff{"text": "a"}'.encode(), "files", "not JSON ("),
    "two on a line": (b'{"text": "a"}{"text": "b"}', "files", "not JSON (Extra data"),
    "raw control sign": (b'{"text": "a\tb"}', "files", "not JSON (Invalid control character"),
    "too long": (b'{"text": "' + b"a" * 5_000_000 + b'"}', "files", "the line is longer than 4194304 bytes"),
    "a list": (b'["text"]', "text_field", "no field 'text' holding text; the line has a list"),
    "null": (b"null", "text_field", "no field 'text' holding text; the line has a null"),
    "a number": (b"3", "text_field", "no field 'text' holding text; the line has a number"),
    "no such field": (b'{"body": "a"}', "text_field", "no field 'text' holding text; the line has the fields body"),
    "text that is a number": (b'{"text": NaN}', "text_field", "no field 'text' holding text; it holds a number"),
    "text that is null": (b'{"text": null}', "text_field", "no field 'text' holding text; it holds a null"),
    "odd names": (
        json.dumps({"a\nb": 1, "\ud800": 2, "x" * 10**6: 3}).encode(),
        "text_field",
        "no field 'text' holding text; the line has the fields 'a\\nb', '\\ud800', '" + "x" * 40 + "'",
    ),
    "many names": (
        json.dumps({f"n{i}": 1 for i in range(500)}).encode(),
        "text_field",
        f"no field 'text' holding text; the line has the fields {', '.join(f'n{i}' for i in range(12))} and 488 more",
    ),
}
WHOLE = {
    "a pair of surrogates": (rb'{"text": "\ud83d\ude00"}', "\U0001f600"),
    "a number of 5000 digits": (b'{"n": ' + b"9" * 5000 + b', "text": "a"}', "a"),
    "numbers that JSON has not": (b'{"n": [NaN, Infinity, -Infinity], "text": "a"}', "a"),
    "a NUL": (rb'{"text": "a\u0000b"}', "a\0b"),
    "a backslash before ud800": (rb'{"text": "\\ud800"}', "\\ud800"),
    "a field twice": (b'{"text": 1, "text": "a"}', "a"),
    "a carriage return": (b'{"text": "a"}\r', "a"),
    "half a character elsewhere": (rb'{"id": "\ud800", "text": "a"}', "a"),
}


@pytest.fixture
def short_lines(monkeypatch):
    monkeypatch.setattr(unpacked_files, "LINE_BYTES", 1 << 22)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_line_is_named_or_left_out(tmp_path, short_lines, case):
    line, field, reason = BROKEN[case]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n' + line)
    message = error_of(lambda: read(path))
    assert message.startswith(f"config.data.{field}: {path}:3: {reason}")
    assert len(message) < 650 and message.isprintable()
    faults = Faults("skip")
    assert read(path, faults=faults) == ["one", "two"]
    assert (faults.count, f"{faults.first}; data.on_error=skip skips it") == (2, message)


@pytest.mark.parametrize("case", WHOLE)
def test_odd_but_whole_lines_are_read(tmp_path, case):
    line, text = WHOLE[case]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([line] * 3))
    assert read(tmp_path / "a.jsonl") == [text] * 3


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1 << 20])
def test_lines_are_the_same_however_the_file_is_read(tmp_path, monkeypatch, size):
    lines = [json.dumps({"text": f"é{i}" * (i % 40)}, ensure_ascii=False) for i in range(50)]
    lines[3] = lines[20] = json.dumps({"text": "x" * 300})
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(unpacked_files, "BLOCK_BYTES", size)
    monkeypatch.setattr(unpacked_files, "LINE_BYTES", 200)
    faults = Faults("skip")
    assert read(tmp_path / "a.jsonl", faults=faults) == [
        f"é{i}" * (i % 40) for i in range(50) if i % 40 and i not in (3, 20)
    ]
    assert faults.count == 2 and faults.first.endswith("a.jsonl:4: the line is longer than 200 bytes")


def test_a_line_of_exactly_the_limit_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": "abc"}')
    monkeypatch.setattr(unpacked_files, "LINE_BYTES", 15)
    assert read(tmp_path / "a.jsonl") == ["abc", "abc"]
    monkeypatch.setattr(unpacked_files, "LINE_BYTES", 14)
    assert ":1: the line is longer than 14 bytes" in error_of(lambda: read(tmp_path / "a.jsonl"))


def test_a_line_that_is_too_long_is_not_held(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + b"x" * 60_000_000 + b'\n{"text": "b"}')
    monkeypatch.setattr(unpacked_files, "LINE_BYTES", 1 << 21)
    tracemalloc.start()
    assert read(tmp_path / "a.jsonl", faults=Faults("skip")) == ["a", "b"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


@pytest.mark.parametrize("count, lines", [(3, "3 lines"), (1, "1 line")])
def test_a_file_of_broken_lines_alone_is_said_to_hold_no_text(tmp_path, count, lines):
    path = tmp_path / "a.jsonl"
    path.write_text('{"txt": "a"}\n' * count)
    assert error_of(lambda: read(path, faults=Faults("skip"))) == (
        f"config.data.files: {path} holds no text that can be read ({lines} left out, such as config.data.text_field: "
        f"{path}:1: no field 'text' holding text; the line has the fields txt)"
    )


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_a_file_that_ends_too_early_is_never_left_out(tmp_path, monkeypatch, compression, on_error):
    """Nobody knows how much is missing. The line says how much was read."""
    path = tmp_path / f"a.jsonl{compression}"
    lines = [json.dumps({"text": os.urandom(999).hex()}) + "\n" for _ in range(400)]
    path.write_bytes(COMPRESS[compression]("".join(lines).encode())[:-9])
    monkeypatch.setattr(unpacked_files, "BLOCK_BYTES", 1000)
    seen = []
    with pytest.raises(ConfigError) as error:
        for text in text_files.documents(path, separator=None, text_field="text", field="f", faults=Faults(on_error)):
            seen.append(text)
    assert len(seen) > 200
    assert str(error.value).startswith(f"config.f: {path}: cannot be read beyond line {len(seen)} (")


@pytest.mark.parametrize("compression", [".gz", ".xz", ".zst"])
def test_a_file_damaged_in_the_middle_is_never_left_out(tmp_path, compression):
    """Also where the damage gives lines that are left out before the checksum at the end tells. `.zst` has one if the
    program that made it put it there, as `zstd` does."""
    content = "".join(json.dumps({"text": os.urandom(50).hex()}) + "\n" for _ in range(400)).encode()
    if compression == ".zst":
        zstandard = pytest.importorskip("zstandard", reason="the zstd extra; .ci/run has it")
        damaged = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(content))
    else:
        damaged = bytearray(COMPRESS[compression](content))
    for i in range(len(damaged) // 2, len(damaged) // 2 + 200):
        damaged[i] ^= 0x55
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(damaged)
    assert "cannot be read" in error_of(lambda: read(path, faults=Faults("skip")))


def test_a_text_file_that_is_not_utf8_is_never_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    assert "byte 3 is not UTF-8" in error_of(lambda: read(tmp_path / "a.txt", faults=Faults("skip")))
    (tmp_path / "b.txt").write_bytes("a\ud800".encode("utf-8", "surrogatepass"))
    assert "byte 1 is not UTF-8" in error_of(lambda: read(tmp_path / "b.txt"))


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe"])
def test_nul_bytes_are_text(tmp_path, tokenizer):
    text = "to be\0or not\0\0to be, " * 200
    (tmp_path / "a.txt").write_text(text)
    data = DataConfig(
        source="files", files=(str(tmp_path / "a.txt"),), tokenizer=tokenizer, tokenizer_vocab=300,
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    made = open_corpus(data, progress=False)
    read = [made.tokenizer.decode(split.tokens[1:]) for split in (made.train, made.validation)]
    assert "".join(read) == text and made.train.num_bytes + made.validation.num_bytes == len(text)
    assert made.train.num_unknown == 0 and tokenizers.Tokenizer.load(made.directory).decode(made.train.tokens[1:7])


def corpus(tmp_path, lines, **settings):
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    fields = {"source": "files", "files": (str(tmp_path / "a.jsonl"),), "tokenizer": "bytes", "on_error": "skip"}
    return DataConfig(**fields | {"cache_dir": str(tmp_path / "cache")} | settings)


def line(text):
    return json.dumps({"text": text})


def test_the_corpus_says_how_many_lines_of_each_split_are_left_out(tmp_path, capsys):
    """Also the second time, when nothing is read; and with a cut that lies among broken lines."""
    lines = ["broken", line("one"), "broken", line("two"), "broken", "broken", line("three"), line("four"), "broken"]
    data = corpus(tmp_path, lines, validation_fraction=0.5)
    for _ in range(2):
        made = open_corpus(data, progress=False)
        assert (made.train.num_documents, made.validation.num_documents) == (2, 2)
        assert (made.train.num_skipped, made.validation.num_skipped, made.num_skipped) == (2, 3, 5)
        assert made.notes() == [
            "2 training and 3 held-out lines or examples cannot be read as text and are left out (data.on_error=skip)"
        ]
    said = capsys.readouterr().err.splitlines()
    assert [text for text in said if "left out" in text] == [
        f"2 lines or examples of the train text cannot be read and are left out; the first: config.data.files: "
        f"{tmp_path}/a.jsonl:1: not JSON (Expecting value: line 1 column 1 (char 0))",
        f"3 lines or examples of the validation text cannot be read and are left out; the first: config.data.files: "
        f"{tmp_path}/a.jsonl:5: not JSON (Expecting value: line 1 column 1 (char 0))",
    ]


def test_one_line_left_out_is_one(tmp_path, capsys):
    open_corpus(corpus(tmp_path, ["broken", line("one"), line("two")], validation_fraction=0.5), progress=False)
    assert "1 line or example of the train text cannot be read and is left out; the first: " in capsys.readouterr().err


def test_counts_with_held_out_files_with_one_document_and_with_a_cut_text(tmp_path):
    (tmp_path / "v.jsonl").write_text(line("held out") + "\nbroken\nbroken")
    lines = ["broken", *[line(f"text {i}") for i in range(9)], "broken"]
    made = open_corpus(corpus(tmp_path, lines, validation_files=(str(tmp_path / "v.jsonl"),)), progress=False)
    assert (made.train.num_skipped, made.validation.num_skipped) == (2, 2)
    made = open_corpus(corpus(tmp_path, ["broken", line("a single document"), "broken"]), progress=False)
    assert (made.train.num_skipped, made.validation.num_skipped) == (2, 0)
    made = open_corpus(corpus(tmp_path, lines, max_train_bytes=10), progress=False)  # what is not read is not counted
    assert (made.train.num_skipped, made.validation.num_skipped) == (1, 1)


def test_what_is_left_out_changes_the_corpus_but_a_clean_one_is_the_same(tmp_path):
    lines = [line(f"text {i}") for i in range(9)]
    clean = [open_corpus(corpus(tmp_path, lines, on_error=how), progress=False) for how in ("stop", "skip")]
    assert clean[0].fingerprint == clean[1].fingerprint and clean[1].notes() == []
    with_broken = open_corpus(corpus(tmp_path, ["broken", *lines]), progress=False)
    assert with_broken.fingerprint == clean[0].fingerprint and with_broken.num_skipped == 1
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: not JSON"):
        open_corpus(corpus(tmp_path, ["broken", *lines], on_error="stop"), progress=False)


def test_files_that_are_none_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")

    def found(*patterns):
        return [path.name for path in text_files.find(tuple(str(tmp_path / each) for each in patterns), "data.files")]

    assert found("a*.txt", "link.txt") == ["a.txt", "link.txt"]
    for pattern in ("pipe.txt", "*.txt"):  # a pipe would be waited for
        assert error_of(lambda pattern=pattern: found(pattern)) == (
            f"config.data.files: {tmp_path}/pipe.txt is a pipe, a socket or a device; accepted: files"
        )
    for pattern in ("gone.jsonl", "*.jsonl"):
        assert error_of(lambda pattern=pattern: found(pattern)) == (
            f"config.data.files: {tmp_path}/gone.jsonl is a link to nothing; accepted: files"
        )
    told = error_of(lambda: found("folder.txt"))
    assert f"({tmp_path}/folder.txt is a folder: give {tmp_path}/folder.txt/*.txt, or " in told
    for inside, instead in (
        ("a.jsonl.gz", f"{tmp_path}/folder.txt/*.jsonl.gz, or "),
        ("tokens.json", f"--config.data.tokens={tmp_path}/folder.txt, token shards; "),
        ("dataset_info.json", f"--config.data.hf_dir={tmp_path}/folder.txt, a saved dataset; "),
    ):
        (tmp_path / "folder.txt" / inside).touch()
        assert f" is a folder: give {instead}" in error_of(lambda: found("folder.txt"))
    (tmp_path / "pipe.txt").unlink()
    assert found("*.txt") == ["a.txt", "link.txt"]


@pytest.mark.parametrize(
    "pattern", ["~nobody-of-that-name/a.txt", "a" * 5000 + ".txt", "a\0b.txt", "a\0*.txt", "", "["]
)
def test_patterns_that_can_be_no_path_match_no_file(pattern):
    assert "no file matches" in error_of(lambda: text_files.find((pattern,), "data.files"))


def test_examples_of_a_dataset_are_left_out_and_counted(monkeypatch, tmp_path):
    """Of a dataset that holds what TFDS's own writers would not write."""
    examples = [{"text": b"one"}, {"text": b"\xff"}, {"text": 3}, {"text": np.bytes_(b"two")}, {"text": b" "}]
    info = SimpleNamespace(file_format=SimpleNamespace(value="array_record"), features={"text": str})
    builder = SimpleNamespace(info=info, as_data_source=lambda split: examples)
    library = SimpleNamespace(builder_from_directory=lambda folder: builder)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", library)
    (tmp_path / "dataset_info.json").write_text("{}")
    data, faults = DataConfig(source="tfds", tfds_dir=str(tmp_path)), Faults("skip")
    assert list(sources.documents(data, "train", faults)) == ["one", "two"]
    line = f"config.data.tfds_train_split: {tmp_path}: train: example 1: byte 0 is not UTF-8 text"
    assert (faults.count, faults.first) == (2, line)
    with pytest.raises(ConfigError) as refused:
        list(sources.documents(data, "train", Faults("stop")))
    assert str(refused.value).startswith(f"{line}; data.on_error=skip ")


def test_sources_without_lines_have_no_faults():
    faults = Faults("skip")
    assert next(sources.documents(DataConfig(on_error="skip"), "train", faults)) and faults.count == 0
