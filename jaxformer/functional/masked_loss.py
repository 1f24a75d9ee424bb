"""The loss of a few selected positions at a proportional cost; the same numbers as `losses.token_loss`.

A masked language model predicts about 15 % of the tokens of each row. Here each row's selected positions are moved to
its front, and only as many blocks of columns are visited as the row with the most of them needs.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.functional.block_loss import block_loss, chosen_chunk
from jaxformer.functional.losses import TokenLoss, VocabularyProjection, with_gradients
from jaxformer.parallel.constraints import batch_shards, constrain, reduce_scatter_sum
from jaxformer.types import Array, Params

BLOCKS = 8  # per row; more would waste less computation but add up the table's gradient more often
LEAST_TOKENS = 128  # per block; fewer are not worth a visit


def masked_token_loss(
    hidden: Array,
    table: Array,
    targets: Array,
    weights: Array,
    bias: Array | None = None,
    *,
    transform: Callable[[Params, Array], Array] | None = None,
    transform_params: Params | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    soft_cap: float | None = None,
) -> TokenLoss:
    """`token_loss` of `transform(transform_params, hidden)`, for weights most of which are 0. Exact for any weights.

    Positions move only within their row, so sharded rows stay on their devices. The number of visited blocks is the
    same for all rows.

    Args:
      hidden: [B, T, D].
      table: [V, D].
      targets: [B, T] int.
      weights: [B, T] float; 0 leaves a position out, but its hidden state must still be finite.
      bias: [V] or None.
      transform: (transform_params, [N, D]) -> [N, D], each position by itself; None: the identity.
      transform_params: the parameters of `transform`; closed-over arrays would receive no gradient.
      label_smoothing, z_loss: as in `cross_entropy`.
      chunk_tokens: most tokens whose logits exist at once, in whole columns of B; None: chosen from V.
      soft_cap: of the logits, as of `layers.cap`.

    Returns:
      TokenLoss of sums. `hidden`, `table`, `bias` and `transform_params` receive gradients, and only from `total`; in
      forward mode, too, the metrics' tangents are 0 and tangents of the weights are ignored.

    >>> h, e = jnp.ones((2, 3, 4)), jnp.zeros((5, 4))
    >>> out = masked_token_loss(h, e, jnp.zeros((2, 3), int), jnp.array([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]))
    >>> round(float(out.total / out.weight), 4), out.weight_rows.tolist()
    (1.6094, [2.0, 0.0])
    """
    weights = weights.astype(jnp.promote_types(hidden.dtype, jnp.float32))
    of = VocabularyProjection(hidden, table, bias, transform, transform_params, soft_cap)
    operands, options = prepare(of, weights, label_smoothing, z_loss, chunk_tokens)
    total, (nll_rows, correct_rows) = _projected(operands, targets, weights, options)
    weight_rows = jnp.sum(weights, axis=1)
    return TokenLoss(total, jnp.sum(weight_rows), nll_rows, correct_rows, weight_rows)


def prepare(
    of: VocabularyProjection, weights: Array, label_smoothing: float, z_loss: float, chunk_tokens: int | None
) -> tuple[tuple, tuple]:
    """(operands, options) of `visit`; arguments as of `masked_token_loss`, the weights in the dtype of the loss."""
    batch, positions, _ = of.hidden.shape
    per_chunk = max(math.ceil(positions / BLOCKS), LEAST_TOKENS // batch)
    if chunk_tokens is None:
        chunk_tokens = chosen_chunk(batch, of.table.shape[0])
    per_chunk = max(1, min(per_chunk, positions, chunk_tokens // batch))
    options = (of.transform or identity, label_smoothing, z_loss, per_chunk, of.soft_cap)
    return (of.hidden, of.table, bias_of(of, weights.dtype), of.params or {}), options


def bias_of(of: VocabularyProjection, dtype: Any) -> Array:
    """[V]; zeros where there is none."""
    return jnp.zeros((of.table.shape[0],), dtype) if of.bias is None else of.bias


def identity(params: Params, x: Array) -> Array:
    """A transform that does nothing."""
    return x


def visit_blocks(operands, targets_BT, weights_BT, options, *, gradients, teacher_BTE=None, soften=None):
    """The sums, and (if asked for) the gradients of `total` by the operands.

    `soften` is as of `losses.block_loss`, with the block's part of `teacher_BTE`, [N, E], as its first argument.
    """
    hidden_BTD, table_VD, bias_V, params = operands
    transform, label_smoothing, z_loss, per_chunk, soft_cap = options
    batch, positions, width = hidden_BTD.shape
    accumulate = weights_BT.dtype
    # As in `losses`: the table is gathered along D before the loop; its gradient is summed over devices once, after it.
    compute_VD = constrain(table_VD.astype(hidden_BTD.dtype), "vocab", None)
    parts = batch_shards(batch)
    left_out_BT = weights_BT == 0
    order_BT = jnp.argsort(left_out_BT, axis=1, stable=True)
    needed = jnp.max(jnp.sum(~left_out_BT, axis=1))
    # Columns beyond the end repeat the last position with weight 0.
    columns = math.ceil(positions / per_chunk) * per_chunk
    beyond = ((0, 0), (0, columns - positions))
    places_BT = jnp.pad(order_BT, beyond, mode="edge")
    sorted_BT = jnp.pad(jnp.take_along_axis(weights_BT, order_BT, axis=1), beyond)

    def visit(index, carry):
        sums, grads, d_hidden_BTD = carry
        start = index * per_chunk
        places_Bt, weights_Bt = (
            jax.lax.dynamic_slice_in_dim(x, start, per_chunk, axis=1) for x in (places_BT, sorted_BT)
        )
        targets_Bt = jnp.take_along_axis(targets_BT, places_Bt, axis=1)
        hidden_ND = jnp.take_along_axis(hidden_BTD, places_Bt[..., None], axis=1).reshape(-1, width)
        of_teacher = soften
        if soften is not None:
            theirs = jnp.take_along_axis(teacher_BTE, places_Bt[..., None], axis=1)
            of_teacher = functools.partial(soften, theirs.reshape(-1, theirs.shape[-1]))
        if gradients:
            x_ND, back = jax.vjp(transform, params, hidden_ND)
        else:
            x_ND = transform(params, hidden_ND)
        new, d = block_loss(
            x_ND,
            compute_VD,
            bias_V,
            targets_Bt,
            weights_Bt,
            label_smoothing,
            z_loss,
            gradients=gradients,
            parts=parts,
            soft_cap=soft_cap,
            soften=of_teacher,
        )
        sums = jax.tree.map(jnp.add, sums, new)
        if not gradients:
            return sums, grads, d_hidden_BTD
        d_x_ND, d_table, d_bias = d
        d_params, d_hidden_ND = back(d_x_ND)
        grads = jax.tree.map(lambda total, g: total + g.astype(total.dtype), grads, (d_table, d_bias, d_params))
        d_hidden_BtD = d_hidden_ND.reshape(batch, per_chunk, width)
        return sums, grads, jax.lax.dynamic_update_slice_in_dim(d_hidden_BTD, d_hidden_BtD, start, axis=1)

    zero_B = jnp.zeros((batch,), accumulate)
    rows = (zero_B,) * (2 if soften is None else 3)
    carry: tuple[Any, Any, Any] = ((jnp.zeros((), accumulate), rows), (), ())
    if gradients:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulate), (table_VD, bias_V, params))
        if parts > 1:
            zeros = (constrain(jnp.zeros((parts, *table_VD.shape), accumulate), "rows", "vocab", None), *zeros[1:])
        carry = (carry[0], zeros, jnp.zeros((batch, columns, width), hidden_BTD.dtype))
    sums, grads, d_sorted_BTD = jax.lax.fori_loop(0, -(-needed // per_chunk), visit, carry)
    if not gradients:
        return sums, None
    back_BT = jnp.argsort(order_BT, axis=1)
    d_hidden_BTD = jnp.take_along_axis(d_sorted_BTD, back_BT[..., None], axis=1)
    if parts > 1:
        grads = (reduce_scatter_sum(grads[0], "vocab", "embed"), *grads[1:])
    d_table, d_bias, d_params = jax.tree.map(lambda g, x: g.astype(x.dtype), grads, (table_VD, bias_V, params))
    return sums, (d_hidden_BTD, d_table, d_bias, d_params)


_projected = with_gradients(visit_blocks)
