"""Bad text, provoked as a user would meet it; the lines stand in bad_input.md."""

import pytest

from jaxformer import manifest
from tests.test_bad_input import Place, expected

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
