"""A feed-forward layer of groups of rows as two products, for implementations that have no more than products."""

from collections.abc import Callable

from jax.ad_checkpoint import checkpoint_name

from jaxformer.kernels.rematerialize import PRODUCT
from jaxformer.types import Array

Arrays = tuple[Array, ...]
# (function, inputs, weights, *more) -> function(*inputs) of each row times each weight of its group; only the inputs
# are kept for the backward pass
ProductsOf = Callable[..., Arrays]


def in_two(products_of: ProductsOf) -> Callable[..., Array]:
    """`functional.grouped_choice.Grouped.mlp_of` by twice `products_of`."""

    def mlp_of(function: Callable[..., Array], x: Array, first: Arrays, last: Array, *more: object) -> Array:
        found = products_of(_same, (x,), first, *more)
        kept = tuple(checkpoint_name(each, PRODUCT) for each in found)
        return products_of(function, kept, (last,), *more)[0]

    return mlp_of


def _same(x: Array) -> Array:
    return x
