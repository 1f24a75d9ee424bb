"""A batch seen in parts, and several batches, one by one inside a compiled program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.parallel.constraints import constrain
from jaxformer.types import Array, Batch


def split_microbatches(x: Array, parts: int) -> Array:
    """[B, ...] -> [parts, B / parts, ...]; part i holds the rows i, i + parts, i + 2 * parts, ..."""
    x = jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)
    return constrain(x, None, "batch_rows", *[None] * (x.ndim - 2))


def fori_over_batches(body: Callable, carry: Any, stacked: Batch, count: Array | int) -> Any:
    """carry = body(index, carry, stacked[index]) for the first `count` indices.

    The next batch is carried along, so that it is an array: XLA's CPU backend would cut a slice out of the stack anew
    in whatever reads it, the masks of attention for one, and such a loop is not vectorized (the softmax of the tiny
    GPT, masks and all, took 12 times as long).
    """

    def at(index):
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)

    def turn(index, carried):
        carry, batch = carried
        return body(index, carry, batch), at(index + 1)  # the last one again after the last

    return jax.lax.fori_loop(0, count, turn, (carry, at(0)))[0]
