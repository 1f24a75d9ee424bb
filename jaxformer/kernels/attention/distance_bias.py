"""A score bias that depends only on how far a key is from its query, described so that a kernel can compute it inside.

It is a function of (query index, key index) like every other bias, so the other implementations call it. What it adds
is a description: -slope * |distance| (ALiBi), or a step function of the distance (T5's buckets).
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import Partial

from jaxformer.types import Array


class DistanceBias(Partial):
    """A bias function and what it computes, with distance = key index - query index.

    Attributes:
      slopes: [H] numbers; the bias of head h is -slopes[h] * |distance|. None: it is a step function.
      edges: the first distance of each step but the first one, ascending; None: it is linear.
      entries: for each step its row in the table [N, H], which is the function's first argument.
    """

    slopes: tuple[float, ...] | None = None
    edges: tuple[int, ...] | None = None
    entries: tuple[int, ...] = ()

    def steps(self) -> Array | None:
        """[H, steps], the bias of each head and step; None: it is linear."""
        return None if self.edges is None else self.args[0][jax.numpy.asarray(self.entries)].T


def linear(function: Callable[..., Array], slopes: Any) -> DistanceBias:
    """The bias -slopes[h] * |distance|, which `function` computes from (query index, key index)."""
    bias = DistanceBias(function)
    bias.slopes = tuple(map(float, slopes))
    return bias


def stepwise(function: Callable[..., Array], table: Array, edges: Any, entries: Any) -> DistanceBias:
    """The bias table[entries[n], h] at distances from edges[n - 1] to edges[n] - 1.

    Args:
      function: (table, query index, key index) -> bias.
      table: [N, H] floats.
      edges, entries: integers; one entry more than edges.
    """
    bias = DistanceBias(function, table)
    bias.edges, bias.entries = tuple(map(int, edges)), tuple(map(int, entries))
    return bias


def _flatten(bias: DistanceBias) -> tuple[Any, Any]:
    return (bias.args, bias.keywords), (bias.func, bias.slopes, bias.edges, bias.entries)


def _unflatten(static: Any, arrays: Any) -> DistanceBias:
    function, slopes, edges, entries = static
    bias = DistanceBias(function, *arrays[0], **arrays[1])
    bias.slopes, bias.edges, bias.entries = slopes, edges, entries
    return bias


jax.tree_util.register_pytree_node(DistanceBias, _flatten, _unflatten)
