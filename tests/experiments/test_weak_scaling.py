"""Weak scaling: every case's mesh covers its slice, and plans become rows and a figure."""

import json

import pytest

from experiments import weak_scaling
from jaxformer.errors import ConfigError


def test_every_mesh_covers_its_slice_and_every_chip_gets_as_many_tokens():
    found = list(weak_scaling.cases())
    assert len(found) == 4 * 12 and len({case.name for case in found}) == len(found)
    for case in found:
        flags = dict(flag.removeprefix("--config.").split("=") for flag in weak_scaling.config_of(case)[1])
        data, fsdp, tensor = (int(flags[f"mesh.{axis}"]) for axis in ("data", "fsdp", "tensor"))
        assert data * fsdp * tensor == weak_scaling.devices(case), case
        rows = int(flags["train.global_batch_size"])
        assert rows == weak_scaling.MODELS[case.model][0] * weak_scaling.devices(case) and rows % (data * fsdp) == 0


def test_plans_become_a_table_and_a_figure(tmp_path):
    (tmp_path / "plans").mkdir()
    with pytest.raises(ConfigError, match="holds no plan yet"):
        weak_scaling.write(tmp_path)
    plan = {
        "mesh": {"data": 2, "fsdp": 8, "tensor": 4, "context": 1}, "devices": 64, "tokens": 64 * 4096, "seconds": 9,
        "memory": {"total": 3 * 2**30, "fits": True}, "collectives": [{"bytes": 2**30}, {"bytes": 2**29}],
        "minimum": {"fsdp": 2**30},
        "roofline": {"step": 0.25, "utilisation": 0.5, "utilisation_no_overlap": 0.4, "bound": "compute"},
    }  # fmt: skip
    (tmp_path / "plans" / "llama_7b-v5e-8x8.json").write_text(json.dumps(plan))
    (tmp_path / "plans" / "llama_70b-v5e-2x4.json").write_text(json.dumps({"skipped": "too large"}))
    files = weak_scaling.write(tmp_path)
    lines = files["table"].read_text().splitlines()
    assert lines[2] == (
        "| llama_7b | 64 v5e (8x8) | data 2 x fsdp 8 x tensor 4 | 3.0 | yes | 1.50 | 1.50 "
        "| 250 ms | 50% | 40% | compute |"
    )
    assert lines[3].startswith("| llama_70b | 8 v5e (2x4) |") and "no: too large" in lines[3]
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|") == lines[3].count("|")
    assert files["figure"].stat().st_size > 5000


def test_a_state_that_cannot_fit_is_not_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(weak_scaling.subprocess, "run", lambda *a, **k: pytest.fail("compiled"))
    file = tmp_path / "plan.json"
    assert weak_scaling.plan(weak_scaling.Case("llama_70b", "v5e", "2x4"), file) == "does not fit"
    assert "alone take 128 GiB" in json.loads(file.read_text())["skipped"]
