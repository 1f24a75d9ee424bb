"""What cross-entropy needs of each row of logits, in one reading of them: the log of the sum, the target's logit and
the largest. XLA reads them once for each of the three, which on GPUs, where [N, V] logits are too many for the cache,
takes 7 % of a step of GPT-2 124M.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.types import Array


class LogitSums(NamedTuple):
    """Of each row, [...]: log(sum(exp(logits))), logits[target], max(logits)."""

    log_sum: Array
    at_target: Array
    top: Array


@jax.custom_jvp
def logit_sums(logits: Array, targets: Array) -> LogitSums:
    """All three of `LogitSums`, by one reduction; `top` passes no gradient.

    Args:
      logits: [..., V] float.
      targets: [...] int in [0, V).

    >>> sums = logit_sums(jnp.zeros((1, 4)), jnp.array([2]))
    >>> round(float(sums.log_sum[0] - sums.at_target[0]), 4)
    1.3863
    """
    chosen = jnp.where(is_target(logits, targets), logits, 0)
    zero = jnp.zeros((), logits.dtype)
    top, total, at_target = jax.lax.reduce(
        (logits, jnp.ones_like(logits), chosen), (-jnp.inf + zero, zero, zero), _both, (logits.ndim - 1,)
    )
    return LogitSums(top + jnp.log(total), at_target, top)


def _both(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    """(top, sum of exp(logit - top), sum of what is chosen) of two groups of logits together.

    By `select`: `jnp.where` is a function call, and XLA's compiler for GPUs crashes (JAX 0.10.2) on a reduction that
    calls one and whose results nobody uses, as where only the statistics of a micro-batch are wanted.
    """
    (top_a, total_a, chosen_a), (top_b, total_b, chosen_b) = a, b
    first = top_a >= top_b
    apart = jnp.exp(-jnp.abs(top_a - top_b))
    shrink = jax.lax.select(top_a == top_b, jnp.ones_like(apart), apart)  # both may be -inf
    total = jax.lax.select(first, total_a + shrink * total_b, total_b + shrink * total_a)
    return jax.lax.select(first, top_a, top_b), total, chosen_a + chosen_b


def is_target(logits: Array, targets: Array) -> Array:
    """[..., V] bool: which entry of each row is its target."""
    entries = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    return entries == targets[..., None]


@logit_sums.defjvp
def _tangent(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[LogitSums, LogitSums]:
    (logits, targets), (change, _) = primals, tangents
    found = logit_sums(logits, targets)
    probabilities = jnp.exp(logits - found.log_sum[..., None])
    chosen = jnp.where(is_target(logits, targets), 1, 0).astype(logits.dtype)
    of_log_sum, of_target = (jnp.sum(slope * change, axis=-1) for slope in (probabilities, chosen))
    return found, LogitSums(of_log_sum, of_target, jnp.zeros_like(found.top))
