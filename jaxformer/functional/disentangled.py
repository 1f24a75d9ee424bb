"""Disentangled attention (DeBERTa): what a token holds and how far it is from another are two vectors, and a score adds
up content to content, content to position and position to content.

    A[i, j] = (Q_i . K_j  +  Q_i . Kr[b(i, j)]  +  K_j . Qr[b(i, j)]) * scale,   scale = (3 K) ** -0.5

Kr and Qr are projections of one table of distances, [2 * span, D], that all layers share; b is the distance i - j in
a bucket. No kernel knows of this: the last two terms are a `ContentBias`.

Source: He et al. 2021, "DeBERTa", section 3.1; DeBERTaV3 (He et al. 2023) and its released code for the logarithmic
buckets, the projections that are those of the tokens, and the norm of the table.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax.tree_util import Partial

from jaxformer.functional.layers import layer_norm, linear, rms_norm
from jaxformer.kernels.attention.content_bias import ContentBias, content_bias, sharded
from jaxformer.kernels.attention.nonfinite import usable_key
from jaxformer.kernels.matmul import product
from jaxformer.types import Array, Params

LIKE_QUERY, NEITHER = ("rows", None, "heads"), (None, "heads")


def buckets(relative: Array, span: int, max_distance: int | None = None) -> Array:
    """The row of the table of distances for each distance.

    Args:
      relative: int, query index - key index.
      span: k; the table has 2 * k rows, for distances from -k to k - 1.
      max_distance: None: distances beyond the table share its first or last row (He et al. 2021, equation 3).
        Otherwise they are exact up to span / 2, logarithmic up to this one, and shared beyond (the released code of
        DeBERTa v2).

    Returns:
      int32 in [0, 2 * span), the shape of `relative`.

    >>> buckets(jnp.arange(-4, 5), 3).tolist()
    [0, 0, 1, 2, 3, 4, 5, 5, 5]
    >>> buckets(jnp.asarray([-100, -2, 0, 2, 3, 15, 100]), 4, 16).tolist()
    [0, 2, 4, 6, 7, 7, 7]
    """
    if max_distance is not None:
        exact = span // 2
        far = jnp.maximum(jnp.abs(relative), exact).astype(jnp.float32)
        steps = jnp.log(far / exact) / math.log((max_distance - 1) / exact) * (exact - 1)
        # At max_distance - 1 they are exact - 1, which a compiled logarithm may miss by its last bit.
        rounded = jnp.where(jnp.abs(relative) < max_distance, jnp.minimum(jnp.ceil(steps), exact - 1), exact)
        logarithmic = (rounded + exact).astype(jnp.int32) * jnp.sign(relative)
        relative = jnp.where(jnp.abs(relative) <= exact, relative, logarithmic)
    return jnp.clip(relative + span, 0, 2 * span - 1).astype(jnp.int32)


def disentangled_bias(
    query: Array,
    key: Array,
    position_key: Array | None,
    position_query: Array | None,
    scale: float,
    max_distance: int | None = None,
    query_index: Array | None = None,
) -> ContentBias:
    """The content-to-position and position-to-content terms, as a bias for `attention`.

    Args:
      query: [B, T, H, K].
      key: [B, S, G, K].
      position_key: [2 * span, H or G, K], keys of the distances; None: no content-to-position term.
      position_query: [2 * span, H, K], queries of the distances; None: no position-to-content term.
      scale: of the scores: pass the same to `attention`; He et al. take (terms * K) ** -0.5, three terms with both.
      max_distance: as of `buckets`.
      query_index: [B, T] int, index among the keys of each query; None: they are the last T.

    Raises:
      ValueError: there is neither term.

    >>> import jax
    >>> from jaxformer import attention
    >>> def attend(q, k, v, position_key, position_query):
    ...     bias = disentangled_bias(q, k, position_key, position_query, scale=24**-0.5)
    ...     return attention(q, k, v, bias=bias, scale=24**-0.5)
    >>> x, table = jnp.ones((2, 6, 4, 8)), jnp.ones((6, 4, 8))
    >>> jax.jit(attend)(x, x, x, table, table).shape
    (2, 6, 4, 8)
    """
    if position_key is None and position_query is None:
        raise ValueError("disentangled_bias: neither position_key nor position_query; accepted: one of them, or both")
    if query_index is None:
        tables = tuple(
            None if x is None else _repeated(x, query.shape[2]).astype(query.dtype)
            for x in (position_key, position_query)
        )
        keys = _repeated(usable_key(key), query.shape[2])
        first = key.shape[1] - query.shape[1]
        there = [axes for axes, x in zip((NEITHER, NEITHER), tables, strict=True) if x is not None]
        function = functools.partial(_in_order, first, scale, max_distance)
        return sharded(Partial(function, query, keys, *tables), (LIKE_QUERY, LIKE_QUERY, *there))
    heads, wide = query.shape[2], jnp.promote_types(query.dtype, jnp.float32)
    of_query, of_key = {}, {}
    if position_key is not None:
        of_query["c2p"] = product("BTHK,RHK->BHTR", query, _repeated(position_key, heads), wide) * scale
    if position_query is not None:
        # A key that is NaN gives NaN scores anyway where it is seen, and must not reach position_query's gradient.
        keys = _repeated(usable_key(key), heads)
        of_key["p2c"] = product("BSHK,RHK->BHSR", keys, _repeated(position_query, heads), wide) * scale
    return content_bias(functools.partial(_gathered, max_distance=max_distance), of_query, of_key, query_index)


def _repeated(x: Array, heads: int) -> Array:
    """[..., G, K] -> [..., H, K]: grouped heads share theirs."""
    return x if x.shape[-2] == heads else jnp.repeat(x, heads // x.shape[-2], axis=-2)


def _in_order(
    first: int,
    scale: float,
    max_distance: int | None,
    query: Array,
    key: Array,
    position_key: Array | None,
    position_query: Array | None,
    query_place: Array,
    key_place: Array,
) -> Array:
    """[B, H, t, s] of tokens that follow each other. A block's queries, and its keys, are multiplied with the distances
    between the block's ends, and each row is shifted: gathers of the products would have scatters as gradients, which
    are slow, and need arrays over [T, 2 * span]."""
    t, s, wide = len(query_place), len(key_place), jnp.promote_types(query.dtype, jnp.float32)
    base, number, found = first + query_place[0] - key_place[0], jnp.arange(t + s - 1), []

    def projected(table: Array, distance: Array) -> Array:
        return jnp.take(table, buckets(distance, table.shape[0] // 2, max_distance), axis=0)

    if position_key is not None:
        rows = projected(position_key, base + (t - 1) - number)
        own = query if t == query.shape[1] else jnp.take(query, query_place, axis=1, mode="clip")
        found.append(_shifted(product("BTHK,RHK->BHTR", own, rows, wide), s))
    if position_query is not None:
        rows = projected(position_query, base + number - (s - 1))
        own = key if s == key.shape[1] else jnp.take(key, key_place, axis=1, mode="clip")
        found.append(_shifted(product("BSHK,RHK->BHSR", own, rows, wide), t).swapaxes(2, 3))
    return sum(found[1:], found[0]) * scale


def _shifted(x: Array, columns: int) -> Array:
    """out[i, j] = x[i, (rows - 1 - i) + j] of [..., rows, rows + columns - 1], by reading rows as one shorter (Dai et
    al. 2019, appendix B)."""
    rows, number = x.shape[-2:]
    if rows == 1:
        return x
    flat = x.reshape(*x.shape[:-2], rows * number)[..., rows - 1 : rows - 1 + rows * (number - 1)]
    return flat.reshape(*x.shape[:-1], number - 1)[..., :columns]


def _gathered(of_query: dict[str, Array], of_key: dict[str, Array], relative: Array, max_distance: int | None) -> Array:
    """[B, H, t, s] of tokens in any order."""
    (rows, *_) = (*of_query.values(), *of_key.values())
    bucket, found = buckets(relative, rows.shape[-1] // 2, max_distance), []
    if "c2p" in of_query:
        found.append(jnp.take_along_axis(of_query["c2p"], bucket, axis=3))
    if "p2c" in of_key:
        found.append(jnp.take_along_axis(of_key["p2c"].swapaxes(2, 3), bucket, axis=2))
    return sum(found[1:], found[0])


def normed_table(params: Params, cfg: Any) -> Array:
    """The table of distances that all layers read, [2 * span, D]: normalised in v2 and v3."""
    table = params["distances"]
    if "distance_scale" in params:
        scale = params["distance_scale"]
        if cfg.norm == "rms_norm":
            table = rms_norm(table, scale, cfg.norm_epsilon)
        else:
            table = layer_norm(table, scale, params.get("distance_bias"), cfg.norm_epsilon)
    return table


def layer_bias(
    params: Params,
    table: Array,
    query: Array,
    key: Array,
    cfg: Any,
    scale: float,
    places: Array | None,
) -> ContentBias:
    """`disentangled_bias` of one layer; see `PositionEncoding.content`.

    Args:
      params: of the layer's attention: its projections of queries and keys turn the table into both, unless it has a
        group "positions" with projections of their own.
      table: from `normed_table`.
      query, key, scale: as of `disentangled_bias`.
      cfg: the model.
      places: [B, T] int, of the queries among the keys; None: they are the last T.
    """
    kind, own = cfg.positions, params.get("positions")

    def projected(name: str, term: str) -> Array | None:
        if kind.terms not in ("both", term):
            return None
        of = params if own is None else own
        return linear(table.astype(query.dtype), of[f"w_{name}"], of.get(f"b_{name}"))

    farthest = kind.max_distance if kind.distance == "log" else None
    position_key, position_query = projected("key", "c2p"), projected("query", "p2c")
    return disentangled_bias(query, key, position_key, position_query, scale, farthest, places)
