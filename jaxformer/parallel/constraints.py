"""Two tables from logical axes to mesh axes, of parameters and of activations, and sharding constraints inside jit.

Functions name the axes along which an activation may be sharded (`constrain`); without a mesh that does nothing.

Without constraints XLA may shard activations like the weights: an embedding table sharded along D by `fsdp` gives
activations sharded along D with every row on every device, and so no data parallelism at all
(`jaxformer plan` shows it).
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxformer.low_rank import map_weights
from jaxformer.parallel.platforms import this_platform
from jaxformer.types import Array

# THE rule table of parameters: logical axis -> the mesh axes that shard it. None: never sharded.
RULES: dict[str, tuple[str, ...] | None] = {
    "vocab": ("tensor",),
    "embed": ("fsdp", "expert"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
    "head_width": None,
    "layers": ("stage",),
    "positions": None,
    "types": None,
    "norm": None,
}
# THE rule table of activations: axis -> the mesh axes that shard it, if the mesh has them.
ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
    "batch_rows": ("stage", "data", "fsdp", "expert"),  # of a batch
    "parts": ("context",),  # of a row, see `parallel.context`
    # As a model sees them: the parts of all rows, one after the other.
    "rows": ("stage", "context", "data", "fsdp", "expert"),
    "looked_up_rows": ("stage", "context", "data"),  # in the embedding's look-up, where the others shard the width
    "looked_up_width": ("fsdp", "expert"),
    "tokens": (),  # of a row, between the layers; see `sequence_parallel`
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}
LANES = 128  # of a TPU's registers: the width of a tile of an array
_KNOWN = frozenset(axis for axes in (*RULES.values(), *ACTIVATION_RULES.values()) for axis in axes or ())
_sequence_parallel: ContextVar[bool] = ContextVar("sequence_parallel", default=False)


@contextmanager
def sequence_parallel(on: bool):
    """Sequence parallelism for programs traced inside: the tensor axis shards the tokens of the residual stream.

    Norms, residual sums and dropout are then done once instead of by every device of the axis, and each all-reduce
    becomes a reduce-scatter and an all-gather. Source: Korthikanti et al. 2022, section 4.2.2.
    """
    token = _sequence_parallel.set(on)
    try:
        yield
    finally:
        _sequence_parallel.reset(token)


def mesh_axes() -> dict[str, int]:
    """Sizes of the axes of the mesh in use that the tables name, XLA shards and have more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in kinds if name in _KNOWN and kind == AxisType.Auto and size > 1}


def constrain(x: Array, *axes: str | None) -> Array:
    """`x` sharded by logical axis names, inside jit; None: not sharded.

    Does nothing without a mesh or if all its axes have size 1, so a program for one device has no constraints. A
    dimension that does not divide stays whole.

    Args:
      x: the activation.
      *axes: one name of `ACTIVATION_RULES` or None for each dimension.

    >>> import jax.numpy as jnp
    >>> constrain(jnp.ones((2, 3)), "rows", None).shape
    (2, 3)
    """
    rules = {**ACTIVATION_RULES, "tokens": ("tensor",)} if _sequence_parallel.get() else ACTIVATION_RULES
    return _constrain(x, axes, rules)


def constrain_params(params: Any, specs: Any) -> Any:
    """Parameters, and so their gradients, sharded by RULES: inside a loop over layers XLA would otherwise sum a layer's
    whole gradient on every device, although each needs only its shard. `specs` is a tree like `params`; only the types
    of its mappings may differ."""
    return map_weights(lambda spec, x: _constrain_matrix(x, spec.axes), specs, params) if mesh_axes() else params


def _constrain_matrix(x: Array, axes: tuple[str | None, ...]) -> Array:
    """A parameter sharded by RULES. Heads that do not fill a TPU's lanes are merged with their width for this: libtpu
    makes an all-reduce of a gradient [D, H, 64], but a reduce-scatter of [D, H * 64]. Wider heads need no merging."""
    width = axes.index("head_width") if "head_width" in axes else 0
    if width == 0 or x.shape[width] % LANES == 0:
        return _constrain(x, axes, RULES)
    merged = entries(x.shape, axes, RULES)
    del merged[width]
    flat = x.reshape(*x.shape[: width - 1], -1, *x.shape[width + 1 :])
    return jax.lax.with_sharding_constraint(flat, P(*merged)).reshape(x.shape)


