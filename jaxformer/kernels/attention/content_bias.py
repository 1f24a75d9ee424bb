"""A score bias made of what queries and keys hold, as the content-to-position terms of relative positions are.

Every row and head has its own bias here, of arrays that lie as queries and keys do. It is a function of (query place,
key place) like every other bias, so the implementations that make no [T, S] array call it for one block at a time; on a
mesh its arrays are sharded with the rows and heads.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from jaxformer.types import Array

# (arrays of queries, arrays of keys, relative [1 or B, 1, t, s]) -> [B, H, t, s]
Terms = Callable[[Any, Any, Array], Array]
Axes = tuple[str | None, ...]


class ContentBias(Partial):
    """A bias function of (query place [t], key place [s]) -> [B, H, t, s] whose arrays lie as rows and heads do.

    Attributes:
      axes: for each of its arrays the names of its leading dimensions: "rows", "heads" or None.
      terms: what `content_bias` was given; None: it was made by `sharded`.
    """

    axes: tuple[Axes, ...] = ()
    terms: Any = None

    def at(self, query_index: Array, key_index: Array) -> Array:
        """The bias of all its queries and keys, at any indices: [B, T] and [B, S] -> [B, H, T, S]."""
        assert self.terms is not None
        of_query, of_key, _ = self.args
        return self.terms(of_query, of_key, query_index[:, None, :, None] - key_index[:, None, None, :])


def content_bias(terms: Terms, of_query: Any, of_key: Any, query_index: Array | None = None) -> ContentBias:
    """The bias that `terms` computes of a block of queries and a block of keys.

    Args:
      terms: (arrays of the queries, arrays of the keys, relative) -> [B, H, t, s]; relative [1 or B, 1, t, s] int is
        query index - key index.
      of_query: tree of arrays [B, H, T, ...].
      of_key: tree of arrays [B, H, S, ...].
      query_index: [T] or [B, T] int, index among the keys of each query; None: 0, 1, 2, ...
    """
    bias = ContentBias(functools.partial(_at_places, terms), of_query, of_key, query_index)
    bias.terms = terms
    bias.axes = (("rows", "heads"),) * len(jax.tree.leaves((of_query, of_key)))
    if query_index is not None:
        bias.axes += (("rows",) if query_index.ndim == 2 else (None,),)
    return bias


def sharded(bias: Partial, axes: tuple[Axes, ...]) -> ContentBias:
    """Another bias function that depends on queries or keys, with the `axes` of its arrays."""
    made = ContentBias(bias.func, *bias.args, **bias.keywords)
    made.axes = axes
    return made


def specs(bias: ContentBias, rows: tuple[str, ...], heads: tuple[str, ...]) -> ContentBias:
    """The bias with a PartitionSpec for each of its arrays: as the rows and heads are sharded."""
    names = {"rows": rows or None, "heads": heads or None, None: None}
    leaves = [P(*(names[axis] for axis in axes)) for axes in bias.axes]
    return jax.tree.unflatten(jax.tree.structure(bias), leaves)


def _at_places(
    terms: Terms, of_query: Any, of_key: Any, query_index: Array | None, query_place: Array, key_place: Array
) -> Array:
    of_query = jax.tree.map(lambda x: jnp.take(x, query_place, axis=2, mode="clip"), of_query)
    of_key = jax.tree.map(lambda x: jnp.take(x, key_place, axis=2, mode="clip"), of_key)
    index = query_place if query_index is None else jnp.take(query_index, query_place, axis=-1, mode="clip")
    index = index[None, :] if index.ndim == 1 else index
    return terms(of_query, of_key, index[:, None, :, None] - key_place[None, None, None, :])


def _flatten(bias: ContentBias) -> tuple[Any, Any]:
    return (bias.args, bias.keywords), (bias.func, bias.axes, bias.terms)


def _unflatten(static: Any, arrays: Any) -> ContentBias:
    function, axes, terms = static
    bias = ContentBias(function, *arrays[0], **arrays[1])
    bias.axes, bias.terms = axes, terms
    return bias


jax.tree_util.register_pytree_node(ContentBias, _flatten, _unflatten)
