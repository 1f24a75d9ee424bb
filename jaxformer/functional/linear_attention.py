"""Attention in linear time: the weights are products of features of queries and keys, phi(q) . phi(k).

Then sum_s (phi(q) . phi(k_s)) v_s = phi(q) . (sum_s phi(k_s) v_s^T), and the sum in brackets is the same for all
queries, or grows from token to token: neither time nor memory has anything of T x T, and decoding needs only the sum.

>>> from jaxformer import attention
>>> x = jnp.sin(jnp.arange(48.0)).reshape(1, 6, 2, 4) / 2
>>> jax.eval_shape(linear_attention, x, x, x, masks.causal()).shape
(1, 6, 2, 4)
>>> @jax.jit
... def error(x):
...     directions = orthogonal_directions(jax.random.key(0), 4000, 4)
...     return favor_attention(x, x, x, directions, masks.causal()) - attention(x, x, x, masks.causal())
>>> bool(jnp.abs(error(x)).max() < 0.1)
True
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jaxformer import masks
from jaxformer.functional.attention_checks import check_shapes
from jaxformer.kernels import feature_sums
from jaxformer.kernels.feature_sums import FeatureMap, FeatureSums
from jaxformer.types import Array

FavorKind = Literal["positive", "hyperbolic"]


class FeatureMaps(NamedTuple):
    """The features of queries and of keys, see `kernels.feature_sums.FeatureMap`."""

    of_query: FeatureMap
    of_key: FeatureMap


def elu_plus_one(x: Array) -> Array:
    """elu(x) + 1: x + 1 above 0, exp(x) below. Source: Katharopoulos et al. 2020, section 3.2.1."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    mask: masks.Mask | None = None,
    *,
    feature_map: Callable[[Array], Array] = elu_plus_one,
    chunk: int = feature_sums.CHUNK,
) -> Array:
    """Attention by features: the mean of the values with weights phi(q) . phi(k).

    What the mask hides has no influence, even if it is NaN, infinite or huge: it changes no bit of another output. A
    query that may see a NaN or an infinite number in any head gets NaN.

    Args:
      query: [B, T, H, K].
      key: [B, S, G, K]; H is a multiple of G.
      value: [B, S, G, K'].
      mask: causality, a prefix, padding, and segments: documents that have no gaps, the same for queries and keys. With
        any of these but padding T = S. None: every key.
      feature_map: [..., K] -> [..., m], not negative.
      chunk: tokens that are read at once.

    Returns:
      [B, T, H, K'] in the dtype of `value`; 0 where nothing is seen, or where all weights are below 1e-36 of the
      query's largest feature. Features and sums are float32 or wider.

    Raises:
      ValueError: shapes that do not fit; a mask that is not one of these.

    Source: Katharopoulos et al. 2020, section 3.2; in chunks, Hua et al. 2022, section 3.2.
    """
    return attend(query, key, value, _plain(feature_map), mask, chunk=chunk)[0]


def _plain(feature_map: Callable[[Array], Array]) -> FeatureMaps:
    """Those of queries relative to their largest, which cancels: products of two small ones would be too small."""

    def of_query(query: Array) -> tuple[Array, None]:
        features = feature_map(query)
        largest = jax.lax.stop_gradient(jnp.max(features, axis=-1, keepdims=True))
        return features / jnp.where(largest > 0, largest, 1), None

    return FeatureMaps(of_query, lambda key: (feature_map(key), None))


ELU = _plain(elu_plus_one)


def favor_attention(
    query: Array,
    key: Array,
    value: Array,
    directions: Array,
    mask: masks.Mask | None = None,
    *,
    kind: FavorKind = "positive",
    scale: float | None = None,
    chunk: int = feature_sums.CHUNK,
) -> Array:
    """FAVOR+: softmax attention, estimated by random features. The error falls as m^-1/2.

    Args:
      query, key, value, mask, chunk: as of `linear_attention`, with the same promise about what the mask hides.
      directions: [M, K], of `orthogonal_directions`. No gradient flows into them.
      kind: as of `favor_features`.
      scale: multiplies query . key; None: K ** -0.5.

    Returns:
      [B, T, H, K'] in the dtype of `value`; 0 where nothing is seen, or where no feature that is large in the query is
      so in a key: the scores are then some hundreds below 0.

    Raises:
      ValueError: as of `linear_attention` and `favor_features`.

    Source: Choromanski et al. 2021, sections 2.3 and 2.4; but keys are scaled by a running maximum, since that over all
    keys lets a query depend on later ones.
    """
    return attend(query, key, value, favor_maps(directions, kind, query.shape[-1], scale), mask, chunk=chunk)[0]


