"""Sharding specs of attention's arrays, for implementations that run on each device under shard_map."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxformer.masks import Mask
from jaxformer.parallel import constraints
from jaxformer.types import Array

# Fields of a Mask that have a batch axis, and the number of axes of a field without one.
MASK_ROWS = {
    "prefix": 0, "prefix_keys": 1, "keys": 1, "query_segments": 1, "key_segments": 1, "query_index": 1, "key_index": 1,
    "global_queries": 1, "global_keys": 1,
}  # fmt: skip


def head_axes(query: Array, key: Array, value: Array, sizes: Mapping[str, int]) -> tuple[Array, Array, tuple[str, ...]]:
    """Key and value, and the mesh axes over which the heads are sharded; () if they do not divide.

    With fewer key/value heads than devices, they are repeated so that each device has the one its queries use.
    """
    groups = key.shape[2]
    heads = constraints.splits(query.shape[2], constraints.ACTIVATION_RULES["heads"], sizes)
    devices = math.prod(sizes[axis] for axis in heads)
    if groups % devices:
        if devices % groups:
            return key, value, ()
        key, value = (jnp.repeat(x, devices // groups, axis=2) for x in (key, value))
    return key, value, heads


def on_devices(function: Callable, rows: tuple[str, ...], heads: tuple[str, ...], *specs: Any) -> Callable:
    """function(query, key, value, *others) on every device, with its rows and heads. `specs`: of the others."""
    array = P(rows or None, None, heads or None)
    return jax.shard_map(function, in_specs=(array, array, array, *specs), out_specs=array, check_vma=False)


def unsupported_mask(mask: Mask, fields: Iterable[str]) -> str | None:
    """Why a kernel without these mask fields, patterns and context parallelism cannot apply a mask; None: it can."""
    if mask.patterns:
        return "a mask of patterns"
    found = [name for name in fields if getattr(mask, name) is not None]
    return f"a mask with {found[0]}" if found else "context parallelism" if mask.parts > 1 else None


def mask_specs(mask: Mask, rows: tuple[str, ...]) -> Mask:
    """The mask with a PartitionSpec for each of its arrays: batch axes over `rows`, those of size 1 and `dense`
    replicated."""

    def of_rows(field: Array | None, least: int) -> P | None:
        if field is None:
            return None
        return P(rows or None) if field.ndim > least and field.shape[0] > 1 else P()

    fields = {name: of_rows(getattr(mask, name), least) for name, least in MASK_ROWS.items()}
    whole = {name: None if getattr(mask, name) is None else P() for name in ("dense", "heads")}
    return replace(mask, **whole, **fields)
