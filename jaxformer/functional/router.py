"""Routers of a mixture of experts as plain functions: which experts each token chooses, and the losses of the choice.

Letters beside those of `types`: E expert, k choice.
"""

import functools

import jax
import jax.numpy as jnp

from jaxformer.types import Array

_FEW = 8  # choices that are found one by one on CPU
_CHUNK = 64  # choices whose ranks are counted by comparing them with each other


def route(
    logits: Array, per_token: int, bias: Array | None = None, renormalize: bool | None = None
) -> tuple[Array, Array]:
    """The experts that each token chooses, and the gates that multiply their outputs.

    Args:
      logits: [..., E] of the router, float32.
      per_token: k, experts of a token.
      bias: [E], added to the probabilities for the choice only, not in the gates; or None.
      renormalize: the gates of a token sum to 1: they are the softmax over its experts alone; None: from two experts
        on. With one, a gate would be 1 whatever the logits, and the router would get no gradient.

    Returns:
      Gates [..., k] in the dtype of the logits, and the numbers of the experts, [..., k] int32, the best first. Equal
      ones go to the lower number.

    Raises:
      ValueError: more experts for a token than there are, a bias of another shape, or `renormalize` with one expert.

    Source: Shazeer et al. 2017, section 2.1; Fedus et al. 2021, section 2.1 (one expert); DeepSeek-AI 2024, section
    2.1.2 (bias).

    >>> gates, chosen = route(jnp.array([[0.0, 2.0, 1.0]]), 2)
    >>> chosen.tolist(), [round(gate, 3) for gate in gates[0].tolist()]
    ([[1, 2]], [0.731, 0.269])
    """
    if not 1 <= per_token <= logits.shape[-1]:
        raise ValueError(f"route: per_token {per_token}; accepted: 1 to {logits.shape[-1]}, the experts")
    if bias is not None and bias.shape != logits.shape[-1:]:
        raise ValueError(f"route: bias {bias.shape}; accepted: {logits.shape[-1:]}")
    if renormalize and per_token == 1:
        raise ValueError("route: renormalize with per_token 1 makes every gate 1; accepted: False")
    probabilities = jax.nn.softmax(jax.lax.stop_gradient(logits), axis=-1)
    scores = probabilities if bias is None else probabilities + jnp.broadcast_to(bias, logits.shape)
    chosen = _highest(jax.lax.stop_gradient(scores), per_token)
    logits = logits + 0 * probabilities[..., :1]  # NaN in any is NaN in all, also in gates of others
    normalised = renormalize or (renormalize is None and per_token > 1)
    if per_token > _FEW:
        hot = jax.nn.one_hot(chosen, logits.shape[-1], dtype=bool)
        own = jnp.sum(jnp.where(hot, logits[..., None, :], 0), axis=-1)
        total = jax.nn.logsumexp(own if normalised else logits, axis=-1, keepdims=True)
        return jnp.exp(own - total), chosen
    # One choice after another: arrays of [..., k, E] take six times as long on CPU, mostly in the backward pass.
    few = [_of_expert(logits, chosen[..., n]) for n in range(per_token)]
    if normalised:
        most = jax.lax.stop_gradient(functools.reduce(jnp.maximum, few))
        odds = [jnp.exp(each - most) for each in few]
        total = functools.reduce(jnp.add, odds)
        return jnp.stack([each / total for each in odds], axis=-1), chosen
    total = jax.nn.logsumexp(logits, axis=-1)
    return jnp.stack([jnp.exp(each - total) for each in few], axis=-1), chosen


def _of_expert(logits: Array, chosen: Array) -> Array:
    """The logit of one expert of each token: [..., E], [...] -> [...]."""
    hot = jax.nn.one_hot(chosen, logits.shape[-1], dtype=bool)
    return jnp.sum(jnp.where(hot, logits, 0), axis=-1)


