"""One of two processes that tell each other this and that (see test_cluster.py); says what it heard in JSON."""

import errno
import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.config import CheckpointConfig, DistributedConfig, MeshConfig
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runtime import cluster, coordination
from jaxformer.training.checkpoint import manager
from jaxformer.training.state import TrainState


def failing_in(*who):
    """What `agree` does when the work fails in these processes."""

    def work():
        if me in who:
            raise ConfigError(f"no file on {me}")
        return f"mine {me}"

    try:
        return coordination.raise_together(work, "work")
    except ConfigError as error:
        return str(error), error.told_elsewhere


def beside():
    """What two threads hear: in process 0 the second one asks first, in process 1 last."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(coordination.gather, me + 5, "a number", "beside") if me == 0 else None
        heard = [coordination.gather(f"{number} of {me}", "a text") for number in range(3)]
        asked = asked or pool.submit(coordination.gather, me + 5, "a number", "beside")
        return heard, asked.result()


def same():
    """What `same` says when the texts differ."""
    try:
        coordination.assert_same({"text": f"corpus {me}"}, "its text")
    except ConfigError as error:
        return str(error)


def checkpoints(folder):
    """Of two, the newer cannot be read by process 1; and then the disk is full for process 1."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=2))
    split, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())

    def state(number):
        zero = jax.jit(lambda: jnp.int32(0), out_shardings=whole)()
        w = jax.jit(lambda: jnp.full(8, float(number)), out_shardings=split)()
        rng = jax.jit(lambda: jnp.zeros(2, jnp.uint32), out_shardings=whole)()
        return TrainState(step=zero, params={"w": w}, opt_state=(), ema=None, rng=rng, bad_steps=zero, skipped=zero)

    kept = manager.Checkpoints(folder, CheckpointConfig(keep=9))
    for step in (1, 2):
        kept.save(step, state(step))
        kept.wait()
    restore, usage = ocp.StandardCheckpointHandler.restore, shutil.disk_usage

    def torn(self, directory, *args, **kwargs):
        if me == 1 and directory.parent.name == "2":
            raise ValueError("a page of it is gone")
        return restore(self, directory, *args, **kwargs)

    def full(path):
        if me == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usage(path)

    ocp.StandardCheckpointHandler.restore, shutil.disk_usage = torn, full
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
    found, step = manager.Checkpoints(folder, CheckpointConfig()).restore(abstract)
    try:
        kept.save(3, state(3))
    except CheckpointError as error:
        return (step, float(found.params["w"].addressable_shards[0].data[0])), str(error)


def main():
    """Tells the other process things, and prints what came of it."""
    told = {
        "gather": coordination.gather(me * 10, "a number"),
        "first": coordination.broadcast_from_0([me, None], "a list"),
    }
    told["beside"] = beside()
    told |= {"none": failing_in(), "one": failing_in(1), "all": failing_in(0, 1), "same": same()}
    told["restored"], told["space"] = checkpoints(Path(sys.argv[1]) / "checkpoints")
    print(json.dumps(told), flush=True)
    if me == 1:
        time.sleep(60)
    coordination.gather(0, "the rest")


if __name__ == "__main__":
    cluster.initialize(DistributedConfig(heartbeat_timeout_seconds=10, stall_timeout_seconds=6))
    me = coordination.index()
    main()
