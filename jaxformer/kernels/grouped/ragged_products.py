"""Products of groups of rows, each group with its own weight, by `jax.lax.ragged_dot`: anywhere, for
what no other implementation can do."""

from collections.abc import Callable

import jax

from jaxformer.types import Array


def alignment(rows: int, groups: int) -> int:
    """1: groups may begin anywhere."""
    return 1


def products_of(
    function: Callable[..., Array], inputs: tuple[Array, ...], weights: tuple[Array, ...], sizes: Array, align: int
) -> tuple[Array, ...]:
    """See `in_two.ProductsOf`; the rest as of `functional.grouped_choice.Grouped.mlp_of`."""

    def products(inputs: tuple[Array, ...], weights: tuple[Array, ...]) -> tuple[Array, ...]:
        hidden = function(*inputs)
        return tuple(jax.lax.ragged_dot(hidden, weight.astype(hidden.dtype), sizes) for weight in weights)

    return jax.checkpoint(products, prevent_cse=False)(inputs, weights)  # only the inputs are kept
