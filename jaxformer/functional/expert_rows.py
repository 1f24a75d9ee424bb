"""Copies each token to a row for each expert that it chose, applies the experts, and sums the results of each token.

Letters as in `functional.experts`.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.functional.expert_exchange import EqualGroups, RaggedGroups, sizes_within
from jaxformer.kernels import derivatives
from jaxformer.types import Array

Exchange = EqualGroups | RaggedGroups
Weights = Mapping[str, Array]  # of experts, by name
HERE = EqualGroups(0)  # all experts are on this device
SELDOM = "seldom"  # named scope: plans leave out what is in it


class Choices(NamedTuple):
    """Where the rows of tokens stand on this device, before they are sent.

    Attributes:
      place: [N, k] int32, the row of each choice; the number of rows: nowhere.
      source: [M] int32, the number of the choice, of all N k, that each row is for; N k: none.
    """

    place: Array
    source: Array


class Rounds(NamedTuple):
    """What a ragged exchange brings to the experts here, `room` rows after another.

    Attributes:
      mlp: (rows [room, D], of each expert how many of them, whole weights) -> [room, D].
      whole: makes whole weights of those that are here.
      room: rows.
    """

    mlp: Callable[[Array, Array, Weights], Array]
    whole: Callable[[Weights], Weights]
    room: int


def through(
    x: Array,
    gates: Array,
    place: Array,
    rows: int,
    mlp: Callable[[Array], Array],
    exchange: Exchange = HERE,
) -> Array:
    """Tokens to the rows of their choices, to their experts, and back.

    Args:
      x: [N, D].
      gates: [N, k].
      place: as of `Choices`.
      rows: of this device before they are sent, M.
      mlp: of the experts here, of rows after they are sent, [M, D] -> [M, D].
      exchange: how rows get to their experts.

    Returns:
      [N, D].
    """
    return _visit(x, gates, _choices(place, rows), exchange, mlp)


def in_rounds(
    x: Array, gates: Array, place: Array, weights: Weights, groups: Array, exchange: RaggedGroups, rounds: Rounds
) -> Array:
    """`through` a ragged exchange with room for `rounds.room` rows: what finds none there comes in later rounds.

    Of these there are as many as the device needs that gets most. They are computed again in the backward pass, which
    keeps nothing of them.

    Args:
      x, gates, place: as of `through`.
      weights: of the experts, parts of them or whole.
      groups: [E / n] int32, rows of each expert of this device.
      exchange: with room for all rows.
      rounds: how the rows of one are computed.
    """
    choices, (mlp, whole, room) = _choices(place, exchange.rows), rounds
    sizes, here = sizes_within(groups, 0, room), whole(weights)
    first = _visit(x, gates, choices, exchange.window(0, room), lambda rows: mlp(rows, sizes, here))
    if room >= exchange.room:
        return first
    # As many on all devices, those too that share out other experts: there are collectives in them.
    used = jax.lax.pmax(jnp.max(exchange.places + exchange.counts), jax.sharding.get_abstract_mesh().manual_axes)
    return first + _later(rounds, x, gates, weights, (choices, groups, exchange), -(-used // room))


def _choices(place: Array, rows: int) -> Choices:
    number = math.prod(place.shape)
    # libtpu takes 12 s to compile this scatter where it is fused with what finds the places, 1 s alone.
    each = jax.lax.optimization_barrier(place.reshape(-1))
    source = jnp.full((rows,), number, jnp.int32).at[each].set(jnp.arange(number, dtype=jnp.int32), mode="drop")
    return Choices(place, source)


def _visit(
    x: Array, gates: Array, choices: Choices, exchange: Exchange, mlp: Callable[[Array], Array], keep: bool = True
) -> Array:
    rows = exchange.to_experts(_dispatch(x, *choices), keep)
    return _combine(mlp(rows), gates, *choices, exchange)


def _all_later(rounds: Rounds, x: Array, gates: Array, weights: Weights, where: Any, number: Array) -> Array:
    """What rounds 1 to `number` - 1 add. `where`: (choices, groups, exchange) of `in_rounds`."""

    def add(index: Array, total: Array) -> Array:
        return total + _round(rounds, x, gates, weights, where, index)

    with jax.named_scope(SELDOM):
        return jax.lax.fori_loop(1, number, add, jnp.zeros_like(x))


def _round(rounds: Rounds, x: Array, gates: Array, weights: Weights, where: Any, index: Array) -> Array:
    (choices, groups, exchange), (mlp, whole, room) = where, rounds

    def of(rows: Array) -> Array:
        return mlp(rows, sizes_within(groups, index, room), whole(weights))

    return _visit(x, gates, choices, exchange.window(index, room), of, keep=False)


_later = jax.custom_jvp(_all_later, nondiff_argnums=(0,))


def _later_tangent(rounds, saved, changes):
    *arguments, where, number = saved

    def of(x, gates, weights):
        return _all_later(rounds, x, gates, weights, where, number)

    return jax.jvp(of, arguments, list(changes[:3]))[1]


def _later_backward(rounds, saved, g):
    *arguments, where, number = saved

    def add(index, total):
        pull = jax.vjp(lambda x, gates, weights: _round(rounds, x, gates, weights, where, index), *arguments)[1]
        return jax.tree.map(jnp.add, total, list(pull(g)))

    with jax.named_scope(SELDOM):
        return *jax.lax.fori_loop(1, number, add, jax.tree.map(jnp.zeros_like, arguments)), None, None


derivatives.define(_later, None, _later_tangent, _later_backward, loops=True)


def _rows_at(x: Array, index: Array) -> Array:
    """x[index], zeros beyond the end."""
    return jnp.asarray(x).at[index].get(mode="fill", fill_value=0)


@jax.custom_jvp
def _dispatch(x: Array, place: Array, source: Array) -> Array:
    """Row m of the result is the token of choice source[m]. Its gradient is a sum over each token's choices, where
    autodiff would add up rows one after the other."""
    return _rows_at(x, source // place.shape[1])


def _dispatch_tangent(saved, changes):
    return _dispatch(changes[0], *saved[1:])


def _dispatch_backward(saved, g):
    return _sum_of_choices(g, None, saved[1]), None, None


derivatives.define(_dispatch, None, _dispatch_tangent, _dispatch_backward)


def _sum_of_choices(rows: Array, gates: Array | None, place: Array) -> Array:
    """Sum over each token's choices of its rows, times its gates: [M, D] -> [N, D]."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    each = [_rows_at(rows, place[:, choice]).astype(wide) for choice in range(place.shape[1])]
    if gates is not None:
        each = [found * gates[:, choice, None].astype(wide) for choice, found in enumerate(each)]
    return functools.reduce(jnp.add, each).astype(rows.dtype)


