"""Recurrent layers as pure functions: LSTM and GRU over packed rows.

Where a document begins, the state is set to zero: no token sees another document, exactly.

>>> import jax
>>> x, w_input, w_hidden, bias = (jnp.ones(shape) for shape in [(2, 5, 3), (3, 16), (4, 16), 16])
>>> out, state = jax.jit(lstm)(x, w_input, w_hidden, bias)
>>> out.shape, state.hidden.shape, state.cell.dtype
((2, 5, 4), (2, 4), dtype('float32'))
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.functional.layers import linear
from jaxformer.kernels.recurrence import RecurrentCell, recur, reset
from jaxformer.types import Array


class LstmState(NamedTuple):
    """After some tokens: `hidden` [B, H], the output, and `cell` [B, H], float32 or wider."""

    hidden: Array
    cell: Array


def document_starts(segments: Array | None, shape: tuple[int, int], *, go_on: bool = False) -> Array:
    """[B, T] bool: true where a token is the first of its document.

    Args:
      segments: [B, T] int, document of each token; None: one document per row.
      shape: (B, T).
      go_on: the first token of a row belongs to the document of the state that is given.
    """
    first = jnp.full((shape[0], 1), not go_on)
    rest = jnp.zeros((shape[0], shape[1] - 1), bool) if segments is None else segments[:, 1:] != segments[:, :-1]
    return jnp.concatenate([first, rest], axis=1)


def lstm(
    x: Array,
    w_input: Array,
    w_hidden: Array,
    bias: Array,
    *,
    segments: Array | None = None,
    state: LstmState | None = None,
    lengths: Array | None = None,
    reverse: bool = False,
) -> tuple[Array, LstmState]:
    """A long short-term memory layer with forget gates (Hochreiter and Schmidhuber 1997; Gers et al. 2000).

    With [i, f, g, o] = x W + h U + b, in this order: c = sigmoid(f) c + sigmoid(i) tanh(g), h = sigmoid(o) tanh(c).

    Args:
      x: [B, T, D].
      w_input: W, [D, 4 H].
      w_hidden: U, [H, 4 H].
      bias: b, [4 H]; the sum of torch's two.
      segments: [B, T] int, document of each token; None: one document per row.
      state: before the first token, whose document it belongs to; None: zeros.
      lengths: [B] int, at least 1: after how many tokens of each row the state is wanted; None: all. Not with reverse.
      reverse: from the last token to the first.

    Returns:
      [B, T, H] in the dtype of x, and the state after the last step, or after `lengths`. The cell state is float32 or
      wider throughout.

    Raises:
      ValueError: shapes that do not fit.
    """
    _check(4, x, w_input, w_hidden, bias)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    first = (
        tuple(jnp.zeros((x.shape[0], w_hidden.shape[0]), dtype) for dtype in (x.dtype, wide))
        if state is None
        else (state.hidden.astype(x.dtype), state.cell.astype(wide))
    )
    starts = _starts(x, segments, state is not None, reverse)
    hidden, cell = _run(LSTM_CELL, x, w_input, w_hidden, bias, starts, first, reverse)
    return hidden, LstmState(*(_last(each, lengths, reverse) for each in (hidden, cell)))


def gru(
    x: Array,
    w_input: Array,
    w_hidden: Array,
    bias: Array,
    bias_hidden: Array | None = None,
    *,
    segments: Array | None = None,
    state: Array | None = None,
    lengths: Array | None = None,
    reset_after: bool = True,
    reverse: bool = False,
) -> tuple[Array, Array]:
    """A layer of gated recurrent units.

    With r and z = sigmoid(x W + b + h U + d) and the candidate n, in this order: h = (1 - z) n + z h. The candidate is
    tanh(x W + b + r (h U + d)) with `reset_after` (cuDNN and torch), else tanh(x W + b + (r h) U + d), as published.

    Args:
      x: [B, T, D].
      w_input: W, [D, 3 H].
      w_hidden: U, [H, 3 H].
      bias: b, [3 H].
      bias_hidden: d, [3 H]; None: zeros.
      segments: [B, T] int, document of each token; None: one document per row.
      state: [B, H], before the first token, whose document it belongs to; None: zeros.
      lengths: [B] int, at least 1: after how many tokens of each row the state is wanted; None: all. Not with reverse.
      reset_after: the reset gate acts on the product with U, not on what is multiplied.
      reverse: from the last token to the first.

    Returns:
      [B, T, H] in the dtype of x, and the state [B, H] after the last step, or after `lengths`.

    Raises:
      ValueError: shapes that do not fit.

    Source: Cho et al. 2014, section 2.3 (with z and 1 - z exchanged, as all libraries have it).
    """
    _check(3, x, w_input, w_hidden, bias)
    first = jnp.zeros((x.shape[0], w_hidden.shape[0]), x.dtype) if state is None else state.astype(x.dtype)
    bias_hidden = jnp.zeros_like(bias) if bias_hidden is None else bias_hidden
    starts = _starts(x, segments, state is not None, reverse)
    if reset_after:
        inputs = x, w_input, w_hidden, bias_hidden, starts
        (hidden,) = _run(GRU_CELL, *inputs, (first,), reverse, bias)
    else:
        hidden = _reset_before(linear(x, w_input, bias), w_hidden, bias_hidden, starts, first, reverse)
    return hidden, _last(hidden, lengths, reverse)


def _check(gates: int, x: Array, w_input: Array, w_hidden: Array, bias: Array) -> None:
    width = gates * w_hidden.shape[0]
    wanted = {"w_input": (w_input, (x.shape[-1], width)), "w_hidden": (w_hidden, (w_hidden.shape[0], width)),
              "bias": (bias, (width,))}  # fmt: skip
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(f"{name}: shape {array.shape}; accepted for x {x.shape}, {gates} gates: {shape}")


def _starts(x: Array, segments: Array | None, go_on: bool, reverse: bool) -> Array:
    segments = segments[:, ::-1] if reverse and segments is not None else segments
    return document_starts(segments, x.shape[:2], go_on=go_on)


def _last(states: Array, lengths: Array | None, reverse: bool) -> Array:
    if lengths is None:
        return states[:, 0 if reverse else -1]
    return jnp.take_along_axis(states, (lengths - 1)[:, None, None], axis=1)[:, 0]


def _run(cell, x, w_input, w_hidden, bias, starts, first, reverse, bias_input=None) -> list[Array]:
    """The states after each token, each [B, T, H]. Tokens come first in the loop's arrays."""
    turn = slice(None, None, -1 if reverse else 1)
    inputs = linear(jnp.swapaxes(x, 0, 1)[turn], w_input, bias_input)
    states = recur(cell, inputs, w_hidden, bias, starts.T, first)
    return [jnp.swapaxes(s[turn], 0, 1) for s in states]


