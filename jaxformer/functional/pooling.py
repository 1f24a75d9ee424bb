"""Pooling of neighbouring tokens to half as many, and back: what a Funnel-Transformer does between its blocks.

A pooled token belongs to the document of the first token that it was pooled from, and takes nothing from another one.

Source: Dai et al. 2020, section 2.2.
"""

import jax.numpy as jnp

from jaxformer.types import Array


def _pairs(x: Array, separate_first: bool) -> tuple[Array, Array]:
    """The two tokens of each pair, [B, T / 2, ...] each; a separate first token is its own neighbour, and the last one
    of the row is then left out."""
    if separate_first:
        x = jnp.concatenate([x[:, :1], x[:, :-1]], axis=1)
    return x[:, 0::2], x[:, 1::2]


def first_of_pairs(x: Array, separate_first: bool = False) -> Array:
    """[B, T, ...] -> [B, T / 2, ...]: of each pair the first, as for the pooled tokens' documents and types."""
    return _pairs(x, separate_first)[0]


def mean_pool(x: Array, segments: Array | None = None, separate_first: bool = False) -> Array:
    """The mean of each two neighbouring tokens.

    Args:
      x: [B, T, D], T even.
      segments: [B, T] int, document of each token: where two neighbours are of different ones, only the first counts.
      separate_first: the first token stays as it is, and the second one is paired with the third.

    Returns:
      [B, T / 2, D].

    Raises:
      ValueError: an odd number of tokens.

    >>> mean_pool(jnp.arange(6.0)[None, :, None])[0, :, 0].tolist()
    [0.5, 2.5, 4.5]
    >>> mean_pool(jnp.arange(6.0)[None, :, None], separate_first=True)[0, :, 0].tolist()
    [0.0, 1.5, 3.5]
    >>> mean_pool(jnp.arange(4.0)[None, :, None], jnp.array([[1, 1, 1, 2]]))[0, :, 0].tolist()
    [0.5, 2.0]
    """
    if x.shape[1] % 2:
        raise ValueError(f"mean_pool: {x.shape[1]} tokens; accepted: an even number")
    first, second = _pairs(x, separate_first)
    mean = (first + second) / 2
    if segments is None:
        return mean
    a, b = _pairs(segments, separate_first)
    return jnp.where((a == b)[..., None], mean, first)


def repeat_pooled(
    pooled: Array, length: int, segments: Array | None = None, pooled_segments: Array | None = None,
    separate_first: bool = False,
) -> Array:  # fmt: skip
    """Every pooled token for each of the tokens that it was pooled from; zeros for a token that was left out, and for
    one of another document than the pooled token.

    Args:
      pooled: [B, P, D], pooled once or more often.
      length: T, a multiple of P.
      segments, pooled_segments: [B, T] and [B, P] int; or None.
      separate_first: as in `mean_pool`.

    Returns:
      [B, T, D].

    >>> repeat_pooled(jnp.array([[[1.0], [2.0]]]), 4)[0, :, 0].tolist()
    [1.0, 1.0, 2.0, 2.0]
    >>> repeat_pooled(jnp.array([[[1.0], [2.0]]]), 4, separate_first=True)[0, :, 0].tolist()
    [1.0, 2.0, 2.0, 0.0]
    """
    each = length // pooled.shape[1]

    def repeated(x: Array, fill: int) -> Array:
        if not separate_first:
            return jnp.repeat(x, each, axis=1)
        rest = jnp.repeat(x[:, 1:], each, axis=1)
        padding = [(0, 0), (0, each - 1)] + [(0, 0)] * (x.ndim - 2)
        return jnp.concatenate([x[:, :1], jnp.pad(rest, padding, constant_values=fill)], axis=1)

    out = repeated(pooled, 0)
    if segments is None or pooled_segments is None:
        return out
    own = repeated(pooled_segments, 0) == segments
    return jnp.where(own[..., None], out, 0)
