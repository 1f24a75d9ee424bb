"""A layer of experts on a mesh: every device sends the tokens that it has to the experts that it has.

Written with explicit collectives, because sorting is local: left to itself, XLA would gather all tokens to sort them.
"""

from collections.abc import Callable, Mapping

import jax
from jax.sharding import PartitionSpec as P

from jaxformer.parallel.constraints import ACTIVATION_RULES, RULES, entries, mesh_axes
from jaxformer.types import Array

# (x [B, T, D], two more arrays [B, T, ...], weights of some experts, number of the first of them) -> [B, T, D]
Layer = Callable[..., Array]


def over_mesh(
    layer: Layer,
    x: Array,
    first: Array,
    second: Array,
    weights: Mapping[str, Array],
    axes: Mapping[str, tuple[str | None, ...]],
) -> Array:
    """`layer` of the arrays, each device computing its own part.

    A device has some rows, and of the weights those that `constraints.RULES` say. Mesh axes that shard an expert's
    width have it gathered first, and its gradients summed and scattered. Those that shard its hidden layer give a part
    of every token's output each, which are summed. Those that shard the experts have the rows of all their devices
    gathered, and the outputs summed and scattered: 4 (n - 1) times the bytes of a device's rows, forward and backward,
    however many experts a token has.

    Args:
      layer: a sum over experts, and over the hidden layer of each; so it may get a part of either.
      x: [B, T, D].
      first, second: [B, T, ...] each: what the router says of each token.
      weights: of the experts, by name.
      axes: the logical axes of each, the first of them "experts".
    """
    if not mesh_axes():
        return layer(x, first, second, weights, 0)
    lie_rows = entries(x.shape, ("rows", None, None), ACTIVATION_RULES)
    rows = P(*lie_rows)
    lie = {name: entries(w.shape, axes[name], RULES) for name, w in weights.items()}
    name = next(iter(weights))
    hidden, split = (_axes_of(lie[name], axes[name], axis) for axis in ("mlp", "experts"))
    gathered = tuple(axis for axis in lie_rows[0] or () if axis in split)
    summed = hidden + tuple(axis for axis in split if axis not in gathered)

    def local(x: Array, first: Array, second: Array, weights: Mapping[str, Array]) -> Array:
        whole = {each: _with_whole(w, lie[each], axes[each], "embed") for each, w in weights.items()}
        if gathered:
            x, first, second = (jax.lax.all_gather(each, gathered, tiled=True) for each in (x, first, second))
        begin = jax.lax.axis_index(split) * len(whole[name]) if split else 0
        out = layer(x, first, second, whole, begin)
        out = jax.lax.psum(out, summed) if summed else out
        return jax.lax.psum_scatter(out, gathered, tiled=True) if gathered else out

    into = (rows, rows, rows, {name: P(*found) for name, found in lie.items()})
    return jax.shard_map(local, in_specs=into, out_specs=rows, check_vma=False)(x, first, second, dict(weights))


def _axes_of(found: list, axes: tuple[str | None, ...], name: str) -> tuple[str, ...]:
    """The mesh axes that shard the dimension of a logical axis."""
    return tuple(
        axis for entry, axis_name in zip(found, axes, strict=True) if axis_name == name for axis in entry or ()
    )


def _with_whole(w: Array, found: list, axes: tuple[str | None, ...], name: str) -> Array:
    """A weight gathered along the dimension of a logical axis."""
    over = _axes_of(found, axes, name)
    return jax.lax.all_gather(w, over, axis=axes.index(name), tiled=True) if over else w
