"""Sends rows of tokens to the devices that hold their experts, and back.

Letters as in `functional.experts`, n devices.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxformer.functional.router import room_for
from jaxformer.kernels import derivatives
from jaxformer.kernels.rematerialize import PRODUCT
from jaxformer.parallel.platforms import this_platform
from jaxformer.types import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EqualGroups:
    """Every expert gets the same number of rows from every device: an all-to-all.

    Attributes:
      experts: those of this device.
      over: the axes; none: this device has all experts, and nothing is sent.
    """

    experts: int = field(metadata={"static": True})
    over: tuple[str, ...] = field(default=(), metadata={"static": True})

    def to_experts(self, rows: Array, keep: bool = False) -> Array:
        """[E N, D], N of each expert -> [E N, D], those that all devices have for the experts of this one.

        `keep`: they are kept for the backward pass wherever the results of matrix products are.
        """
        if not self.over:
            return rows
        parts = rows.reshape(self.experts * jax.lax.axis_size(self.over), -1, rows.shape[1])
        found = jax.lax.all_to_all(parts, self.over, 0, 1, tiled=True).reshape(rows.shape)
        return checkpoint_name(found, PRODUCT) if keep else found

    def from_experts(self, rows: Array) -> Array:
        """The inverse of `to_experts`."""
        if not self.over:
            return rows
        parts = rows.reshape(self.experts, -1, rows.shape[1])
        return jax.lax.all_to_all(parts, self.over, 1, 0, tiled=True).reshape(rows.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RaggedGroups:
    """Rows sorted by expert, any number of each: only they are sent, nothing that fills up groups.

    CPUs have no such collective: there all rows are gathered, and what this one does not need is left out.

    Attributes:
      counts: [n, E] int32, rows that each device has for each expert.
      begins: [n, E] int32, where they begin on that device, whose rows are ordered by expert.
      places: [n, E] int32, where they begin on the device of that expert.
      over: the axes.
      rows: of a device before they are sent, M.
      room: rows of a device after that.
    """

    counts: Array
    begins: Array
    places: Array
    over: tuple[str, ...] = field(metadata={"static": True})
    rows: int = field(metadata={"static": True})
    room: int = field(metadata={"static": True})

    def to_experts(self, rows: Array, keep: bool = False) -> Array:
        """[M, D] -> [room, D], those that all devices have for the experts of this one, zeros between them.

        `keep`: as of `EqualGroups.to_experts`.
        """
        found = _sent(rows, self)
        return checkpoint_name(found, PRODUCT) if keep else found

    def from_experts(self, rows: Array) -> Array:
        """The inverse of `to_experts`: [room, D] -> [M, D], zeros where nothing was sent."""
        return _returned(rows, self)

    def window(self, number: Array | int, room: int) -> "RaggedGroups":
        """The part of this exchange that lands in rows [number * room, (number + 1) * room) of each device.

        >>> one = RaggedGroups(jnp.array([[3, 2]]), jnp.array([[0, 3]]), jnp.array([[0, 4]]), (), rows=5, room=8)
        >>> second = one.window(1, room=3)
        >>> second.counts.tolist(), second.begins.tolist(), second.places.tolist()
        ([[0, 2]], [[3, 3]], [[0, 1]])
        """
        first, last = _within(self.places, number, room), _within(self.places + self.counts, number, room)
        skipped = jnp.clip(number * room - self.places, 0, self.counts)
        return RaggedGroups(last - first, self.begins + skipped, first, self.over, self.rows, room)


def sorted_exchange(sizes: Array, over: tuple[str, ...], rows: int, align: int) -> tuple[RaggedGroups, Array]:
    """The exchange after which the rows for one expert follow each other, one device after the other, and each expert
    begins at a multiple of `align`; sized for the worst case, in which all rows of all devices go to one.

    Args:
      sizes: [E] int32, rows of this device for each expert. They stand one expert after the other.
      over: the mesh axes.
      rows: of this device, M.
      align: rows.

    Returns:
      It, and the rows of each of this device's experts after it, [E / n] int32, multiples of `align`.
    """
    counts = jax.lax.all_gather(sizes.astype(jnp.int32), over)
    places, groups = packed(counts, align)
    room = room_for(len(counts) * rows, groups.shape[1], align)
    begins = jnp.cumsum(counts, axis=1, dtype=jnp.int32) - counts
    return RaggedGroups(counts, begins, places, over, rows, room), groups[jax.lax.axis_index(over)]


def slots_exchange(sizes: Array, over: tuple[str, ...], rows: int, slots: int) -> RaggedGroups:
    """The exchange after which each device has `slots` rows for every expert, as after `EqualGroups`. Other arguments
    as of `sorted_exchange`."""
    counts = jax.lax.all_gather(sizes.astype(jnp.int32), over)
    devices, experts = counts.shape
    own = jnp.arange(experts, dtype=jnp.int32) % (experts // devices)
    places = (own[None] * devices + jnp.arange(devices, dtype=jnp.int32)[:, None]) * slots
    return RaggedGroups(
        counts, jnp.cumsum(counts, axis=1, dtype=jnp.int32) - counts, places, over, rows, experts * slots
    )


def packed(counts: Array, align: int) -> tuple[Array, Array]:
    """`RaggedGroups.places` of `sorted_exchange`, and [n, E / n] int32, the rows of each expert of each device.

    >>> places, sizes = packed(jnp.array([[3, 1], [2, 0]]), align=4)
    >>> places.tolist(), sizes.tolist()
    ([[0, 0], [3, 1]], [[8], [4]])
    """
    sizes = (-(-jnp.sum(counts, axis=0, dtype=jnp.int32) // align) * align).reshape(len(counts), -1)
    first = (jnp.cumsum(sizes, axis=1, dtype=jnp.int32) - sizes).reshape(1, -1)
    return first + jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts, sizes


def sizes_within(sizes: Array, number: Array | int, room: int) -> Array:
    """Of groups of these sizes, one after the other, what is in rows [number * room, (number + 1) * room).

    >>> sizes_within(jnp.array([5, 2, 4]), 1, room=4).tolist()
    [1, 2, 1]
    """
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    return _within(ends, number, room) - _within(ends - sizes, number, room)


def _within(place: Array, number: Array | int, room: int) -> Array:
    """Places counted from number * room on: those before become 0, those after the next `room` rows `room`."""
    return jnp.clip(place - number * room, 0, room)


def _own(exchange: RaggedGroups) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """(begins, counts, places) of this device's rows, [E] each; of its experts' rows, [n E / n], device by device."""
    devices, experts = exchange.counts.shape
    here = jax.lax.axis_index(exchange.over)
    arrays = exchange.begins, exchange.counts, exchange.places
    own = here * (experts // devices), experts // devices
    theirs = (jax.lax.dynamic_slice_in_dim(each, *own, axis=1).reshape(-1) for each in arrays)
    return tuple(each[here] for each in arrays), tuple(theirs)


def _to_native(rows: Array, exchange: RaggedGroups) -> Array:
    (begins, number, places), (_, received, _) = _own(exchange)
    out = jnp.zeros((exchange.room, rows.shape[1]), rows.dtype)
    return jax.lax.ragged_all_to_all(rows, out, begins, number, places, received, axis_name=exchange.over)


def _from_native(rows: Array, exchange: RaggedGroups) -> Array:
    (_, received, _), (begins, number, places) = _own(exchange)
    out = jnp.zeros((exchange.rows, rows.shape[1]), rows.dtype)
    return jax.lax.ragged_all_to_all(rows, out, places, number, begins, received, axis_name=exchange.over)


def _standing(exchange: RaggedGroups) -> tuple[Array, Array]:
    """[n, M] int32 each: the device of the expert of each row, n for rows that are not sent; and its place there."""
    devices, experts = exchange.counts.shape
    row = jnp.arange(exchange.rows, dtype=jnp.int32)[None]
    ends = exchange.begins + exchange.counts
    expert = jnp.sum(row[:, :, None] >= ends[:, None, :], axis=2, dtype=jnp.int32)
    known = jnp.minimum(expert, experts - 1)
    begin, place = (jnp.take_along_axis(each, known, axis=1) for each in (exchange.begins, exchange.places))
    sent = (expert < experts) & (row >= begin)
    return jnp.where(sent, known // (experts // devices), devices), place + row - begin


def _to_by_gather(rows: Array, exchange: RaggedGroups) -> Array:
    device, place = _standing(exchange)
    place = jnp.where(device == jax.lax.axis_index(exchange.over), place, exchange.room).reshape(-1)
    out = jnp.zeros((exchange.room, rows.shape[1]), rows.dtype)
    return out.at[place].set(jax.lax.all_gather(rows, exchange.over, tiled=True), mode="drop")


def _from_by_gather(rows: Array, exchange: RaggedGroups) -> Array:
    device, place = (each[jax.lax.axis_index(exchange.over)] for each in _standing(exchange))
    every = jax.lax.all_gather(rows, exchange.over, tiled=True)
    place = jnp.where(device < len(exchange.counts), device * exchange.room + place, len(every))
    return every.at[place].get(mode="fill", fill_value=0)


# Not by `jax.lax.platform_dependent`: XLA keeps its conditional around a collective, and a GPU's host waits for it.
@jax.custom_jvp
def _sent(rows: Array, exchange: RaggedGroups) -> Array:
    return (_to_by_gather if this_platform() == "cpu" else _to_native)(rows, exchange)


@jax.custom_jvp
def _returned(rows: Array, exchange: RaggedGroups) -> Array:
    return (_from_by_gather if this_platform() == "cpu" else _from_native)(rows, exchange)


# Every row goes to one place, so each of the two is the other's transpose.
derivatives.define(
    _sent,
    lambda rows, exchange: (_sent(rows, exchange), exchange),
    lambda exchange, changes: _sent(changes[0], exchange),
    lambda exchange, g: (_returned(g, exchange), None),
)
derivatives.define(
    _returned,
    lambda rows, exchange: (_returned(rows, exchange), exchange),
    lambda exchange, changes: _returned(changes[0], exchange),
    lambda exchange, g: (_sent(g, exchange), None),
)
