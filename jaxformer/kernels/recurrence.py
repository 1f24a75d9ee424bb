"""A recurrence over the tokens of a row, with a backward pass that multiplies by the weights' transposes in few, large
products.

In each step the hidden state goes through one product with weights; all else is elementwise, a `RecurrentCell`.
Autodiff would add up the gradient of the weights step by step, one small product after another. Here the loop of the
backward pass only finds the gradients of the gates, and one product over all steps makes of them that of the weights.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.kernels import derivatives
from jaxformer.kernels.matmul import rounded_einsum, times_transpose, transposed_product
from jaxformer.types import Array

UNROLL = 4  # steps in a loop's body
State = tuple[Array, ...]  # each [B, H]; the first goes through the weights and is the output


class RecurrentCell(NamedTuple):
    """The elementwise part of a recurrent cell with H units.

    Attributes:
      join: (from the input [B, G], from the hidden state [B, G]) -> gates; linear.
      split: cotangent of the gates, [..., of `join`] -> cotangents of the two; the transpose of `join`.
      update: (state before, gates) -> state after, in the dtypes of the state.
    """

    join: Callable[[Array, Array], Array]
    split: Callable[[Array], tuple[Array, Array]]
    update: Callable[[State, Array], State]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def recur(cell: RecurrentCell, inputs: Array, w: Array, bias: Array, starts: Array, first: State) -> State:
    """The states of a cell after each of T steps.

    Args:
      cell: the elementwise part.
      inputs: [T, B, G], what the tokens add to the gates.
      w: [H, G], cast to the dtype of `inputs`.
      bias: [G], is added to state @ w.
      starts: [T, B] bool: the state is set to zero before this step.
      first: the state before the first step, each [B, H].

    Returns:
      For each array of the state [T, B, H].
    """
    return _forward(cell, inputs, w, bias, starts, first)[0]


def reset(state: State, start: Array) -> State:
    """Zeros, exactly, where `start` [B] is true: not even a NaN goes on."""
    return tuple(jnp.where(start[:, None], jnp.zeros((), s.dtype), s) for s in state)


def _forward(cell, inputs, w, bias, starts, first):
    narrow, added = w.astype(inputs.dtype), bias.astype(inputs.dtype)

    def step(state, now):
        of_input, start = now
        state = reset(state, start)
        gates = cell.join(of_input, rounded_einsum("BH,HG->BG", state[0], narrow, inputs.dtype) + added[None])
        state = cell.update(state, gates)
        return state, (state, gates)

    _, (states, gates) = jax.lax.scan(step, first, (inputs, starts), unroll=UNROLL)
    return states, (states, gates, w, bias, starts, first)


def _before(states: State, first: State, starts: Array) -> State:
    """The state that each step began with, [T, B, H]."""
    shifted = (jnp.concatenate([one[None], all_of[:-1]]) for all_of, one in zip(states, first, strict=True))
    return tuple(jnp.where(starts[..., None], jnp.zeros((), s.dtype), s) for s in shifted)


def _tangent(cell, saved, changes):
    states, gates, w, _, starts, first = saved
    d_inputs, d_w, d_bias, _, d_first = changes
    dtype = gates.dtype

    def step(change, now):
        before, gate, start, d_input = now
        change = reset(change, start)
        d_hidden = change[0] @ w.astype(dtype) + before[0] @ d_w.astype(dtype) + d_bias.astype(dtype)[None]
        change = jax.jvp(cell.update, (before, gate), (change, cell.join(d_input, d_hidden)))[1]
        return change, change

    return jax.lax.scan(step, d_first, (_before(states, first, starts), gates, starts, d_inputs))[1]


def _backward(cell, saved, cotangents):
    states, gates, w, bias, starts, first = saved
    before, narrow = _before(states, first, starts), w.astype(gates.dtype)

    def step(after, now):
        of_output, state, gate, start = now
        total = tuple(a + o.astype(a.dtype) for a, o in zip(after, of_output, strict=True))
        d_state, d_gate = jax.vjp(cell.update, state, gate)[1](total)
        back = times_transpose(cell.split(d_gate)[1], narrow, gates.dtype)
        d_state = (d_state[0] + back.astype(d_state[0].dtype), *d_state[1:])
        return reset(d_state, start), d_gate

    none = tuple(jnp.zeros_like(x) for x in first)
    d_first, d_gates = jax.lax.scan(step, none, (cotangents, before, gates, starts), reverse=True, unroll=UNROLL)
    d_inputs, d_hidden = cell.split(d_gates)
    flat = d_hidden.reshape(-1, d_hidden.shape[-1])
    d_w = transposed_product(before[0].reshape(flat.shape[0], -1), flat, w.dtype)
    return d_inputs, d_w, jnp.sum(flat, axis=0, dtype=bias.dtype), None, d_first


derivatives.define(recur, _forward, _tangent, _backward, loops=True)
