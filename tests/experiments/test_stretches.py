"""Pairs of stretches: what is written, for a row of which sizes."""

import json

import pytest

from experiments import stretches
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError


@pytest.fixture
def said(tmp_path, monkeypatch):
    words = [f"{number * number % 97}" * (1 + number * number % 5) for number in range(12_000)]
    (tmp_path / "books0.txt").write_text("\f".join([" ".join(words), " ".join(words[::-1])]))
    (tmp_path / "held.txt").write_text(" ".join(words[::2]))
    (tmp_path / "odd.txt").write_bytes(b"\xff" * 10_000)
    monkeypatch.chdir(tmp_path)

    def run(*flags):
        given = ["--files=books*.txt", "--validation=held.txt", "--out=out", *flags]
        monkeypatch.setattr("sys.argv", ["stretches", *given])
        stretches.main()
        return [json.loads(line) for line in (tmp_path / "out" / "pairs.jsonl").read_text().splitlines()]

    return run


def test_a_row_has_room_for_every_pair_and_not_for_two(said, tmp_path, monkeypatch):
    monkeypatch.setattr(stretches, "ALONE", (191, 95))
    with pytest.raises(ConfigError, match=r"pairs.jsonl: none of .* pairs has a source of 191 to 191 tokens and a ta"):
        said("--pairs=60")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(stretches, "ALONE", (0, 0))
    every = said("--pairs=60")
    tokenizer = Tokenizer.load(tmp_path / "out" / "tokenizer.json")
    sizes = [[len(tokenizer.encode(line[side])) for side in ("source", "target")] for line in every]
    least = sorted(source for source, _ in sizes)[len(sizes) // 2], 1
    monkeypatch.setattr(stretches, "ALONE", least)
    left = [line for line, (source, _) in zip(every, sizes, strict=True) if source >= least[0]]
    assert said("--pairs=60") == left and 60 <= len(every) < 120 and len(left) < len(every)
    assert (tmp_path / "out" / "held_out.jsonl").exists()


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--separator=", "--separator: ''; accepted: the text between two documents"),
        ("--out=held.txt", "--out: held.txt is a file; accepted: a folder"),
        ("--out=held.txt/x", "--out: held.txt/x cannot be written (Not a directory)"),
        ("--files=odd.txt", "--files: "),
        ("--files=none*.txt", "--files: no file matches 'none*.txt'"),
    ],
)
def test_bad_flags_are_one_line(said, tmp_path, monkeypatch, flag, line):
    monkeypatch.setattr(stretches, "ALONE", (0, 0))
    with pytest.raises(ConfigError) as error:
        said(flag)
    assert str(error.value).startswith(line) and not (tmp_path / "out").exists()