def favor_maps(directions: Array, kind: FavorKind, width: int, scale: float | None = None) -> FeatureMaps:
    """The features of `favor_attention`, each with the logarithm of its largest taken out.

    Raises ValueError: as `favor_features`."""
    _check_directions(directions, kind, width)
    half = math.sqrt(width**-0.5 if scale is None else scale)

    def features(x: Array) -> tuple[Array, Array]:
        exponents = _exponents(x * half, directions, kind)
        largest = jnp.maximum(jax.lax.stop_gradient(exponents.max(-1)), jnp.finfo(x.dtype).min / 2)
        return jnp.exp(exponents - largest[..., None]), largest

    return FeatureMaps(features, features)


def favor_features(x: Array, directions: Array, *, kind: FavorKind = "positive") -> Array:
    """Random features phi, with phi(q) . phi(k) equal to exp(q . k) on the average over `directions`.

    "positive": exp(w . x - |x|^2 / 2) / sqrt(M) for the M directions w. "hyperbolic": these and those of -w, 2 M in all
    and divided by sqrt(2 M): less variance than 2 M positive ones.

    Args:
      x: [..., K].
      directions: [M, K], of `orthogonal_directions`, or independent normal numbers.
      kind: "positive" or "hyperbolic".

    Returns:
      [..., M] or [..., 2 M], float32 or wider.

    Raises:
      ValueError: another kind; directions of another width.

    Source: Choromanski et al. 2021, lemma 1.

    >>> x = jnp.array([[0.3, -0.2]])
    >>> phi = jax.jit(lambda x: favor_features(x, orthogonal_directions(jax.random.key(0), 5000, 2)))(x)
    >>> round(float(jnp.vdot(phi, phi)), 1), round(math.exp(0.3**2 + 0.2**2), 1)
    (1.1, 1.1)
    """
    _check_directions(directions, kind, x.shape[-1])
    exponents = _exponents(x.astype(jnp.promote_types(x.dtype, jnp.float32)), directions, kind)
    return jnp.exp(exponents) / math.sqrt(exponents.shape[-1])


def _exponents(x: Array, directions: Array, kind: FavorKind) -> Array:
    """w . x - |x|^2 / 2, in full precision on TPUs as well: errors in an exponent are relative errors of its power."""
    w = jax.lax.stop_gradient(directions).astype(x.dtype)
    along = jnp.einsum("...K,MK->...M", x, w, precision=jax.lax.Precision.HIGHEST)
    along = jnp.concatenate([along, -along], axis=-1) if kind == "hyperbolic" else along
    return along - jnp.sum(x * x, axis=-1, keepdims=True) / 2


def _check_directions(directions: Array, kind: str, width: int) -> None:
    if kind not in get_args(FavorKind):
        raise ValueError(f"favor_features: kind {kind!r}; accepted: {', '.join(get_args(FavorKind))}")
    if directions.ndim != 2 or directions.shape[1] != width or not len(directions):
        raise ValueError(f"favor_features: directions {directions.shape}; accepted: (M, {width}), the width of heads")


