"""Bad settings of attention in linear time; the lines stand in bad_input.md."""

import pytest
from bad_input_cases import expected, place

__all__ = ["place"]

BERT = ["--config.model.family=bert", "--config.data.objective=masked", "--config.model.attention=linformer"]

# case -> flags
FLAGS = {
    "dropout of weights that are not there": [
        "--config.model.attention=performer", "--config.model.attention.dropout=0.1",
    ],
    "soft cap of scores that are not there": [
        "--config.model.attention=linear", "--config.model.attention.soft_cap=30",
    ],
    "bias of scores that are not there": ["--config.model.attention=performer", "--config.model.positions=alibi"],
    "odd number of hyperbolic features": [
        "--config.model.attention=performer", "--config.model.attention.feature_kind=hyperbolic",
        "--config.model.attention.features=7",
    ],
    "linformer that is causal": ["--config.model.attention=linformer"],
    "linformer of packed documents": BERT,
    "linear attention on a context axis": [
        "--config.model.attention=linear", "--config.mesh.data=4", "--config.mesh.context=2",
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", FLAGS)
def test_settings(place, case):
    assert place.pretrain(*FLAGS[case]) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()