def _highest(scores: Array, number: int) -> Array:
    """Where the highest of [..., E] are, [..., k] int32, the highest first; of equal ones the earlier first.

    On CPU `top_k` is a call that XLA does not split over devices, for which all scores would be gathered, and slow.
    """

    def one_by_one(scores: Array) -> Array:
        scores, found = jnp.maximum(scores, jnp.finfo(scores.dtype).min), []  # -inf: found before
        for _ in range(number):
            found.append(jnp.argmax(scores, axis=-1).astype(jnp.int32))
            scores = jnp.where(jax.nn.one_hot(found[-1], scores.shape[-1], dtype=bool), -jnp.inf, scores)
        return jnp.stack(found, axis=-1)

    def sorted_all(scores: Array) -> Array:
        return jax.lax.top_k(scores, number)[1].astype(jnp.int32)

    if number > _FEW:
        return sorted_all(scores)
    return jax.lax.platform_dependent(scores, cpu=one_by_one, default=sorted_all)


def count_choices(chosen: Array, experts: int) -> Array:
    """How many of the choices [...] fall on each expert, [E] float32; those that are E count nowhere."""
    hot = jax.nn.one_hot(chosen.reshape(-1), experts, dtype=bool)
    return jnp.sum(hot, axis=0, dtype=jnp.float32)


def among(chosen: Array, first: Array | int, number: int) -> Array:
    """Choices as numbers of `number` experts from `first` on; those of others become `number`, nobody.

    >>> among(jnp.array([0, 2, 3, 5]), 2, 3).tolist()
    [3, 0, 1, 3]
    """
    chosen = chosen - first
    return jnp.where((chosen >= 0) & (chosen < number), chosen, number)


def balance_loss(logits: Array, counts: Array, valid: Array | None = None) -> Array:
    """E * sum over experts of (share of the choices) * (probability), summed over tokens: if
    all experts are equally busy, the number of tokens.

    The shares are constants, so over parts of a batch these sums add up to that of the whole batch, if `counts` are
    those of the whole batch.

    Args:
      logits: [..., E] of the router, float32.
      counts: [E], choices that fell on each expert.
      valid: [...] bool, False for padding; None: no padding.

    Returns:
      () float32.

    Raises:
      ValueError: other counts than one for each expert.

    Source: Fedus et al. 2021, section 2.2, equations 4 to 6.

    >>> float(balance_loss(jnp.zeros((3, 4)), jnp.array([5.0, 5.0, 5.0, 5.0])))
    3.0
    """
    if counts.shape != logits.shape[-1:]:
        raise ValueError(f"balance_loss: counts {counts.shape}; accepted: {logits.shape[-1:]}, see `count_choices`")
    shares = jax.lax.stop_gradient(counts / jnp.maximum(jnp.sum(counts), 1e-30)) * logits.shape[-1]
    each = jnp.einsum("...E,E->...", jax.nn.softmax(logits, axis=-1), shares.astype(logits.dtype))
    return jnp.sum(each if valid is None else jnp.where(valid, each, 0))


def z_loss(logits: Array, valid: Array | None = None) -> Array:
    """log(sum(exp(logits)))**2, summed over tokens. Arguments as of `balance_loss`.

    Source: Zoph et al. 2022, section 3.3, equation 5.

    >>> round(float(z_loss(jnp.zeros((3, 4)))), 3)
    5.765
    """
    each = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    return jnp.sum(each if valid is None else jnp.where(valid, each, 0))


def bias_term(counts: Array, bias: Array) -> Array:
    """0, with the gradient counts - mean(counts) of the bias [E]; so that it adds up as any loss does.

    Source: DeepSeek-AI 2024, section 2.1.2 (the update: against the sign of this gradient).
    """
    excess = jax.lax.stop_gradient(counts - jnp.mean(counts))
    return jnp.sum(excess * (bias - jax.lax.stop_gradient(bias)))


