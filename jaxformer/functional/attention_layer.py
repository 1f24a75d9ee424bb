"""Softmax attention as a sublayer: projections, rotary positions, attention, output projection. `key_value_cache` has
what it keeps in decoding.

Position encodings enter here in three ways. `context.rotation` turns queries and keys and `context.bias` is added to
the scores, both made once for all layers; a bias that depends on the layer's own queries and keys is made here.
`position_encodings` says how to add an encoding.
"""

import math
from typing import Any

import jax.numpy as jnp

from jaxformer.config import Execution, ModelConfig
from jaxformer.functional import positions as pos
from jaxformer.functional.attention import attention
from jaxformer.functional.key_value_cache import (
    LayerCache,
    attend_to_cache,
    init_cache,
    keys_of_rows,
    places_of_slots,
    write_cache,
)
from jaxformer.functional.layer import (
    Context,
    Cost,
    KeyInput,
    Rotation,
    Sublayer,
    scale_init,
    scale_of,
    shard_residual,
    weight_init,
)
from jaxformer.functional.layers import linear, rms_norm
from jaxformer.functional.position_encodings import encoding_of, score_bias, self_scale
from jaxformer.parallel.constraints import constrain
from jaxformer.specs import ParamSpec, zeros
from jaxformer.types import Array, Params

PROJECTIONS = ("w_query", "w_key", "w_value", "w_out")  # weights that only `linear` multiplies by


def specs(cfg: ModelConfig) -> dict[str, Any]:
    """Those of `projection_specs`, and the layer's positions."""
    of_positions = encoding_of(cfg).layer_specs
    found = {} if of_positions is None else of_positions(cfg)
    return projection_specs(cfg) | ({"positions": found} if found else {})


def projection_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Projections to queries, keys and values, and back; their biases; scales of `qk_norm`."""
    d, h, g, k = cfg.width, cfg.attention.num_heads, cfg.attention.kv_heads, cfg.head_size
    into_queries = weight_init(cfg, d, h * k, query=True)
    tree = {
        "w_query": ParamSpec((d, h, k), ("embed", "heads", "head_width"), into_queries, "hidden"),
        "w_key": ParamSpec((d, g, k), ("embed", "kv_heads", "head_width"), weight_init(cfg, d, g * k), "hidden"),
        "w_value": ParamSpec((d, g, k), ("embed", "kv_heads", "head_width"), weight_init(cfg, d, g * k), "hidden"),
        "w_out": ParamSpec(
            (h, k, d), ("heads", "head_width", "embed"), weight_init(cfg, h * k, d, residual=True), "hidden", 2
        ),
    }
    if cfg.attention.joint_qk_norm:
        tree["query_scale"] = ParamSpec((h, k), ("heads", "head_width"), scale_init(cfg), "norm")
        tree["key_scale"] = ParamSpec((g, k), ("kv_heads", "head_width"), scale_init(cfg), "norm")
    elif cfg.attention.qk_norm:
        tree |= dict.fromkeys(("query_scale", "key_scale"), ParamSpec((k,), ("head_width",), scale_init(cfg), "norm"))
    if cfg.use_bias or cfg.attention.qkv_bias:
        tree |= {
            "b_query": ParamSpec((h, k), ("heads", "head_width"), zeros, "bias"),
            "b_key": ParamSpec((g, k), ("kv_heads", "head_width"), zeros, "bias"),
            "b_value": ParamSpec((g, k), ("kv_heads", "head_width"), zeros, "bias"),
        }
    if cfg.use_bias:
        tree["b_out"] = ParamSpec((d,), ("norm",), zeros, "bias")
    return tree


def apply(
    params: Params, x: Array, cfg: ModelConfig, context: Context
) -> tuple[Array, LayerCache | None, dict[str, Array]]:
    """[B, T, D] -> [B, T, D]; see `layer.Sublayer`.

    With `qk_norm` each head's queries and keys go through an RMS norm whose scale all heads share. Scores then cannot
    grow with the weights, and training is stable over a wider range of learning rates (Dehghani et al. 2023, section 2;
    Wortsman et al. 2023, section 3.1.1).
    """
    query, key, value = project(params, x, x if context.key_input is None else context.key_input.states, cfg)
    if context.rotation is not None:
        query = pos.rotary(query, *_at(context.rotation, _places(context.key_input, query.shape[1], key.shape[1])))
        key = pos.rotary(key, *context.rotation)
    cache, progress = context.cache, context.progress
    if progress is not None:
        cache = write_cache(cache, progress, key, value)
    if progress is not None and progress.steps is not None:
        out: Any = _attend_to_cache(params, query, cache, cfg, context)
    else:
        places = None if context.key_input is None else context.key_input.places
        bias = _bias(params, query, key, cfg, context, places)
        shifted = encoding_of(cfg).query
        query = query if shifted is None else shifted(params, query)
        out = attention(
            query,
            key,
            value,
            context.mask,
            bias=bias,
            scale=self_scale(cfg),
            soft_cap=cfg.attention.soft_cap,
            dropout_rate=cfg.attention.dropout,
            rng=context.rng,
            implementation=context.execution.attention,
        )
    return project_out(params, out, cfg), cache, {}


def _places(key_input: KeyInput | None, queries: int, keys: int) -> Array | None:
    """The place among the keys of each query, [T] or [B, T]; None: 0, 1, 2, ..."""
    if key_input is None or key_input.places is not None or queries == keys:
        return None if key_input is None else key_input.places
    return jnp.arange(keys - queries, keys)


def _at(rotation: Rotation, places: Array | None) -> Rotation:
    """The angles of queries among those of the keys."""
    if places is None:
        return rotation

    def taken(x: Array) -> Array:
        if x.ndim == 2:
            return x[places]
        index = jnp.broadcast_to(places, (x.shape[0], places.shape[-1]))
        return jnp.take_along_axis(x, index[..., None], axis=1)

    return rotation._replace(cos=taken(rotation.cos), sin=taken(rotation.sin))


def _bias(params: Params, query: Array, key: Array, cfg: ModelConfig, context: Context, places: Array | None) -> Any:
    """What the positions add to the scores of these queries [B, T, H, K] and keys [B, S, G, K], or None."""
    content = encoding_of(cfg).content
    if content is not None:
        return content(params, context.shared, query, key, cfg, self_scale(cfg), places)
    return bias_of(params, cfg, context)


def bias_of(params: Params, cfg: ModelConfig, context: Context) -> Any:
    """The score bias of positions alone: the layer's own, or that of the whole model."""
    return score_bias(params["positions"], cfg, context.mask) if "positions" in params else context.bias


