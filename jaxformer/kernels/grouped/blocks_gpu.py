"""Products of groups of rows, each group with its own weight, in blocks of rows: a kernel for NVIDIA GPUs.

XLA makes of `lax.ragged_dot` one product of all rows with all weights there, E times the work. Here every group begins
a new block, so that one weight belongs to each block of rows. A program has one block and some columns of its output
and walks over the width; blocks beyond the last group have nothing to walk over. The weight's gradient has a program
for every tile of every weight, which walks over the rows of its group.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxformer.kernels.grouped import row_blocks
from jaxformer.types import Array

INTERPRET = False  # True in tests: Pallas's interpreter
STEP = 64  # of widths: they are multiples of it
alignment = functools.partial(row_blocks.block_rows, smallest=16)  # the tensor cores want 16
unsupported = functools.partial(row_blocks.unsupported, STEP)


def products_of(
    function: Callable[..., Array], inputs: tuple[Array, ...], weights: tuple[Array, ...], sizes: Array, align: int
) -> tuple[Array, ...]:
    """See `in_two.ProductsOf`; the rest as of `functional.grouped_choice.Grouped.mlp_of`.

    Supports `jax.grad` but not `jax.jvp`.
    """

    def products(inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> tuple[Array, ...]:
        hidden = function(*inputs)
        return tuple(_product(align, hidden, weight, sizes) for weight in weights)

    return jax.checkpoint(products, prevent_cse=False)(inputs, weights)  # only the inputs are kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(block: int, hidden: Array, weights: Array, sizes: Array) -> Array:
    """[M, D] and [E, D, F] -> [M, F], zeros after the last group."""
    return _times(block, hidden, weights.astype(hidden.dtype), sizes, turned=False)


def _forward(block: int, hidden: Array, weights: Array, sizes: Array) -> tuple[Array, Any]:
    return _product(block, hidden, weights, sizes), (hidden, weights, sizes)


def _backward(block: int, saved: Any, g: Array) -> tuple[Array, Array, None]:
    hidden, weights, sizes = saved
    d_hidden = _times(block, g, weights.astype(g.dtype), sizes, turned=True)
    return d_hidden, _summed(block, hidden, g, sizes, weights.dtype), None


_product.defvjp(_forward, _backward)


def _tile(size: int) -> int:
    return 2 * STEP if size % (2 * STEP) == 0 else STEP


def _step(dtype: Any) -> int:
    """How far a program walks at once: two tiles for each of three stages have to lie in the shared memory."""
    return STEP * 2 // max(2, jnp.dtype(dtype).itemsize)


def _launch(name: str, rows: int, columns: int) -> dict[str, Any]:
    """What `pallas_call` is told of a kernel whose programs compute so many numbers each."""
    warps = min(8, max(1, rows * columns // 1024))  # no more than a tile has work for
    return {
        "name": name,
        "interpret": INTERPRET,
        "compiler_params": triton.CompilerParams(num_warps=warps, num_stages=3),
    }


def _times(block: int, x: Array, weights: Array, sizes: Array, turned: bool) -> Array:
    """Every row of x times the weight of its group, or the transpose of that."""
    rows, (groups, width, out) = x.shape[0], weights.shape
    width, out = (out, width) if turned else (width, out)
    tile = _tile(out)
    owners = _owners_of(sizes, rows, block)
    of_tile = (groups, tile, width) if turned else (groups, width, tile)
    return pl.pallas_call(
        functools.partial(_product_kernel, groups, turned),
        grid=(rows // block, out // tile),
        in_specs=[
            pl.BlockSpec(owners.shape, lambda i, j: (0,)),
            pl.BlockSpec((block, width), lambda i, j: (i, 0)),
            pl.BlockSpec(of_tile, lambda i, j: (0, j, 0) if turned else (0, 0, j)),
        ],
        out_specs=pl.BlockSpec((block, tile), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows, out), x.dtype),
        **_launch("grouped_gpu_product", block, tile),
    )(owners, x, weights)


def _owners_of(sizes: Array, rows: int, block: int) -> Array:
    """The group of each block, [rows / block] int32; after the last group the number of groups."""
    begins = jnp.arange(0, rows, block, dtype=jnp.int32)
    return jnp.sum(begins[:, None] >= jnp.cumsum(sizes, dtype=jnp.int32)[None, :], axis=1, dtype=jnp.int32)


def _product_kernel(groups: int, turned: bool, owners: Any, x: Any, weights: Any, out: Any) -> None:
    group, width, size = owners[pl.program_id(0)], x.shape[1], _step(x.dtype)
    known = jnp.minimum(group, groups - 1)

    def step(number: Array, total: Array) -> Array:
        along = pl.ds(number * size, size)
        part = triton.load(x.at[:, along])
        if turned:
            return total + triton.dot(part, triton.load(weights.at[known, :, along]).T)
        return total + triton.dot(part, triton.load(weights.at[known, along, :]))

    steps = jnp.minimum(groups - group, 1) * np.int32(width // size)  # 0 for a block of no group
    zeros = jnp.zeros(out.shape, jnp.float32)
    out[...] = jax.lax.fori_loop(np.int32(0), steps, step, zeros).astype(out.dtype)


def _summed(block: int, x: Array, g: Array, sizes: Array, dtype: Any) -> Array:
    """[M, D] and [M, F] -> for each group the sum over its rows of the outer products, [E, D, F]."""
    (rows, width), out = x.shape, g.shape[1]
    size = min(block, _step(x.dtype))
    ends = jnp.append(0, jnp.cumsum(sizes, dtype=jnp.int32)) // size
    tiles = _tile(width), _tile(out)
    return pl.pallas_call(
        functools.partial(_weight_kernel, size),
        grid=(len(sizes), width // tiles[0], out // tiles[1]),
        in_specs=[
            pl.BlockSpec(ends.shape, lambda e, i, j: (0,)),
            pl.BlockSpec((rows, tiles[0]), lambda e, i, j: (0, i)),
            pl.BlockSpec((rows, tiles[1]), lambda e, i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((None, *tiles), lambda e, i, j: (e, i, j)),
        out_shape=jax.ShapeDtypeStruct((len(sizes), width, out), dtype),
        **_launch("grouped_gpu_weights", *tiles),
    )(ends, x, g)


def _weight_kernel(size: int, ends: Any, x: Any, g: Any, out: Any) -> None:
    group = pl.program_id(0)

    def visit(number: Array, total: Array) -> Array:
        some = pl.ds(number * size, size)
        return total + triton.dot(triton.load(x.at[some, :]).T, triton.load(g.at[some, :]))

    zeros = jnp.zeros(out.shape, jnp.float32)
    out[...] = jax.lax.fori_loop(ends[group], ends[group + 1], visit, zeros).astype(out.dtype)
