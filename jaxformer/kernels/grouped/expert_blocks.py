"""A feed-forward layer of groups of rows, each group with weights of its own, in blocks of rows: for CPUs.

`lax.ragged_dot` multiplies every row with every weight on CPUs, E times the work. Here every group begins a new block,
so that one weight belongs to each block, and loops take one part of a group after another; blocks beyond the last group
are never visited. A part is up to eight blocks of one group, because a product of few rows keeps only one core busy.

A visit takes its part through the whole layer, forward or backward. XLA's CPU backend splits products over the cores,
but inside a loop nothing else; what is computed for each number keeps the other core busy while there are products to
do. The backward pass has loops of its own, because those that JAX derives would keep the weights of every part.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxformer.kernels import derivatives
from jaxformer.kernels.grouped import row_blocks
from jaxformer.kernels.matmul import rounded_einsum, times_transpose, transposed_product
from jaxformer.kernels.rematerialize import PRODUCT
from jaxformer.types import Array

TOGETHER = (8, 4, 2, 1)  # blocks of a part
Arrays = tuple[Array, ...]
Function = Callable[..., Array]
alignment = functools.partial(row_blocks.block_rows, smallest=8)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 5))
def mlp_of(function: Function, x: Array, first: Arrays, last: Array, sizes: Array, block: int) -> Array:
    """See `functional.grouped_choice.Grouped.mlp_of`; `block` divides the number of rows."""
    return _forward(function, x, first, last, sizes, block)[0]


def _forward(function, x, first, last, sizes, block):
    out, found = _whole(_products, function, block)(x, first, last, sizes)
    return out, (x, tuple(checkpoint_name(each, PRODUCT) for each in found), first, last, sizes)


def _backward(function, block, saved, g):
    return *_whole(_gradients, function, block)(saved, g), None


def _tangent(function, block, saved, changes):
    x, _, first, last, sizes = saved

    def visit(out: Array, begin: Array, owner: Array, size: int) -> Array:
        def given(x: Array, first: Arrays, last: Array) -> tuple[Array, Arrays, Array]:
            return _at(x, begin, size), _of_group(first, owner, x.dtype), _of_group((last,), owner, x.dtype)[0]

        change = jax.jvp(functools.partial(_layer, function), given(x, first, last), given(*changes[:3]))[1]
        return _put(out, change[0], begin)

    return _visit_parts(visit, jnp.zeros((len(x), last.shape[2]), x.dtype), sizes, len(x), block)


derivatives.define(mlp_of, _forward, _tangent, _backward)


def _whole(loops: Callable[..., Any], function: Function, block: int) -> Callable[..., Any]:
    """The loops as a call that JAX does not split; their derivative is that of loops over numbers, not over bits."""
    fast, plain = (functools.partial(loops, function, block, bits) for bits in (True, False))
    return derivatives.apart(fast, plain)


def _layer(function: Function, rows: Array, first: Arrays, last: Array) -> tuple[Array, Arrays]:
    """A part's output, and its products with the first weights."""
    found = tuple(rounded_einsum("ND,DF->NF", rows, weight, rows.dtype) for weight in first)
    return rounded_einsum("NF,FD->ND", function(*found), last, rows.dtype), found


def _products(function: Function, block: int, bits: bool, x: Array, first: Arrays, last: Array, sizes: Array) -> Any:
    """[M, D] out, and the products with the first weights, [M, F] each."""

    def visit(carried: Any, begin: Array, owner: Array, size: int) -> Any:
        given = _at(x, begin, size), _of_group(first, owner, x.dtype), _of_group((last,), owner, x.dtype)[0]
        return jax.tree.map(lambda all_rows, new: _put(all_rows, new, begin), carried, _layer(function, *given))

    empty = functools.partial(_empty, len(x), x.dtype, bits)
    carried = empty(last.shape[2]), tuple(empty(weight.shape[2]) for weight in first)
    return _numbers(_visit_parts(visit, carried, sizes, len(x), block), x.dtype)


def _gradients(function: Function, block: int, bits: bool, saved: Any, g: Array) -> Any:
    """Those of x, of the first weights and of the last."""
    x, found, first, last, sizes = saved

    def visit(carried: Any, begin: Array, owner: Array, size: int) -> Any:
        d_x, d_first, d_last = carried
        part, rows = _at(g, begin, size), _at(x, begin, size)
        d_hidden = times_transpose(part, _of_group((last,), owner, g.dtype)[0], g.dtype)
        hidden, pull = jax.vjp(function, *(_at(each, begin, size) for each in found))
        d_found = pull(d_hidden)
        pairs = zip(d_found, _of_group(first, owner, g.dtype), strict=True)
        d_rows = functools.reduce(jnp.add, (times_transpose(each, weight, g.dtype) for each, weight in pairs))
        of_first = (transposed_product(rows, each, d.dtype) for each, d in zip(d_found, d_first, strict=True))
        return (
            _put(d_x, d_rows, begin),
            tuple(_add_to_group(d, owner, new) for d, new in zip(d_first, of_first, strict=True)),
            _add_to_group(d_last, owner, transposed_product(hidden, part, d_last.dtype)),
        )

    carried = _empty(len(x), x.dtype, bits, x.shape[1]), *jax.tree.map(jnp.zeros_like, (first, last))
    d_x, *of_weights = _visit_parts(visit, carried, sizes, len(x), block)
    return _numbers(d_x, x.dtype), *of_weights


def _visit_parts(visit: Callable[..., Any], out: Any, sizes: Array, rows: int, block: int) -> Any:
    """`out` after ``out = visit(out, first row, group, number of rows)`` for parts that together are all groups."""
    begins, left = jnp.cumsum(sizes, dtype=jnp.int32) - sizes, sizes
    for size in (block * number for number in TOGETHER if block * number <= rows):
        parts = left // size
        ends = jnp.cumsum(parts, dtype=jnp.int32)

        def turn(number: Array, out: Any, size: int = size, about: tuple = (begins, parts, ends)) -> Any:
            begins, parts, ends = about
            owner = jnp.sum(number >= ends, dtype=jnp.int32)
            return visit(out, begins[owner] + (number - ends[owner] + parts[owner]) * size, owner, size)

        out = jax.lax.fori_loop(0, ends[-1], turn, out)
        begins, left = begins + parts * size, left - parts * size
    return out


def _of_group(weights: Arrays, group: Array, dtype: Any) -> Arrays:
    return tuple(jax.lax.dynamic_index_in_dim(each, group, keepdims=False).astype(dtype) for each in weights)


def _add_to_group(sums: Array, group: Array, new: Array) -> Array:
    old = jax.lax.dynamic_index_in_dim(sums, group, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(sums, old + new, group, 0)


def _empty(rows: int, dtype: Any, bits: bool, width: int) -> Array:
    """[rows, width] of zeros. Of 16-bit numbers their bits, if wanted: to write a few rows of the numbers themselves,
    XLA's CPU backend converts all rows to float32 and back."""
    return jnp.zeros((rows, width), jnp.uint16 if bits and dtype.itemsize == 2 else dtype)


def _numbers(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype), tree)


def _at(x: Array, first: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, first, size)


def _put(x: Array, new: Array, first: Array) -> Array:
    new = new if x.dtype == new.dtype else jax.lax.bitcast_convert_type(new, x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(x, new, first, 0)
