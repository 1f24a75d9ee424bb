"""Token shards and token files that cannot be used; the lines stand in bad_input.md."""

import json
import re
import shutil
import struct
import sys

import numpy as np
import pytest
from bad_input_cases import expected, place  # noqa: F401
from token_folders import here, tokens_of, write_files

from jaxformer.config import DataConfig
from jaxformer.data import tokenizers
from jaxformer.errors import ConfigError
from jaxformer.runs.tokenization import tokenize as tokenize_text


@pytest.fixture
def shards(tmp_path):
    """A folder of token shards."""
    tokens_of(write_files(tmp_path / "text", tokenizer="bytes"), tmp_path / "tokens", 3)
    shutil.rmtree(tmp_path / "tokens" / "work")
    return tmp_path / "tokens"


def pretrain(place, *flags):  # noqa: F811
    """Exit code and line; nothing was written but what is checked before."""
    found = place.pretrain("--config.data.source=none", *flags)
    assert not (place.folder / "run").exists() or not list((place.folder / "run").glob("*.json*"))
    return found


def test_no_tokens(place):  # noqa: F811
    code, line = pretrain(place, "--config.data.source=tokens")
    assert (code, line) == (2, expected()["a source of tokens without any"])
    code, line = pretrain(place, f"--config.data.tokens={place.folder / 'none'}")
    assert (code, line) == (2, expected()["a folder without token shards"])


def spoil(shards, case):
    """Makes a folder what a row speaks of."""
    if case == "token shards that were begun":
        (shards / "tokens.json").unlink()
    elif case == "a damaged manifest of tokens":
        text = (shards / "tokens.json").read_text()
        (shards / "tokens.json").write_text(text.replace('"num_tokens"', '"num_token"', 1))
    elif case == "a token shard that is missing":
        (shards / "train-00001.tokens").unlink()
    elif case == "a token shard of another size":
        with open(shards / "train-00001.starts", "ab") as file:
            file.write(b"1")
    elif case == "another tokenizer beside the tokens":
        tokenizers.train("chars", ["abc"], None).save(shards)


@pytest.mark.parametrize(
    "case",
    [
        "token shards that were begun",
        "a damaged manifest of tokens",
        "a token shard that is missing",
        "a token shard of another size",
        "another tokenizer beside the tokens",
    ],
)
def test_shards_that_are_not_what_was_written(place, shards, case):  # noqa: F811
    spoil(shards, case)
    assert pretrain(place, f"--config.data.tokens={shards}") == (2, expected()[case])


def test_a_tokenizer_that_did_not_make_the_tokens(place, shards):  # noqa: F811
    other = tokenizers.train("chars", ["abc"], None)
    other.save(place.folder)
    given = f"--config.data.tokenizer_file={place.folder / 'tokenizer.json'}"
    code, line = pretrain(place, f"--config.data.tokens={shards}", given)
    made = tokenizers.Tokenizer.load(shards).fingerprint
    line = line.replace(made, "HASH").replace(other.fingerprint, "HASH")
    assert (code, line) == (2, expected()["token shards of another tokenizer"])


def test_two_folders_of_shards(place, shards):  # noqa: F811
    shutil.copytree(shards, place.folder / "more")
    code, line = pretrain(place, f"--config.data.tokens={shards},{place.folder / 'more'}")
    assert (code, line) == (2, expected()["two folders of token shards"])


def test_shards_that_a_disk_does_not_give(place, shards):  # noqa: F811
    code, line = pretrain(place, f"--config.data.tokens={shards / 'train-00000.tokens'}")
    assert (code, line) == (2, expected()["a token shard for a folder of them"])


def test_a_folder_for_tokens_in_use(place, shards):  # noqa: F811
    data = write_files(place.folder / "text", tokenizer="bytes")

    def meanwhile(function, items):
        with pytest.raises(ConfigError) as error:
            tokenize_text(data, place.folder / "out", 2, here)
        line = re.sub(r"process \d+ on \S+ since .*", "process PROCESS on HOST since SINCE", f"error: {error.value}")
        assert line.replace(str(place.folder), "DIR") == expected()["a folder for tokens that is in use"]
        here(function, items)

    tokenize_text(data, place.folder / "out", 2, meanwhile)


def test_tokens_cut_by_bytes(place, shards):  # noqa: F811
    code, line = pretrain(place, f"--config.data.tokens={shards}", "--config.data.max_train_bytes=100")
    assert (code, line) == (2, expected()["a part of token shards"])
    code, line = pretrain(place, f"--config.data.tokens={shards}", f"--config.data.validation_tokens={place.text}")
    assert (code, line) == (2, expected()["held-out tokens beside token shards"])


def index(lengths, pointers, documents):
    """The bytes of Megatron's index of uint16 tokens."""
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(documents))
    rest = np.array(lengths, "<i4").tobytes() + np.array([*pointers, *documents], "<i8").tobytes()
    return np.frombuffer(head + rest, np.uint8)


