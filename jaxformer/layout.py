"""Two tables from logical axes to mesh axes, of parameters and of activations, and what pins a layout inside jit.

Without a pin XLA is free to hand the layout of the weights on to the activations: an embedding table split along D by
`fsdp` gave activations split along D with every row on every device, and with them the products, collectives and memory
of no data parallelism at all (measured; `python -m experiments.plan` shows it).
"""

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxformer.specs import is_spec
from jaxformer.types import Array

# Logical axis of a parameter or a batch -> the mesh axes it is split over. None: never split.
RULES: dict[str, tuple[str, ...] | None] = {
    "rows": ("data", "fsdp"),  # of a batch
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "head_width": None,
    "layers": None,
    "positions": None,
    "types": None,
    "norm": None,
}
# Logical axis of an activation -> the mesh axes it is split over, as far as the mesh has them.
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),  # of a batch
    "sequence": ("context",),
    "looked_up_rows": ("data",),  # where the embedding table's parts are looked up: rows move to the table's width
    "looked_up_width": ("fsdp",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}


def pin(x: Array, *axes: str | None) -> Array:
    """`x` laid out by logical axis names, inside jit; None: not split.

    Does nothing where no mesh is set or all its axes concerned have size 1, so that a program for one device is the
    one without. A dimension that does not divide stays whole.

    Args:
      x: the activation.
      *axes: one name of `ACTIVATIONS` or None for each dimension.

    >>> import jax.numpy as jnp
    >>> pin(jnp.ones((2, 3)), "rows", None).shape
    (2, 3)
    """
    return _pin(x, axes, ACTIVATIONS)


def pin_params(params: Any, specs: Any) -> Any:
    """Parameters, and by it their gradients, laid out by RULES: inside a loop over layers XLA would otherwise add up a
    layer's whole gradient on every device, where each needs its part only. `specs` is a tree like `params`, but for
    the kind of its mappings."""
    if jax.sharding.get_abstract_mesh().empty:
        return params
    leaves, structure = jax.tree.flatten(params)
    axes = [spec.axes for spec in jax.tree.leaves(specs, is_leaf=is_spec)]
    return jax.tree.unflatten(structure, [_pin(x, a, RULES) for x, a in zip(leaves, axes, strict=True)])


def _pin(x: Array, axes: tuple[str | None, ...], rules: Any) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or all(size == 1 for name, size in mesh.shape.items() if name in _PINNED):
        return x
    return jax.lax.with_sharding_constraint(x, P(*_entries(x.shape, axes, rules)))


def _entries(shape: tuple[int, ...], axes: tuple[str | None, ...], rules: Any) -> list[Any]:
    mesh = jax.sharding.get_abstract_mesh()
    entries: list[Any] = []
    used: set[str] = set()
    for size, axis in zip(shape, axes, strict=True):
        wanted = tuple(a for a in rules.get(axis) or () if mesh.shape.get(a, 1) > 1 and a not in used)
        if size % math.prod(mesh.shape[a] for a in wanted):
            wanted = ()
        used.update(wanted)
        entries.append(wanted or None)
    return entries


def sum_parts(x: Array, *axes: str | None) -> Array:
    """The sum over the first axis of [R, ...], R = `row_shards`, laid out by RULES.

    Said as collectives, because of a plain sum XLA makes an all-reduce of the whole where each device needs a part.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rows = tuple(a for a in ACTIVATIONS["rows"] if mesh.shape.get(a, 1) > 1)
    into = tuple(_entries(x.shape[1:], axes, RULES))
    kept = tuple(None if entry is None else tuple(a for a in entry if a not in rows) or None for entry in into)

    def local(part: Array) -> Array:
        part = part[0]
        for dimension, entry in enumerate(into):
            for axis in (a for a in entry or () if a in rows):
                part = jax.lax.psum_scatter(part, axis, scatter_dimension=dimension, tiled=True)
        left = tuple(a for a in rows if not any(a in (entry or ()) for entry in into))
        return jax.lax.psum(part, left) if left else part

    return jax.shard_map(local, in_specs=P(rows, *kept), out_specs=P(*into), check_vma=False)(x)


def row_shards(rows: int) -> int:
    """Into how many parts the mesh that is set splits the rows of a batch; 1 where `rows` do not divide."""
    mesh = jax.sharding.get_abstract_mesh()
    parts = 1 if mesh.empty else math.prod(mesh.shape.get(a, 1) for a in ACTIVATIONS["rows"])
    return parts if rows % parts == 0 else 1


_PINNED = {axis for axes in (*ACTIVATIONS.values(), *RULES.values()) for axis in axes or ()}