@jax.custom_jvp
def _combine(rows: Array, gates: Array, place: Array, source: Array, exchange: Exchange) -> Array:
    """Each token's rows times its gates, summed: [M, D] -> [N, D]. The rows come from their experts.

    The gradient of a gate is computed on its expert's device, so a block that computes its forward pass again does not
    have to send the experts' outputs back a second time.
    """
    return _sum_of_choices(exchange.from_experts(rows), gates, place)


def _combine_tangent(saved, changes):
    rows, gates, *where = saved
    return _combine(changes[0], gates, *where) + _combine(rows, changes[1], *where)


def _combine_backward(saved, g):
    rows, gates, place, source, exchange = saved
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    of_rows = exchange.to_experts(jnp.asarray(g).at[source // place.shape[1]].get(mode="clip")).astype(wide)
    chosen = source < place.size  # rows that no token chose hold those of some token; masked below
    about = jnp.stack([_rows_at(gates.reshape(-1), source).astype(wide), chosen.astype(wide)], axis=1)
    about = exchange.to_experts(about)
    d_rows = jnp.where(about[:, 1:] > 0, of_rows * about[:, :1], 0)
    d_gates = exchange.from_experts(jnp.sum(rows.astype(wide) * of_rows, axis=1, keepdims=True))
    d_gates = _rows_at(d_gates[:, 0], place.reshape(-1)).reshape(gates.shape)
    return d_rows.astype(rows.dtype), d_gates.astype(gates.dtype), None, None, None


derivatives.define(_combine, None, _combine_tangent, _combine_backward)