BINS = {
    "token files without a tokenizer": {"a.bin": np.zeros(9, np.uint16)},
    "a token file of odd length": {"a.bin": np.zeros(9, np.uint8)},
    "ids beyond the vocabulary": {"a.bin": np.array([0, 9, 0, 50_000, 0, 9], np.uint16)},
    "a token file shorter than its header says": {"a.bin": np.array([20240520, 1, 99, *[0] * 253, 7], np.int32)},
    "an index that is not Megatron's": {"a.bin": np.zeros(9, np.uint16), "a.idx": np.zeros(99, np.uint8)},
    "an index of another type": {
        "a.bin": np.zeros(9, np.uint16),
        "a.idx": np.frombuffer(b"MMIDIDX\0\0\1\0\0\0\0\0\0\0\6" + bytes(16), np.uint8),
    },
    "an index that is cut off": {
        "a.bin": np.zeros(9, np.uint16),
        "a.idx": np.frombuffer(b"MMIDIDX\0\0\1\0\0\0\0\0\0\0\x08\2" + bytes(15), np.uint8),
    },
    "an index of other tokens": {
        "a.bin": np.zeros(9, np.uint16),
        "a.idx": np.frombuffer(b"MMIDIDX\0\0\1\0\0\0\0\0\0\0\x08" + bytes(16), np.uint8),
    },
    "a token file of another version": {"a.bin": np.array([20240520, 9, 2, *[0] * 253, 7], np.int32)},
    "a token file of examples": {"a.bin": np.array([20240522, 1, 2, *[0] * 253, 7], np.int32)},
    "token files that hold none": {"a.bin": np.array([20240520, 1, 0, *[0] * 253], np.int32)},
    "an index with a length below zero": {
        "a.bin": np.zeros(2, np.uint16),
        "a.idx": index([-1, 3], [0, -2], [0, 2]),
    },
    "an index whose documents are out of order": {
        "a.bin": np.zeros(3, np.uint16),
        "a.idx": index([1, 2], [0, 2], [0, 2, 1]),
    },
    "some token files with an index": {
        "a.bin": np.array([], np.uint16),
        "a.idx": np.frombuffer(b"MMIDIDX\0\0\1\0\0\0\0\0\0\0\x08" + bytes(16), np.uint8),
        "b.bin": np.array([0, 7] * 9, np.uint16),
    },
    "token files that are all held out": {"val.bin": np.array([0, 7] * 9, np.uint16)},
    "no document to hold out": {"a.bin": np.array([0, 7, *[8] * 90], np.uint16)},
    "token files without held-out text": {"a.bin": np.array([0, 7, *[8] * 90], np.uint16)},
}


@pytest.mark.parametrize("case", [*BINS])
def test_token_files_that_cannot_be_read(place, case):  # noqa: F811
    folder = place.folder / "bins"
    folder.mkdir()
    for name, content in BINS[case].items():
        content.tofile(folder / name)
    tokenizers.train("bytes", [], None).save(place.folder)
    given = [f"--config.data.tokenizer_file={place.folder / 'tokenizer.json'}"] if "without a tok" not in case else []
    share = ["--config.data.validation_fraction=0"] if "without held" in case else []
    assert pretrain(place, f"--config.data.tokens={folder}", *given, *share) == (2, expected()[case])


def test_tokenize_without_beam(place, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    code, line = place.run("tokenize", f"--config.data.files={place.text}", f"--out={place.folder / 'out'}")
    assert (code, line) == (2, expected()["tokenize without the extra beam"])
    assert not (place.folder / "out").exists()


@pytest.fixture
def tokenize(place, monkeypatch):  # noqa: F811
    """Runs the program in this process, without Beam."""
    from jaxformer.runs import tokenization

    monkeypatch.setattr(tokenization, "need_beam", lambda: None)
    monkeypatch.setattr(tokenization, "beam", lambda out, options: here)
    flags = [f"--config.data.files={place.text}", "--config.data.tokenizer=bytes", f"--out={place.folder / 'out'}"]
    return lambda *more: place.run("tokenize", *flags, *more)


def test_a_folder_that_tokenize_does_not_write_into(place, tokenize):  # noqa: F811
    out = place.folder / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("a")
    assert tokenize() == (2, expected()["a folder for tokens that holds something else"])
    assert [path.name for path in out.iterdir() if path.is_file()] == ["thesis.tex"]
    (out / "thesis.tex").unlink()
    assert tokenize("--shards=2")[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert tokenize("--shards=3") == (2, expected()["a folder for tokens of other settings"])
    assert before == {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    code, line = place.run("tokenize", f"--config.data.tokens={out}", f"--out={place.folder / 'more'}")
    assert (code, line) == (2, expected()["tokens that are to be tokenised"])
    mixed = [f"--config.data.mixture.a.files={place.text}", "--config.data.mixture.b.source=stdlib"]
    code, line = place.run("tokenize", *mixed, f"--out={place.folder / 'more'}")
    assert (code, line) == (2, expected()["mixture that is to be tokenised"])


def test_a_folder_for_tokens_that_is_a_file(place):  # noqa: F811
    from jaxformer.runs import tokenization

    with pytest.raises(ConfigError) as error:
        data = DataConfig(files=(str(place.text),), tokenizer="bytes")
        tokenization.tokenize(data, place.text, 2, lambda function, items: None)
    line = f"error: {error.value}".replace(str(place.folder), "DIR")
    assert (2, line) == (2, expected()["a folder for tokens that is a file"])


def test_text_that_changes_while_it_is_tokenised(place, tokenize):  # noqa: F811
    assert tokenize("--shards=2")[0] == 0
    (place.folder / "out" / "tokens.json").unlink()
    place.text.write_text("Happy families. " * 100)
    assert tokenize("--shards=2") == (2, expected()["text that changed before it was tokenised"])
    assert json.loads((place.folder / "out" / "train-00000.json").read_text())["num_documents"] == 1
