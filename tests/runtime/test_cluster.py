"""Who the processes are, from environments as the schedulers set them; and what they agree on."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxformer.config import DistributedConfig
from jaxformer.errors import ConfigError
from jaxformer.runtime import cluster, coordination
from jaxformer.runtime.cluster import Membership, detect

ROOT = Path(__file__).parents[2]
AUTO = DistributedConfig()
STEP = {  # what srun sets in a task of `srun -N2 --ntasks-per-node=4`
    "SLURM_JOB_ID": "8195", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8",
    "SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip
SLICE = {"TPU_WORKER_HOSTNAMES": "j-0-0.j,j-0-1.j", "TPU_WORKER_ID": "1", "JOB_COMPLETION_INDEX": "1"}
OWN = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:99", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}

FOUND = {
    "nothing": ({}, None),
    "our own variables": (OWN, Membership("environment", "10.0.0.1:99", 4, 3)),
    "our own variables come before SLURM's": ({**STEP, **OWN}, Membership("environment", "10.0.0.1:99", 4, 3)),
    "one of one": ({**OWN, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
    "an address alone says nothing": ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:99"}, None),
    "an Indexed Job": (
        {"JAX_COORDINATOR_ADDRESS": "j-0.j:99", "JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "1"},
        Membership("environment", "j-0.j:99", 2, 1),
    ),
    "SLURM that says nothing of GPUs": (STEP, Membership("SLURM", "gpu03:61443", 8, 6, (2,))),  # as JAX supposes
    "SLURM, a process per GPU": (
        {**STEP, "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        Membership("SLURM", "gpu03:61443", 8, 6, (2,)),
    ),
    "SLURM, two GPUs a process": (
        {**STEP, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
        Membership("SLURM", "gpu03:61443", 8, 6, (4, 5)),
    ),
    "SLURM gave each task its GPU": ({**STEP, "CUDA_VISIBLE_DEVICES": "2"}, Membership("SLURM", "gpu03:61443", 8, 6)),
    "SLURM, a process per node": (
        {**STEP, "SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_LOCALID": "0", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        Membership("SLURM", "gpu03:61443", 8, 6),
    ),
    "SLURM with an address of the user's": (
        {**STEP, "JAX_COORDINATOR_ADDRESS": "ib0:7"},
        Membership("SLURM", "ib0:7", 8, 6, (2,)),
    ),
    "the batch script of SLURM itself": (
        {name: value for name, value in STEP.items() if not name.startswith("SLURM_STEP")},
        None,
    ),
    "an interactive shell in a job of eight": ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, None),
    "a TPU slice on GKE": (SLICE, Membership("TPU slice", "j-0-0.j:8476", 2, 1)),
    "two TPU slices on GKE": (
        {**SLICE, "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "j-0.j:80"},
        Membership("TPU slice", "j-0.j:8476", 4, 3),
    ),
    "one TPU host on GKE": (
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0", "JOB_COMPLETION_INDEX": "0"},
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_detection(case):
    environment, expected = FOUND[case]
    assert detect(environment, AUTO) == expected


def test_off_is_alone_whatever_the_environment():
    assert detect(STEP, DistributedConfig(mode="off")) is None


def test_the_config_comes_before_the_environment():
    cfg = DistributedConfig(coordinator_address="h:1", num_processes=3, process_id=2)
    assert detect(STEP, cfg) == Membership("config", "h:1", 3, 2)


def test_a_tpu_vm_is_asked_by_jax(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "has_tpu", lambda: True)
    assert detect({}, AUTO) == Membership("TPU VM")
    assert detect({"TPU_SKIP_MDS_QUERY": "1"}, AUTO) is None
    monkeypatch.undo()
    monkeypatch.setattr(cluster, "find_spec", lambda name: name)
    assert not cluster.has_tpu(tmp_path)
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "0").touch()
    assert cluster.has_tpu(tmp_path)
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    assert not cluster.has_tpu(tmp_path)


WRONG = {
    "JAX_COORDINATOR_ADDRESS is not set": {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
    "JAX_NUM_PROCESSES is not set": {"JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "h:1"},
    "JAX_PROCESS_ID is not set": {"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "h:1"},
    "JAX_PROCESS_ID is 'x'": {**OWN, "JAX_PROCESS_ID": "x"},
    "says process 4 of 4; accepted: 0 to 3": {**OWN, "JAX_PROCESS_ID": "4"},
    "SLURM runs 4 processes on a node that shows 3 GPUs": {**STEP, "CUDA_VISIBLE_DEVICES": "0,1,2"},
    "an Indexed Job": {"JOB_COMPLETION_INDEX": "0"},
    "SLURM_JOB_ID is None": {name: value for name, value in STEP.items() if name != "SLURM_JOB_ID"},
}


@pytest.mark.parametrize("line", WRONG)
def test_an_environment_that_contradicts_itself_is_one_line(line):
    with pytest.raises(ConfigError, match=r"config\.distributed") as found:
        detect(WRONG[line], AUTO)
    assert line in str(found.value) and "\n" not in str(found.value)


def test_on_and_alone_is_an_error():
    with pytest.raises(ConfigError, match=r"config\.distributed\.mode: on"):
        detect({}, DistributedConfig(mode="on"))


def test_a_single_process_starts_nothing(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **k: pytest.fail("it waits for others"))
    assert cluster.initialize(AUTO, environment={}) is None
    assert coordination.num_processes() == 1 and coordination.index() == 0
    assert coordination.gather(1, "a number") == [1] and coordination.broadcast_from_0([2], "a list") == [2]
    coordination.assert_same({"text": "x"}, "all")
    with pytest.raises(ConfigError, match=r"^mine$") as found:
        coordination.raise_together(lambda: (_ for _ in ()).throw(ConfigError("mine")), "work")
    assert not hasattr(found.value, "told_elsewhere")


def test_a_late_start_of_jax_is_one_line():
    """Another program may have used a device before it called us."""
    jax.devices()
    with pytest.raises(ConfigError, match=r"process 3 of 4 \(environment\) cannot join: jax\.distributed"):
        cluster.initialize(AUTO, environment=OWN)


def test_the_watchdog_bites_only_who_stands_still(monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(coordination, "leave", ended.append)
    monkeypatch.setattr(coordination, "num_processes", lambda: 2)
    with coordination.Watchdog(0.2) as dog:
        for _ in range(8):
            dog.alive()
            coordination.time.sleep(0.05)
        assert ended == []
        coordination.time.sleep(0.6)
    assert ended and ended[0] == coordination.STALLED
    assert re.search(r"process 0 ends: .* 0\.2 s .*stall_timeout_seconds", capfd.readouterr().err)
    monkeypatch.setattr(coordination, "num_processes", lambda: 1)
    ended.clear()
    with coordination.Watchdog(0.05):
        coordination.time.sleep(0.2)
    assert ended == []


@pytest.mark.slow
def test_two_processes_agree_and_do_not_wait_for_ever(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    both = []
    for index in range(2):
        environment = {
            **os.environ, "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index),
            "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1",
        }  # fmt: skip
        command = [sys.executable, str(Path(__file__).parent / "coordinating_process.py"), str(tmp_path)]
        both.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=-1, stderr=-1, text=True))
    try:
        out, err = both[0].communicate(timeout=60)  # process 1 sleeps for a minute: nobody waits for that
        assert both[0].returncode == coordination.STALLED, (err + both[1].communicate(timeout=5)[1])[-4000:]
        assert "process 0 ends: process 1 did not report the rest within 6 s" in err and "most recent call first" in err
    finally:
        both[1].kill()
    last = both[1].communicate()[0]
    told = [json.loads(next(line for line in text.splitlines() if line.startswith("{"))) for text in (out, last)]
    for index, said in enumerate(told):
        assert said["gather"] == [0, 10] and said["first"] == [0, None] and said["none"] == f"mine {index}"
        assert said["beside"] == [[[f"{number} of {who}" for who in (0, 1)] for number in range(3)], [5, 6]]
        assert said["one"] == ["process 1: no file on 1", index == 0]
        assert said["all"] == ["no file on 0", index == 1]
        assert said["same"] == "process 1 has another text than process 0 (corpus 1, not corpus 0)"
        assert said["restored"] == [1, 1.0]  # not 2, which one process alone could not read
        assert said["space"].startswith("process 1: checkpoint of step 3 in ")
        assert said["space"].endswith("not written: no space left on the disk; older checkpoints are intact: 1, 2")
    reason = "process 1: cannot be read (a page of it is gone)"
    assert "checkpoint" in err and f"is not valid: {reason}; trying an older one" in err
