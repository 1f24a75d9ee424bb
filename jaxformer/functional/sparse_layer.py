"""Sparse attention as sublayers: softmax attention under the pattern of `model.attention`.

Global tokens are those of each document in a row; blocks and strides are those of the row. Decoding keeps all keys and
values, as softmax attention does, and each new token attends to those that its pattern names.
"""

from typing import Any

import jax.numpy as jnp

from jaxformer import masks, patterns
from jaxformer.config import Execution, ModelConfig
from jaxformer.functional import attention_layer, key_value_cache
from jaxformer.functional import positions as pos
from jaxformer.functional.attention import attention
from jaxformer.functional.layer import Context, Cost, DecodeProgress
from jaxformer.patterns import GlobalPositions, GlobalTokens, MaskPattern
from jaxformer.types import Array, Params


def document_ends(segments: Array, first: int, last: int) -> Array:
    """[B, T] bool: the first and the last so many tokens of each document, where `segments` [B, T] int changes.

    >>> document_ends(jnp.array([[1, 1, 1, 1, 2, 2]]), 1, 1).astype(int).tolist()
    [[1, 0, 0, 1, 1, 1]]
    """
    at = jnp.arange(segments.shape[1])[None]
    changes = segments[:, 1:] != segments[:, :-1]
    edge = jnp.ones_like(segments[:, :1], bool)
    starts = jnp.where(jnp.concatenate([edge, changes], axis=1), at, 0)
    ends = jnp.where(jnp.concatenate([changes, edge], axis=1), at, segments.shape[1])
    since = at - jnp.maximum.accumulate(starts, axis=1)
    until = jnp.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1] - at
    return (since < first) | (until < last)


def global_of(cfg: ModelConfig, mask: masks.Mask, length: int) -> GlobalPositions | GlobalTokens | None:
    """The global tokens of rows of `length` tokens, those of each document where the mask has segments; or None."""
    first, last = cfg.fitted_attention.global_ends(cfg.causal)
    if not first and not last:
        return None
    if mask.query_segments is None:
        return patterns.global_tokens(min(first, length), last=min(last, length), length=length)
    return patterns.global_tokens(document_ends(mask.query_segments, first, last))


def patterns_of(cfg: ModelConfig, length: int) -> tuple[MaskPattern, ...]:
    """The patterns of a config without its global tokens."""
    return cfg.fitted_attention.patterns(max(length, cfg.context_length), cfg.causal)


def apply(params: Params, x: Array, cfg: ModelConfig, context: Context) -> tuple[Array, Any, dict[str, Array]]:
    """[B, T, D] -> [B, T, D]; see `layer.Sublayer`."""
    query, key, value = attention_layer.project(params, x, x, cfg)
    query, key = rotated(context, query, key)
    cache, progress = context.cache, context.progress
    bias = attention_layer.bias_of(params, cfg, context)
    if progress is not None:
        cache = key_value_cache.write_cache(cache, progress, key, value)
    length = x.shape[1]
    if progress is not None and progress.steps is not None:
        out = key_value_cache.attend_to_cache(
            query, cache, progress, cfg, bias, decoding_patterns(cfg, cache, progress)
        )
    else:
        mask = masks.Mask() if context.mask is None else context.mask
        ends = global_of(cfg, mask, length)
        sparse = masks.either(patterns_of(cfg, length), *(() if ends is None else (ends,)))
        out = attend(query, key, value, mask & sparse, cfg, context, bias)
    return attention_layer.project_out(params, out, cfg), cache, {}


def rotated(context: Context, *arrays: Array) -> list[Array]:
    """Queries and keys [B, T, H, K], turned by rotary positions if there are any."""
    return [x if context.rotation is None else pos.rotary(x, *context.rotation) for x in arrays]


def attend(
    query: Array, key: Array, value: Array, mask: masks.Mask, cfg: ModelConfig, context: Context, bias: Any
) -> Array:
    """Attention with the config's options."""
    return attention(
        query,
        key,
        value,
        mask,
        bias=bias,
        scale=cfg.attention.scale,
        soft_cap=cfg.attention.soft_cap,
        dropout_rate=cfg.attention.dropout,
        rng=context.rng,
        implementation=context.execution.attention,
    )


def decoding_patterns(
    cfg: ModelConfig, cache: key_value_cache.LayerCache, progress: DecodeProgress
) -> tuple[MaskPattern, ...]:
    """The patterns of one new token, by its place in its sequence."""
    first, _ = cfg.fitted_attention.global_ends(True)
    found = patterns_of(cfg, key_value_cache.slots_of(cache, progress))
    return (*found, patterns.GlobalPositions(first)) if first else found


def keys_seen(cfg: ModelConfig, length: int) -> float:
    """Keys that a token sees, about: the patterns' and the global tokens', half of them in a causal model."""
    ends = sum(cfg.fitted_attention.global_ends(cfg.causal))
    found = sum(pattern.keys(length) for pattern in cfg.fitted_attention.patterns(length, cfg.causal)) + 2 * ends
    return min(length, found / 2 if cfg.causal else found)


def cost(cfg: ModelConfig, length: int, execution: Execution) -> Cost:
    """See `layer.Cost`. Scores count over the keys that a token sees; `xla` keeps those of whole rows."""
    of_all = attention_layer.cost(cfg, length, execution)
    return of_all._replace(scores=of_all.scores * keys_seen(cfg, length) / length, ring=(0, 0))


SPARSE = attention_layer.SOFTMAX._replace(apply=apply, cost=cost)
