"""Softmax attention as a sublayer: projections, rotary positions, attention, output projection; and its cache.

For decoding, each layer has a ring of S key/value slots: every row writes its i-th new token into slot i mod S. Its
prompt, however long, ends in slot S - 1. So one step writes one slot, prompts of different lengths leave no padding
between tokens, and a model with a window needs a ring of window size only.

Position encodings enter here in two ways, both made once for all layers: `context.rotation` turns queries and keys,
`context.bias` is added to the scores. `position_encodings` says how to add an encoding.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer import masks
from jaxformer.config import Execution, ModelConfig
from jaxformer.functional import positions as pos
from jaxformer.functional.attention import attention
from jaxformer.functional.layer import Context, Cost, DecodeProgress, Sublayer, shard_residual, weight_init
from jaxformer.functional.layers import linear, rms_norm
from jaxformer.functional.position_encodings import encoding_of, score_bias
from jaxformer.kernels.attention.decode import attend_one
from jaxformer.parallel.constraints import constrain
from jaxformer.specs import ParamSpec, ones, zeros
from jaxformer.types import Array, Params


class LayerCache(NamedTuple):
    """One layer's keys and values, [B * G, S, K], each row's heads one after the other."""

    key: Array
    value: Array


def specs(cfg: ModelConfig) -> dict[str, Any]:
    """Projections to queries, keys and values, and back; their biases; scales of `qk_norm`; the layer's positions."""
    d, h, g, k = cfg.width, cfg.attention.num_heads, cfg.attention.kv_heads, cfg.head_size
    tree: dict[str, Any] = {
        "w_query": ParamSpec((d, h, k), ("embed", "heads", "head_width"), weight_init(cfg, d, h * k), "hidden"),
        "w_key": ParamSpec((d, g, k), ("embed", "kv_heads", "head_width"), weight_init(cfg, d, g * k), "hidden"),
        "w_value": ParamSpec((d, g, k), ("embed", "kv_heads", "head_width"), weight_init(cfg, d, g * k), "hidden"),
        "w_out": ParamSpec(
            (h, k, d), ("heads", "head_width", "embed"), weight_init(cfg, h * k, d, residual=True), "hidden", 2
        ),
    }
    if cfg.attention.qk_norm:
        tree |= dict.fromkeys(("query_scale", "key_scale"), ParamSpec((k,), ("head_width",), ones, "norm"))
    of_positions = encoding_of(cfg).layer_specs
    if of_positions is not None:
        tree["positions"] = of_positions(cfg)
    if cfg.use_bias:
        tree |= {
            "b_query": ParamSpec((h, k), ("heads", "head_width"), zeros, "bias"),
            "b_key": ParamSpec((g, k), ("kv_heads", "head_width"), zeros, "bias"),
            "b_value": ParamSpec((g, k), ("kv_heads", "head_width"), zeros, "bias"),
            "b_out": ParamSpec((d,), ("norm",), zeros, "bias"),
        }
    return tree


def apply(
    params: Params, x: Array, cfg: ModelConfig, context: Context
) -> tuple[Array, LayerCache | None, dict[str, Array]]:
    """[B, T, D] -> [B, T, D]; see `layer.Sublayer`.

    With `qk_norm` each head's queries and keys go through an RMS norm whose scale all heads share. Scores then cannot
    grow with the weights, and training is stable over a wider range of learning rates (Dehghani et al. 2023, section 2;
    Wortsman et al. 2023, section 3.1.1).
    """
    query, key, value = (
        constrain(linear(x, params[f"w_{name}"], params.get(f"b_{name}")), "rows", None, "heads", None)
        for name in ("query", "key", "value")
    )
    if cfg.attention.qk_norm:
        query = rms_norm(query, params["query_scale"], cfg.norm_epsilon)
        key = rms_norm(key, params["key_scale"], cfg.norm_epsilon)
    if context.rotation is not None:
        query = pos.rotary(query, *context.rotation)
        key = pos.rotary(key, *context.rotation)
    cache, progress = context.cache, context.progress
    own = "positions" in params
    bias = score_bias(params["positions"], cfg, context.mask) if own else context.bias
    if progress is not None:
        cache = _write(cache, progress, key, value)
    if progress is not None and progress.steps is not None:
        out: Any = _attend_to_cache(query, cache, progress.starts, progress.steps, cfg, bias)
    else:
        out = attention(
            query,
            key,
            value,
            context.mask,
            bias=bias,
            soft_cap=cfg.attention.soft_cap,
            dropout_rate=cfg.attention.dropout,
            rng=context.rng,
            implementation=context.execution.attention,
        )
    out = linear(out.reshape(*out.shape[:2], -1), params["w_out"].reshape(-1, cfg.width), params.get("b_out"))
    return shard_residual(out), cache, {}


