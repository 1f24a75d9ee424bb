"""Bad text, provoked as a user would meet it; the lines stand in bad_input.md."""

import gzip
import os

import pytest
from bad_input_cases import Place, expected
from quick_runs import one_device

from jaxformer import records
from jaxformer.runs import manifest, pretrain

PAIRS = [
    "--config.model.family=bert", "--config.model.token_types=2", "--config.model.next_sentence=true",
    "--config.data.objective=masked", "--config.data.pairs=true", "--config.data.separator=|",
]  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch, capsys):
    return Place(tmp_path, monkeypatch, capsys)


@pytest.mark.slow
def test_pairs_of_another_version(place, monkeypatch):
    """A run whose batches this version would cut otherwise is not gone on with; one of its own is."""
    one_device(monkeypatch)
    place.text.write_text("All happy families are alike. |" * 100)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "BATCHES", 1)
        assert place.pretrain(*PAIRS) == (0, "")
        assert place.pretrain(*PAIRS) == (0, "")
    before = sorted((p, p.read_bytes()) for p in (place.folder / "run").rglob("*") if p.is_file())
    assert place.pretrain(*PAIRS) == (2, expected()["pairs of a version that told their label"])
    assert sorted((p, p.read_bytes()) for p in (place.folder / "run").rglob("*") if p.is_file()) == before


def test_pairs_of_documents_that_are_not_alike(place):
    place.text.write_text(("All happy families are alike. " * 10 + "|no|") * 2)
    assert place.pretrain(*PAIRS, "--config.data.validation_fraction=0.5") == (
        2,
        expected()["pairs without two documents of like length"],
    )
    assert not (place.folder / "run" / "manifest.json").exists()


GOOD = b'{"text": "All happy families are alike. "}\n' * 20
LINES = {
    "JSONL line with a lone surrogate": GOOD + rb'{"text": "All \ud800 families"}',
    "JSONL line nested too deeply": GOOD + b"[" * 100_000 + b"]" * 100_000,
    "JSONL line that is not UTF-8": GOOD + b'{"text": "caf\xe9"}',
    "JSONL line that is not JSON": GOOD + b"All happy families are alike.",
    "JSONL line without the field": GOOD + b'{"body": "All"}',
    "JSONL line whose text is a number": GOOD + b'{"text": 1}',
    "JSONL line that is a list": GOOD + b'["All"]',
}


@pytest.mark.parametrize("case", LINES)
def test_lines(place, case):
    (place.folder / "bad.jsonl").write_bytes(LINES[case])
    flag = f"--config.data.files={place.folder / 'bad.jsonl'}"
    assert place.pretrain(flag) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()


def test_nothing_but_broken_lines(place):
    (place.folder / "bad.jsonl").write_bytes(GOOD)
    flags = [f"--config.data.files={place.folder / 'bad.jsonl'}", "--config.data.text_field=txt"]
    case = "JSONL of which every line is left out"
    assert place.pretrain(*flags, "--config.data.on_error=skip") == (2, expected()[case])
    assert place.pretrain(*flags, "--config.data.on_error=go on") == (2, expected()["unknown on_error"])


def test_files_that_cannot_be_read(place):
    os.mkfifo(place.folder / "pipe.txt")
    (place.folder / "link.txt").symlink_to(place.folder / "nothing")
    (place.folder / "cut.jsonl.gz").write_bytes(gzip.compress(GOOD)[:-4])
    (place.folder / "texts.txt").mkdir()
    cases = {
        "pipe.txt": "a pipe for a text file",
        "link.txt": "a link to nothing for a text file",
        "texts.txt": "a folder for a text file",
        "cut.jsonl.gz": "JSONL cut off inside its compression",
    }
    for name, case in cases.items():
        for how in ("stop", "skip"):
            got = place.pretrain(f"--config.data.files={place.folder / name}", f"--config.data.on_error={how}")
            assert got == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()


class Heard:
    """capsys, and all that was said."""

    def __init__(self, capsys):
        self.capsys, self.out = capsys, ""

    def readouterr(self):
        captured = self.capsys.readouterr()
        self.out += captured.out
        return captured


@pytest.mark.slow
def test_lines_left_out_are_counted_in_the_records(tmp_path, monkeypatch, capsys):
    """Nothing of it where all lines are read, or where data.on_error is what it is by default."""
    one_device(monkeypatch)
    told = []

    def train(*_, final_fields, **__):
        told.append(final_fields)
        return pretrain.loop.Result("finished", 0, None, None, 0.0)

    for broken, how, expected_count in ((3, "skip", 3), (0, "skip", 0), (0, "stop", None)):
        folder = tmp_path / f"{broken}{how}"
        folder.mkdir()
        heard = Heard(capsys)
        place = Place(folder, monkeypatch, heard)
        (folder / "a.jsonl").write_bytes(b"broken\n" * broken + GOOD)
        flags = [f"--config.data.files={folder / 'a.jsonl'}", f"--config.data.on_error={how}"]
        with monkeypatch.context() as patch:
            if not broken:  # what the record would have besides
                patch.setattr(pretrain.loop, "train", train)
            assert place.pretrain(*flags) == (0, "")
        final = records.load(folder / "run" / "records.jsonl", "final")[0] if broken else told.pop()
        assert final.get("num_skipped") == expected_count
        notes = [line for line in heard.out.splitlines() if line.startswith("note: ") and "read as text" in line]
        assert notes == (
            ["note: 3 training and 0 held-out lines or examples cannot be read as text and are left out "
             "(data.on_error=skip)"]
            if broken else []
        )  # fmt: skip
