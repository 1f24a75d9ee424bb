"""Tokens to the rows of the experts that they chose, through these, and back to sums of what each expert made of them.

Letters as in `functional.experts`.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformer.functional.expert_exchange import EqualGroups, RaggedGroups
from jaxformer.kernels import derivatives
from jaxformer.types import Array

Exchange = EqualGroups | RaggedGroups
HERE = EqualGroups(0)  # all experts are on this device
SELDOM = "seldom"  # the scope of what a plan takes not to run


def through(
    x: Array,
    gates: Array,
    place: Array,
    rows: int,
    mlp: Callable[[Array, Array | int, bool], Array],
    exchange: Exchange = HERE,
    room: int | None = None,
) -> Array:
    """Tokens to the rows of their choices, to their experts, and back.

    Args:
      x: [N, D].
      gates: [N, k].
      place: [N, k] int32, the row of each choice; `rows`: nowhere.
      rows: of this device.
      mlp: (rows of the experts here [M, D], number of the round, whether it is the first) -> [M, D].
      exchange: how rows get to their experts.
      room: of a ragged exchange, rows that a device takes at once. What finds no room comes in later rounds, which are
        skipped where no device has any. None: there is room for all.

    Returns:
      [N, D].
    """
    number = math.prod(place.shape)
    # libtpu takes 12 s to compile this scatter where it is fused with what finds the places, 1 s alone.
    each = jax.lax.optimization_barrier(place.reshape(-1))
    source = jnp.full((rows,), number, jnp.int32).at[each].set(jnp.arange(number, dtype=jnp.int32), mode="drop")
    own = _dispatch(x, place, source)

    def visit(exchange: Exchange, number: Array | int = 0, first: bool = True) -> Array:
        rows = exchange.to_experts(own, keep=first)
        return _combine(mlp(rows, number, first), gates, place, source, exchange)

    if isinstance(exchange, EqualGroups) or room is None or room >= exchange.room:
        return visit(exchange)
    # All take the same branch, those that share out other experts too: there are collectives in it.
    used = jax.lax.pmax(jnp.max(exchange.places + exchange.counts), jax.sharding.get_abstract_mesh().manual_axes)

    @jax.checkpoint  # only what all rounds begin with is kept
    def add(total: Array, number: Array) -> tuple[Array, None]:
        return total + visit(exchange.window(number, room), number, first=False), None

    def later() -> Array:
        return jax.lax.scan(add, jnp.zeros_like(x), jnp.arange(1, -(-exchange.room // room), dtype=jnp.int32))[0]

    first = visit(exchange.window(0, room))
    with jax.named_scope(SELDOM):
        return first + jax.lax.cond(used > room, later, lambda: jnp.zeros_like(x))


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

    The gradient of a gate is computed where its expert is, so the backward pass does not need the rows here: a block
    that computes its forward pass again need not send them again.
    """
    return _sum_of_choices(exchange.from_experts(rows), gates, place)


def _combine_tangent(saved, changes):
    rows, gates, *where = saved
    return _combine(changes[0], gates, *where) + _combine(rows, changes[1], *where)


def _combine_backward(saved, g):
    rows, gates, place, source, exchange = saved
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    of_rows = exchange.to_experts(jnp.asarray(g).at[source // place.shape[1]].get(mode="clip")).astype(wide)
    chosen = source < place.size  # the others of `of_rows` are of some token; to fill them here would be one more pass
    about = jnp.stack([_rows_at(gates.reshape(-1), source).astype(wide), chosen.astype(wide)], axis=1)
    about = exchange.to_experts(about)
    d_rows = jnp.where(about[:, 1:] > 0, of_rows * about[:, :1], 0)
    d_gates = exchange.from_experts(jnp.sum(rows.astype(wide) * of_rows, axis=1, keepdims=True))
    d_gates = _rows_at(d_gates[:, 0], place.reshape(-1)).reshape(gates.shape)
    return d_rows.astype(rows.dtype), d_gates.astype(gates.dtype), None, None, None


derivatives.define(_combine, None, _combine_tangent, _combine_backward)
