"""Settings of disentangled positions that cannot work, provoked as a user would meet them; the lines stand in
bad_input.md."""

import pytest
from bad_input_cases import expected, place

__all__ = ["place"]

BERT = ["--config.model.family=bert", "--config.data.objective=masked"]
POSITIONS = "--config.model.positions=disentangled"

# case -> flags of pretrain
CONFIGS = {
    "enhanced mask decoder without distances": [*BERT, "--config.model.bert.mask_decoder=enhanced"],
    "distances logarithmic before they begin": [
        POSITIONS, "--config.model.positions.span=64", "--config.model.positions.max_distance=33",
    ],
    "a context axis with positions of whole rows": [
        POSITIONS, "--config.mesh.data=1", "--config.mesh.context=8",
    ],
    "kernel that cannot add a bias of the content": [
        POSITIONS, "--config.model.context_length=128", "--config.execution.attention=splash",
        "--config.model.head_width=64",
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(place, case, monkeypatch):
    if "kernel" in case:
        monkeypatch.setattr("jaxformer.runs.pretrain.check_available", lambda execution: None)
    assert place.pretrain(*CONFIGS[case]) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()
