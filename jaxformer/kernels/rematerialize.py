"""Rematerialisation that works on CPU: recompute a value in the backward pass instead of keeping it in memory.

XLA merges equal computations and keeps the result between its uses, and its CPU backend removes `optimization_barrier`
first. Making the value depend on the incoming gradient forces XLA to recompute it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxformer.types import Array

# Name (`checkpoint_name`) of small arrays that all layers compute alike: no layer computes them again.
SAME_IN_ALL_LAYERS = "same_in_all_layers"
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


def rematerialize(x: Array, gradient: Array, kept_bytes: int | None = None) -> Array:
    """`x`, but if worthwhile depending on `gradient`, so that whatever is computed from it waits for the gradient.

    Args:
      x: of any shape.
      gradient: broadcasts to x. Where it is NaN, so is the result.
      kept_bytes: size of what would be kept in memory otherwise; None: that of x.

    Returns:
      An array equal to x.
    """

    def on_cpu(x, gradient):
        return x + jnp.minimum(jnp.abs(gradient), 0).astype(x.dtype)

    kept_bytes = x.size * x.dtype.itemsize if kept_bytes is None else kept_bytes
    if x.dtype.itemsize <= _NARROW or kept_bytes < _WORTH_IT:
        return x
    return jax.lax.platform_dependent(x, gradient, cpu=on_cpu, default=lambda x, gradient: x)
