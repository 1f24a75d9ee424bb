"""How attention's arrays lie on the mesh in use, for implementations that run on each device by itself."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxformer.masks import Mask
from jaxformer.parallel import constraints
from jaxformer.types import Array

# Fields of a Mask that have rows, and the most axes a field without rows has.
_ROWS = {"prefix": 0, "keys": 1, "query_segments": 1, "key_segments": 1, "query_index": 1, "key_index": 1}


def head_axes(query: Array, key: Array, value: Array, sizes: Mapping[str, int]) -> tuple[Array, Array, tuple[str, ...]]:
    """Key and value, and the mesh axes that all heads are split over; () where they do not divide.

    Where there are fewer key/value heads than devices, each device gets the one its queries use.
    """
    groups = key.shape[2]
    heads = constraints.splits(query.shape[2], constraints.ACTIVATION_RULES["heads"], sizes)
    devices = math.prod(sizes[axis] for axis in heads)
    if groups % devices:
        if devices % groups:
            return key, value, ()
        key, value = (jnp.repeat(x, devices // groups, axis=2) for x in (key, value))
    return key, value, heads


def unsupported_mask(mask: Mask | None, fields: Iterable[str]) -> str | None:
    """What a kernel that knows none of these fields, and no folded rows, says about a mask; None: nothing."""
    if mask is None:
        return None
    for name in fields:
        if getattr(mask, name) is not None:
            return f"a mask with {name}"
    return "rows cut into parts" if mask.parts > 1 else None


def mask_specs(mask: Mask, rows: tuple[str, ...]) -> Mask:
    """The mask with a PartitionSpec for each of its arrays: rows over `rows`, one row that stands for all on every
    device, `dense` whole."""

    def of_rows(field: Array | None, least: int) -> P | None:
        if field is None:
            return None
        return P(rows or None) if field.ndim > least and field.shape[0] > 1 else P()

    dense = None if mask.dense is None else P()
    return replace(mask, dense=dense, **{name: of_rows(getattr(mask, name), least) for name, least in _ROWS.items()})
