"""Refuses a run that cannot fit into memory, with the numbers, before anything compiles.

Only what is certain counts: parameters, their gradients, the optimizer's moments and the batches of one dispatch, or a
decoder's cache. Activations come on top; `jaxformer plan` knows those.
"""

import math
import os
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxformer.config import Config, ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.functional.block import init_cache
from jaxformer.functional.sublayers import sublayers_of
from jaxformer.models.families import family_of
from jaxformer.parallel.mesh import param_shardings
from jaxformer.specs import count_params, is_spec
from jaxformer.training.chunks import longest_chunk

# Where a container's limit stands: cgroups v2, v1.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
MOMENTS = {"adamw": 2, "lion": 1, "muon": 1, "adafactor": 0}  # of each parameter, at least


def machine_bytes() -> int:
    """Memory that this process may have: the machine's, and no more than its container's."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in LIMITS:
        try:
            most = min(most, int(limit.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return most


def limit_of(devices: Any) -> tuple[float, int, str]:
    """(bytes of memory, how many of this process's devices share it, whose it is, in words)."""
    mine = [device for device in devices if device.process_index == jax.process_index()] or list(devices)
    if mine[0].platform == "cpu":
        return machine_bytes(), len(mine), "this machine"
    return (mine[0].memory_stats() or {}).get("bytes_limit", math.inf), 1, "each device"


def check_training(config: Config, specs: Any, mesh: Mesh) -> None:
    """Refuses a model whose training cannot fit.

    Args:
      config: vocabulary size filled in.
      specs: of the model.
      mesh: what the parameters are laid over.

    Raises:
      ConfigError: with what it needs at least, and what there is; or a parameter that does not divide over the mesh.
    """
    limit, sharing, where = limit_of(mesh.devices.flat)
    shardings = jax.tree.leaves(param_shardings(specs, mesh))
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    moments = MOMENTS[config.optimizer.name] + (config.optimizer.ema_decay is not None)
    copies = [2 + moments if leaf.trained else 1 for leaf in leaves]  # itself, its gradient, what the optimizer keeps
    each = [n * math.prod(s.shard_shape(x.shape)) for n, x, s in zip(copies, leaves, shardings, strict=True)]
    state = 4 * sum(each) * sharing
    train = config.train
    steps = longest_chunk(config)
    batch = jax.tree.leaves(family_of(config.model).batch_spec(config.model, config.data, train.global_batch_size))
    batches = steps * sum(map(_bytes, batch)) * sharing // mesh.devices.size
    if state + batches > limit:
        larger = (
            "model"
            if state > batches
            else f"train.global_batch_size ({train.global_batch_size}) x steps_per_dispatch ({steps})"
        )
        raise ConfigError(
            f"config.{larger}: {_size(state)} for {count_params(specs):.3g} parameters, their gradients and {moments} "
            f"moments, and {_size(batches)} for the batches of {steps} steps, on {where}, which has {_size(limit)}; "
            "accepted: what fits (a smaller model or batch, more devices with mesh.fsdp; `jaxformer plan` says more)"
        )


def check_decoding(cfg: ModelConfig, rows: int, tokens: int, flags: str, sources: int | None = None) -> None:
    """Refuses to decode what cannot fit.

    Args:
      cfg: the model.
      rows: sequences at once.
      tokens: of each, prompt and new ones.
      flags: those that the error blames.
      sources: of which a cache is kept once for all their continuations; None: as many as rows.

    Raises:
      ConfigError: the cache alone needs more than there is.
    """
    limit, _, where = limit_of(jax.devices()[:1])
    once = {name for name, sublayer in sublayers_of(cfg).items() if sublayer.per_source}
    needed = 4 * rows * tokens
    for count, wanted in ((rows, False), (rows if sources is None else sources, True)):
        layers = jax.eval_shape(lambda count=count: init_cache(cfg, count, tokens, cfg.dtype))
        kept = [cache for layer in layers for name, cache in layer.items() if (name in once) == wanted]
        needed += sum(map(_bytes, jax.tree.leaves(kept)))
    if needed > limit:
        raise ConfigError(
            f"{flags}: {rows} x {tokens} tokens need {_size(needed)} for their decoding cache, on {where}, which has "
            f"{_size(limit)}; accepted: what fits"
        )


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _size(number: float) -> str:
    """Bytes in three digits: 8632745984 -> "8.04 GiB"."""
    power = max(0, min(5, int(math.log2(max(number, 1)) // 10)))
    return f"{number / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"