def _constrain(x: Array, axes: tuple[str | None, ...], rules: Mapping[str, tuple[str, ...] | None]) -> Array:
    return jax.lax.with_sharding_constraint(x, P(*entries(x.shape, axes, rules))) if mesh_axes() else x


def entries(
    shape: Sequence[int], axes: Sequence[str | None], rules: Any, sizes: Mapping[str, int] | None = None
) -> list[tuple[str, ...] | None]:
    """THE algorithm from logical axes to mesh axes: for each dimension the mesh axes that shard it; None: not sharded.

    A mesh axis is used once per array, by the first dimension that asks for it and divides. A dimension that does not
    divide over all the axes that it asks for stays whole.

    Args:
      shape: of the array.
      axes: its logical axes.
      rules: logical axis -> mesh axes.
      sizes: of the mesh axes that exist; None: those of the mesh in use.
    """
    sizes, used = mesh_axes() if sizes is None else sizes, set[str]()
    out: list[tuple[str, ...] | None] = []
    for size, axis in zip(shape, axes, strict=True):
        wanted = tuple(name for name in (rules[axis] or () if axis else ()) if name not in used)
        found = splits(size, wanted, sizes)
        used.update(found)
        out.append(found or None)
    return out


def splits(size: int, axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes that shard a dimension: those of `axes` that exist, or none if it does not divide over them all."""
    there = tuple(axis for axis in axes if axis in sizes)
    return there if size % math.prod(sizes[axis] for axis in there) == 0 else ()


def reduce_scatter_sum(x: Array, *axes: str | None) -> Array:
    """The sum over the first axis of [R, ...], R = `batch_shards`, sharded by RULES.

    With explicit collectives, because XLA makes an all-reduce of a plain sum although each device needs only a shard.
    """
    rows = tuple(a for a in ACTIVATION_RULES["rows"] if a in mesh_axes())
    into = tuple(entries(x.shape[1:], axes, RULES))
    kept = tuple(None if entry is None else tuple(a for a in entry if a not in rows) or None for entry in into)

    def local(part: Array) -> Array:
        part = part[0]
        for dimension, entry in enumerate(into):
            for axis in (a for a in entry or () if a in rows):
                part = _scatter(part, axis, dimension)
        left = tuple(a for a in rows if not any(a in (entry or ()) for entry in into))
        return jax.lax.psum(part, left) if left else part

    return jax.shard_map(local, in_specs=P(rows, *kept), out_specs=P(*into), check_vma=False)(x)


def _scatter(x: Array, axis: str, dimension: int) -> Array:
    """The sum over a mesh axis, of which each device gets its shard along `dimension`."""
    columns = x.ndim == 2 and dimension == 1
    if this_platform() == "tpu" and columns and x.shape[1] // jax.lax.axis_size(axis) % LANES:
        return scatter_by_rows(x, axis)
    return jax.lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)


def scatter_by_rows(x: Array, axis: str) -> Array:
    """The sum of [V, D] over a mesh axis of n devices, columns scattered: [V, D / n]. Inside shard_map.

    libtpu makes an all-reduce, twice the bytes, of a reduce-scatter into shards that are no multiples of LANES. So the
    rows, which can be padded, are scattered instead; an all-to-all of these shards then gives the columns.
    """
    rows = x.shape[0]
    fill = -rows % (LANES * jax.lax.axis_size(axis))
    part = jax.lax.psum_scatter(jnp.pad(x, ((0, fill), (0, 0))), axis, scatter_dimension=0, tiled=True)
    return jax.lax.all_to_all(part, axis, 1, 0, tiled=True)[:rows]


def context_parts() -> int:
    """The number of shards of each row in the mesh in use; 1: rows are whole."""
    return math.prod(mesh_axes().get(axis, 1) for axis in ACTIVATION_RULES["parts"])


def batch_shards(rows: int) -> int:
    """The number of shards that the mesh in use divides the rows of a batch into; 1 if `rows` do not divide."""
    sizes = mesh_axes()
    return math.prod(sizes[axis] for axis in splits(rows, ACTIVATION_RULES["rows"], sizes))
