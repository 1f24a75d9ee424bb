"""Weights that `fsdp` shards along the model's width, whole where they are used: sent in the compute dtype.

Their gradients are summed and scattered in the weights' own dtype. Left to itself, XLA sends weights in their own dtype
too on GPUs, where a product wants another layout than that of the parameters, and each weight once for every use.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxformer.kernels import derivatives
from jaxformer.low_rank import map_weights
from jaxformer.parallel.constraints import RULES, entries, mesh_axes
from jaxformer.types import Array


def gathered_params(params: Any, specs: Any, dtype: str) -> Any:
    """Parameters of a layer, hidden matrices whole along the width, rounded to `dtype` but in their own dtypes.

    A layer that is computed again in the backward pass uses each weight twice there; said like this it is gathered
    once. Others than hidden matrices stay as they are, such as a router's, which is not to be rounded; those of experts
    are gathered where they are used (`gathered`).

    Args:
      params: of a layer.
      specs: a tree like it.
      dtype: of the computation.
    """

    def whole(spec: Any, x: Array) -> Array:
        lie = entries(x.shape, spec.axes, RULES)
        kept = [None if axis == "embed" else entry for axis, entry in zip(spec.axes, lie, strict=True)]
        there = kept == lie or spec.role != "hidden" or "experts" in spec.axes
        return x if there else _constrained(x, P(*kept), jnp.dtype(dtype))

    return map_weights(whole, specs, params) if mesh_axes() else params


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _constrained(x: Array, where: P, dtype: Any) -> Array:
    small = jax.lax.optimization_barrier(x.astype(dtype))  # so that XLA does not round it after it is sent
    return jax.lax.with_sharding_constraint(small, where).astype(x.dtype)


derivatives.define(
    _constrained,
    lambda x, where, dtype: (_constrained(x, where, dtype), ()),
    lambda where, dtype, saved, changes: changes[0],
    lambda where, dtype, saved, g: (g,),
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def gathered(w: Array, over: tuple[str, ...], axis: int, dtype: Any) -> Array:
    """All parts of a weight, rounded to `dtype` but in its own dtype. Inside shard_map.

    Args:
      w: this device's part.
      over: mesh axes.
      axis: which is sharded over them.
      dtype: of the computation.
    """
    return jax.lax.all_gather(w.astype(dtype), over, axis=axis, tiled=True).astype(w.dtype)


derivatives.define(
    gathered,
    lambda w, over, axis, dtype: (gathered(w, over, axis, dtype), ()),
    lambda over, axis, dtype, saved, changes: jax.lax.all_gather(changes[0], over, axis=axis, tiled=True),
    lambda over, axis, dtype, saved, g: (jax.lax.psum_scatter(g, over, scatter_dimension=axis, tiled=True),),
)