def ranks(chosen: Array, experts: int) -> Array:
    """How many earlier choices fell on the same expert.

    Args:
      chosen: [M] int32 in [0, E]; E: no expert.
      experts: E.

    Returns:
      [M] int32.

    >>> ranks(jnp.array([1, 0, 1, 1]), 2).tolist()
    [0, 0, 1, 2]
    """
    parts, inside, before, _ = _counted(chosen, experts)
    return (inside + jnp.take_along_axis(before, parts, axis=1)).reshape(-1)[: len(chosen)]


def sort_by_expert(chosen: Array, experts: int, align: int = 1) -> tuple[Array, Array, int]:
    """Where each choice stands if they are sorted by expert, and each expert begins at a multiple of `align`.

    Args:
      chosen, experts: as of `ranks`.
      align: rows.

    Returns:
      [M] int32, the row of each choice: all different, but choices of nobody have the number of rows; [E] int32, the
      rows of each expert, multiples of `align`; the number of rows.

    >>> [each.tolist() for each in sort_by_expert(jnp.array([1, 0, 2, 1, 1]), 2)[:2]]
    [[1, 0, 5, 2, 3], [1, 3]]
    """
    parts, inside, before, counts = _counted(chosen, experts)
    sizes = -(-counts // align) * align
    rows = room_for(len(chosen), experts, align)
    # Those of nobody stand beyond the end.
    begins = jnp.append(jnp.cumsum(sizes, dtype=jnp.int32) - sizes, jnp.int32(rows))
    # One lookup for both: libtpu compiles one of `begins` by `chosen` for 18 s.
    found = inside + jnp.take_along_axis(begins[None] + before, parts, axis=1)
    return jnp.minimum(found, rows).reshape(-1)[: len(chosen)], sizes, rows


def room_for(rows: int, experts: int, align: int) -> int:
    """Rows enough for so many of any experts, each of which begins at a multiple of `align`.

    >>> room_for(5, experts=2, align=4)
    8
    """
    return (rows + experts * (align - 1)) // align * align


def _counted(chosen: Array, experts: int) -> tuple[Array, Array, Array, Array]:
    """In parts of C choices: [P, C], filled up with nobody; how many earlier ones of the part fell on the same expert,
    [P, C]; how many fell on each expert and on nobody before each part, [P, E + 1]; and on each expert in all, [E]."""
    parts = jnp.pad(chosen, (0, -len(chosen) % _CHUNK), constant_values=experts).reshape(-1, _CHUNK)
    hot = jax.nn.one_hot(parts, experts + 1, dtype=bool)
    totals = jnp.cumsum(jnp.sum(hot, axis=1, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    earlier = jnp.tril(jnp.ones((_CHUNK, _CHUNK), bool), -1)
    inside = jnp.sum((parts[:, :, None] == parts[:, None, :]) & earlier[None], axis=2, dtype=jnp.int32)
    return parts, inside, jnp.pad(totals, ((1, 0), (0, 0)))[:-1], totals[-1, :experts]


def within_capacity(chosen: Array, experts: int, capacity: int) -> tuple[Array, Array]:
    """The choices that find a place: in each row, every expert takes the earliest tokens.

    Tokens come one after the other, each with its best expert first; so no later token takes a place from an earlier
    one, as it would if all first choices came before all second ones.

    Args:
      chosen: [B, T, k] int32 in [0, E]; E: no expert.
      experts: E.
      capacity: tokens of a row that one expert takes.

    Returns:
      [B, T, k] each: `chosen` with E where the expert is full; and the place among those that it takes of the row.

    Source: Lepikhin et al. 2020, section 2.2; Fedus et al. 2021, section 2.2 (capacity).
    """
    rank = jax.vmap(functools.partial(ranks, experts=experts))(chosen.reshape(len(chosen), -1))
    rank = rank.reshape(chosen.shape)
    return jnp.where(rank < capacity, chosen, experts), rank
