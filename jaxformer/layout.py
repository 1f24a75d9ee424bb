"""How activations lie on the devices of a mesh: the rule table, and what pins a layout inside jit.

Functions say where an activation may be split by the names of its axes (`pin`); without a mesh that does nothing.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxformer.types import Array

# THE rule table of activations: axis -> the mesh axes it is split over.
RULES: dict[str, tuple[str, ...]] = {
    "batch_rows": ("data", "fsdp"),  # of a batch
    "rows": ("context", "data", "fsdp"),  # as a model sees them, cut into parts (`parts`)
    "tokens": (),  # of a row, between the layers; see `shard_norms`
    "heads": ("tensor",),
    "mlp": ("tensor",),
}
_shard_norms: ContextVar[bool] = ContextVar("shard_norms", default=False)


@contextmanager
def shard_norms(on: bool):
    """While entered (as a program is traced), what lies between the layers is split over the tensor axis by tokens.

    Norms, residual sums and dropout are then done once and not by every device of the axis, and each all-reduce becomes
    a reduce-scatter and an all-gather. Source: Korthikanti et al. 2022, section 4.2.2 (sequence parallelism).
    """
    token = _shard_norms.set(on)
    try:
        yield
    finally:
        _shard_norms.reset(token)


def mesh_axes() -> dict[str, int]:
    """The axes of the mesh in use that are split automatically and have more than one device, and their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in kinds if kind == AxisType.Auto and size > 1}


def pin(x: Array, *axes: str | None) -> Array:
    """Pins the layout of an activation inside jit, by names of `RULES`; does nothing where no mesh is set.

    A dimension that does not divide over its mesh axes, or whose mesh axes there are not, is left alone.

    >>> import jax.numpy as jnp
    >>> pin(jnp.ones((4, 8)), "rows", None).shape
    (4, 8)
    """
    sizes = mesh_axes()
    if not sizes:
        return x
    entries: list[Any] = []
    for size, axis in zip(x.shape, axes, strict=True):
        wanted = ("tensor",) if axis == "tokens" and _shard_norms.get() else RULES[axis] if axis else ()
        entries.append(splits(size, wanted, sizes) or None)
    return jax.lax.with_sharding_constraint(x, P(*entries))


def splits(size: int, axes: tuple[str, ...], sizes: dict[str, int]) -> tuple[str, ...]:
    """Those of `axes` that a dimension is split over: the ones there are, if it divides over all of them, else none."""
    there = tuple(axis for axis in axes if axis in sizes)
    return there if size % int(np.prod([sizes[axis] for axis in there])) == 0 else ()
