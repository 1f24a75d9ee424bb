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
def products_of(
    function: Callable[..., Array], inputs: tuple[Array, ...], weights: tuple[Array, ...], sizes: Array, block: int
) -> tuple[Array, ...]:
    """See `functional.grouped_choice.Grouped.products_of`; `block` divides the number of rows."""

    def add(outs: tuple[Array, ...], first: Array, owner: Array, size: int) -> tuple[Array, ...]:
        hidden = function(*(_at(x, first, size) for x in inputs))
        each = (_of_group(w, owner, hidden.dtype) for w in weights)
        found = [rounded_einsum("ND,DF->NF", hidden, weight, hidden.dtype) for weight in each]
        return tuple(_put(out, new, first) for out, new in zip(outs, found, strict=True))

    rows, dtype = inputs[0].shape[0], inputs[0].dtype
    return _visit_parts(add, tuple(jnp.zeros((rows, w.shape[2]), dtype) for w in weights), sizes, rows, block)


def _backward(function, block, saved, gs):
    inputs, weights, sizes = saved

    def add(sums, first, owner, size):
        d_inputs, d_weights = sums
        parts = [_at(g, first, size) for g in gs]
        each = [_of_group(w, owner, parts[0].dtype) for w in weights]
        through = (times_transpose(part, w, part.dtype) for part, w in zip(parts, each, strict=True))
        d_hidden = functools.reduce(jnp.add, through)
        hidden, pull = jax.vjp(function, *(_at(x, first, size) for x in inputs))
        d_inputs = tuple(_put(d, new, first) for d, new in zip(d_inputs, pull(d_hidden), strict=True))
        added = [transposed_product(hidden, part, w.dtype) for part, w in zip(parts, weights, strict=True)]
        return d_inputs, tuple(_add_to_group(d, owner, new) for d, new in zip(d_weights, added, strict=True))

    zeros = tuple(map(jnp.zeros_like, inputs)), tuple(map(jnp.zeros_like, weights))
    return *_visit_parts(add, zeros, sizes, gs[0].shape[0], block), None


def _tangent(function, block, saved, changes):
    inputs, weights, sizes = saved
    hidden, change = jax.jvp(function, inputs, changes[0])
    first = products_of(_same, (change,), weights, sizes, block)
    return tuple(map(jnp.add, first, products_of(_same, (hidden,), changes[1], sizes, block)))


derivatives.define(products_of, None, _tangent, _backward, loops=True)


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


def _add_to_group(sums: Array, group: Array, new: Array) -> Array:
    old = jax.lax.dynamic_index_in_dim(sums, group, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(sums, old + new, group, 0)


def _at(x: Array, first: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, first, size)


def _put(x: Array, new: Array, first: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), first, 0)
