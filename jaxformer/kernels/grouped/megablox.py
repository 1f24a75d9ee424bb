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
    """1: groups may begin anywhere; `product_of` fills all rows together up to whole tiles."""
    return 1


unsupported = functools.partial(row_blocks.unsupported, TILE)


def product_of(
    function: Callable[..., Array], inputs: tuple[Array, ...], weights: Array, sizes: Array, align: int
) -> Array:
    """See `functional.grouped_choice.Grouped.product_of`. Supports `jax.grad` but not `jax.jvp`."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    rows = inputs[0].shape[0]

    def product(inputs: tuple[Array, ...], weights: Array) -> Array:
        hidden = function(*inputs)
        hidden = jnp.pad(hidden, ((0, -rows % TILE), (0, 0)))
        tiling = (TILE, min(512, weights.shape[1]), min(512, weights.shape[2]))
        sizes_of = sizes.astype(jnp.int32)
        out = gmm(hidden, weights.astype(hidden.dtype), sizes_of, hidden.dtype, tiling, interpret=INTERPRET)
        return out[:rows]

    return jax.checkpoint(product, prevent_cse=False)(inputs, weights)
