"""Rematerialisation that XLA does not undo: recompute a value in the backward pass instead of keeping it in memory.

XLA merges equal computations and keeps the result between its uses. Its CPU backend removes `optimization_barrier`
first, and on GPUs what a barrier holds is written out. Making the value depend on the incoming gradient forces XLA to
recompute it, fused with what uses it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxformer.types import Array

# Name (`checkpoint_name`) of small arrays that all layers compute alike: no layer computes them again.
SAME_IN_ALL_LAYERS = "same_in_all_layers"
# Name of the results of products with weights: policies cannot see the products inside a custom derivative.
PRODUCT = "linear_product"
# Name of attention's output and of what turns its scores into weights: with them, the backward pass need not compute
# attention's forward pass again.
ATTENTION = "attention"
_WORTH_IT = 2**20  # bytes; smaller arrays fit in the CPU's caches
_NARROW = 2  # bytes per number; 16-bit arrays save half as much memory and need conversions, so steps get slower


def named_attention(tree: Any) -> Any:
    """The same arrays, under the name `ATTENTION`."""
    return jax.tree.map(lambda x: checkpoint_name(x, ATTENTION), tree)


def keeps_attention(primitive: Any, *arrays: Any, **options: Any) -> bool:
    """A policy of `jax.checkpoint`: cuDNN's output and statistics, which have no name, are kept."""
    return primitive.name.startswith("dot_product_attention_fwd")


def rematerialize(x: Array, gradient: Array, kept_bytes: int | None = None, *, elementwise: bool = False) -> Array:
    """`x`, but if worthwhile depending on `gradient`, so that whatever is computed from it waits for the gradient.

    Args:
      x: of any shape.
      gradient: broadcasts to x. Where it is NaN, so is the result.
      kept_bytes: size of what would be kept in memory otherwise; None: that of x.
      elementwise: only numbers of x and of the gradient that belong together are computed with. Then it is worthwhile
        on GPUs too, in any dtype: otherwise XLA keeps what it finds costly in between, such as a float32 tanh.

    Returns:
      An array equal to x.
    """

    def same(x, gradient):
        return x

    def dependent(x, gradient):
        return x + jnp.minimum(jnp.abs(gradient), 0).astype(x.dtype)

    kept_bytes = x.size * x.dtype.itemsize if kept_bytes is None else kept_bytes
    on_cpu = x.dtype.itemsize > _NARROW
    if kept_bytes < _WORTH_IT or not (on_cpu or elementwise):
        return x
    branches = {"cpu": dependent if on_cpu else same, "cuda": dependent if elementwise else same}
    return jax.lax.platform_dependent(x, gradient, **branches, default=same)
