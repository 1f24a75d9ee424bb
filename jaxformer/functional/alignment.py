"""Attention before the Transformer: a recurrent decoder aligns its state with the states of an encoder.

A score says how well target state and source state match; `align` turns scores into weights over the source; the
context is the weighted sum of the source's states. The scores differ in how they compare: by a hidden layer (additive)
or by a product (multiplicative).

>>> import jax
>>> target, source = jnp.ones((1, 2, 3)), jax.random.normal(jax.random.key(0), (1, 5, 3))
>>> weights = align(dot_scores(target, source))
>>> context(weights, source).shape
(1, 2, 3)
"""

import jax
import jax.numpy as jnp

from jaxformer.types import Array


def additive_scores(target: Array, source: Array, w_target: Array, w_source: Array, v: Array) -> Array:
    """v . tanh(W s + U h).

    Args:
      target: s, [B, T, N].
      source: h, [B, S, M].
      w_target: W, [N, A].
      w_source: U, [M, A].
      v: [A].

    Returns:
      [B, T, S].

    Source: Bahdanau et al. 2015, section 3.1 and appendix A.1.2. Where the target's states come one by one, compute
    U h once and call `additive_scores_of`.
    """
    return additive_scores_of(target @ w_target.astype(target.dtype), source @ w_source.astype(source.dtype), v)


def additive_scores_of(target: Array, source: Array, v: Array) -> Array:
    """`additive_scores` of what has been multiplied already: W s, [B, T, A], and U h, [B, S, A]. Returns [B, T, S]."""
    return jnp.tanh(target[:, :, None] + source[:, None]) @ v.astype(target.dtype)


def dot_scores(target: Array, source: Array) -> Array:
    """s . h. `target`: [B, T, N]; `source`: [B, S, N]. Returns [B, T, S]. Source: Luong et al. 2015, section 3.1."""
    return jnp.einsum("BTN,BSN->BTS", target, source)


def general_scores(target: Array, source: Array, w: Array) -> Array:
    """s . W h. `target`: [B, T, N]; `source`: [B, S, M]; `w`: [N, M]. Returns [B, T, S].

    Source: Luong et al. 2015, section 3.1.
    """
    return jnp.einsum("BTM,BSM->BTS", target @ w.astype(target.dtype), source)


def concat_scores(target: Array, source: Array, w: Array, v: Array) -> Array:
    """v . tanh(W [s; h]): `additive_scores` with W in two parts.

    Args:
      target: s, [B, T, N].
      source: h, [B, S, M].
      w: [N + M, A].
      v: [A].

    Returns:
      [B, T, S].

    Source: Luong et al. 2015, section 3.1.
    """
    w_target, w_source = jnp.split(w, [target.shape[-1]])
    return additive_scores(target, source, w_target, w_source, v)


def align(scores: Array, allowed: Array | None = None, windows: Array | None = None) -> Array:
    """Weights over the source: softmax in float32 or wider.

    Args:
      scores: [B, T, S].
      allowed: bool, broadcastable to [B, T, S]; False: not aligned with; None: all may be. A target that may align
        with nothing has weights 0.
      windows: [B, T, S], multiplies the weights, which are not normalised again; see `local_windows`.

    Returns:
      [B, T, S] in the dtype of the scores. Whatever stands in scores that are not allowed, NaN included, changes
      nothing.
    """
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    if allowed is not None:
        wide = jnp.where(allowed, wide, -jnp.inf)
    top = jnp.max(wide, axis=-1, keepdims=True)
    weights = jnp.exp(wide - jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0, top)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    return (weights if windows is None else weights * windows).astype(scores.dtype)


def context(weights: Array, source: Array, allowed: Array | None = None) -> Array:
    """The weighted sum of the source's states. `weights`: [B, T, S]; `source`: [B, S, M]. Returns [B, T, M].

    `allowed`: [B, S] bool; states where it is False count as zeros, so that not even a NaN in them is seen.
    """
    if allowed is not None:
        source = jnp.where(allowed[..., None], source, 0)
    return jnp.einsum("BTS,BSM->BTM", weights, source)


def predicted_positions(target: Array, w: Array, v: Array, lengths: Array) -> Array:
    """Where in the source each target step looks: S sigmoid(v . tanh(W s)), local-p alignment.

    Args:
      target: s, [B, T, N].
      w: [N, A].
      v: [A].
      lengths: S, broadcastable to [B, T], tokens of the source.

    Returns:
      [B, T], float32 or wider, between 0 and S.

    Source: Luong et al. 2015, section 3.2, equation 9.
    """
    wide = jnp.promote_types(target.dtype, jnp.float32)
    hidden = jnp.tanh(target @ w.astype(target.dtype)).astype(wide)
    return lengths * jax.nn.sigmoid(hidden @ v.astype(wide))


def local_windows(centres: Array, positions: Array, half_width: int, *, gaussian: bool) -> tuple[Array, Array]:
    """The window that local alignment looks at.

    Args:
      centres: p, [B, T]; the target's own positions are local-m, `predicted_positions` local-p.
      positions: s, [B, S], of the source's tokens in their document.
      half_width: D; the window is p - D to p + D.
      gaussian: weights fall off as exp(-(s - p)^2 / (2 (D / 2)^2)), which lets p be learned; else they are 1.

    Returns:
      Both [B, T, S]: what is in the window (bool), and the factors of the weights.

    Source: Luong et al. 2015, section 3.2, equation 10.
    """
    distance = positions[:, None, :] - centres[..., None]
    inside = jnp.abs(distance) <= half_width
    if not gaussian:
        return inside, jnp.ones(inside.shape, jnp.result_type(centres, jnp.float32))
    return inside, jnp.exp(-2 * (distance / half_width) ** 2)


def maxout(x: Array) -> Array:
    """The larger of each two neighbours, [..., 2 N] -> [..., N] (Goodfellow et al. 2013, section 2)."""
    return jnp.max(x.reshape(*x.shape[:-1], -1, 2), axis=-1)
