"""block(): one Transformer layer in its three arrangements. stack(): all of them, by scan or unrolled.

Parameters are said in `block_specs`; `stack` wants them stacked on a leading layer axis (`specs.stack_specs`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer import masks
from jaxformer.config import Execution, ModelConfig, Rotary
from jaxformer.functional import positions as pos
from jaxformer.functional.attention import KERNELS, attention
from jaxformer.functional.layer import gather_sequence, norm, norm_specs, shard_residual, weight_init
from jaxformer.functional.layers import PRODUCT, dropout, linear, mlp, rms_norm
from jaxformer.kernels.attention.decode import attend_one
from jaxformer.kernels.attention.xla import Bias
from jaxformer.parallel.constraints import constrain, constrain_params
from jaxformer.specs import ParamSpec, ones, zeros
from jaxformer.types import Array, Params

AS_USUAL = Execution()


class Rotation(NamedTuple):
    """What rotary positions need in every layer: cos and sin [B, T, K / 2] or [T, K / 2], and yarn's factor."""

    cos: Array
    sin: Array
    scale: float


class LayerCache(NamedTuple):
    """One layer's keys and values of the tokens before these ones (see `decoding`).

    Attributes:
      key, value: [B * G, S, K], each row's heads one after the other. None: nothing came before; the tokens see each
        other, and the cache handed back holds just them, S = T.
      slot: () int, where the one new token (T = 1) is written; None with the others.
    """

    key: Any = None
    value: Any = None
    slot: Array | None = None


def block_specs(cfg: ModelConfig) -> dict[str, Any]:
    """Parameters of one block: two norms (one if parallel), attention, MLP."""
    d, f = cfg.width, cfg.feed_forward.hidden_width(cfg.width)
    h, g, k = cfg.attention.num_heads, cfg.attention.kv_heads, cfg.head_size
    attention_specs = {
        "w_query": ParamSpec((d, h, k), ("embed", "heads", "head_width"), weight_init(cfg, d, h * k)),
        "w_key": ParamSpec((d, g, k), ("embed", "kv_heads", "head_width"), weight_init(cfg, d, g * k)),
        "w_value": ParamSpec((d, g, k), ("embed", "kv_heads", "head_width"), weight_init(cfg, d, g * k)),
        "w_out": ParamSpec((h, k, d), ("heads", "head_width", "embed"), weight_init(cfg, h * k, d, residual=True)),
    }
    mlp_specs = {
        "w_up": ParamSpec((d, f), ("embed", "mlp"), weight_init(cfg, d, f)),
        "w_down": ParamSpec((f, d), ("mlp", "embed"), weight_init(cfg, f, d, residual=True)),
    }
    if cfg.attention.qk_norm:
        attention_specs |= dict.fromkeys(("query_scale", "key_scale"), ParamSpec((k,), ("head_width",), ones))
    if cfg.feed_forward.gated:
        mlp_specs["w_gate"] = ParamSpec((d, f), ("embed", "mlp"), weight_init(cfg, d, f))
    if cfg.use_bias:
        attention_specs |= {
            "b_query": ParamSpec((h, k), ("heads", "head_width"), zeros, decay=False),
            "b_key": ParamSpec((g, k), ("kv_heads", "head_width"), zeros, decay=False),
            "b_value": ParamSpec((g, k), ("kv_heads", "head_width"), zeros, decay=False),
            "b_out": ParamSpec((d,), ("norm",), zeros),
        }
        mlp_specs |= {"b_up": ParamSpec((f,), ("mlp",), zeros), "b_down": ParamSpec((d,), ("norm",), zeros)}
    specs = {"attention": attention_specs, "attention_norm": norm_specs(cfg), "mlp": mlp_specs}
    if cfg.block != "parallel":
        specs["mlp_norm"] = norm_specs(cfg)
    return specs


def rotation(cfg: ModelConfig, positions: Array) -> Rotation | None:
    """The rotary angles of `positions` ([T] or [B, T] int), or None if the config's positions are not rotary."""
    if not isinstance(cfg.positions, Rotary):
        return None
    rotary = cfg.positions
    original = rotary.original_length or round(cfg.context_length / rotary.factor)
    frequencies, scale = pos.rotary_frequencies(cfg.head_size, rotary.base, rotary.scaling, rotary.factor, original)
    return Rotation(*pos.rotary_angles(positions, frequencies), scale)


