"""Finds the processes of a multi-process run, from the config or the launcher's environment, and starts JAX's runtime.

>>> detect({}, DistributedConfig()) is None  # an ordinary machine: a single process
True
>>> slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1",
...          "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1"}
>>> detect(slurm, DistributedConfig())
Membership(found='SLURM', address='n3:61447', processes=2, process=1, devices=None)
"""

import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import jax

from jaxformer.config import DistributedConfig
from jaxformer.errors import ConfigError
from jaxformer.runtime import coordination

TPU_PORT = 8476


class Membership(NamedTuple):
    """This process's place among the processes of its run.

    Attributes:
      found: where this was found, such as "SLURM".
      address: host:port of process 0; None if JAX finds the rest itself (a TPU VM asks its metadata server).
      processes: number of processes.
      process: index of this one, from 0.
      devices: local indices of the accelerators this process uses; None: all that are visible.
    """

    found: str
    address: str | None = None
    processes: int | None = None
    process: int | None = None
    devices: tuple[int, ...] | None = None


def refuse_several(cfg: DistributedConfig, what: str) -> None:
    """Raises ConfigError: there are other processes, each of which would train the whole `what`."""
    found = detect(os.environ, cfg)
    if found is not None and found.processes is not None:  # a TPU VM does not know whether there are others
        raise ConfigError(
            f"config.distributed: {found.found} reports {found.processes} processes, and each would train the whole "
            f"{what}; accepted: one process"
        )


def initialize(
    cfg: DistributedConfig, log: Callable[[str], None] = print, environment: Mapping[str, str] = os.environ
) -> Membership | None:
    """Joins the other processes of this run, if there are any; call it before any device is used.

    Args:
      cfg: of the run.
      log: prints a line.
      environment: read by `detect`.

    Returns:
      This process's membership; None for a single process, for which nothing is started.

    Raises:
      ConfigError: the environment is inconsistent, or mode=on and there are no other processes.
    """
    found = detect(environment, cfg)
    coordination.wait_at_most(cfg.stall_timeout_seconds)
    if found is None or jax.distributed.is_initialized():
        return found
    # Our loop handles SIGTERM (training/interrupt.py); JAX's preemption service would intercept it.
    jax.config.update("jax_enable_preemption_service", False)
    # On CPU, a collective blocks one of XLA's threads, by default one per core. With as many collectives waiting as
    # there are threads (two cores, two devices) nothing else runs: a deadlock. XLA takes its thread count from NPROC.
    os.environ.setdefault("NPROC", str(max(16, os.cpu_count() or 1)))
    who = "this process" if found.process is None else f"process {found.process} of {found.processes}"
    waits = threading.Timer(
        min(20.0, cfg.start_timeout_seconds / 2),
        lambda: print(
            f"{who} ({found.found}) waits for the others at {found.address}; "
            f"gives up after {cfg.start_timeout_seconds} s (config.distributed.start_timeout_seconds)",
            file=sys.stderr, flush=True,
        ),
    )  # fmt: skip
    waits.daemon = True
    waits.start()
    try:
        jax.distributed.initialize(
            found.address,
            num_processes=found.processes,
            process_id=found.process,
            local_device_ids=found.devices,
            # Stops JAX from filling in what is None: under SLURM it would give each process one GPU, even with one
            # process per node.
            cluster_detection_method=None if found.address is None else "deactivate",
            initialization_timeout=cfg.start_timeout_seconds,
            heartbeat_timeout_seconds=cfg.heartbeat_timeout_seconds,
            shutdown_timeout_seconds=cfg.heartbeat_timeout_seconds,
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"config.distributed: {who} ({found.found}) cannot join: {reason}") from None
    finally:
        waits.cancel()
    if jax.process_index() == 0:
        log(f"{jax.process_count()} processes ({found.found}), {jax.device_count()} devices")
    return found


def detect(environment: Mapping[str, str], cfg: DistributedConfig) -> Membership | None:
    """This process's place among those of its run; None if it is the only one. Starts nothing, waits for nothing.

    Looks, in this order, at the config's coordinator fields, the variables that launch/ sets (JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES, JAX_PROCESS_ID), SLURM, a TPU slice on GKE, a Kubernetes Indexed Job, and a TPU VM.

    Raises:
      ConfigError: the environment is inconsistent, or mode=on and there are no other processes.
    """
    if cfg.mode == "off":
        return None
    if cfg.coordinator_address is not None:
        found: Membership | None = Membership("config", cfg.coordinator_address, cfg.num_processes, cfg.process_id)
    else:
        launchers = (_variables, _slurm, _tpu_slice, _indexed_job, _tpu_vm)
        found = next(filter(None, (launcher(environment) for launcher in launchers)), None)
    if found is not None and found.processes is not None and not 0 <= (found.process or 0) < found.processes:
        raise ConfigError(
            f"config.distributed: {found.found} says process {found.process} of {found.processes}; "
            f"accepted: 0 to {found.processes - 1}"
        )
    if found is not None and found.processes == 1:
        found = None
    if found is None and cfg.mode == "on":
        raise ConfigError(
            "config.distributed.mode: on; neither the config nor the environment says who the other processes are; "
            "accepted: auto, or start it by a script of launch/"
        )
    return found


