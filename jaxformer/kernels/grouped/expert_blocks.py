"""Products of groups of rows, each group with its own weight, in blocks of rows: for CPUs.

`lax.ragged_dot` multiplies every row with every weight on CPUs, E times the work. Here every group begins a new block,
so that one weight belongs to each block, and loops take one part of a group after another; blocks beyond the last group
are never visited. A part is up to eight blocks of one group, because a product of few rows keeps only one core busy.
The backward pass has loops of its own, because those that JAX derives would keep the weight of every part.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.kernels import derivatives
from jaxformer.kernels.grouped import row_blocks
from jaxformer.kernels.matmul import rounded_einsum, times_transpose, transposed_product
from jaxformer.types import Array

TOGETHER = (8, 4, 2, 1)  # blocks of a part
alignment = functools.partial(row_blocks.block_rows, smallest=8)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 4))
def product_of(
    function: Callable[..., Array], inputs: tuple[Array, ...], weights: Array, sizes: Array, block: int
) -> Array:
    """See `functional.grouped_choice.Grouped.product_of`; `block` divides the number of rows."""

    def add(out: Array, first: Array, owner: Array, size: int) -> Array:
        hidden = function(*(_at(x, first, size) for x in inputs))
        found = rounded_einsum("ND,DF->NF", hidden, _of_group(weights, owner, hidden.dtype), hidden.dtype)
        return _put(out, found, first)

    rows = inputs[0].shape[0]
    return _visit_parts(add, jnp.zeros((rows, weights.shape[2]), inputs[0].dtype), sizes, rows, block)


def _backward(function, block, saved, g):
    inputs, weights, sizes = saved

    def add(sums, first, owner, size):
        d_inputs, d_weights = sums
        part = _at(g, first, size)
        d_hidden = times_transpose(part, _of_group(weights, owner, part.dtype), part.dtype)
        hidden, pull = jax.vjp(function, *(_at(x, first, size) for x in inputs))
        d_inputs = tuple(_put(d, new, first) for d, new in zip(d_inputs, pull(d_hidden), strict=True))
        old = jax.lax.dynamic_index_in_dim(d_weights, owner, keepdims=False)
        new = old + transposed_product(hidden, part, weights.dtype)
        return d_inputs, jax.lax.dynamic_update_index_in_dim(d_weights, new, owner, 0)

    zeros = tuple(map(jnp.zeros_like, inputs)), jnp.zeros_like(weights)
    return *_visit_parts(add, zeros, sizes, g.shape[0], block), None


def _tangent(function, block, saved, changes):
    inputs, weights, sizes = saved
    hidden, change = jax.jvp(function, inputs, changes[0])
    first = product_of(_same, (change,), weights, sizes, block)
    return first + product_of(_same, (hidden,), changes[1], sizes, block)


derivatives.define(product_of, None, _tangent, _backward, loops=True)


def _same(x: Array) -> Array:
    return x


def _visit_parts(add: Callable[..., Any], out: Any, sizes: Array, rows: int, block: int) -> Any:
    """`out` after ``out = add(out, first row, group, number of rows)`` for parts that together are all groups."""
    begins, left = jnp.cumsum(sizes, dtype=jnp.int32) - sizes, sizes
    for size in (block * number for number in TOGETHER if block * number <= rows):
        parts = left // size
        ends = jnp.cumsum(parts, dtype=jnp.int32)

        def visit(number: Array, out: Any, size: int = size, about: tuple = (begins, parts, ends)) -> Any:
            begins, parts, ends = about
            owner = jnp.sum(number >= ends, dtype=jnp.int32)
            return add(out, begins[owner] + (number - ends[owner] + parts[owner]) * size, owner, size)

        out = jax.lax.fori_loop(0, ends[-1], visit, out)
        begins, left = begins + parts * size, left - parts * size
    return out


def _of_group(weights: Array, group: Array, dtype) -> Array:
    return jax.lax.dynamic_index_in_dim(weights, group, keepdims=False).astype(dtype)


def _at(x: Array, first: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, first, size)


def _put(x: Array, new: Array, first: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), first, 0)