def project(params: Params, x: Array, source: Array, cfg: ModelConfig) -> tuple[Array, Array, Array]:
    """Queries [B, T, H, K] of `x` [B, T, D], keys and values [B, S, G, K] of `source` [B, S, D]."""
    query, key, value = (
        _heads(params, name, read) for name, read in (("query", x), ("key", source), ("value", source))
    )
    if cfg.attention.qk_norm:
        query, key = _normed(query, params["query_scale"], cfg), _normed(key, params["key_scale"], cfg)
    return query, key, value


def project_query(params: Params, x: Array, cfg: ModelConfig) -> Array:
    """The first of `project`'s."""
    query = _heads(params, "query", x)
    if not cfg.attention.qk_norm:
        return query
    return _normed(query, params["query_scale"], cfg)


def _normed(x: Array, scale: Array, cfg: ModelConfig) -> Array:
    """The norm of queries or keys [B, T, H, K]: of each head, or of all together."""
    flat = x.reshape(*x.shape[:2], -1) if cfg.attention.joint_qk_norm else x
    return rms_norm(flat, scale_of(scale, cfg).reshape(-1), cfg.norm_epsilon).reshape(x.shape)


def _heads(params: Params, name: str, x: Array) -> Array:
    return constrain(linear(x, params[f"w_{name}"], params.get(f"b_{name}")), "rows", None, "heads", None)


def project_out(params: Params, out: Array, cfg: ModelConfig) -> Array:
    """What attention adds to the residual stream: [B, T, H, K] -> [B, T, D]."""
    return shard_residual(linear(out, params["w_out"], params.get("b_out"), num_inputs=2))


def score_scale(cfg: ModelConfig) -> float:
    """What multiplies query . key where positions have no say."""
    return 1 / math.sqrt(cfg.head_size) if cfg.attention.scale is None else cfg.attention.scale


def cost(cfg: ModelConfig, length: int, execution: Execution) -> Cost:
    """See `layer.Cost`. Scores count over the whole [T, T] square, or the window (Chowdhery et al. 2022, appendix B);
    `saved_scores` counts only the blocks that `xla` keeps of a causal square."""
    d, h, g, k = cfg.width, cfg.attention.num_heads, cfg.attention.kv_heads, cfg.head_size
    window = cfg.attention.window
    keys = length if window is None else min(length, window if cfg.causal else 2 * window - 1)
    of_positions = encoding_of(cfg).flops
    weights = h * ((length + 128) / 2 if cfg.causal else length) if execution.attention == "xla" else 0
    return Cost(
        products=2 * d * k * (2 * h + 2 * g),
        scores=2 * 2 * h * k * keys + (0 if of_positions is None else of_positions(cfg, length)),
        last=2 * d * k * h,
        saved=(h + 2 * g) * k,
        saved_scores=2 * weights,
        ring=(g, 2 * k),
        kept_scores=2 * 2 * h * k * keys,
        kept=h * k + (weights or 2 * h),
    )


def _attend_to_cache(params: Params, query: Array, cache: LayerCache, cfg: ModelConfig, context: Context) -> Array:
    """`attend_to_cache` with the positions of this layer."""
    encoding, progress = encoding_of(cfg), context.progress
    assert progress is not None and progress.steps is not None
    if encoding.content is None:
        return attend_to_cache(query, cache, progress, cfg, bias_of(params, cfg, context))
    index = (progress.starts + progress.steps)[:, None]
    places = places_of_slots(cache, progress)
    keys, scale = keys_of_rows(cache, progress, query), self_scale(cfg)
    bias = encoding.content(params, context.shared, query, keys, cfg, scale, index).at(index, places)
    query = query if encoding.query is None else encoding.query(params, query)
    return attend_to_cache(query, cache, progress, cfg, bias)


SOFTMAX = Sublayer(specs, apply, cost, init_cache, low_rank=PROJECTIONS)
