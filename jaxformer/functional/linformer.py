"""Linformer: softmax attention to a few mixtures of all keys, whatever their number."""

from dataclasses import replace

import jax.numpy as jnp

from jaxformer import masks
from jaxformer.functional.attention import attention
from jaxformer.types import Array


def linformer_attention(
    query: Array,
    key: Array,
    value: Array,
    w_key: Array,
    w_value: Array,
    mask: masks.Mask | None = None,
    *,
    scale: float | None = None,
    implementation: str = "auto",
) -> Array:
    """softmax(q (E K)^T) (F V): each query attends to k mixtures of the keys and values of its row.

    A mixture holds something of every token of the row. So there is no causal form, and a row must hold one document.

    Args:
      query: [B, T, H, K].
      key: [B, S, G, K]; H is a multiple of G.
      value: [B, S, G, K'].
      w_key: E, [S', k] or one for each head [S', G, k]; S' is at least S, and the first S of it are used.
      w_value: F, as `w_key`.
      mask: padding and nothing else: keys that are False have no influence, even if they are NaN. None: every key.
      scale: multiplies query . key; None: K ** -0.5.
      implementation: as of `attention`.

    Returns:
      [B, T, H, K'] in the dtype of `value`.

    Raises:
      ValueError: shapes that do not fit; a mask that hides keys from some queries only.

    Source: Wang et al. 2020, section 4.

    >>> x = jnp.ones((1, 6, 2, 4))
    >>> linformer_attention(x, x, x, jnp.ones((6, 3)) / 6, jnp.ones((6, 3)) / 6).shape
    (1, 6, 2, 4)
    """
    seen = None if mask is None else mask.keys
    if mask is not None and (replace(mask, keys=None).hides or mask.parts > 1):
        raise ValueError("linformer_attention: a mask of places or segments; it mixes a whole row; accepted: padding")
    key, value = (_mixed(x, w, seen) for x, w in ((key, w_key), (value, w_value)))
    return attention(query, key, value, scale=scale, implementation=implementation)


def _mixed(x: Array, w: Array, seen: Array | None) -> Array:
    """[B, S, G, K] -> [B, k, G, K]."""
    batch, length, groups, _ = x.shape
    if w.ndim not in (2, 3) or len(w) < length or (w.ndim == 3 and w.shape[1] != groups):
        raise ValueError(
            f"linformer_attention: a projection {w.shape} of {length} tokens and {groups} heads; accepted: (S, k) or "
            f"(S, {groups}, k), S at least {length}"
        )
    if seen is not None:
        x = jnp.where(jnp.broadcast_to(seen, (batch, length))[..., None, None], x, 0)
    subscripts = "BSGK,Sk->BkGK" if w.ndim == 2 else "BSGK,SGk->BkGK"
    return jnp.einsum(subscripts, x, w[:length].astype(x.dtype))
