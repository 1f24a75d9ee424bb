"""LSH attention as a sublayer: one projection to queries that are keys as well, hashing, attention; and its cache.

Decoding keeps keys, values and their buckets: a new token sees those of the last `chunk` tokens of its bucket, as it
would in the row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import Execution, ModelConfig
from jaxformer.functional.key_value_cache import slot_positions
from jaxformer.functional.layer import Context, Cost, DecodeProgress, Sublayer, shard_residual, weight_init
from jaxformer.functional.layers import linear
from jaxformer.functional.lsh import lsh_attention, unit_keys
from jaxformer.functional.lsh_hashing import Rotations, hash_buckets, random_rotations
from jaxformer.kernels.attention.xla_vjp import softmax
from jaxformer.parallel.constraints import constrain
from jaxformer.specs import ParamSpec, zeros
from jaxformer.types import Array, Params


class LshCache(NamedTuple):
    """One layer's normed keys and values, [B, H, S, K], and their buckets in every round, [B, H, S, R] int32."""

    key: Array
    value: Array
    buckets: Array


def specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Projections to queries, which are keys, to values, and back; their biases."""
    d, h, k = cfg.width, cfg.attention.num_heads, cfg.attention.head_size(cfg.width)
    into = ("embed", "heads", "head_width")
    tree = {
        "w_query_key": ParamSpec((d, h, k), into, weight_init(cfg, d, h * k, query=True), "hidden"),
        "w_value": ParamSpec((d, h, k), into, weight_init(cfg, d, h * k), "hidden"),
        "w_out": ParamSpec(
            (h, k, d), ("heads", "head_width", "embed"), weight_init(cfg, h * k, d, residual=True), "hidden", 2
        ),
    }
    if cfg.use_bias:
        tree |= dict.fromkeys(("b_query_key", "b_value"), ParamSpec((h, k), ("heads", "head_width"), zeros, "bias"))
        tree["b_out"] = ParamSpec((d,), ("norm",), zeros, "bias")
    return tree


def apply(
    params: Params, x: Array, cfg: ModelConfig, context: Context
) -> tuple[Array, LshCache | None, dict[str, Array]]:
    """[B, T, D] -> [B, T, D]; see `layer.Sublayer`.

    Raises:
      ValueError: the mask has prefixes.
    """
    kind, mask, progress, cache = cfg.attention, context.mask, context.progress, context.cache
    if mask is not None and (mask.prefix is not None or mask.prefix_keys is not None):
        raise ValueError("lsh: the mask has a prefix; accepted: causality and segments")
    query_key, value = (
        constrain(linear(x, params[f"w_{name}"], params.get(f"b_{name}")), "rows", None, "heads", None)
        for name in ("query_key", "value")
    )
    rotations = rotations_of(cfg, context.rng)
    if progress is not None:
        buckets = jnp.moveaxis(hash_buckets(query_key, rotations), 2, 3)
        new = LshCache(jnp.swapaxes(unit_keys(query_key), 1, 2), jnp.swapaxes(value, 1, 2), buckets)
        cache = _write(cache, progress, new)
    if progress is not None and progress.steps is not None:
        out = _attend_to_cache(query_key, value, new.buckets, cache, progress, kind.chunk, kind.duplicates)
    else:
        out = lsh_attention(
            query_key, value, rotations, chunk=kind.chunk, causal=cfg.causal, across_buckets=kind.across_buckets,
            segments=None if mask is None else mask.query_segments, duplicates=kind.duplicates,
            dropout_rate=kind.dropout, rng=context.rng,
        )  # fmt: skip
    out = linear(out, params["w_out"], params.get("b_out"), num_inputs=2)
    return shard_residual(out), cache, {}


def rotations_of(cfg: ModelConfig, rng: Array | None = None) -> Rotations:
    """[H, K, R, buckets / 2] of each factor of the buckets: a pure function of the config's seed, or where it redraws
    of `rng`, if there is one."""
    kind = cfg.attention
    key = jax.random.fold_in(rng, 1) if kind.redraw and rng is not None else jax.random.key(kind.seed)
    heads, width = kind.num_heads, kind.head_size(cfg.width)
    return random_rotations(key, heads, width, kind.rounds, kind.factors(cfg.context_length))


def cost(cfg: ModelConfig, length: int, execution: Execution) -> Cost:
    """See `layer.Cost`. A token is hashed, and in each round multiplied with the tokens of two chunks."""
    kind, d = cfg.attention, cfg.width
    h, k = kind.num_heads, kind.head_size(d)
    chunk = min(kind.chunk, length) if kind.across_buckets else kind.chunk
    one = kind.across_buckets and length <= kind.chunk
    rounds, chunks = 1 if one else kind.rounds, -(-length // chunk)
    keys = rounds * chunks * chunk / length * (chunk if rounds * chunks == 1 else 2 * chunk)
    hashed = 0 if one else h * k * kind.rounds * sum(kind.factors(cfg.context_length))
    return Cost(
        products=2 * d * k * 3 * h,
        scores=2 * 2 * h * k * keys + hashed,
        last=2 * d * k * h,
        saved=3 * h * k,
        saved_scores=2 * h * keys,
    )


def init_cache(cfg: ModelConfig, rows: int, length: int, dtype: Any) -> LshCache:
    """Empty slots for sequences of `length` tokens."""
    shape = rows, cfg.attention.num_heads, length
    empty = jnp.zeros((*shape, cfg.attention.head_size(cfg.width)), dtype)
    return LshCache(empty, empty, jnp.zeros((*shape, cfg.attention.rounds), jnp.int32))


def _write(cache: LshCache, progress: DecodeProgress, new: LshCache) -> LshCache:
    """The cache with new tokens added, as `attention_layer` has it: those of a prompt end in the last slot."""
    slots = cache.key.shape[2]
    if progress.steps is None:
        source = jnp.maximum(slot_positions(progress.starts, jnp.zeros((), jnp.int32), slots), 0)[:, None, :, None]
        return LshCache(
            *(jnp.take_along_axis(n, source, axis=2).astype(o.dtype) for o, n in zip(cache, new, strict=True))
        )
    slot = progress.steps % slots
    return LshCache(
        *(jax.lax.dynamic_update_slice_in_dim(o, n.astype(o.dtype), slot, 2) for o, n in zip(cache, new, strict=True))
    )


def _attend_to_cache(
    query: Array, value: Array, buckets: Array, cache: LshCache, progress: DecodeProgress, chunk: int, duplicates: bool
) -> Array:
    """Attention of one new token per row, [B, 1, H, K]: to the last `chunk` of its bucket in each round, or itself."""
    steps: Any = progress.steps
    slots = cache.key.shape[2]
    places = slot_positions(progress.starts, steps + 1, slots)
    earlier = (places >= 0) & (places < (progress.starts + steps)[:, None])
    same = (cache.buckets == buckets) & earlier[:, None, :, None]  # [B, H, S, R]
    in_order = jnp.roll(same, -(steps + 1), axis=2)  # the slot after the newest one is the oldest
    newer = jnp.cumsum(in_order[:, :, ::-1], axis=2)[:, :, ::-1] - in_order
    times = jnp.sum(same & (jnp.roll(newer, steps + 1, axis=2) < chunk), axis=3)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("BTHK,BHSK->BHTS", query, cache.key.astype(query.dtype), preferred_element_type=wide)
    if duplicates:
        scores = scores + jnp.log(jnp.maximum(times, 1).astype(wide))[:, :, None]
    seen = times[:, :, None] > 0
    weights = softmax(jnp.where(seen, scores, -jnp.inf)).astype(value.dtype)
    out = jnp.einsum("BHTS,BHSK->BTHK", weights, cache.value.astype(value.dtype), preferred_element_type=wide)
    alone = ~jnp.any(seen, axis=3)[:, :, :, None].swapaxes(1, 2)
    return jnp.where(alone, value.astype(wide), out).astype(value.dtype)


LSH = Sublayer(specs, apply, cost, init_cache, low_rank=("w_query_key", "w_value", "w_out"))
