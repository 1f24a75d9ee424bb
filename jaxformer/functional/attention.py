"""attention(): the one front door. Describes the arguments, checks them, and picks an implementation."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer import masks
from jaxformer.kernels import chunked, xla
from jaxformer.types import Array

# name -> implementation; every one takes (query, key, value, mask, bias, **options) and honours all of them.
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"xla": xla.attend, "chunked": chunked.attend}


def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: masks.Mask | Array | None = None,
    *,
    bias: xla.Bias | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    implementation: str = "auto",
    return_weights: bool = False,
) -> Array | tuple[Array, Array]:
    """Scaled dot-product attention: multi-head, grouped-query, multi-query and cross.

    Args:
      query: [B, T, H, K].
      key: [B, S, G, K]; H is a multiple of G (G = H multi-head, 1 < G < H grouped, G = 1 multi-query).
      value: [B, S, G, K'].
      mask: a `Mask`, or bool broadcastable to [B, H, T, S], True where attending is allowed. A query that may see
        no key at all gets zeros. None: every key.
      bias: added to the scores before the mask: an array broadcastable to [B, H, T, S], or a function of
        (query index [T], key index [S]) that returns one.
      scale: multiplies query . key; None: K ** -0.5.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap); None: no cap.
      dropout_rate: share of the attention weights dropped; needs `rng` to act.
      rng: PRNG key of the dropout; None: no dropout.
      implementation: "auto" (see `choose`), or a name in `IMPLEMENTATIONS`.
      return_weights: also return the weights after softmax and dropout, [B, H, T, S] float32.

    Returns:
      [B, T, H, K'], in the dtype of `value`; with `return_weights` a pair of it and the weights. The softmax is
      computed in float32 (float64 for float64 inputs).

    Raises:
      ValueError: shapes that disagree, H not a multiple of G, a soft cap or dropout rate out of range, an unknown
        implementation.
      TypeError: a mask array that is not bool.

    Source: Vaswani et al. 2017, section 3.2.1; grouped heads, Ainslie et al. 2023; soft cap, Gemma 2 report 2024.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attention(x, x, x, masks.causal()).shape
    (1, 3, 2, 4)
    """
    if mask is not None and not isinstance(mask, masks.Mask):
        if mask.dtype != jnp.bool_:
            raise TypeError(f"attention: mask has dtype {mask.dtype}; accepted: bool, or a Mask")
        mask = masks.dense(mask)
    _check(query, key, value, mask, bias, soft_cap, dropout_rate)
    if implementation == "auto" or return_weights:
        implementation = "xla" if return_weights else choose(query.shape[1], key.shape[1])
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention: implementation {implementation!r}; accepted: auto, {', '.join(sorted(IMPLEMENTATIONS))}"
        )
    extra = {"return_weights": True} if return_weights else {}
    return IMPLEMENTATIONS[implementation](
        query,
        key,
        value,
        mask,
        bias,
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        soft_cap=soft_cap,
        dropout_rate=dropout_rate,
        rng=rng,
        **extra,
    )


def choose(queries: int, keys: int, platform: str | None = None) -> str:
    """What "auto" stands for: "chunked" where [T, S] is large, else "xla". `platform`: that the program is for; None:
    where it is traced.

    Both honour everything, so only speed and memory decide. On CPU the chunked one, forward and backward, took 1.07 of
    the time of the other at 1024 causal tokens and 0.60 at 4096; elsewhere it is for lengths whose scores do not fit.
    """
    limit = 2048 if (platform or jax.default_backend()) == "cpu" else 8192
    return "chunked" if queries * keys >= limit * limit else "xla"


def _check(query, key, value, mask, bias, soft_cap, dropout_rate) -> None:
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            raise ValueError(f"attention: {name} has shape {array.shape}; accepted: 4 axes [B, T, H, K]")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"attention: key {key.shape} and value {value.shape} differ in batch, length or heads")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"attention: query {query.shape} and key {key.shape} differ in batch or head width")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"attention: {query.shape[2]} query heads are not a multiple of {key.shape[2]} key heads")
    scores = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if mask is not None:
        masks.check_shapes(mask, *scores)
    if bias is not None and not callable(bias):
        pairs = zip(bias.shape[::-1], scores[::-1], strict=False)
        if bias.ndim > 4 or any(size not in (1, full) for size, full in pairs):
            raise ValueError(f"attention: bias has shape {bias.shape}; accepted: what broadcasts to {scores}")
    if soft_cap is not None and not soft_cap > 0.0:
        raise ValueError(f"attention: soft_cap {soft_cap}; accepted: None, or a number above 0")
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"attention: dropout_rate {dropout_rate}; accepted: 0 <= rate < 1")
