"""Products of groups of rows, each group with its own weight, by `jax.lax.ragged_dot`: anywhere, for
what no other implementation can do."""

from collections.abc import Callable

import jax

from jaxformer.types import Array


def alignment(rows: int, groups: int) -> int:
    """1: groups may begin anywhere."""
    return 1


def product_of(
    function: Callable[..., Array], inputs: tuple[Array, ...], weights: Array, sizes: Array, align: int
) -> Array:
    """See `functional.grouped_choice.Grouped.product_of`."""

    def product(inputs: tuple[Array, ...], weights: Array) -> Array:
        hidden = function(*inputs)
        return jax.lax.ragged_dot(hidden, weights.astype(hidden.dtype), sizes)

    return jax.checkpoint(product, prevent_cse=False)(inputs, weights)  # only the inputs are kept
