"""Relative attention with a term of the segment, as a sublayer: of tokens to themselves, or of pooled ones to those
that they were pooled from.

    score = ((q + u) . k + (q + v) . W_r R(distance) + (q + s) . e[same or other segment]) / sqrt(K)

Source: Dai et al. 2020, section 2.2 and appendix A.2; Dai et al. 2019, section 3.3.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxformer.config import Execution, ModelConfig
from jaxformer.functional import attention_layer
from jaxformer.functional.attention import attention
from jaxformer.functional.layer import Context, Cost, Sublayer, weight_init
from jaxformer.functional.layers import linear
from jaxformer.functional.positions import sinusoidal
from jaxformer.functional.relative_terms import Places, SegmentTerm, distances, relative_terms
from jaxformer.parallel.constraints import constrain
from jaxformer.specs import ParamSpec, zeros
from jaxformer.types import Array, Params


class Side(NamedTuple):
    """What relative attention looks at of queries, or of keys.

    Attributes:
      places: where they stand.
      types: [B, T] int, sentence A or B; negative: like every other.
      there: [T] bool, False for tokens that have no place and no type, as a separate [CLS]; None: all have.
    """

    places: Places
    types: Array
    there: Array | None = None


def specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Projections and their biases, u, v and s, the projection of distances, the keys of same and other segment."""
    d, h, k = cfg.width, cfg.attention.num_heads, cfg.attention.head_size(cfg.width)
    into, of_heads = ("embed", "heads", "head_width"), ("heads", "head_width")
    init, bias = weight_init(cfg, d, h * k), ParamSpec((h, k), of_heads, zeros, "bias")
    tree = dict.fromkeys(("w_query", "w_key", "w_value", "w_position"), ParamSpec((d, h, k), into, init, "hidden"))
    tree["w_out"] = ParamSpec((h, k, d), (*of_heads, "embed"), weight_init(cfg, h * k, d, residual=True), "hidden", 2)
    tree |= dict.fromkeys(("content_bias", "position_bias", "segment_bias"), bias)
    tree["segment_keys"] = ParamSpec((2, h, k), ("types", *of_heads), init, "input")
    if cfg.use_bias:
        tree |= dict.fromkeys(("b_key", "b_value"), bias)
        tree["b_out"] = ParamSpec((d,), ("norm",), zeros, "bias")
    return tree


def apply(params: Params, x: Array, cfg: ModelConfig, context: Context) -> tuple[Array, None, dict[str, Array]]:
    """[B, T, D] -> [B, T, D]; see `layer.Sublayer`. Keys and values are of `context.source`, where there is one.

    Raises:
      ValueError: the context does not say where tokens stand.
    """
    if context.sides is None:
        raise ValueError("funnel: the Context has no sides; accepted: the Side of the queries and of the keys")
    queries, keys = context.sides
    source = x if context.source is None else context.source
    query, key, value = (
        constrain(linear(read, params[f"w_{name}"], params.get(f"b_{name}")), "rows", None, "heads", None)
        for name, read in (("query", x), ("key", source), ("value", source))
    )
    distance = distances(x.shape[1], source.shape[1], queries.places, keys.places)
    waves = sinusoidal(jnp.asarray(distance), cfg.width)  # sines in the even entries; here they come before all cosines
    waves = jnp.concatenate([waves[:, 0::2], waves[:, 1::2]], axis=1).astype(x.dtype)
    scale = cfg.attention.head_size(cfg.width) ** -0.5
    bias = relative_terms(
        query, linear(waves, params["w_position"]), source.shape[1], scale=scale,
        position_bias=params["position_bias"],
        segments=SegmentTerm(params["segment_bias"], params["segment_keys"], queries.types, keys.types),
        query_places=queries.places, key_places=keys.places, query_there=queries.there, key_there=keys.there,
    )  # fmt: skip
    query = query + params["content_bias"][None, None].astype(query.dtype)
    out: Any = attention(
        query, key, value, context.mask, bias=bias, scale=scale, dropout_rate=cfg.attention.dropout, rng=context.rng,
        implementation=context.execution.attention,
    )  # fmt: skip
    return attention_layer.project_out(params, out, cfg), None, {}


def cost(cfg: ModelConfig, length: int, execution: Execution) -> Cost:
    """See `layer.Cost`. Every query is multiplied with the distances to all keys, 2 T - 1 in all, with pooled queries
    4 T - 2. The projection of the distances, once for all rows, is left out."""
    d, h, k = cfg.width, cfg.attention.num_heads, cfg.attention.head_size(cfg.width)
    keys_each = 2 if cfg.pools else 1  # keys and values for each query
    keys, number = keys_each * length, keys_each * (2 * length - 1)
    return Cost(
        products=2 * d * h * k * (2 + 2 * keys_each),
        scores=2 * h * k * (2 * keys + number + 2),
        last=2 * d * h * k,
        saved=(1 + 2 * keys_each) * h * k,
        saved_scores=4 * h * keys if execution.attention == "xla" else 0,
    )


FUNNEL = Sublayer(specs, apply, cost, low_rank=(*attention_layer.PROJECTIONS, "w_position"))
