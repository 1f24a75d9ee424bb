"""The loss of one block of positions: products with the vocabulary, losses, gradients, while its logits exist."""

import functools

import jax
import jax.numpy as jnp

from jaxformer.functional.layers import cap
from jaxformer.kernels.logit_sums import is_target, logit_sums
from jaxformer.kernels.matmul import product, times_transpose, transposed_product
from jaxformer.parallel.constraints import constrain
from jaxformer.types import Array

# Most logits of a block on one device, if the caller does not say how many tokens: 128 MiB of float32; on GPUs 1 GiB,
# as each block adds its part to the gradient of the whole table, which took 8 % of a step of GPT-2 124M on an H200.
MOST_LOGITS, MOST_ON_GPU = 2**25, 2**28
MIN_POSITIONS = 16


def chosen_chunk(batch: int, entries: int, shards: int = 1, platform: str | None = None) -> int:
    """Tokens whose logits exist at once, of all `shards` of the rows.

    Args:
      batch: rows; a block has at least `MIN_POSITIONS` columns of them.
      entries: of the vocabulary.
      shards: devices that share the rows.
      platform: that the program is for, "cpu", "cuda" or "tpu"; None: where it is traced.
    """
    platform = platform or jax.default_backend()
    most = MOST_ON_GPU if platform in ("cuda", "gpu") else MOST_LOGITS
    return max(MIN_POSITIONS * batch, shards * (most // entries))


def loss_of_sums(
    logits: Array, log_z: Array, chosen: Array, label_smoothing: float, z_loss: float
) -> tuple[Array, Array]:
    """As `losses.cross_entropy`, from the log of the sum and the target's logit of each row."""
    nll = log_z - chosen
    loss = nll
    if label_smoothing:
        loss = (1 - label_smoothing) * nll + label_smoothing * (log_z - jnp.mean(logits, axis=-1))
    if z_loss:
        loss = loss + z_loss * jnp.square(log_z)
    return loss, nll


def at_target(logits: Array, targets: Array) -> Array:
    """logits[..., targets] by comparison: its gradient is a select that fuses, and that of a gather is a scatter."""
    return jnp.sum(jnp.where(is_target(logits, targets), logits, 0), axis=-1)


def block_loss(
    hidden_ND,
    compute_VD,
    bias_V,
    targets_Bt,
    weights_Bt,
    label_smoothing,
    z_loss,
    *,
    gradients,
    parts=1,
    soft_cap=None,
    soften=None,
):
    """The loss of one block of positions, N = B * t, whose logits exist only here.

    With `parts` > 1 the gradient of the table is [parts, V, D], to be summed over the first axis at the very end.
    `soften`, if there is one, makes another loss of each position, and a metric, of ([N, V] capped logits, [N] loss).

    Returns:
      (total, (nll of each row, correct weight of each row, that metric of each row if there is one)), and (None unless
      asked for) the gradients of `total` by hidden [N, D] in its own dtype, and by table and bias in the dtype of the
      weights.
    """
    accumulate, batch = weights_Bt.dtype, len(targets_Bt)
    targets_N, weights_N = targets_Bt.reshape(-1), weights_Bt.reshape(-1)
    logits_NV = times_transpose(hidden_ND, compute_VD, accumulate) + bias_V[None, :]
    logits_NV = constrain(logits_NV, "rows", "vocab")

    def visit(logits_NV, targets_N, weights_N, once):
        """The total, what each position has of the metrics, and the gradient of the logits. `once`: reads them once."""

        def weighted(logits_NV):
            capped_NV = cap(logits_NV, soft_cap)
            if once:
                log_z_N, at_N, _ = sums = logit_sums(capped_NV, targets_N)
            else:
                sums, log_z_N, at_N = None, jax.nn.logsumexp(capped_NV, axis=-1), at_target(capped_NV, targets_N)
            loss_N, nll_N = loss_of_sums(capped_NV, log_z_N, at_N, label_smoothing, z_loss)
            more = []
            if soften is not None:
                loss_N, metric_N = soften(capped_NV, loss_N)
                more = [metric_N]
            return jnp.sum(loss_N * weights_N), (nll_N, sums, more)

        if gradients:
            total, backward, (nll_N, sums, more) = jax.vjp(weighted, logits_NV, has_aux=True)
        else:
            total, (nll_N, sums, more) = weighted(logits_NV)
        if sums is not None and soft_cap is None:
            hit_N = sums.at_target >= sums.top
        else:
            hit_N = at_target(logits_NV, targets_N) >= jnp.max(logits_NV, axis=-1)
        return total, (nll_N, hit_N, *more), backward(jnp.ones((), accumulate)) if gradients else ()

    once, thrice = (functools.partial(visit, once=flag) for flag in (True, False))
    given = logits_NV, targets_N, weights_N
    total, metrics, g_logits = jax.lax.platform_dependent(*given, cuda=once, default=thrice)
    rows = tuple(jnp.sum((x * weights_N).reshape(batch, -1), axis=1) for x in metrics)
    if not gradients:
        return (total, rows), None
    (g_NV,) = g_logits
    d_bias = jnp.sum(g_NV, axis=0)
    g_NV = g_NV.astype(hidden_ND.dtype)
    d_table = table_gradient(g_NV, hidden_ND, accumulate, parts)
    d_hidden = product("NV,VD->ND", g_NV, compute_VD, hidden_ND.dtype)
    return (total, rows), (d_hidden, d_table, d_bias)


def table_gradient(g_NV: Array, hidden_ND: Array, dtype, parts: int = 1) -> Array:
    """g^T hidden, [V, D] in `dtype`; with `parts` > 1 one sum for each shard of the rows, [parts, V, D].

    If rows are sharded, each device adds up its own sum over all blocks, and these are summed over devices once:
    summing them in every block would send the table once per block.
    """
    if parts == 1:
        return transposed_product(g_NV, hidden_ND, dtype)
    g, hidden = (x.reshape(parts, -1, x.shape[-1]) for x in (g_NV, hidden_ND))
    return constrain(jnp.einsum("RNV,RND->RVD", g, hidden, preferred_element_type=dtype), "rows", "vocab", None)
