"""Rows of a table that may be sharded over devices: the embedding's look-up and its gradient.

Written with explicit collectives. XLA's own choice for a tied table was to gather all of it in float32, and to sum its
whole gradient over all devices: more than half of the communication of an update (`experiments/LOG.md`).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxformer.functional.layers import embed
from jaxformer.kernels import derivatives
from jaxformer.parallel.constraints import ACTIVATION_RULES, RULES, entries, mesh_axes
from jaxformer.types import Array

_Axes = tuple[str, ...] | None


def look_up(tokens: Array, table: Array, axis: str) -> Array:
    """Rows of a table for tokens, positions or types; every device looks up the rows that its shard of the table has.

    On a mesh the result is sharded as "looked_up_rows" and "looked_up_width" of `constraints.ACTIVATION_RULES`.

    Args:
      tokens: [B, T] int in [0, V). From -V to -1 they count from the end; beyond that they are clipped to the first or
        last row, which gets no gradient from them. Where a mesh splits the table's rows, all of these are zeros.
      table: [V, D], with the logical axes (`axis`, "embed").
      axis: logical axis of the table's rows, such as "vocab".

    Returns:
      [B, T, D] in the dtype of the table.

    >>> look_up(jnp.array([[1, 0]]), jnp.array([[1.0, 2.0], [3.0, 4.0]]), "vocab").tolist()
    [[[3.0, 4.0], [1.0, 2.0]]]
    """
    if not mesh_axes():
        return embed(tokens, table)
    over = (
        *entries(table.shape, (axis, "embed"), RULES),
        *entries(tokens.shape[:1], ("looked_up_rows",), ACTIVATION_RULES),
    )
    return _look_up(table, tokens, table.shape, over)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _look_up(table: Array, tokens: Array, shape: tuple[int, int], over: tuple[_Axes, _Axes, _Axes]) -> Array:
    """`shape`: of the table. `over`: mesh axes that shard its rows, its width and the rows of tokens."""
    vocab, width, rows = over

    def local(part: Array, tokens: Array) -> Array:
        if not vocab:
            return embed(tokens, part)
        found = part.at[_places(tokens, len(part), vocab)].get(mode="fill", fill_value=0)
        return jax.lax.psum(found, vocab)

    run = jax.shard_map(local, in_specs=(P(vocab, width), P(rows)), out_specs=P(rows, None, width), check_vma=False)
    return run(table, tokens)


def _forward(table, tokens, shape, over):
    return _look_up(table, tokens, shape, over), tokens


def _backward(shape, over, tokens, g):
    (vocab, width, rows), sizes = over, mesh_axes()
    part = tuple(n // math.prod(sizes[axis] for axis in axes or ()) for n, axes in zip(shape, over[:2], strict=True))

    def local(g: Array, tokens: Array) -> Array:
        places = _places(tokens, part[0], vocab) if vocab else tokens
        summed = jnp.zeros(part, g.dtype).at[places].add(g, mode="drop")
        return jax.lax.psum(summed, rows) if rows else summed

    run = jax.shard_map(local, in_specs=(P(rows, None, width), P(rows)), out_specs=P(vocab, width), check_vma=False)
    return run(g, tokens), None


def _tangent(shape, over, tokens, changes):
    return _look_up(changes[0], tokens, shape, over)


derivatives.define(_look_up, _forward, _tangent, _backward)


def _places(tokens: Array, size: int, vocab: tuple[str, ...]) -> Array:
    """Places of the tokens in this device's `size` rows of the table; beyond the end for rows of other devices."""
    places = tokens - jax.lax.axis_index(vocab) * size
    return jnp.where(places >= 0, places, size)