def _variables(environment: Mapping[str, str]) -> Membership | None:
    """The variables that our launch scripts set; other launchers may set them too."""
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    if not {"JAX_NUM_PROCESSES", "JAX_PROCESS_ID"} & environment.keys():
        return None
    found = {"JAX_PROCESS_ID": environment.get("JOB_COMPLETION_INDEX", ""), **environment}
    missing = [name for name in names if not found.get(name)]
    if missing:
        there = " and ".join(name for name in names if name not in missing)
        raise ConfigError(
            f"config.distributed: {missing[0]} is not set, but {there}; accepted: all three in the environment, or none"
        )
    return Membership("environment", found[names[0]], _number(found, names[1]), _number(found, names[2]))


def _slurm(environment: Mapping[str, str]) -> Membership | None:
    """A task of an srun step; the batch script itself is not one."""
    if "SLURM_STEP_NODELIST" not in environment or "SLURM_PROCID" not in environment:
        return None
    # salloc's interactive step has one task, however many the job has.
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    count, job = _number(environment, name), _number(environment, "SLURM_JOB_ID")
    if count == 1:
        return None
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if address is None:
        port = environment.get("JAX_COORDINATOR_PORT") or 65536 - 4096 + job % 4096
        address = f"{first_host(environment['SLURM_STEP_NODELIST'])}:{port}"
    return Membership("SLURM", address, count, _number(environment, "SLURM_PROCID"), _slurm_devices(environment))


def _slurm_devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Local indices of this task's equal share of its node's GPUs; None: all visible ones (one task per node, or SLURM
    made only the task's own visible)."""
    tasks = expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    here = tasks[min(int(environment.get("SLURM_NODEID", 0)), len(tasks) - 1)]
    visible = [each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if here == 1 or len(visible) == 1:
        return None
    local, each = _number(environment, "SLURM_LOCALID"), max(1, len(visible) // here)
    if len(visible) % here:
        raise ConfigError(
            f"config.distributed: SLURM runs {here} processes on a node that shows {len(visible)} GPUs; "
            "accepted: --ntasks-per-node=1, or a divisor of the GPUs"
        )
    return tuple(range(local * each, (local + 1) * each))


def _tpu_slice(environment: Mapping[str, str]) -> Membership | None:
    """A pod on GKE, whose environment lists the workers of its TPU slice and, with several, the slice's index."""
    hosts = (environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or "").split(",")
    slices = int(environment.get("MEGASCALE_NUM_SLICES") or 1)
    if not hosts[0] or len(hosts) * slices == 1:
        return None
    first = environment.get("MEGASCALE_COORDINATOR_ADDRESS") or hosts[0]
    index = _number(environment, "TPU_WORKER_ID") + int(environment.get("MEGASCALE_SLICE_ID") or 0) * len(hosts)
    return Membership("TPU slice", f"{first.partition(':')[0]}:{TPU_PORT}", len(hosts) * slices, index)


def _indexed_job(environment: Mapping[str, str]) -> Membership | None:
    """A pod of an Indexed Job: Kubernetes sets its index, but not the number of pods, nor the first one's address."""
    if "JOB_COMPLETION_INDEX" not in environment or "TPU_WORKER_HOSTNAMES" in environment:
        return None
    raise ConfigError(
        "config.distributed: an Indexed Job (JOB_COMPLETION_INDEX) without JAX_COORDINATOR_ADDRESS and "
        "JAX_NUM_PROCESSES; set them as launch/gke-gpu.yaml does, or config.distributed.mode=off for independent runs"
    )


def _tpu_vm(environment: Mapping[str, str]) -> Membership | None:
    """A Cloud TPU VM: JAX asks its metadata server for the other workers."""
    if "TPU_SKIP_MDS_QUERY" in environment or "TPU_WORKER_HOSTNAMES" in environment or not has_tpu():
        return None
    return Membership("TPU VM")


def has_tpu(devices: Path = Path("/dev")) -> bool:
    """True if this machine has TPU chips and libtpu; looks only at files."""
    return any(any(devices.glob(chip)) for chip in ("accel[0-9]*", "vfio/[0-9]*")) and find_spec("libtpu") is not None


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list.

    >>> first_host("gpu[007,009-12],login"), first_host("rack1-[2-3]-ib"), first_host("a,b")
    ('gpu007', 'rack1-2-ib', 'a')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        raise ConfigError(f"config.distributed: SLURM_STEP_NODELIST is {nodes!r}; accepted: a list of nodes")
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0])


def expand_counts(text: str) -> list[int]:
    """SLURM's tasks per node, such as "2(x3),1", as a list.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))] or [1]


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None or not text.strip().isdigit():
        raise ConfigError(f"config.distributed: {name} is {text!r}; accepted: a whole number")
    return int(text)
