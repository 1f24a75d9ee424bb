"""Attention from a target to its source as a sublayer: queries of the tokens, keys and values of an encoder's states.

No positions enter here. In decoding, keys and values of a source are computed once, with the prompt, and kept once for
all continuations of it: their queries attend to the same array.

Source: Vaswani et al. 2017, section 3.2.3.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxformer.config import Execution, ModelConfig
from jaxformer.functional import attention_layer, key_value_cache
from jaxformer.functional.attention import attention
from jaxformer.functional.layer import Context, Cost, Sublayer
from jaxformer.kernels.attention.decode import attend_shared
from jaxformer.types import Array, Params


class SourceCache(NamedTuple):
    """One layer's keys of the sources, [B * G, K, S], their values, [B * G, S, K], and which are no padding, [B, S]
    bool."""

    key: Array
    value: Array
    there: Array


def apply(
    params: Params, x: Array, cfg: ModelConfig, context: Context
) -> tuple[Array, SourceCache | None, dict[str, Array]]:
    """[B, T, D] -> [B, T, D]; see `layer.Sublayer`. With a cache of earlier tokens, `x` has [B * W, 1, D]: W rows for
    each source.

    Raises:
      ValueError: the context has no source.
    """
    cache, scale, soft_cap = context.cache, attention_layer.score_scale(cfg), cfg.attention.soft_cap
    if context.progress is not None and context.progress.steps is not None:
        query = attention_layer.project_query(params, x, cfg)
        out: Any = attend_shared(query, *cache, scale=scale, soft_cap=soft_cap)
        return attention_layer.project_out(params, out, cfg), cache, {}
    source, mask = context.source, context.source_mask
    if source is None:
        raise ValueError("cross attention: the Context has no source; accepted: an encoder's states [B, S, D]")
    query, key, value = attention_layer.project(params, x, source, cfg)
    out = attention(
        query,
        key,
        value,
        mask,
        scale=scale,
        soft_cap=soft_cap,
        dropout_rate=cfg.attention.dropout,
        rng=context.rng,
        implementation=context.execution.attention,
    )
    if cache is not None:
        there = jnp.ones(source.shape[:2], bool) if mask is None or mask.keys is None else mask.keys
        key, value = (key_value_cache.heads_as_rows(a).astype(cache.key.dtype) for a in (key, value))
        cache = SourceCache(jnp.swapaxes(key, 1, 2), value, there)
    return attention_layer.project_out(params, out, cfg), cache, {}


def cost(cfg: ModelConfig, length: int, execution: Execution) -> Cost:
    """See `layer.Cost`: of a target token in rows of `length`, with its share of the source's keys and values."""
    d, h, g, k = cfg.width, cfg.attention.num_heads, cfg.attention.kv_heads, cfg.head_size
    keys = _source_length(cfg)
    each = keys / length  # source tokens for each of the target
    weights = h * keys if execution.attention == "xla" else 0
    return Cost(
        products=2 * d * k * (2 * h + 2 * g * each),
        scores=2 * 2 * h * k * keys,
        last=2 * d * k * h,
        saved=(h + 2 * g * each) * k,
        saved_scores=2 * weights,
        ring=(g, 2 * k * each),
        kept_scores=2 * 2 * h * k * keys,
        kept=h * k + (weights or 2 * h),
    )


def init_cache(cfg: ModelConfig, rows: int, length: int, dtype: Any) -> SourceCache:
    """Empty keys and values of sources of the longest length."""
    keys = _source_length(cfg)
    empty = jnp.zeros((rows * cfg.attention.kv_heads, keys, cfg.head_size), dtype)
    return SourceCache(jnp.swapaxes(empty, 1, 2), empty, jnp.zeros((rows, keys), bool))


def _source_length(cfg: ModelConfig) -> int:
    assert cfg.encoder is not None
    return cfg.encoder.source_length


CROSS = Sublayer(
    attention_layer.projection_specs, apply, cost, init_cache, per_source=True, low_rank=attention_layer.PROJECTIONS
)
