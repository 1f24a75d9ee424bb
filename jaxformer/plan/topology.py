"""Devices to compile for, from "v5e:16x16", "h100:4x8" or "cpu:8", that this machine need not have.

TPUs use libtpu's compiler, GPUs XLA's deviceless CUDA compiler with a description of the chip (`targets/*.txtpb`), and
any number of CPU devices can be simulated.
"""

import difflib
import importlib.util
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxformer.config.fields import shown
from jaxformer.errors import ConfigError
from jaxformer.runtime.hardware import CHIPS, Chip

TARGETS = Path(__file__).parent / "targets"
FORMS = "v4:XxYxZ, v5p:XxYxZ, v5e:XxY, v6e:XxY (chips), a100:NxG, h100:NxG, h200:NxG, b200:NxG (nodes x GPUs), cpu:N"
# Each CPU device needs threads in this process; the largest TPU slices have about 9,000 chips.
MOST_DEVICES = {"cpu": 1024, "tpu": 65536, "cuda": 65536}
# Values that libtpu would otherwise query from the machine.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Topology:
    """Devices to compile for.

    Attributes:
      name: as the user gave it.
      chip: of every device.
      shape: chips along each axis of a TPU's torus; (nodes, GPUs per node); (devices,).
      devices: in JAX's order.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    devices: tuple[Any, ...]

    @property
    def per_node(self) -> int:
        """Devices connected without the network."""
        return self.shape[-1] if self.chip.platform == "cuda" else len(self.devices)


def parse(name: str) -> tuple[Chip, tuple[int, ...]]:
    """The chip and the shape of a topology's name; starts no backend.

    Raises:
      ConfigError: no such chip, or a shape it cannot have.

    >>> chip, shape = parse("h100:4x8")
    >>> chip.name, shape
    ('h100', (4, 8))
    """
    kind, _, sizes = name.lower().partition(":")
    planned = [each for each in CHIPS if f"{each}:" in FORMS]  # the compilers here know no other
    if kind not in planned:
        near = difflib.get_close_matches(kind, planned, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"--topology: {name!r} is not known; {hint}known: {FORMS}")
    chip = CHIPS[kind]
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes):
        raise ConfigError(f"--topology: {name!r} has no shape; accepted: {FORMS}")
    shape = tuple(int(n[:40]) for n in sizes.split("x"))  # so large a number is refused below anyway
    if chip.platform == "cuda" and len(shape) == 1:
        shape = (1, *shape)
    wanted = chip.torus or {"cuda": 2, "cpu": 1}[chip.platform]
    if len(shape) != wanted:
        raise ConfigError(f"--topology: {name!r} has {len(shape)} axes, {kind} has {wanted}; accepted: {FORMS}")
    most = MOST_DEVICES[chip.platform]
    if math.prod(shape) > most:
        raise ConfigError(f"--topology: {shown(name)} has too many devices; accepted: at most {most} of {kind}")
    if chip.platform == "tpu" and any(n % 2 for n in shape[:2]):
        form = ":XxY" if wanted == 2 else ":XxYxZ"
        raise ConfigError(f"--topology: {name!r}: a host has 2 x 2 chips; accepted: {kind}{form} with even X and Y")
    return chip, shape


def prepare(name: str) -> None:
    """Configures JAX before it starts a backend: uses no accelerator, and simulates enough CPU devices.

    Raises:
      ConfigError: as in `parse`; or a compiler that is needed is not installed.
    """
    chip, shape = parse(name)
    if chip.platform == "cpu":
        with suppress(RuntimeError):  # a backend has already started: `make` checks its devices
            jax.config.update("jax_num_cpu_devices", math.prod(shape))
    elif chip.platform == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            raise ConfigError(f"--topology: {name} needs libtpu, which is not installed; pip install 'jaxformer[plan]'")
        for variable, value in TPU_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
    else:
        if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
            raise ConfigError(
                f"--topology: {name} needs JAX's CUDA compiler, which is not installed; pip install 'jaxformer[cuda]'"
            )
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.config.update("jax_platforms", "cpu")


def make(name: str) -> Topology:
    """The devices of a topology; call `prepare` first.

    Raises:
      ConfigError: as in `parse`; or the compiler has no such topology.
    """
    chip, shape = parse(name)
    if chip.platform == "cpu":
        devices = jax.devices("cpu")
        if len(devices) < math.prod(shape):
            raise ConfigError(f"--topology: {name}; JAX has started with {len(devices)} CPU devices")
        return Topology(name, chip, shape, tuple(devices[: math.prod(shape)]))
    from jax.experimental import topologies

    sizes = "x".join(map(str, shape))
    try:
        if chip.platform == "tpu":
            found = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip.name}:{sizes}")
        else:
            config = (TARGETS / f"{chip.name}.txtpb").read_text(encoding="utf-8")
            found = topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x{sizes}")
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"--topology: the compiler has no {name} ({reason[:200]}); accepted: {FORMS}") from None
    return Topology(name, chip, shape, tuple(found.devices))