def attention_layer(
    params: Params,
    x: Array,
    cfg: ModelConfig,
    mask: masks.Mask | None,
    *,
    rotate: Rotation | None = None,
    bias: Bias | None = None,
    rng: Array | None = None,
    cache: LayerCache | None = None,
    execution: Execution = AS_USUAL,
) -> tuple[Array, LayerCache | None]:
    """Projections, rotary positions, attention, output projection.

    With `qk_norm` each head's queries and keys go through an RMS norm whose scale all heads share, so that scores
    cannot grow with the weights: a run then bears a wider range of learning rates (Dehghani et al. 2023, section 2;
    Wortsman et al. 2023, section 3.1.1).

    Args:
      params: as in `block_specs(cfg)["attention"]`.
      x: [B, T, D].
      cfg: the model's config.
      mask: who sees whom; over the cache's slots if it holds any.
      rotate: rotary angles of the T positions.
      bias: score bias (ALiBi, T5).
      rng: dropout of the weights; None: none.
      cache: what this layer remembers, or None.
      execution: its `attention` is the implementation.

    Returns:
      [B, T, D], and the cache with the new keys and values in it.
    """
    query, key, value = (
        constrain(linear(x, params[f"w_{name}"], params.get(f"b_{name}")), "rows", None, "heads", None)
        for name in ("query", "key", "value")
    )
    if cfg.attention.qk_norm:
        query = rms_norm(query, params["query_scale"], cfg.norm_epsilon)
        key = rms_norm(key, params["key_scale"], cfg.norm_epsilon)
    if rotate is not None:
        query = pos.rotary(query, *rotate)
        key = pos.rotary(key, *rotate)
    if cache is not None:
        cache = _write_cache(cache, key, value)
    implementation = execution.attention
    if cache is not None and implementation in KERNELS:  # which do not take any length
        implementation = "auto"
    out: Any
    if cache is not None and cache.slot is not None:
        scale = 1 / math.sqrt(cfg.head_size)
        out = attend_one(query, cache.key, cache.value, mask, bias, scale=scale, soft_cap=cfg.attention.soft_cap)
    else:
        out = attention(
            query,
            key,
            value,
            mask,
            bias=bias,
            soft_cap=cfg.attention.soft_cap,
            dropout_rate=cfg.attention.dropout,
            rng=rng,
            implementation=implementation,
        )
    w_out = params["w_out"]
    flat = out.reshape(*out.shape[:2], -1)
    out = linear(flat, w_out.reshape(-1, w_out.shape[-1]), params.get("b_out"))
    return shard_residual(out), cache


def _write_cache(cache: LayerCache, key: Array, value: Array) -> LayerCache:
    """The cache with new keys and values, [B, T, G, K], in it."""
    key, value = (jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (key, value))
    slot = cache.slot
    if slot is None:
        return LayerCache(key, value)

    def write(old: Array, new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), slot, axis=1)

    return cache._replace(key=write(cache.key, key), value=write(cache.value, value))


def mlp_layer(params: Params, x: Array, cfg: ModelConfig) -> Array:
    """The MLP the config names. `x`: [..., D]."""
    out = mlp(x, **params, activation=cfg.feed_forward.activation)
    return shard_residual(out) if x.ndim == 3 else out


def block(
    params: Params,
    x: Array,
    cfg: ModelConfig,
    mask: masks.Mask | None = None,
    *,
    rotate: Rotation | None = None,
    bias: Bias | None = None,
    rng: Array | None = None,
    cache: LayerCache | None = None,
    execution: Execution = AS_USUAL,
) -> tuple[Array, LayerCache | None]:
    """One Transformer block; what lies between its layers is laid out as `constraints.ACTIVATION_RULES` says.

    pre_norm:  x + attention(norm(x)), then x + mlp(norm(x))         (Radford et al. 2019, section 2.3)
    post_norm: norm(x + attention(x)), then norm(x + mlp(x))         (Vaswani et al. 2017, section 3.1)
    parallel:  x + attention(norm(x)) + mlp(norm(x))                 (Wang and Komatsuzaki 2021; PaLM, section 2)

    Args:
      params: as in `block_specs(cfg)`.
      x: [B, T, D].
      cfg, mask, rotate, bias, cache, execution: as in `attention_layer`.
      rng: dropout; None: nothing is dropped.

    Returns:
      [B, T, D], and the cache with the new keys and values (None if none was given).
    """
    params = constrain_params(params, block_specs(cfg))
    rngs = [None] * 3 if rng is None else list(jax.random.split(rng, 3))
    attend = functools.partial(
        attention_layer, params["attention"], cfg=cfg, mask=mask, rotate=rotate, bias=bias, rng=rngs[0], cache=cache,
        execution=execution,
    )  # fmt: skip
    feed = functools.partial(mlp_layer, params["mlp"], cfg=cfg)
    first_norm = functools.partial(norm, params["attention_norm"], cfg=cfg)
    drop_first, drop_second = (functools.partial(dropout, rate=cfg.dropout, rng=rng) for rng in rngs[1:])
    if cfg.block == "parallel":
        normed = gather_sequence(first_norm(x))
        attended, cache = attend(normed)
        return shard_residual(x + drop_first(attended) + drop_second(feed(normed))), cache
    second_norm = functools.partial(norm, params["mlp_norm"], cfg=cfg)
    if cfg.block == "post_norm":
        attended, cache = attend(gather_sequence(x))
        x = first_norm(shard_residual(x + drop_first(attended)))
        return second_norm(shard_residual(x + drop_second(feed(gather_sequence(x))))), cache
    attended, cache = attend(gather_sequence(first_norm(x)))
    x = shard_residual(x + drop_first(attended))
    return shard_residual(x + drop_second(feed(gather_sequence(second_norm(x))))), cache