def orthogonal_directions(rng: Array, count: int, width: int) -> Array:
    """Random directions for `favor_features`: each is normal, and within a block of `width` they are orthogonal.

    Orthogonal ones estimate better than independent ones. A pure function of `rng`: to draw anew in every step, pass
    `jax.random.fold_in(jax.random.key(seed), step)`.

    Args:
      rng: PRNG key.
      count: M.
      width: K.

    Returns:
      [M, K] float32. The last block is cut off if M is no multiple of K.

    Source: Choromanski et al. 2021, section 2.4; uniform rotations, Mezzadri 2007, section 5.

    >>> w = jax.device_get(jax.jit(lambda: orthogonal_directions(jax.random.key(0), 6, 4))())
    >>> w.shape, bool(abs(w[0] @ w[1]) < 1e-5)
    ((6, 4), True)
    """
    of_blocks, of_lengths = jax.random.split(rng)
    blocks = jax.random.normal(of_blocks, (-(-count // width), width, width))
    rotations = _orthonormal_columns(blocks)
    lengths = jnp.linalg.norm(jax.random.normal(of_lengths, (count, width)), axis=-1)
    return rotations.reshape(-1, width)[:count] * lengths[:, None]


def _orthonormal_columns(blocks: Array) -> Array:
    """Gram and Schmidt's, [N, K, K]: Q of the QR decomposition in which R has a positive diagonal.

    Each column twice, because once leaves what rounding makes of it (Giraud et al. 2005). Not `jnp.linalg.qr`: jaxlib
    0.10's for CPU waits for threads of the pool that it runs in, so layers that draw at once can wait for ever.
    """

    def column(i: Array, q: Array) -> Array:
        v = blocks[:, :, i]
        for _ in range(2):
            along = jnp.einsum("nkc,nk->nc", q, v, precision=jax.lax.Precision.HIGHEST)
            v = v - jnp.einsum("nkc,nc->nk", q, along, precision=jax.lax.Precision.HIGHEST)
        return q.at[:, :, i].set(v / jnp.linalg.norm(v, axis=-1, keepdims=True))

    return jax.lax.fori_loop(0, blocks.shape[-1], column, jnp.zeros_like(blocks))


def attend(
    query: Array,
    key: Array,
    value: Array,
    maps: FeatureMaps,
    mask: masks.Mask | None = None,
    *,
    state: FeatureSums | None = None,
    chunk: int = feature_sums.CHUNK,
) -> tuple[Array, FeatureSums]:
    """`linear_attention` by any features, and the sums over the keys of the last document.

    Args:
      query, key, value, mask, chunk: as of `linear_attention`.
      maps: the features.
      state: the sums that came out for earlier tokens, to go on from with a causal mask: one token or many at a time.

    Raises:
      ValueError: as `linear_attention`.
    """
    mask = masks.Mask() if mask is None else mask
    _check(query, key, value, mask, chunk)
    early = mask.prefix_keys
    if mask.prefix is not None:
        early = jnp.arange(key.shape[1])[None] < mask.prefix[:, None]
    whole = functools.partial(jnp.broadcast_to, shape=key.shape[:2])
    segments, seen, early = (x if x is None else whole(x) for x in (mask.query_segments, mask.keys, early))
    return feature_sums.attend(
        query,
        key,
        value,
        *maps,
        causal=mask.causal or early is not None,
        segments=segments,
        seen=seen,
        early=early,
        state=state,
        chunk=chunk,
    )


def _check(query: Array, key: Array, value: Array, mask: masks.Mask, chunk: int) -> None:
    """Raises ValueError, see `linear_attention`."""
    if not isinstance(mask, masks.Mask):
        raise ValueError(f"linear_attention: mask is a {type(mask).__name__}; accepted: a Mask such as causal()")
    shapes = query.shape, key.shape, value.shape
    if {len(shape) for shape in shapes} != {4} or 0 in (*query.shape, *key.shape, *value.shape):
        raise ValueError(f"linear_attention: shapes {shapes}; accepted: 4 axes [B, T, H, K], none of them empty")
    if key.shape[:3] != value.shape[:3] or (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]):
        raise ValueError(f"linear_attention: shapes {shapes}; accepted: the same batch, length, heads and head width")
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"linear_attention: {query.shape[2]} query heads are not a multiple of {key.shape[2]} key heads"
        )
    if chunk < 1:
        raise ValueError(f"linear_attention: chunk {chunk}; accepted: at least 1")
    check_shapes(mask, query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    cannot = ("window", "dense", "query_index", "key_index")
    found = [name for name in cannot if getattr(mask, name) is not None] + ["parts"] * (mask.parts > 1)
    found += ["patterns"] * bool(mask.patterns)
    if found:
        raise ValueError(
            f"linear_attention: a mask with {found[0]}; accepted: causality, a prefix, segments and padding (keys)"
        )
    inner = mask.causal or any(x is not None for x in (mask.prefix, mask.prefix_keys, mask.query_segments))
    if inner and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"linear_attention: {query.shape[1]} queries and {key.shape[1]} keys with a mask of places or segments; "
            "accepted there: as many of both"
        )
