"""What certainly does not fit is refused: counted per device under the mesh, against the container or the device."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest
from flat_config import changed, model_config

from jaxformer.config import CheckpointConfig, Config, Execution, MeshConfig, OptimizerConfig, TrainConfig
from jaxformer.errors import ConfigError
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs import memory_check
from jaxformer.specs import count_params

MODEL = model_config(num_layers=1, width=64, num_heads=2, context_length=16, vocab_size=1024, use_bias=False)
CONFIG = Config(
    model=MODEL,
    train=TrainConfig(steps=10, global_batch_size=8),
    execution=Execution(steps_per_dispatch=1),
    optimizer=OptimizerConfig(warmup_steps=0),
    checkpoint=CheckpointConfig(),
)
SPECS = make_model(MODEL, CONFIG.loss).specs
NUMBERS = count_params(SPECS)


def accepted(config, mesh, limit, monkeypatch):
    monkeypatch.setattr(memory_check, "machine_bytes", lambda: limit)
    try:
        memory_check.check_training(config, SPECS, mesh)
    except ConfigError:
        return False
    return True


def least(config, mesh, monkeypatch):
    """The least memory that is accepted, by bisection."""
    low, high = 0, 2**40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if accepted(config, mesh, middle, monkeypatch) else (middle, high)
    return high


def test_one_device_counts_parameters_gradients_moments_and_batches(monkeypatch):
    mesh = make_mesh(MeshConfig(1), jax.devices()[:1])
    batch = 20 * 8 * 16
    assert least(CONFIG, mesh, monkeypatch) == 16 * NUMBERS + batch
    for name, ema, numbers in ("lion", None, 3), ("adafactor", None, 2), ("adamw", 0.99, 5):
        optimizer = dataclasses.replace(CONFIG.optimizer, name=name, ema_decay=ema)
        config = dataclasses.replace(CONFIG, optimizer=optimizer)
        assert least(config, mesh, monkeypatch) == 4 * numbers * NUMBERS + batch
    config = dataclasses.replace(CONFIG, execution=Execution(steps_per_dispatch=1000))
    assert least(config, mesh, monkeypatch) == 16 * NUMBERS + 10 * batch  # no more than the run has


def test_cpu_devices_share_the_machine_and_split_what_the_mesh_splits(monkeypatch):
    batch = 20 * 8 * 16
    assert least(CONFIG, make_mesh(MeshConfig(8)), monkeypatch) == 8 * 16 * NUMBERS + batch
    split = least(CONFIG, make_mesh(MeshConfig(1, 8)), monkeypatch)
    assert 16 * NUMBERS + batch <= split < 1.05 * 16 * NUMBERS + batch  # norms stay whole


def test_the_smallest_limit_counts(monkeypatch, tmp_path):
    whole = memory_check.machine_bytes()
    for text, wanted in ("max\n", whole), ("1048576\n", 2**20), ("9223372036854771712", whole), ("", whole):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(memory_check, "LIMITS", (tmp_path / "memory.max", tmp_path / "none"))
        physical = memory_check.machine_bytes()
        assert physical == wanted or (wanted == whole and physical >= whole)


def test_accelerators_say_their_own_limit():
    def device(stats):
        return SimpleNamespace(process_index=0, platform="gpu", memory_stats=lambda: stats)

    assert memory_check.limit_of([device({"bytes_limit": 100}), device({"bytes_limit": 100})]) == (
        100,
        1,
        "each device",
    )
    assert memory_check.limit_of([device(None)])[0] == float("inf")  # nobody knows


def test_decoding_counts_the_cache(monkeypatch):
    monkeypatch.setattr(memory_check, "machine_bytes", lambda: 10**6)
    most = 10**6 // (2 * 4 * 64 + 4)
    memory_check.check_decoding(MODEL, 1, most, "--flags")
    with pytest.raises(ConfigError, match=r"^--flags: 1 x \d+ tokens need 977 KiB for their decoding cache"):
        memory_check.check_decoding(MODEL, 1, most + 1, "--flags")
    memory_check.check_decoding(changed(MODEL, window=8), 1, 100_000, "--flags")  # a ring of eight
