"""Objectives compared on one task: what is read, what is trained, and what the page says."""

import argparse
import json
from pathlib import Path

import pytest

from experiments import objectives, objectives_page, stretches
from experiments.transfer_runs import read
from jaxformer.config import from_mapping, load
from jaxformer.errors import ConfigError
from jaxformer.models.flops import training_flops

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "objectives"


def options(folder, **changes):
    given = {"files": str(folder / "books*.txt"), "validation": str(folder / "held.txt"), "separator": "\f",
             "workdir": folder / "runs", "flop": 1e12, "seeds": 1}  # fmt: skip
    return argparse.Namespace(**given | changes)


@pytest.fixture
def texts(tmp_path):
    words = [f"word{number % 97}" for number in range(12_000)]
    (tmp_path / "books0.txt").write_text("\f".join([" ".join(words), " ".join(words[::-1])]))
    (tmp_path / "held.txt").write_text(" ".join(words[::2]))
    return tmp_path


def test_pairs_follow_each_other_and_fit_a_row(texts):
    book = (texts / "held.txt").read_text()
    pairs = list(stretches.cut(book))
    assert "".join(source + target for source, target in pairs) == book[: sum(map(len, sum(pairs, ())))]
    paths = objectives.prepare(options(texts))
    lines = [json.loads(line) for line in paths["pairs"].read_text().splitlines()]
    assert len(lines) > 50 and all(line.keys() == {"source", "target"} for line in lines)
    assert not any("\f" in line["source"] + line["target"] for line in lines)  # no pair of two books
    before = paths["pairs"].stat().st_mtime_ns
    objectives.prepare(options(texts, files=None, validation=None))
    assert paths["pairs"].stat().st_mtime_ns == before


def test_without_files_nothing_is_trained(tmp_path):
    with pytest.raises(ConfigError, match="--files: none; accepted: a glob of text files, or --stage=report"):
        objectives.prepare(options(tmp_path, files=None))
    assert not any(tmp_path.iterdir())


def test_texts_without_pairs_leave_nothing_behind(texts):
    (texts / "word.txt").write_text("word")
    with pytest.raises(ConfigError, match=r"--validation: '.*word.txt' holds 0 pairs; accepted: texts of at least 50"):
        objectives.prepare(options(texts, validation=str(texts / "word.txt")))
    assert not (texts / "runs").exists()


@pytest.mark.parametrize(
    "flag, line",
    [
        ("--flop=nan", "--flop: nan; accepted: a finite number, at least 1e+12"),
        ("--flop=0", "--flop: 0; accepted: a finite number, at least 1e+12"),
        ("--separator=", "--separator: ''; accepted: the text between two documents"),
        ("--workdir=held.txt", "--workdir: held.txt is a file; accepted: a folder"),
    ],
)
def test_bad_flags_are_one_line(flag, line, texts, monkeypatch):
    monkeypatch.chdir(texts)
    monkeypatch.setattr("sys.argv", ["objectives", "--out=out", "--files=books*.txt", "--validation=held.txt", flag])
    with pytest.raises(ConfigError) as error:
        objectives.main()
    assert str(error.value) == line and not (texts / "out").exists()


@pytest.mark.parametrize("arm", objectives_page.ARMS)
def test_every_arm_has_the_same_compute_and_the_same_task(arm, tmp_path):
    given = options(tmp_path)
    paths = {name: tmp_path / name for name in ("tokenizer", "pairs", "held_out", "texts")}
    for part, flop in ((objectives.pretraining, 1e12), (objectives.tuning, 0.2e12)):
        planned = part(arm, 0, given, paths)
        config = from_mapping(load(planned.config), planned.changes)
        tokens = config.model.context_length * config.train.global_batch_size * config.train.steps
        assert tokens * training_flops(config.model, config.data) == pytest.approx(flop, rel=0.1)
    assert config.data.files == (str(paths["pairs"]),)
    assert config.init_from == str(tmp_path / "runs" / f"{arm},seed=0")


def test_the_page_is_what_the_records_say():
    found = read(RESULT)
    assert (RESULT / "README.md").read_text(encoding="utf-8") == objectives_page.page(found)
    ends = [each for each in found if each["part"] == "tuning"]
    assert {each["arm"] for each in ends} == set(objectives_page.ARMS)
    for end in ends:
        assert end["flops"] == pytest.approx(objectives.FLOP * objectives.TUNING, rel=0.02)
