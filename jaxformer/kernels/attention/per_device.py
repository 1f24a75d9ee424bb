"""Attention without communication on a mesh: every device computes its own rows and heads, by any implementation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from jaxformer.kernels.attention import shard_specs
from jaxformer.kernels.attention.xla import Bias
from jaxformer.kernels.attention.xla_vjp import rank4
from jaxformer.masks import Mask
from jaxformer.parallel import constraints
from jaxformer.types import Array


def attend(
    implementation: Callable[..., Any],
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    bias: Bias | None,
    *,
    rng: Array | None,
    return_log_sum: bool = False,
    **options: Any,
) -> Any:
    """Attention as `functional.attention.attention` documents it, on the current mesh; arguments are checked there.

    Each device draws its own dropout, so the result depends on the mesh.
    """
    sizes = constraints.mesh_axes()
    key, value, heads = shard_specs.head_axes(query, key, value, sizes)
    rows = constraints.splits(query.shape[0], constraints.ACTIVATION_RULES["batch_rows"], sizes)
    # A Partial passes a function's arrays as arguments: shard_map cannot close over arrays of another mesh.
    bias = Partial(bias) if callable(bias) and not isinstance(bias, Partial) else bias

    def local(query, key, value, mask, bias, rng):
        if rng is not None:
            for axis in rows + heads:
                rng = jax.random.fold_in(rng, jax.lax.axis_index(axis))

        def own(x: Array) -> Array:  # [B or 1, H or 1, ...] of all rows and heads -> those of this device
            x = rank4(x)
            for axis, names in ((0, rows), (1, heads)):
                if x.shape[axis] > 1 and names:
                    size = query.shape[(0, 2)[axis]]
                    x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(names) * size, size, axis)
            return x

        if bias is not None:
            bias = (lambda q, k, whole=bias: own(whole(q, k))) if callable(bias) else own(bias)
        mask = replace(mask, dense=None if mask.dense is None else own(mask.dense))
        if heads and mask.patterns:
            at = jax.lax.axis_index(heads) * query.shape[2] + jnp.arange(query.shape[2])
            mask = replace(mask, heads=at if mask.heads is None else mask.heads[at])
        return implementation(
            query, key, value, mask, bias, rng=rng, return_log_sum=return_log_sum, **options
        )  # fmt: skip

    array, numbers = P(rows or None, None, heads or None), P(rows or None, heads or None)
    whole = (None if x is None else P() for x in (bias, rng))
    run = jax.shard_map(
        local,
        in_specs=(array, array, array, shard_specs.mask_specs(mask, rows), *whole),
        out_specs=(array, numbers) if return_log_sum else array,
        check_vma=False,
    )
    return run(query, key, value, mask, bias, rng)
