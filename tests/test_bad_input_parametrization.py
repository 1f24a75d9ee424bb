"""Parametrisations that do not fit, and a noise scale of nothing; the lines stand in bad_input.md."""

import pytest
from bad_input_cases import expected, place

__all__ = ["place"]

MUP = "--config.model.parametrization=mup"
BASE = "--config.model.parametrization.base_"

# case -> flags
FLAGS = {
    "base wider than the model": [MUP, f"{BASE}width=128"],
    "base deeper than the model": [MUP, f"{BASE}width=8", f"{BASE}layers=9"],
    "base with wider heads than the model": [MUP, f"{BASE}width=8", f"{BASE}head_width=64"],
    "muP with Adafactor": [MUP, f"{BASE}width=8", "--config.optimizer.name=adafactor"],
    "muP of a mixer without rules": [MUP, "--config.model.attention=lsh"],
    "muP of experts": [MUP, f"{BASE}width=8", "--config.model.feed_forward=experts"],
    "noise scale with one micro-batch": ["--config.train.noise_scale=true"],
}


@pytest.mark.parametrize("case", FLAGS)
def test_settings(place, case):
    assert place.pretrain(*FLAGS[case]) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()
