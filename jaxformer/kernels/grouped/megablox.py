"""Products of groups of rows, each group with its own weight, by the TPU kernel that comes with JAX ("megablox").

`lax.ragged_dot` is such a kernel there too, but its weight gradient is a dense product, E times the work.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformer.kernels.grouped import row_blocks
from jaxformer.types import Array

INTERPRET = False  # True in tests: Pallas's interpreter
TILE = 128


def alignment(rows: int, groups: int) -> int:
    """1: groups may begin anywhere; `products_of` fills all rows together up to whole tiles."""
    return 1


unsupported = functools.partial(row_blocks.unsupported, TILE)


def products_of(
    function: Callable[..., Array], inputs: tuple[Array, ...], weights: tuple[Array, ...], sizes: Array, align: int
) -> tuple[Array, ...]:
    """See `in_two.ProductsOf`; the rest as of `functional.grouped_choice.Grouped.mlp_of`.

    Supports `jax.grad` but not `jax.jvp`.
    """
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    rows = inputs[0].shape[0]

    def products(inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> tuple[Array, ...]:
        hidden = jnp.pad(function(*inputs), ((0, -rows % TILE), (0, 0)))

        def product(weight: Array) -> Array:
            tiling = (TILE, min(512, weight.shape[1]), min(512, weight.shape[2]))
            sizes_of, weight = sizes.astype(jnp.int32), weight.astype(hidden.dtype)
            return gmm(hidden, weight, sizes_of, hidden.dtype, tiling, interpret=INTERPRET)[:rows]

        return tuple(map(product, weights))

    return jax.checkpoint(products, prevent_cse=False)(inputs, weights)
