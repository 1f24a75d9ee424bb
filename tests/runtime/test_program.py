"""Cores as devices: all that the process may use, unless the user chose."""

import logging
import os
import subprocess
import sys

import pytest

from jaxformer.runs.command_line import parser
from jaxformer.runtime import program

SCRIPT = "import jax; from jaxformer.runtime.program import a_device_for_each_core as f; f(); print(len(jax.devices()))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "devices"),
    [
        ({}, program.usable_cores()),
        ({"JAX_NUM_CPU_DEVICES": "3"}, 3),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=5"}, 5),
    ],
    ids=["nothing", "jax", "xla"],
)
def test_a_device_for_each_core(chosen, devices):
    kept = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    run = [sys.executable, "-c", SCRIPT]
    told = subprocess.run(run, env=kept | {"JAX_PLATFORMS": "cpu"} | chosen, capture_output=True, text=True, check=True)
    assert int(told.stdout) == devices


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 16), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 16)]
)
def test_a_container_s_share_of_the_cores(monkeypatch, tmp_path, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    file = tmp_path / "cpu.max"
    monkeypatch.setattr(program, "CPU_QUOTA", file)
    assert program.usable_cores() == 16
    file.write_text(quota + "\n")
    assert program.usable_cores() == cores


def test_with_log_programs_say_each_choice_once(capsys, monkeypatch):
    logger = logging.getLogger("jaxformer")
    monkeypatch.setattr(logger, "handlers", [])
    level = logger.level
    try:
        for argv, times in ([], 0), (["--log"], 1):
            parser("", "pretrain").parse_args(argv)
            for _ in range(2):
                logging.getLogger("jaxformer.functional.attention").info("attention: auto is %s", "xla")
            assert capsys.readouterr().err == "attention: auto is xla\n" * times
    finally:
        logger.setLevel(level)


@pytest.mark.parametrize(
    "installed, chip, chosen, platforms",
    [
        ({"libtpu"}, False, None, "cpu"),
        ({"libtpu"}, False, "tpu,cpu", "tpu,cpu"),
        ({"libtpu"}, True, None, None),
        ({"libtpu", "jax_plugins"}, False, None, None),
        (set(), False, None, None),
    ],
)
def test_libtpu_without_a_tpu_is_left_alone(monkeypatch, installed, chip, chosen, platforms):
    told = {"jax_platforms": chosen}
    monkeypatch.setattr(program, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(program.cluster, "has_tpu", lambda: chip)
    config = type("Config", (), {"jax_platforms": chosen, "update": staticmethod(told.__setitem__)})
    monkeypatch.setattr(program.jax, "config", config)
    program.leave_out_tpus()
    assert told == {"jax_platforms": platforms}
