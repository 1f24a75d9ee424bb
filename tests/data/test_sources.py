import subprocess
import sys
import sysconfig

import pytest

from jaxformer.config import DataConfig
from jaxformer.data import sources
from jaxformer.errors import ConfigError

STDLIB = DataConfig()


def both(data):
    return [list(sources.documents(data, split)) for split in sources.SPLITS]


def files(tmp_path, texts, **settings):
    """Configuration of a folder with these texts as files."""
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    return DataConfig(**{"source": "files", "files": (str(tmp_path / "*.txt"),)} | settings)


def error_of(data, split="train"):
    with pytest.raises(ConfigError) as error:
        list(sources.documents(data, split))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_stdlib_holds_out_one_file_in_twenty():
    train, held_out = map(sources.stdlib_files, sources.SPLITS)
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sources.stdlib_files() and train == sorted(train)
    assert 0.03 < len(held_out) / len(train) < 0.09
    assert "html/entities.py" in held_out and "argparse.py" in train  # the same on every machine
    for name in sources.stdlib_files():
        assert not {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"} & set(name.split("/"))
        assert "sysconfigdata" not in name


def test_stdlib_texts():
    train, held_out = both(STDLIB)
    assert 9e6 < sum(len(text.encode()) for text in train) < 13e6
    sizes = [len(text.encode()) for text in held_out]
    assert 5e5 < sum(sizes) < 7e5 and max(sizes) < 0.2 * sum(sizes)
    assert not set(train) & set(held_out)
    assert any("class ArgumentParser" in text for text in train)


def test_stdlib_without_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert error_of(STDLIB) == (
        f"config.data.source: stdlib: no Python sources under {tmp_path}; set data.files instead"
    )


def test_stdlib_skips_what_is_not_utf8(monkeypatch, tmp_path):
    (tmp_path / "a.py").write_bytes(b"\xff")
    (tmp_path / "b.py").write_text("b = 1")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert sorted([text for texts in both(STDLIB) for text in texts]) == ["b = 1"]


def test_one_document_is_cut_as_nanogpt_cuts_it(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(1003)) + "é"
    data = files(tmp_path, {"a.txt": text})
    (train,), (held_out,) = both(data)
    assert (train, held_out) == (text[: int(len(text) * 0.9)], text[int(len(text) * 0.9) :])


def test_the_last_documents_are_held_out(tmp_path):
    data = files(tmp_path, {"b.txt": "6|7|8", "a.txt": "1|2|3|4|5"}, separator="|", validation_fraction=0.25)
    assert both(data) == [["1", "2", "3", "4", "5", "6"], ["7", "8"]]


def test_at_least_one_document_is_in_each_split(tmp_path):
    for fraction in (0.01, 0.9):
        assert both(files(tmp_path, {"a.txt": "1|2"}, separator="|", validation_fraction=fraction)) == [["1"], ["2"]]


def test_validation_files_are_held_out_even_if_the_glob_for_training_finds_them(tmp_path):
    data = files(tmp_path, {"a.txt": "one", "b.txt": "two", "v.txt": "held out"})
    data = DataConfig(source="files", files=data.files, validation_files=(str(tmp_path / "v*"),))
    assert both(data) == [["one", "two"], ["held out"]]


def test_max_train_bytes_cuts_the_training_text_only(tmp_path):
    data = files(tmp_path, {"a.txt": "abc|dé|fgh|ijk|lmn"}, separator="|", max_train_bytes=5)
    assert both(data) == [["abc", "d"], ["lmn"]]
    data = files(tmp_path, {"a.txt": "abc|dé|fgh|ijk|lmn"}, separator="|", max_train_bytes=6)
    assert both(data) == [["abc", "dé"], ["lmn"]]
    capped = DataConfig(max_train_bytes=100_000)
    train, held_out = both(capped)
    assert 99_990 < sum(len(text.encode()) for text in train) <= 100_000
    assert held_out == both(STDLIB)[1]


def test_documents_are_read_one_at_a_time(tmp_path):
    data = files(tmp_path, {"a.txt": "good", "b.txt": "x"}, validation_files=(str(tmp_path / "b.txt"),))
    (tmp_path / "c.txt").write_bytes(b"\xff")
    reader = sources.documents(data, "train")
    assert next(reader) == "good"
    with pytest.raises(ConfigError, match="byte 0 is not UTF-8"):
        next(reader)


def test_bad_files(tmp_path):
    data = files(tmp_path, {"a.txt": "a"})
    assert error_of(data) == (
        "config.data.validation_fraction: 0.1 of one document of 1 characters leaves nothing in one of the splits"
    )
    assert error_of(files(tmp_path, {}, validation_fraction=0.0)) == (
        "config.data.validation_fraction: 0.0 holds nothing out; set it above 0, or set data.validation_files"
    )
    assert error_of(files(tmp_path, {}, validation_files=data.files)) == (
        "config.data.files: every file is also in data.validation_files; nothing is left to train on"
    )
    assert error_of(files(tmp_path, {"b.txt": ""})) == f"config.data.files: {tmp_path / 'b.txt'} holds no text"
    data = files(tmp_path, {"b.txt": "b", "v.jsonl": "{}"}, validation_files=(str(tmp_path / "v.jsonl"),))
    assert "v.jsonl:1" in error_of(data, "validation")


def test_inputs_are_the_files_that_are_read(tmp_path):
    data = files(tmp_path, {"a.txt": "1", "v.txt": "2"}, validation_files=(str(tmp_path / "v.txt"),))
    assert [(each.path.name, each.label) for each in sources.inputs(data)] == [
        ("a.txt", "train.txt.txt"),
        ("v.txt", "validation.txt.txt"),
    ]
    stdlib = sources.inputs(STDLIB)
    assert len(stdlib) == len(sources.stdlib_files()) and all(each.path.is_file() for each in stdlib)
    assert {each.label.partition("/")[0] for each in stdlib} == {"train", "validation"}


@pytest.mark.slow
def test_reading_text_needs_nothing_heavy():
    code = (
        "import sys; import jaxformer.data.corpus; "
        "heavy = {'tensorflow_datasets', 'tensorflow', 'flax', 'grain', 'rich'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
