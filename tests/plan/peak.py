"""Runs a real train step and prints, in JSON, the peak memory it took beside what a plan says: bytes.

Measured as resident memory: what the process holds after compiling and before there is a state is the base; the
kernel's high-water mark is set back when the state and the batch are there and read after two updates.
"""

import ctypes
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np

from jaxformer.config import from_mapping
from jaxformer.plan import measures, topology
from jaxformer.plan.compiled_step import abstract_chunk, compile_step
from jaxformer.training import state as states
from jaxformer.training.optim import make_optimizer


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    """The one argument is a config as JSON."""
    topology.prepare("cpu:1")
    target = topology.make("cpu:1")
    config = from_mapping(json.loads(sys.argv[1]))
    step = compile_step(config, target)
    plan = measures.describe(step, target)
    optimizer = make_optimizer(config.optimizer, config.train.steps, step.model.specs)
    init = jax.jit(
        lambda: states.fresh_state(step.model, optimizer, 0),
        out_shardings=jax.tree.map(lambda x: x.sharding, step.state),
    ).lower()
    init = init.compile()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    base = resident("VmRSS")
    state = init()
    chunk = jax.tree.map(
        lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding), abstract_chunk(step.config, step.mesh)
    )
    jax.block_until_ready((state, chunk))
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    with jax.set_mesh(step.mesh):
        for _ in range(2):
            state, metrics = step.compiled(state, chunk, np.int32(1))
    assert np.isfinite(jax.block_until_ready(metrics).loss).all()
    print(json.dumps({"predicted": plan["memory"]["total"], "measured": resident("VmHWM") - base}))


if __name__ == "__main__":
    main()
