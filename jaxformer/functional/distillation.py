"""Distillation: a student learns from a teacher's probabilities as well as from the text.

Both vocabularies of logits exist for one block of positions at a time, as in `masked_loss`, which does the visits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.functional.layers import cap
from jaxformer.functional.losses import VocabularyProjection, with_gradients
from jaxformer.functional.masked_loss import bias_of, identity, prepare, visit_blocks
from jaxformer.kernels.matmul import times_transpose
from jaxformer.parallel.constraints import constrain
from jaxformer.types import Array


class DistillationLoss(NamedTuple):
    """Sums over positions, in nats, float32 or wider; divide by `weight` once, at the very end.

    Attributes:
      total: scalar to minimise.
      weight: scalar, sum of the weights.
      nll_rows: [B], plain negative log-likelihood of each row, of the student.
      correct_rows: [B], weight of the positions whose target has the student's highest logit.
      divergence_rows: [B], KL(teacher || student) of each row at the temperature.
      weight_rows: [B], weight of each row.
    """

    total: Array
    weight: Array
    nll_rows: Array
    correct_rows: Array
    divergence_rows: Array
    weight_rows: Array


def distillation_loss(
    student: VocabularyProjection,
    teacher: VocabularyProjection,
    targets: Array,
    weights: Array,
    *,
    temperature: float = 2.0,
    soft_weight: float = 5.0,
    hard_weight: float = 2.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
) -> DistillationLoss:
    """soft_weight temperature^2 KL(p || q) + hard_weight (the loss of the targets), where p and q are the teacher's and
    the student's probabilities of the logits divided by the temperature.

    Args:
      student: receives gradients, and only from `total`; [B, T, D] states, [V, D] table.
      teacher: receives none; its states are [B, T, E], its table is [V, E].
      targets: [B, T] int.
      weights: [B, T] float; 0 leaves a position out, but its hidden states must still be finite.
      temperature: divides both logits.
      soft_weight, hard_weight: of the two parts.
      label_smoothing, z_loss: of the second part, as in `cross_entropy`.
      chunk_tokens: as of `masked_token_loss`.

    Returns:
      DistillationLoss of sums.

    Source: Hinton et al. 2015, section 2; Sanh et al. 2019, section 3, whose weights are the defaults.

    >>> same = VocabularyProjection(jnp.ones((2, 3, 4)), jnp.eye(5, 4))
    >>> out = distillation_loss(same, same, jnp.zeros((2, 3), int), jnp.ones((2, 3)), hard_weight=0.0)
    >>> float(out.total), out.divergence_rows.tolist()
    (0.0, [0.0, 0.0])
    """
    weights = weights.astype(jnp.promote_types(student.hidden.dtype, jnp.float32))
    operands, options = prepare(student, weights, label_smoothing, z_loss, chunk_tokens)
    theirs = (teacher.hidden, teacher.table, bias_of(teacher, weights.dtype), teacher.params or {})
    softening = (teacher.transform or identity, teacher.soft_cap, temperature, soft_weight, hard_weight)
    total, (nll, correct, divergence) = _distilled(operands, (targets, *theirs), weights, (options, softening))
    weight_rows = jnp.sum(weights, axis=1)
    return DistillationLoss(total, jnp.sum(weight_rows), nll, correct, divergence, weight_rows)


def _visit(operands, targets, weights_BT, options, *, gradients):
    """As `visit_blocks`; of the targets, all but the first are the teacher's."""
    targets_BT, hidden_BTE, table_VE, bias_V, params = targets
    for_student, (transform, soft_cap, temperature, soft_weight, hard_weight) = options
    compute_VE = constrain(table_VE.astype(hidden_BTE.dtype), "vocab", None)

    def soften(hidden_NE, logits_NV, loss_N):
        theirs_NV = times_transpose(transform(params, hidden_NE), compute_VE, weights_BT.dtype) + bias_V[None, :]
        theirs_NV = constrain(theirs_NV, "rows", "vocab")
        log_p, log_q = (jax.nn.log_softmax(x / temperature) for x in (cap(theirs_NV, soft_cap), logits_NV))
        divergence_N = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
        return soft_weight * temperature**2 * divergence_N + hard_weight * loss_N, divergence_N

    return visit_blocks(
        operands, targets_BT, weights_BT, for_student, gradients=gradients, teacher_BTE=hidden_BTE, soften=soften
    )


_distilled = with_gradients(_visit, metrics=3)


def cosine_distance(student: Array, teacher: Array, weights: Array) -> Array:
    """Sum of weights (1 - cosine of the angle between the two states).

    Args:
      student, teacher: [B, T, D]; the teacher's receive no gradient.
      weights: [B, T].

    Returns:
      A scalar, float32 or wider.

    Source: Sanh et al. 2019, section 3.

    >>> x = jnp.ones((1, 2, 4))
    >>> float(cosine_distance(x, -x, jnp.ones((1, 2))))
    4.0
    """
    dtype = jnp.promote_types(student.dtype, jnp.float32)
    a, b = student.astype(dtype), jax.lax.stop_gradient(teacher).astype(dtype)
    dots, squares = jnp.sum(a * b, axis=-1), jnp.sum(a * a, axis=-1) * jnp.sum(b * b, axis=-1)
    cosine = dots * jax.lax.rsqrt(jnp.maximum(squares, 1e-16))
    return jnp.sum(weights.astype(dtype) * (1 - cosine))
