"""What a new user gets wrong in the first week."""

import pytest
from bad_input_cases import Nothing, Place, expected, place
from quick_runs import quickly
from token_folders import tokens_of, write_files

__all__ = ["place"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of a tokenizer that knows few characters."""
    with quickly() as patch:
        made = Place(tmp_path_factory.mktemp("run"), patch, Nothing())
        assert made.pretrain("--config.data.tokenizer=chars", "--config.train.steps=2") == (0, "")
    return made.folder / "run"


@pytest.mark.slow  # a run is trained
@pytest.mark.parametrize(
    "flags, case",
    [
        (["--files=DIR/none.txt"], "evaluate on files that are not there"),
        (["--files=DIR/a.jsonl"], "evaluate on a line that is no text"),
        (["--files=DIR/symbols.txt"], "evaluate on text of other characters"),
        (["--files=", "--text-field=a"], "evaluate on an empty list of files"),
        (["--files=DIR/saved"], "evaluate on a saved dataset of several splits"),
        (["--files=DIR/a.jsonl,DIR/shards"], "evaluate on token shards and more"),
        (["--files=DIR/shards", "--separator=."], "evaluate on token shards, with a separator"),
        (["--files=DIR/shards"], "evaluate on token shards of another tokenizer"),
    ],
)
def test_other_text(place, run, flags, case):
    (place.folder / "a.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    (place.folder / "symbols.txt").write_text("§±" * 20)
    for split in ("train", "test"):
        (place.folder / "saved" / split).mkdir(parents=True)
        (place.folder / "saved" / split / "state.json").write_text("{}")
    (place.folder / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    if "DIR/shards" in flags[0]:
        tokens_of(write_files(place.folder / "text", tokenizer="bytes"), place.folder / "shards", 1)
    flags = [flag.replace("DIR", str(place.folder)) for flag in flags]
    assert place.run("evaluate", str(run), *flags) == (2, expected()[case])


@pytest.mark.parametrize(
    "flags, case",
    [
        (["runs/a", "--separator=x"], "how other text is read, without any"),
        (["runs/a", "--workdir=runs/b"], "a run named twice"),
        ([], "flag that is needed"),
    ],
)
def test_which_run(place, flags, case):
    assert place.run("evaluate", *flags) == (2, expected()[case])


def test_a_source_of_a_mixture(place):
    line = expected()["a source of a mixture that is misspelt"]
    assert place.run("pretrain", "gpt_mixture", "--config.data.mixture.chian.weight=2") == (2, line)


def test_a_report_of_which_sweep(place):
    assert place.run("sweep", "--report-only") == (2, expected()["report without a folder"])