def cost(cfg: ModelConfig, length: int, execution: Execution) -> Cost:
    """See `layer.Cost`. Scores count over the whole [T, T] square, or the window (Chowdhery et al. 2022, appendix B);
    `saved_scores` counts only the blocks that `xla` keeps of a causal square."""
    d, h, g, k = cfg.width, cfg.attention.num_heads, cfg.attention.kv_heads, cfg.head_size
    window = cfg.attention.window
    keys = length if window is None else min(length, window if cfg.causal else 2 * window - 1)
    return Cost(
        products=2 * d * k * (2 * h + 2 * g),
        scores=2 * 2 * h * k * keys,
        last=2 * d * k * h,
        saved=(h + 2 * g) * k,
        saved_scores=2 * h * ((length + 128) / 2 if cfg.causal else length) if execution.attention == "xla" else 0,
        ring=(g, 2 * k),
    )


def init_cache(cfg: ModelConfig, rows: int, length: int, dtype: Any) -> LayerCache:
    """An empty ring for sequences of `length` tokens: that many slots, or the window's size if it is smaller."""
    slots = length if cfg.attention.window is None else min(cfg.attention.window, length)
    empty = jnp.zeros((rows * cfg.attention.kv_heads, slots, cfg.head_size), dtype)
    return LayerCache(empty, empty)


def slot_positions(starts: Array, steps: Array | int, slots: int) -> Array:
    """Index of the token in each slot once `steps` new tokens are written, [B, S] int32; negative: empty."""
    newest = steps - 1
    return (starts + newest)[:, None] - ((newest - jnp.arange(slots, dtype=jnp.int32)) % slots)[None, :]


def _write(cache: LayerCache, progress: DecodeProgress, key: Array, value: Array) -> LayerCache:
    """The cache with new keys and values [B, T, G, K] added: those of a prompt, or of one token."""
    slots, dtype = cache.key.shape[1], cache.key.dtype
    new = (jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (key, value))
    if progress.steps is not None:
        slot = progress.steps % slots
        return LayerCache(
            *(jax.lax.dynamic_update_slice_in_dim(o, n.astype(dtype), slot, 1) for o, n in zip(cache, new, strict=True))
        )
    # Empty slots hold a copy of the first token, which is finite; the mask hides them.
    source = jnp.maximum(slot_positions(progress.starts, jnp.zeros((), jnp.int32), slots), 0)
    source = jnp.repeat(source, key.shape[2], axis=0)[:, :, None]
    return LayerCache(*(jnp.take_along_axis(x, source, axis=1).astype(dtype) for x in new))


def _attend_to_cache(
    query: Array, cache: LayerCache, starts: Array, steps: Array, cfg: ModelConfig, bias: Any
) -> Array:
    """Attention of one new token per row, [B, 1, H, K], to all slots including its own."""
    index = (starts + steps)[:, None]
    # All that the ring holds may be seen, so the mask only has to hide empty slots.
    places = slot_positions(starts, steps + 1, cache.key.shape[1])
    mask = masks.Mask(query_index=index, key_index=places)
    bias = bias(index, places) if callable(bias) else bias
    options = {"scale": 1 / math.sqrt(cfg.head_size), "soft_cap": cfg.attention.soft_cap}
    return attend_one(query, cache.key, cache.value, mask, bias, **options)


SOFTMAX = Sublayer(specs, apply, cost, init_cache)
