"""Tokens to the rows of the experts that they chose, through these, and back to sums of what each expert made of them.

Letters as in `functional.experts`.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxformer.kernels import derivatives
from jaxformer.kernels.rematerialize import PRODUCT
from jaxformer.types import Array


class Exchange(NamedTuple):
    """How rows of equal groups, one for each expert, get to the devices of the axes `over` that share out the experts.

    `experts` of them are on this device; without axes it has all, and nothing is sent.
    """

    experts: int
    over: tuple[str, ...] = ()

    def to_experts(self, rows: Array, keep: bool = False) -> Array:
        """[E N, D], N of each expert -> [E N, D], those that all devices have for the experts of this one.

        `keep`: the backward pass keeps them where it keeps products, because sending them again costs as much.
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


def through(
    x: Array,
    gates: Array,
    place: Array,
    rows: int,
    mlp: Callable[[Array], Array],
    exchange: Exchange | None = None,
) -> Array:
    """[N, D] -> [N, D]: tokens to the rows of their choices (`place` [N, k], `rows`: nowhere), experts, and back."""
    number = math.prod(place.shape)
    exchange = exchange or Exchange(0)
    # libtpu takes 12 s to compile this scatter where it is fused with what finds the places, 1 s alone.
    each = jax.lax.optimization_barrier(place.reshape(-1))
    source = jnp.full((rows,), number, jnp.int32).at[each].set(jnp.arange(number, dtype=jnp.int32), mode="drop")
    return _combine(exchange, mlp(exchange.to_experts(_dispatch(x, place, source), keep=True)), gates, place, source)


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


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _combine(exchange: Exchange, rows: Array, gates: Array, place: Array, source: Array) -> Array:
    """Each token's rows times its gates, summed: [M, D] -> [N, D]. The rows come from their experts.

    The gradient of a gate is computed where its expert is, so the backward pass does not need the rows here: a block
    that computes its forward pass again need not send them again.
    """
    return _sum_of_choices(exchange.from_experts(rows), gates, place)


def _combine_tangent(exchange, saved, changes):
    rows, gates, place, source = saved
    first = _combine(exchange, changes[0], gates, place, source)
    return first + _combine(exchange, rows, changes[1], place, source)


def _combine_backward(exchange, saved, g):
    rows, gates, place, source = saved
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    of_rows = exchange.to_experts(jnp.asarray(g).at[source // place.shape[1]].get(mode="clip")).astype(wide)
    chosen = source < place.size  # the others of `of_rows` are of some token; to fill them here would be one more pass
    about = jnp.stack([_rows_at(gates.reshape(-1), source).astype(wide), chosen.astype(wide)], axis=1)
    about = exchange.to_experts(about)
    d_rows = jnp.where(about[:, 1:] > 0, of_rows * about[:, :1], 0)
    d_gates = exchange.from_experts(jnp.sum(rows.astype(wide) * of_rows, axis=1, keepdims=True))
    d_gates = _rows_at(d_gates[:, 0], place.reshape(-1)).reshape(gates.shape)
    return d_rows.astype(rows.dtype), d_gates.astype(gates.dtype), None, None


derivatives.define(_combine, None, _combine_tangent, _combine_backward)
