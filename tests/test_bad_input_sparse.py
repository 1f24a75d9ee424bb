"""Bad fields of sparse attention, provoked as a user would meet them; the lines stand in bad_input.md."""

import pytest
from bad_input_cases import expected, place

from jaxformer.benchmarks.long import MECHANISMS

__all__ = ["place"]


def of(kind, **fields):
    return [f"--config.model.attention={kind}", *(f"--config.model.attention.{k}={v}" for k, v in fields.items())]


# case -> flags of pretrain
CONFIGS = {
    "window of an odd size": of("longformer", attention_window=5),
    "blocks that do not divide a row": of("bigbird", block=48),
    "more last tokens than a block has": of("fixed", block=8, last=9),
    "sparse attention in a model with a source": [
        *of("strided"), "--config.model.family=encoder_decoder", "--config.data.objective=denoising",
        "--config.model.encoder.source_length=16",
    ],
    "sparse attention and a context axis": [*of("dilated"), "--config.mesh.data=1", "--config.mesh.context=8"],
    "kernel without patterns": [
        *of("longformer"), "--config.model.context_length=128", "--config.execution.attention=splash",
        "--config.model.attention.head_width=64",
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(place, case, monkeypatch):
    if "kernel" in case:
        monkeypatch.setattr("jaxformer.runs.pretrain.check_available", lambda execution: None)
    assert place.pretrain(*CONFIGS[case]) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()


def test_benchmark(place):
    line = expected()["mechanism that the benchmark has not"].replace("MECHANISMS", ", ".join(MECHANISMS))
    assert place.run("benchmark", "--suite=long", "--mechanisms=dens") == (2, line)
