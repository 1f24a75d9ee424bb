"""A weight that is stored by columns, as CPUs read it fastest where few tokens are multiplied by it.

`functional.layers.linear` takes a `Columns` where it takes a weight, for decoding.

>>> from jaxformer.functional.layers import linear
>>> w = jnp.arange(24.0).reshape(3, 4, 2)
>>> float(jnp.max(jnp.abs(linear(jnp.ones((5, 3)), by_columns(w)) - linear(jnp.ones((5, 3)), w))))
0.0
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformer.kernels.matmul import FEW_ROWS, rounded_einsum, times_transpose
from jaxformer.low_rank import Columns
from jaxformer.types import Array


def by_columns(w: Array, num_inputs: int = 1) -> Columns:
    """`w` stored by columns. `num_inputs`: how many of its leading axes are summed over."""
    return Columns(w.reshape(math.prod(w.shape[:num_inputs]), -1).T, w.shape)


def times_columns(x: Array, w: Array, dtype) -> Array:
    """x w^T of a weight that is stored by columns. `x`: [N, D]; `w`: [F, D]. Returns [N, F] in `dtype`.

    On CPU few rows, as of a token that is decoded, are the second factor: then the weight, which is all there is to
    read, is read as it lies. That takes 0.4 to 1.0 of the time of x times a weight stored by rows.
    """

    def plain(x, w):
        return rounded_einsum("ND,FD->NF", x, w, dtype)

    def few(x, w):
        wide = jnp.promote_types(dtype, jnp.float32)
        out = jax.lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=wide)
        # Without the barrier XLA would exchange the factors again.
        return jax.lax.optimization_barrier(out).T.astype(dtype)

    if len(x) > FEW_ROWS:
        return times_transpose(x, w, dtype)
    return jax.lax.platform_dependent(x, w, cpu=functools.partial(a_row_as_two, few), default=plain)


def a_row_as_two(function: Callable[[Array, Array], Array], x: Array, w: Array) -> Array:
    """function(x, w), a product of rows [..., D] with a matrix; on CPU a single 16-bit row is computed twice, because
    XLA has a fast routine for two, which takes an eighth to a half of the time."""

    def twice(x, w):
        return function(jnp.concatenate([x, x]), w)[: len(x)]

    if x.dtype.itemsize >= 4 or x.ndim < 2 or x.size != x.shape[-1]:
        return function(x, w)
    return jax.lax.platform_dependent(x, w, cpu=twice, default=function)
