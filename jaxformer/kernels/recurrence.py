"""A recurrence over the tokens of a row, with a backward pass that multiplies by the weights' transposes in few, large
products.

In each step the hidden state goes through one product with weights; all else is elementwise, a `RecurrentCell`.
Autodiff would add up the gradient of the weights step by step, one small product after another. Here the loop of the
backward pass only finds the gradients of the gates, and one product over all steps makes of them that of the weights.

What the forward pass keeps are the gates after their activation functions: the backward pass then needs no exponentials
but of the state. And because they are kept, XLA's CPU backend computes each in a loop of its own, as vectors; all
in one loop it computes number by number, at a fifth of the speed.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.kernels import derivatives
from jaxformer.kernels.matmul import rounded_einsum, transposed_product
from jaxformer.parallel.platforms import this_platform
from jaxformer.types import Array

State = tuple[Array, ...]  # each [B, H]; the first goes through the weights and is the output


class RecurrentCell(NamedTuple):
    """The elementwise part of a recurrent cell with H units.

    Attributes:
      join: (from the input [B, G], from the hidden state [B, G]) -> gates; linear.
      split: cotangent of the gates, [..., of `join`] -> cotangents of the two; the transpose of `join`.
      activate: gates -> arrays of the same leading axes, float32 or wider: what the gates are after their functions.
      deactivate: (what `activate` returned, cotangents of it) -> cotangent of the gates, in the wider dtype.
      update: (state before, what `activate` returned) -> state after, in the dtypes of the state.
    """

    join: Callable[[Array, Array], Array]
    split: Callable[[Array], tuple[Array, Array]]
    activate: Callable[[Array], State]
    deactivate: Callable[[State, State], Array]
    update: Callable[[State, State], State]


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
        of_state = rounded_einsum("BH,HG->BG", state[0], narrow, inputs.dtype) + added[None]
        active = cell.activate(cell.join(of_input, of_state))
        state = cell.update(state, active)
        return state, (_stackable(state), active)

    _, (stacked, active) = jax.lax.scan(step, first, (inputs, starts))
    states = tuple(s.astype(one.dtype) for s, one in zip(stacked, first, strict=True))
    return states, (states, active, w, bias, starts, first)


def _stackable(arrays: State) -> State:
    """What a loop over steps is to stack: on CPU 16-bit numbers as float32, because to write those of a step XLA's CPU
    backend would convert those of all steps to float32 and back."""
    if this_platform() != "cpu":
        return arrays
    return tuple(x.astype(jnp.float32) if x.dtype.itemsize == 2 else x for x in arrays)


def _before(states: State, first: State, starts: Array) -> State:
    """The state that each step began with, [T, B, H]."""
    shifted = (jnp.concatenate([one[None], all_of[:-1]]) for all_of, one in zip(states, first, strict=True))
    return tuple(jnp.where(starts[..., None], jnp.zeros((), s.dtype), s) for s in shifted)


def _tangent(cell, saved, changes):
    states, active, w, _, starts, first = saved
    d_inputs, d_w, d_bias, _, d_first = changes
    dtype = d_inputs.dtype

    def step(change, now):
        before, gates, start, d_input = now
        change = reset(change, start)
        d_hidden = change[0] @ w.astype(dtype) + before[0] @ d_w.astype(dtype) + d_bias.astype(dtype)[None]
        d_gates = cell.join(d_input, d_hidden).astype(gates[0].dtype)
        (d_active,) = jax.linear_transpose(functools.partial(cell.deactivate, gates), gates)(d_gates)
        change = jax.jvp(cell.update, (before, gates), (change, d_active))[1]
        return change, change

    return jax.lax.scan(step, d_first, (_before(states, first, starts), active, starts, d_inputs))[1]


def _backward(cell, saved, cotangents):
    states, active, w, bias, starts, first = saved
    dtype, before = states[0].dtype, _before(states, first, starts)
    turned = jax.lax.optimization_barrier(w.astype(dtype).T)  # once, and not in every step

    def step(after, now):
        of_output, state, gates, start = now
        total = tuple(a + o.astype(a.dtype) for a, o in zip(after, of_output, strict=True))
        d_state, d_active = jax.vjp(cell.update, state, gates)[1](total)
        d_gates = cell.deactivate(gates, d_active).astype(dtype)
        back = rounded_einsum("BG,GH->BH", cell.split(d_gates)[1], turned, dtype)
        return reset((d_state[0] + back, *d_state[1:]), start), _stackable((d_gates,))[0]

    none = tuple(jnp.zeros_like(x) for x in first)
    d_first, d_gates = jax.lax.scan(step, none, (cotangents, before, active, starts), reverse=True)
    d_inputs, d_hidden = cell.split(d_gates.astype(dtype))
    flat = d_hidden.reshape(-1, d_hidden.shape[-1])
    d_w = transposed_product(before[0].reshape(flat.shape[0], -1), flat, w.dtype)
    return d_inputs, d_w, jnp.sum(flat, axis=0, dtype=bias.dtype), None, d_first


derivatives.define(recur, _forward, _tangent, _backward, loops=True)
