"""Losses as (sum, weight) instead of means, without ever holding the float32 logits of a whole batch.

The vocabulary projection and the loss are computed together, one block of positions at a time. The gradient of a
block's logits is known as soon as they are, so the backward pass is done in the same visit: three products of
[tokens, D, V] in all, where rematerialisation needs four, and no logits are kept.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.functional.block_loss import at_target, block_loss, chosen_chunk, loss_of_sums
from jaxformer.kernels import derivatives
from jaxformer.parallel.constraints import batch_shards, constrain, reduce_scatter_sum
from jaxformer.types import Array, Params


class TokenLoss(NamedTuple):
    """Sums over positions, in nats, float32 or wider; divide by `weight` once, at the very end.

    Attributes:
      total: scalar to minimise: cross-entropy with label smoothing, plus z-loss.
      weight: scalar, sum of the weights.
      nll_rows: [B], plain negative log-likelihood of each row.
      correct_rows: [B], weight of the positions whose target has the highest logit; a tie counts.
      weight_rows: [B], weight of each row.
    """

    total: Array
    weight: Array
    nll_rows: Array
    correct_rows: Array
    weight_rows: Array


class VocabularyProjection(NamedTuple):
    """What logits are made of: cap(transform(params, hidden) table^T + bias).

    Attributes:
      hidden: [B, T, D].
      table: [V, D].
      bias: [V], or None.
      transform: (params, [N, D]) -> [N, D], each position by itself; None: the identity.
      params: the parameters of `transform`; None: it has none.
      soft_cap: of the logits, as of `layers.cap`; None: there is none.
    """

    hidden: Array
    table: Array
    bias: Array | None = None
    transform: Callable[[Params, Array], Array] | None = None
    params: Params | None = None
    soft_cap: float | None = None


def cross_entropy(
    logits: Array, targets: Array, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Array, Array]:
    """Loss of each position, and its plain negative log-likelihood.

    Args:
      logits: [..., V] float.
      targets: [...] int in [0, V).
      label_smoothing: share of the target's probability spread evenly over all V entries.
      z_loss: multiplies log(sum(exp(logits)))**2.

    Returns:
      Two [...] arrays in nats, in the dtype of the logits: the loss, and -log p(target). (So pass float32 logits.)
      A logit of -inf is a probability of 0: -log p is inf where it is the target's. With label smoothing, which asks
      a share of every entry, the loss is inf wherever any logit is -inf; its gradient stays finite.

    Source: Szegedy et al. 2016, section 7 (smoothing); Chowdhery et al. 2022, section 5 (z-loss).

    >>> loss, nll = cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))
    >>> round(float(nll[0]), 4)
    1.3863
    """
    return loss_of_sums(logits, jax.nn.logsumexp(logits, axis=-1), at_target(logits, targets), label_smoothing, z_loss)


def token_loss(
    hidden: Array,
    table: Array,
    targets: Array,
    weights: Array,
    bias: Array | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    soft_cap: float | None = None,
) -> TokenLoss:
    """Cross-entropy of the vocabulary projection of `hidden`, in blocks of positions.

    Args:
      hidden: [B, T, D].
      table: [V, D].
      targets: [B, T] int.
      weights: [B, T] float; 0 leaves a position out, but its hidden state must still be finite. Only `hidden`, `table`
        and `bias` receive gradients, and only from `total`; in forward mode, too, the metrics' tangents are 0 and
        tangents of the weights are ignored.
      bias: [V] or None.
      label_smoothing, z_loss: as in `cross_entropy`.
      chunk_tokens: tokens whose logits exist at once, rounded to whole columns of B; None: chosen from V.
      soft_cap: of the logits, as of `layers.cap`.

    Returns:
      TokenLoss of sums.

    >>> h, e = jnp.ones((2, 3, 4)), jnp.zeros((5, 4))
    >>> out = token_loss(h, e, jnp.zeros((2, 3), int), jnp.ones((2, 3)))
    >>> round(float(out.total / out.weight), 4)
    1.6094
    """
    batch, positions, _ = hidden.shape
    weights = weights.astype(jnp.promote_types(hidden.dtype, jnp.float32))
    if chunk_tokens is None:
        chunk_tokens = chosen_chunk(batch, table.shape[0], batch_shards(batch))
    per_chunk = max(1, min(positions, chunk_tokens // batch))
    chunks = math.ceil(positions / per_chunk)
    per_chunk = math.ceil(positions / chunks)
    padding = ((0, 0), (0, chunks * per_chunk - positions), (0, 0))
    hidden, targets, padded = (
        jnp.pad(x, padding[: x.ndim]) if padding[1][1] else x for x in (hidden, targets, weights)
    )
    if bias is None:
        bias = jnp.zeros((table.shape[0],), weights.dtype)
    options = (label_smoothing, z_loss, chunks, per_chunk, soft_cap)
    total, (nll_rows, correct_rows) = _projected((hidden, table, bias), targets, padded, options)
    weight_rows = jnp.sum(weights, axis=1)
    return TokenLoss(total, jnp.sum(weight_rows), nll_rows, correct_rows, weight_rows)


def with_gradients(visit: Callable, metrics: int = 2) -> Callable:
    """A loss that can be differentiated, from a visit of all blocks that computes gradients along with the loss.

    Args:
      visit: (operands, targets, weights [B, T], options, gradients=bool) -> (total, metrics of each row, [B] each),
        and if asked for the gradients of `total`, a tree like `operands`.
      metrics: how many there are: negative log-likelihood, weight of what is correct, ...

    Returns:
      (operands, targets, weights, options) -> (total, metrics of each row). The operands receive gradients, and only
      from `total`; the metrics and the targets, a tree, pass none.
    """

    @functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
    def loss(operands, targets, weights, options):
        return visit(operands, targets, weights, options, gradients=False)[0]

    def backward(options, gradients, cotangents):
        return jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), gradients), None, None

    def tangent(options, gradients, changes):
        operands, _, weights = changes
        dtype, rows = weights.dtype, jnp.zeros(len(weights), weights.dtype)
        products = jax.tree.map(lambda g, t: jnp.sum(g.astype(dtype) * t.astype(dtype)), gradients, operands)
        return sum(jax.tree.leaves(products), jnp.zeros((), dtype)), (rows,) * metrics

    derivatives.define(loss, functools.partial(visit, gradients=True), tangent, backward, loops=True)
    return loss


def _visit(operands, targets_BT, weights_BT, options, *, gradients):
    """One pass over the chunks: the sums, and (if asked for) the gradients of `total` by hidden, table and bias."""
    hidden_BTD, table_VD, bias_V = operands
    label_smoothing, z_loss, chunks, per_chunk, soft_cap = options
    batch, _, width = hidden_BTD.shape
    accumulate = weights_BT.dtype
    # Gathered along D before the loop, or every block would gather it.
    compute_VD = constrain(table_VD.astype(hidden_BTD.dtype), "vocab", None)
    parts = batch_shards(batch)

    def chunk(carry, part):
        hidden_BtD, *targets_and_weights = part
        sums, grads = block_loss(
            hidden_BtD.reshape(-1, width),
            compute_VD,
            bias_V,
            *targets_and_weights,
            label_smoothing,
            z_loss,
            gradients=gradients,
            parts=parts,
            soft_cap=soft_cap,
        )
        sums = jax.tree.map(jnp.add, carry[:2], sums)
        if not gradients:
            return sums, None
        d_hidden, d_table, d_bias = grads
        return (*sums, carry[2] + d_table, carry[3] + d_bias), d_hidden.reshape(hidden_BtD.shape)

    zero_B = jnp.zeros((batch,), accumulate)
    carry: tuple[Any, ...] = (jnp.zeros((), accumulate), (zero_B, zero_B))
    if gradients:
        table_sum = jnp.zeros(table_VD.shape, accumulate)
        if parts > 1:
            table_sum = constrain(jnp.zeros((parts, *table_VD.shape), accumulate), "rows", "vocab", None)
        carry = (*carry, table_sum, jnp.zeros(bias_V.shape, accumulate))
    whole = (hidden_BTD, targets_BT, weights_BT)
    if chunks == 1:
        carry, d_hidden = chunk(carry, whole)
    else:
        by_chunk = [jnp.moveaxis(x.reshape(batch, chunks, per_chunk, *x.shape[2:]), 1, 0) for x in whole]
        carry, d_hidden = jax.lax.scan(chunk, carry, tuple(by_chunk))
    if not gradients:
        return carry, None
    if chunks > 1:
        d_hidden = jnp.moveaxis(d_hidden, 0, 1).reshape(hidden_BTD.shape)
    d_table = reduce_scatter_sum(carry[2], "vocab", "embed") if parts > 1 else carry[2]
    return carry[:2], (d_hidden, d_table.astype(table_VD.dtype), carry[3].astype(bias_V.dtype))


_projected = with_gradients(_visit)
