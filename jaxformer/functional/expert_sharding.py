"""A layer of experts on a mesh: the tokens of all devices meet the experts of all devices.

Written with explicit collectives, because sorting is local: left to itself, XLA would gather all tokens to sort them.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxformer.functional import whole_weights
from jaxformer.functional.expert_rows import Weights
from jaxformer.functional.experts import ROOM
from jaxformer.parallel.constraints import ACTIVATION_RULES, LANES, RULES, entries, mesh_axes
from jaxformer.parallel.platforms import this_platform
from jaxformer.types import Array

LOG = logging.getLogger(__name__)  # says which exchange a layer takes; `--log` of the programs shows it


class Here(NamedTuple):
    """What a layer computes on this device.

    Attributes:
      first: number of the first expert whose weights are here.
      over: mesh axes over which the layer itself sends tokens; empty: all tokens for these experts are already here.
      ragged: whether by a ragged all-to-all.
      whole: gathers weights that are sharded along the model's width.
    """

    first: Array | int = 0
    over: tuple[str, ...] = ()
    ragged: bool = False
    whole: Callable[[Weights], Weights] = lambda weights: weights


# (x [B, T, D], two more arrays [B, T, ...], weights of some experts, Here) -> [B, T, D]
Layer = Callable[[Array, Array, Array, Weights, Here], Array]


def over_mesh(
    layer: Layer,
    x: Array,
    first: Array,
    second: Array,
    weights: Weights,
    axes: Mapping[str, tuple[str | None, ...]],
    exchange: str = "auto",
    slots: int | None = None,
    choices: int | None = None,
) -> Array:
    """`layer` of the arrays, each device computing its own part.

    A device has some rows, and of the weights those that `constraints.RULES` say. Weights that are sharded along the
    model's width are gathered, and their gradients summed and scattered. Where the hidden layer is sharded, each
    device has a part of every token's output, and the parts are summed. Between the n devices that share out the
    experts, one of three goes over the links, forward and backward together (5 in place of 4 where rows are not kept):

      gather             the rows of all of them, and the sums of the outputs, scattered: 4 (n - 1) times the bytes of a
                         device's rows, however many experts a token has
      all_to_all         tokens to their experts and back, padded to what an expert can take: 4 (n - 1) / n times the
                         bytes of the slots that all experts have for a device's rows. Only with a capacity
      ragged_all_to_all  the same without the padding: 4 (n - 1) / n times the bytes of the k choices of a device's
                         tokens, if all experts are equally busy. Not where experts choose: they fill their slots

    Args:
      layer: its output is a sum over experts and hidden units, so each device can compute a part of that sum.
      x: [B, T, D].
      first, second: [B, T, ...] each: what the router says of each token.
      weights: of the experts, by name.
      axes: the logical axes of each, the first of them "experts".
      exchange: one of the three where it can be done, or "auto": what sends least, see `choose`.
      slots: tokens that all experts together take of a row; None: any number.
      choices: experts that a token chooses; None: no ragged exchange is possible.
    """
    if not mesh_axes():
        return layer(x, first, second, weights, Here())
    lie_rows = entries(x.shape, ("rows", None, None), ACTIVATION_RULES)
    rows = P(*lie_rows)
    lie = {name: entries(w.shape, axes[name], RULES) for name, w in weights.items()}
    name = next(iter(weights))
    hidden, split = (_axes_of(lie[name], axes[name], axis) for axis in ("mlp", "experts"))
    gathered = tuple(axis for axis in lie_rows[0] or () if axis in split)
    summed = hidden + tuple(axis for axis in split if axis not in gathered)
    devices = math.prod(mesh_axes()[axis] for axis in split)
    asked, exchange = exchange, "gather"
    if devices > 1 and gathered == split:
        exchange = choose(asked, devices, (x.shape[1], x.shape[2]), x.dtype.name, slots, choices)
        LOG.info(f"experts: {asked} is {exchange} between {devices} devices")
    elif devices > 1:
        LOG.info(
            f"experts: {asked} is gather, as {x.shape[0]} rows are not split over the {devices} devices of experts"
        )

    dtype = x.dtype

    def whole(weights: Weights) -> Weights:
        over = {each: _axes_of(lie[each], axes[each], "embed") for each in weights}
        parts = {each: axes[each].index("embed") for each in weights}
        return {
            each: whole_weights.gathered(w, over[each], parts[each], dtype) if over[each] else w
            for each, w in weights.items()
        }

    def local(x: Array, first: Array, second: Array, weights: Weights) -> Array:
        if exchange != "gather":
            out = layer(x, first, second, weights, Here(0, split, exchange == "ragged_all_to_all", whole))
            return jax.lax.psum(out, hidden) if hidden else out
        if gathered:
            x, first, second = (jax.lax.all_gather(each, gathered, tiled=True) for each in (x, first, second))
        begin = jax.lax.axis_index(split) * len(weights[name]) if split else 0
        out = layer(x, first, second, weights, Here(begin, whole=whole))
        out = jax.lax.psum(out, summed) if summed else out
        return jax.lax.psum_scatter(out, gathered, tiled=True) if gathered else out

    into = (rows, rows, rows, {name: P(*found) for name, found in lie.items()})
    return jax.shard_map(local, in_specs=into, out_specs=rows, check_vma=False)(x, first, second, dict(weights))


def choose(
    exchange: str,
    devices: int,
    shape: tuple[int, int],
    dtype: str,
    slots: int | None,
    choices: int | None,
    platform: str | None = None,
) -> str:
    """For "auto" the exchange that sends the fewest bytes; any other if it can be done, else "gather".

    The others may send 1.25 times as much as a gather, if it needs room for the rows of more devices than they do. A
    ragged all-to-all sends gates beside the rows, and TPUs fill up both to whole lanes. CPUs have none
    (`expert_exchange.RaggedGroups` gathers there), so it is not chosen.

    Args:
      exchange, slots, choices: as of `over_mesh`.
      devices: those that share out the experts.
      shape: (length of a row of tokens, width of the model).
      dtype: of the tokens.
      platform: that of the devices; None: of this process.

    >>> [choose("auto", devices, (2048, 512), "bfloat16", 5120, 2, "cpu") for devices in (2, 4)]
    ['gather', 'all_to_all']
    >>> [choose("auto", devices, (2048, 512), "bfloat16", None, 8, "cuda") for devices in (4, 8)]
    ['gather', 'ragged_all_to_all']
    >>> [choose("auto", 4, (2048, width), "bfloat16", 5120, 2, "tpu") for width in (192, 2048)]
    ['all_to_all', 'ragged_all_to_all']
    """
    platform, (length, width) = this_platform() if platform is None else platform, shape
    each = width * jnp.dtype(dtype).itemsize
    found = {"gather": devices * length * each * (1.25 if devices > ROOM else 1.0)}
    if slots is not None:
        found["all_to_all"] = slots * each
    if choices is not None and (exchange != "auto" or platform != "cpu"):
        filled = each + -width % LANES * jnp.dtype(dtype).itemsize
        alone = filled + 2 * 4 * LANES / 4 if platform == "tpu" else each + 3 * 4 / 4  # gates go two ways of four
        found["ragged_all_to_all"] = min(choices * length, math.inf if slots is None else slots) * alone
    if exchange == "auto":
        return min(found, key=found.__getitem__)
    return exchange if exchange in found else "gather"


def _axes_of(found: list, axes: tuple[str | None, ...], name: str) -> tuple[str, ...]:
    """The mesh axes that shard the dimension of a logical axis."""
    return tuple(
        axis for entry, axis_name in zip(found, axes, strict=True) if axis_name == name for axis in entry or ()
    )