def _reset_before(inputs, w_hidden, bias, starts, state, reverse) -> Array:
    units = w_hidden.shape[0]
    w_gates, w_new = jnp.split(w_hidden.astype(inputs.dtype), [2 * units], axis=1)
    b_gates, b_new = jnp.split(bias.astype(inputs.dtype), [2 * units])
    turn = slice(None, None, -1 if reverse else 1)

    def step(state, now):
        of_input, start = now
        (state,) = reset((state,), start)
        r, z = jnp.split(jax.nn.sigmoid(of_input[:, : 2 * units] + state @ w_gates + b_gates[None]), 2, axis=-1)
        new = jnp.tanh(of_input[:, 2 * units :] + (r * state) @ w_new + b_new[None])
        state = (1 - z) * new + z * state
        return state, state

    _, states = jax.lax.scan(step, state, (jnp.swapaxes(inputs, 0, 1)[turn], starts.T))
    return jnp.swapaxes(states[turn], 0, 1)


def _activate_lstm(gates):
    wide = gates.astype(jnp.promote_types(gates.dtype, jnp.float32))
    units = gates.shape[-1] // 4
    gated, new, out = jnp.split(wide, [2 * units, 3 * units], axis=-1)
    return jax.nn.sigmoid(gated), jnp.tanh(new), jax.nn.sigmoid(out)


def _deactivate_lstm(active, change):
    slopes = [_slope(active[0]), 1 - jnp.square(active[1]), _slope(active[2])]
    return jnp.concatenate([d * slope for d, slope in zip(change, slopes, strict=True)], axis=-1)


def _slope(sigmoid):
    """The derivative of a sigmoid of this value."""
    return sigmoid * (1 - sigmoid)


def _update_lstm(state, active):
    hidden, cell = state
    sigmoid, new, out = active
    i, f = jnp.split(sigmoid, 2, axis=-1)
    cell = f * cell + i * new
    return (out * jnp.tanh(cell)).astype(hidden.dtype), cell


def _join_gru(of_input, of_hidden):
    """[r, z, what the token says of the candidate, what the state says of it]."""
    units = of_input.shape[-1] // 3
    gates = of_input[..., : 2 * units] + of_hidden[..., : 2 * units]
    return jnp.concatenate([gates, of_input[..., 2 * units :], of_hidden[..., 2 * units :]], axis=-1)


def _split_gru(gates):
    rest = 3 * (gates.shape[-1] // 4)
    gate = gates[..., : rest - gates.shape[-1] // 4]
    return gates[..., :rest], jnp.concatenate([gate, gates[..., rest:]], axis=-1)


def _activate_gru(gates):
    """r and z, the candidate, and what the state says of it."""
    wide = gates.astype(jnp.promote_types(gates.dtype, jnp.float32))
    units = gates.shape[-1] // 4
    sigmoid, of_input, of_hidden = jnp.split(wide, [2 * units, 3 * units], axis=-1)
    sigmoid = jax.nn.sigmoid(sigmoid)
    return sigmoid, jnp.tanh(of_input + sigmoid[..., :units] * of_hidden), of_hidden


def _deactivate_gru(active, change):
    sigmoid, new, of_hidden = active
    d_sigmoid, d_new, d_of_hidden = change
    units = new.shape[-1]
    d_inner = d_new * (1 - jnp.square(new))
    d_reset = d_sigmoid[..., :units] + d_inner * of_hidden
    d_gates = jnp.concatenate([d_reset, d_sigmoid[..., units:]], axis=-1) * _slope(sigmoid)
    return jnp.concatenate([d_gates, d_inner, d_of_hidden + d_inner * sigmoid[..., :units]], axis=-1)


def _update_gru(state, active):
    (hidden,), (sigmoid, new, _) = state, active
    z = sigmoid[..., new.shape[-1] :]
    return (((1 - z) * new + z * hidden.astype(z.dtype)).astype(hidden.dtype),)


LSTM_CELL = RecurrentCell(jnp.add, lambda gates: (gates, gates), _activate_lstm, _deactivate_lstm, _update_lstm)
GRU_CELL = RecurrentCell(_join_gru, _split_gru, _activate_gru, _deactivate_gru, _update_gru)
