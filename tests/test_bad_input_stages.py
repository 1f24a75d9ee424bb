"""Stages of a pipeline that cannot be; the lines stand in bad_input.md."""

import pytest
from bad_input_cases import expected, place

from jaxformer.config import Config

__all__ = ["place"]

STAGES = [
    "--config.mesh.data=4", "--config.mesh.stage=2", "--config.model.num_layers=2",
    "--config.execution.gradient_accumulation_steps=2",
]  # fmt: skip
# case -> flags of pretrain
CONFIGS = {
    "layers that stages do not divide": [*STAGES, "--config.model.num_layers=3"],
    "layers of a pattern that stages do not divide": [
        *STAGES, "--config.model.attention.window=4", "--config.model.attention.global_every=2",
    ],
    "fewer micro-batches than stages": [*STAGES, "--config.execution.gradient_accumulation_steps=1"],
    "rounds without stages": ["--config.execution.pipeline_repeats=2"],
    "parts of stages that do not divide": [*STAGES, "--config.execution.pipeline_repeats=2"],
    "parts of stages without remat": [
        *STAGES, "--config.execution.pipeline_repeats=2", "--config.model.num_layers=4",
    ],
    "stages of reversible layers": [*STAGES, "--config.model.block=reversible"],
    "stages of another family": [
        *STAGES, "--config.model.family=encoder_decoder", "--config.data.objective=denoising",
        "--config.model.encoder.source_length=16",
    ],
    "stages and a context axis": [*STAGES, "--config.mesh.context=2", "--config.mesh.data=2"],
    "stages and the head of a task": [*STAGES, "--config.data.objective=sequence_classification"],
    "stages and a mask decoder": [
        *STAGES, "--config.model.family=bert", "--config.data.objective=masked",
        "--config.model.positions=disentangled", "--config.model.bert.mask_decoder=enhanced",
    ],
    "stages and a teacher": [*STAGES, "--config.distill.teacher=there"],
    "stages and adapters": [*STAGES, "--config.tune.lora_rank=2", "--config.init_from=there"],
    "stages and the noise scale": [*STAGES, "--config.train.noise_scale=true"],
    "stages and layers that stay": [*STAGES, "--config.tune.trained_layers=1"],
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(place, case):
    assert place.pretrain(*CONFIGS[case]) == (2, expected()[case])
    assert not (place.folder / "run" / "manifest.json").exists()


def test_decoding(place):
    place.monkeypatch.setattr("jaxformer.runs.manifest.read_config", lambda workdir: Config())
    line = expected()["decoding on stages"]
    assert place.run("generate", "--workdir=run", "--prompt=a", "--mesh=stage=2,data=4") == (2, line)
