"""Trackers and traces that cannot be: one line, before anything compiles or is written."""

import sys

import pytest
from bad_input_cases import expected, place

from jaxformer.config import registry
from jaxformer.tracking.tracker import TrackerKind
from jaxformer.tracking.trackers import TRACKERS

__all__ = ["place"]


@pytest.mark.parametrize(("case", "field"), [
    ("unknown tracker", "tracking.trackers=wandbs"),
    ("tracker given twice", "tracking.trackers=wandb,wandb"),
    ("steps to trace that are one number", "train.profile_steps=5"),
    ("steps to trace the wrong way round", "train.profile_steps=105,100"),
    ("steps to trace after the end", "train.profile_steps=3,9"),
])  # fmt: skip
def test_fields(place, case, field):
    assert place.pretrain(f"--config.{field}") == (2, expected()[case])
    assert not (place.folder / "run").exists()


def test_a_missing_extra(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert place.pretrain("--config.tracking.trackers=wandb") == (2, expected()["extra of a tracker missing"])
    assert {path.name for path in (place.folder / "run").iterdir()} <= {".lock"}


def test_a_tracker_that_cannot_start(place, monkeypatch):
    """The run may be started again with another config."""

    def refuse(run):
        raise RuntimeError("No API key configured.")

    monkeypatch.setattr("jaxformer.training.loop.compile_ahead", None)  # nothing is compiled
    monkeypatch.setitem(registry.TRACKERS, "keyless", None)  # first, so that both are gone afterwards
    monkeypatch.setitem(TRACKERS, "keyless", TrackerKind(refuse))
    flags = ("--config.tracking.trackers=keyless", "--config.seed=1")
    assert place.pretrain(*flags) == (2, expected()["tracker that cannot start"])
    assert not (place.folder / "run" / "records.jsonl").exists()
