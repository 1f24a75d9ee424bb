"""Longformer's attention: a window for all tokens, and global tokens with projections of their own.

A token sees its window and the global tokens, in one softmax, by the projections of all tokens. A global token sees its
whole document (of a causal model, the part before it) by queries, keys and values of its own.

Source: Beltagy et al. 2020, "Longformer", section 3.1; what `transformers` computes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer import masks, patterns
from jaxformer.config import Execution, ModelConfig
from jaxformer.functional import attention_layer, key_value_cache, sparse_layer
from jaxformer.functional.key_value_cache import LayerCache
from jaxformer.functional.layer import Context, Cost, Sublayer
from jaxformer.patterns import GlobalPositions, GlobalTokens
from jaxformer.types import Array, Params


class LongformerCache(NamedTuple):
    """Keys and values of all tokens by both projections; see `key_value_cache.LayerCache`."""

    local: LayerCache
    whole: LayerCache


GLOBAL = "global_"  # before the names of the projections of global tokens


def specs(cfg: ModelConfig) -> dict[str, Any]:
    """Those of softmax attention, and the projections of global tokens to queries, keys and values."""
    tree: dict[str, Any] = attention_layer.specs(cfg)
    if cfg.attention.global_tokens:
        inner = attention_layer.projection_specs(cfg)
        tree |= {f"{GLOBAL}{name}": spec for name, spec in inner.items() if not name.endswith("out")}
    return tree


def global_params(params: Params) -> dict[str, Any]:
    """The projections of global tokens by the names that softmax attention has for them."""
    return {name.removeprefix(GLOBAL): x for name, x in params.items() if name.startswith(GLOBAL)}


def longformer(
    local: tuple[Array, Array, Array],
    whole: tuple[Array, Array, Array] | None,
    mask: masks.Mask,
    window: int,
    global_tokens: GlobalPositions | GlobalTokens | None,
    attend: Any,
) -> Array:
    """Attention of all tokens.

    Args:
      local: query [B, T, H, K], key and value [B, T, G, K] of all tokens.
      whole: the same by the projections of global tokens, with the first queries only where `global_tokens` is a number
        of first tokens; None: there are no global tokens.
      mask: causality, documents and padding.
      window: a token sees keys fewer than so many away.
      global_tokens: from `patterns.global_tokens`, seeing and seen; None: there are none.
      attend: attention of (query, key, value, mask), such as `functional.attention.attention`.

    Returns:
      [B, T, H, K].

    >>> from jaxformer.functional.attention import attention
    >>> x = jnp.ones((1, 6, 2, 4))
    >>> of = patterns.global_tokens(1)
    >>> jax.jit(lambda x: longformer((x, x, x), (x[:, :1], x, x), masks.causal(), 2, of, attention))(x).shape
    (1, 6, 2, 4)
    """
    near = patterns.local(window)
    if global_tokens is None or whole is None:
        return attend(*local, mask & masks.either(near))
    length = local[0].shape[1]
    if isinstance(global_tokens, GlobalPositions):
        count = min(global_tokens.first, length)
        seen = patterns.global_tokens(count, see=False)
        out = attend(*local, mask & masks.either(near, seen))
        of_first = attend(*whole, masks.crop(mask, length, length, slice(0, count), slice(0, length)))
        return out.at[:, :count].set(of_first)
    marked = global_tokens.marked
    out = attend(*local, mask & masks.either(near, patterns.global_tokens(marked, see=False)))
    of_marked = attend(*whole, mask & masks.either(patterns.global_tokens(marked, seen=False)))
    return jnp.where(marked[..., None, None], of_marked, out)


def apply(params: Params, x: Array, cfg: ModelConfig, context: Context) -> tuple[Array, Any, dict[str, Array]]:
    """[B, T, D] -> [B, T, D]; see `layer.Sublayer`."""
    cache, progress, kind = context.cache, context.progress, cfg.fitted_attention
    mask = masks.Mask() if context.mask is None else context.mask
    bias = attention_layer.bias_of(params, cfg, context)
    decodes, length = progress is not None and progress.steps is not None, x.shape[1]
    ends = None if decodes else sparse_layer.global_of(cfg, mask, length)
    local, whole = _projected(params, x, cfg, context), None
    if kind.global_tokens:
        # Only global tokens' queries are needed, which are the first ones of a row that holds one document.
        first = min(kind.global_tokens, length) if isinstance(ends, GlobalPositions) else length
        whole = _projected(global_params(params), x, cfg, context, first)
    if progress is not None:
        kept = key_value_cache.write_cache(cache.local, progress, *local[1:])
        of_all = cache.whole if whole is None else key_value_cache.write_cache(cache.whole, progress, *whole[1:])
        cache = LongformerCache(kept, of_all)
    rngs = iter((None, None) if context.rng is None else jax.random.split(context.rng))

    def attend(query: Array, key: Array, value: Array, mask: masks.Mask) -> Array:
        return sparse_layer.attend(query, key, value, mask, cfg, context._replace(rng=next(rngs)), bias)

    if decodes:
        out = _next_token(local[0], None if whole is None else whole[0], cache, cfg, context, bias)
    else:
        out = longformer(local, whole, mask, kind.attention_window // 2 + 1, ends, attend)
    return attention_layer.project_out(params, out, cfg), cache, {}


def _projected(params, x: Array, cfg: ModelConfig, context: Context, queries: int | None = None) -> tuple[Any, ...]:
    """Query, key and value, with the first `queries` queries; None: all."""
    query, key, value = attention_layer.project(params, x, x, cfg)
    query, key = sparse_layer.rotated(context, query, key)
    return query if queries is None else query[:, :queries], key, value


def _next_token(query, of_global, cache: LongformerCache, cfg: ModelConfig, context: Context, bias) -> Array:
    """The output of one new token of each row, [B, 1, H, K]."""
    progress = context.progress
    assert progress is not None and progress.steps is not None
    seen = sparse_layer.decoding_patterns(cfg, cache.local, progress)
    out = key_value_cache.attend_to_cache(query, cache.local, progress, cfg, bias, seen)
    if of_global is None:
        return out
    all_of_it = key_value_cache.attend_to_cache(of_global, cache.whole, progress, cfg, bias)
    is_global = progress.starts + progress.steps < cfg.attention.global_tokens
    return jnp.where(is_global[:, None, None, None], all_of_it, out)


def cost(cfg: ModelConfig, length: int, execution: Execution) -> Cost:
    """See `layer.Cost`."""
    found = sparse_layer.cost(cfg, length, execution)
    if not cfg.attention.global_tokens:
        return found
    d, h, g, k = cfg.width, cfg.attention.num_heads, cfg.attention.kv_heads, cfg.head_size
    return found._replace(products=found.products + 2 * d * k * (h + 2 * g), saved=found.saved + (h + 2 * g) * k)


def init_cache(cfg: ModelConfig, rows: int, length: int, dtype: Any) -> LongformerCache:
    """See `layer.Sublayer.init_cache`."""
    local = key_value_cache.init_cache(cfg, rows, length, dtype)
    return LongformerCache(local, local if cfg.attention.global_tokens else LayerCache(*(x[:, :1] for x in local)))


LONGFORMER = Sublayer(
    specs, apply, cost, init_cache,
    low_rank=(*attention_layer.PROJECTIONS, *(f"{GLOBAL}w_{name}" for name in ("query", "key", "value"))),
)  # fmt: skip
