"""Splitting a batch into micro-batches, and a loop over batches inside a compiled program."""

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

    The loop carries the next batch, which makes it an array of its own: otherwise XLA's CPU backend fuses the slice of
    the stack into every reader, such as the attention mask, and those loops are not vectorized.
    """

    def at(index):
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)

    def step(index, carried):
        carry, batch = carried
        return body(index, carry, batch), at(index + 1)  # clamped to the last batch at the end

    return jax.lax.fori_loop(0, count, step, (carry, at(0)))[0]
