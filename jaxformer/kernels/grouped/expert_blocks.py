"""Products of groups of rows, each group with its own weight, in blocks of rows: for CPUs.

`lax.ragged_dot` multiplies every row with every weight there, E times the work. Here every group begins a new block, so
that one weight belongs to each block, and a loop takes one block after another; blocks beyond the last group are never
visited. The backward pass is a loop of its own, because the one that JAX derives would keep the weight of every block.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformer.kernels import derivatives
from jaxformer.kernels.grouped import row_blocks
from jaxformer.kernels.matmul import rounded_einsum, times_transpose, transposed_product
from jaxformer.types import Array

alignment = functools.partial(row_blocks.block_rows, smallest=8)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 4))
def product_of(
    function: Callable[..., Array], inputs: tuple[Array, ...], weights: Array, sizes: Array, block: int
) -> Array:
    """See `functional.grouped_choice.Grouped.product_of`; `block` divides the number of rows."""

    def visit(number: Array, out: Array) -> Array:
        hidden = function(*(_at(x, number, block) for x in inputs))
        found = rounded_einsum("ND,DF->NF", hidden, _of_group(weights, owners[number], hidden.dtype), hidden.dtype)
        return _put(out, found, number, block)

    rows = inputs[0].shape[0]
    owners, count = owners_of(sizes, rows, block)
    return jax.lax.fori_loop(0, count, visit, jnp.zeros((rows, weights.shape[2]), inputs[0].dtype))


def _backward(function, block, saved, g):
    inputs, weights, sizes = saved
    owners, count = owners_of(sizes, g.shape[0], block)

    def visit(number, sums):
        d_inputs, d_weights = sums
        part, owner = _at(g, number, block), owners[number]
        d_hidden = times_transpose(part, _of_group(weights, owner, part.dtype), part.dtype)
        hidden, pull = jax.vjp(function, *(_at(x, number, block) for x in inputs))
        d_inputs = tuple(_put(d, new, number, block) for d, new in zip(d_inputs, pull(d_hidden), strict=True))
        old = jax.lax.dynamic_index_in_dim(d_weights, owner, keepdims=False)
        new = old + transposed_product(hidden, part, weights.dtype)
        return d_inputs, jax.lax.dynamic_update_index_in_dim(d_weights, new, owner, 0)

    zeros = tuple(map(jnp.zeros_like, inputs)), jnp.zeros_like(weights)
    return *jax.lax.fori_loop(0, count, visit, zeros), None


def _tangent(function, block, saved, changes):
    inputs, weights, sizes = saved
    hidden, change = jax.jvp(function, inputs, changes[0])
    first = product_of(_same, (change,), weights, sizes, block)
    return first + product_of(_same, (hidden,), changes[1], sizes, block)


derivatives.define(product_of, None, _tangent, _backward, loops=True)


def _same(x: Array) -> Array:
    return x


def owners_of(sizes: Array, rows: int, block: int) -> tuple[Array, Array]:
    """The group of each block, [rows / block] int32, and how many blocks have one."""
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    begins = jnp.arange(0, rows, block, dtype=jnp.int32)
    owners = jnp.sum(begins[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    return jnp.minimum(owners, len(sizes) - 1), ends[-1] // block


def _of_group(weights: Array, group: Array, dtype) -> Array:
    return jax.lax.dynamic_index_in_dim(weights, group, keepdims=False).astype(dtype)


def _at(x: Array, number: Array, block: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, number * block, block)


def _put(x: Array, new: Array, number: Array, block: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), number * block, 0)
