"""Relative positions of Transformer-XL and XLNet as positions of a model: what a layer owns, and its bias.

    A[i, j] = ((q_i + u) . k_j  +  (q_i + v) . W r[i - j]) / sqrt(K)

r[d] are sines and cosines of the distance d; W, u and v are the layer's own. Adding u to the queries is the first term.
The second is `relative_terms`, or, of queries that do not follow each other, a gather of the products with all
distances.

Source: Dai et al. 2019, "Transformer-XL", section 3.3.
"""

import functools
from typing import Any

import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.functional.layer import weight_init
from jaxformer.functional.layers import linear
from jaxformer.functional.relative_terms import Places, distances, encoded, relative_terms
from jaxformer.kernels.attention.content_bias import ContentBias, content_bias, sharded
from jaxformer.kernels.matmul import product
from jaxformer.specs import ParamSpec, zeros
from jaxformer.types import Array, Params


def layer_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """W, u and v of one layer."""
    d, h, k = cfg.width, cfg.attention.num_heads, cfg.head_size
    bias = ParamSpec((h, k), ("heads", "head_width"), zeros, "bias")
    return {
        "w_distance": ParamSpec((d, h, k), ("embed", "heads", "head_width"), weight_init(cfg, d, h * k), "hidden"),
        "content_bias": bias,
        "distance_bias": bias,
    }


def shifted_query(params: Params, query: Array) -> Array:
    """q + u, what is multiplied with the keys. `query`: [B, T, H, K]."""
    return query + params["positions"]["content_bias"][None, None].astype(query.dtype)


def layer_bias(
    params: Params, shared: Any, query: Array, key: Array, cfg: ModelConfig, scale: float, places: Array | None
) -> ContentBias:
    """The term of distances of one layer; see `PositionEncoding.content`."""
    own, queries, keys = params["positions"], query.shape[1], key.shape[1]
    if places is None:
        at = Places(keys - queries)
        rows = _projected(own, distances(queries, keys, at), query, cfg)
        bias = relative_terms(query, rows, keys, scale=scale, position_bias=own["distance_bias"], query_places=at)
        return sharded(bias, (("rows", None, "heads"), (None, "heads")))
    rows = _projected(own, distances(keys, keys), query, cfg)  # from S - 1 to 1 - S
    asking = query + own["distance_bias"][None, None].astype(query.dtype)
    each = product("BTHK,RHK->BHTR", asking, rows, jnp.promote_types(query.dtype, jnp.float32)) * scale
    return content_bias(functools.partial(_gathered, keys), each, (), places)


def _projected(own: Params, distance: Any, query: Array, cfg: ModelConfig) -> Array:
    """W r of some distances: [R, H, K]."""
    return linear(jnp.asarray(encoded(distance, cfg.width), query.dtype), own["w_distance"])


def _gathered(keys: int, of_query: Array, of_key: Any, relative: Array) -> Array:
    entry = jnp.clip(keys - 1 - relative, 0, 2 * keys - 2)
    return jnp.take_along_axis(of_query, entry, axis=3)
