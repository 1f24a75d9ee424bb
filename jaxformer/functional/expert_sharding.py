"""A layer of experts on a mesh: the tokens of all devices meet the experts of all devices.

Written with explicit collectives, because sorting is local: left to itself, XLA would gather all tokens to sort them.
"""

import math
from collections.abc import Callable, Mapping

import jax
from jax.sharding import PartitionSpec as P

from jaxformer.parallel.constraints import ACTIVATION_RULES, RULES, entries, mesh_axes
from jaxformer.types import Array

# (x [B, T, D], two more arrays [B, T, ...], weights of some experts, number of the first of them, mesh axes over which
# the layer itself sends tokens) -> [B, T, D]
Layer = Callable[..., Array]


def over_mesh(
    layer: Layer,
    x: Array,
    first: Array,
    second: Array,
    weights: Mapping[str, Array],
    axes: Mapping[str, tuple[str | None, ...]],
    exchange: str = "auto",
    slots: int | None = None,
) -> Array:
    """`layer` of the arrays, each device computing its own part.

    A device has some rows, and of the weights those that `constraints.RULES` say. Weights that are sharded along the
    model's width are gathered first, and their gradients summed and scattered. Where the hidden layer is sharded, each
    device has a part of every token's output, and the parts are summed. Between the n devices that share out the
    experts, one of two goes over the links, forward and backward, and a quarter more where rows are not kept:

      gather      the rows of all of them, and the sums of the outputs, scattered: 4 (n - 1) times the bytes of a
                  device's rows, however many experts a token has
      all_to_all  tokens to their experts and back, padded to what an expert can take: 4 (n - 1) / n times the bytes of
                  the slots that all experts have for a device's rows. Only where that number is known before

    Args:
      layer: a sum over experts, and over the hidden layer of each; so it may get a part of either.
      x: [B, T, D].
      first, second: [B, T, ...] each: what the router says of each token.
      weights: of the experts, by name.
      axes: the logical axes of each, the first of them "experts".
      exchange: "gather", "all_to_all" where it can be done, or "auto": what sends less.
      slots: tokens that all experts together take of a row; None: any number.
    """
    if not mesh_axes():
        return layer(x, first, second, weights, 0, ())
    lie_rows = entries(x.shape, ("rows", None, None), ACTIVATION_RULES)
    rows = P(*lie_rows)
    lie = {name: entries(w.shape, axes[name], RULES) for name, w in weights.items()}
    name = next(iter(weights))
    hidden, split = (_axes_of(lie[name], axes[name], axis) for axis in ("mlp", "experts"))
    gathered = tuple(axis for axis in lie_rows[0] or () if axis in split)
    summed = hidden + tuple(axis for axis in split if axis not in gathered)
    devices = math.prod(mesh_axes()[axis] for axis in gathered)
    able = slots is not None and devices > 1 and gathered == split
    sends = able and (exchange == "all_to_all" or (exchange == "auto" and sends_less(slots, x.shape[1], devices)))

    def local(x: Array, first: Array, second: Array, weights: Mapping[str, Array]) -> Array:
        whole = {each: _with_whole(w, lie[each], axes[each], "embed") for each, w in weights.items()}
        if sends:
            out = layer(x, first, second, whole, 0, split)
            return jax.lax.psum(out, hidden) if hidden else out
        if gathered:
            x, first, second = (jax.lax.all_gather(each, gathered, tiled=True) for each in (x, first, second))
        begin = jax.lax.axis_index(split) * len(whole[name]) if split else 0
        out = layer(x, first, second, whole, begin, ())
        out = jax.lax.psum(out, summed) if summed else out
        return jax.lax.psum_scatter(out, gathered, tiled=True) if gathered else out

    into = (rows, rows, rows, {name: P(*found) for name, found in lie.items()})
    return jax.shard_map(local, in_specs=into, out_specs=rows, check_vma=False)(x, first, second, dict(weights))


def sends_less(slots: int, length: int, devices: int) -> bool:
    """Whether an all-to-all of the experts' slots for a row of `length` tokens is fewer bytes than a gather.

    >>> sends_less(slots=5120, length=2048, devices=2), sends_less(slots=5120, length=2048, devices=4)
    (False, True)
    """
    return slots < devices * length


def _axes_of(found: list, axes: tuple[str | None, ...], name: str) -> tuple[str, ...]:
    """The mesh axes that shard the dimension of a logical axis."""
    return tuple(
        axis for entry, axis_name in zip(found, axes, strict=True) if axis_name == name for axis in entry or ()
    )


def _with_whole(w: Array, found: list, axes: tuple[str | None, ...], name: str) -> Array:
    """A weight gathered along the dimension of a logical axis."""
    over = _axes_of(found, axes, name)
    return jax.lax.all_gather(w, over, axis=axes.index(name), tiled=True) if over else w