def _remat(function: Callable, policy: str, *, scanned: bool) -> Callable:
    if policy == "none":
        return function
    keep = {"dots": jax.checkpoint_policies.save_only_these_names(PRODUCT), "full": None}[policy]
    # Outside a loop XLA would find that what is computed again has been computed before, and keep it after all.
    return jax.checkpoint(function, policy=keep, prevent_cse=not scanned)


def stack(
    params: Params,
    x: Array,
    cfg: ModelConfig,
    mask: masks.Mask | None = None,
    *,
    rotate: Rotation | None = None,
    bias: Bias | None = None,
    rng: Array | None = None,
    cache: list[LayerCache] | None = None,
    execution: Execution = AS_USUAL,
) -> tuple[Array, list[LayerCache] | None]:
    """All blocks, one after another; by `lax.scan` (one compiled body) or unrolled (faster, slower to compile).

    `execution.remat` says what the backward pass recomputes: "none" nothing, "dots" all but the products with
    weights, "full" everything between block inputs (Chen et al. 2016).

    Args:
      params: as in `stack_specs(block_specs(cfg), L)`, every leaf with a leading [L]; or a list of the L blocks'
        parameters (`unstack`), which are then always unrolled.
      x: [B, T, D].
      cfg, mask, rotate, bias, rng: as in `block`.
      cache: one for each layer. Always unrolled: a scan would copy every layer's cache at every step.
      execution: how it is computed: `layers`, `remat`, and `attention`.

    Returns:
      [B, T, D], and the cache of each layer (None if none was given).
    """
    if execution.layers == "scan" and cache is None and not isinstance(params, list):

        def layer(x, part):
            number, layer_params = part
            layer_rng = None if rng is None else jax.random.fold_in(rng, number)
            return block(layer_params, x, cfg, mask, rotate=rotate, bias=bias, rng=layer_rng, execution=execution)

        layers = (jnp.arange(cfg.num_layers), params)
        return jax.lax.scan(_remat(layer, execution.remat, scanned=True), x, layers)[0], None

    @functools.partial(_remat, policy=execution.remat, scanned=False)
    def unrolled(x, number, layer_params, layer_cache):
        layer_rng = None if rng is None else jax.random.fold_in(rng, number)
        return block(
            layer_params, x, cfg, mask, rotate=rotate, bias=bias, rng=layer_rng, cache=layer_cache, execution=execution
        )

    if isinstance(x, jax.core.Tracer):  # traced and lowered once, not once for each layer; XLA puts it in place
        unrolled = jax.jit(unrolled)
    caches = []
    for number, layer_params in enumerate(params if isinstance(params, list) else unstack(params, cfg.num_layers)):
        x, layer_cache = unrolled(x, number, layer_params, None if cache is None else cache[number])
        caches.append(layer_cache)
    return x, None if cache is None else caches


def unstack(tree: Any, num_layers: int) -> list[Any]:
    """One tree per layer. By `lax.split`, whose gradient is one concatenation; indexing would pad and add L times."""
    leaves, structure = jax.tree.flatten(tree)
    split = [jax.lax.split(leaf, (1,) * num_layers, axis=0) for leaf in leaves]
    return [jax.tree.unflatten(structure, [parts[i][0] for parts in split]) for i in range(num_layers)]
