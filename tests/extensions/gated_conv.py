"""A config file that brings a mixer: a gated causal convolution (Dauphin et al. 2017, section 2), depthwise."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxformer import AttentionConfig, ConfigError, Cost, ParamSpec, Sublayer, linear
from jaxformer.config.checks import at_least
from jaxformer.functional.layer import weight_init
from jaxformer.functional.sublayers import MIXERS
from jaxformer.specs import normal


@dataclass(frozen=True)
class GatedConv(AttentionConfig, kind="gated_conv", accepts={"taps": at_least(1)}):
    """`taps`: tokens that each one sees, itself included."""

    taps: int = 4


def specs(cfg):
    d, taps = cfg.width, cfg.attention.taps
    matrix = ParamSpec((d, d), ("embed", "mlp"), weight_init(cfg, d, d), "hidden")
    out = ParamSpec((d, d), ("mlp", "embed"), weight_init(cfg, d, d, residual=True), "hidden")
    return {
        "w_value": matrix,
        "w_gate": matrix,
        "w_out": out,
        "taps": ParamSpec((taps, d), (None, "mlp"), normal(0.5), "norm"),
    }


def apply(params, x, cfg, context):
    (rows, length, _), reach, progress = x.shape, cfg.attention.taps - 1, context.progress
    if getattr(context.mask, "parts", 1) > 1:
        raise ConfigError("config.mesh.context: gated_conv sees whole rows; accepted: 1")
    value, goes_on = linear(x, params["w_value"]), progress is not None and progress.steps is not None
    before = context.cache if goes_on else jnp.zeros((rows, reach, cfg.width))
    line = jnp.concatenate([before.astype(x.dtype), value], axis=1)
    segments, taps = getattr(context.mask, "query_segments", None), params["taps"][:, None, None].astype(x.dtype)
    total = taps[0] * value
    for back in range(1, reach + 1):
        part = line[:, reach - back : reach - back + length]
        if segments is not None:  # a token of another document is not seen
            same = segments == jnp.pad(segments, ((0, 0), (back, 0)), constant_values=-1)[:, :length]
            part = jnp.where(same[..., None], part, 0)
        total += taps[back] * part
    out = linear(jax.nn.silu(linear(x, params["w_gate"])) * total, params["w_out"])
    if progress is None:
        return out, None, {}
    first = jnp.ones_like(progress.starts) if goes_on else progress.starts
    places = first[:, None, None] + jnp.arange(reach)[None, :, None]
    return out, jnp.take_along_axis(line, places, axis=1), {}


def cost(cfg, length, execution):
    d = cfg.width
    return Cost(products=6 * d * d, scores=2 * cfg.attention.taps * d, last=2 * d * d, saved=2 * d)


MIXERS["gated_conv"] = Sublayer(
    specs, apply, cost, lambda cfg, rows, length, dtype: jnp.zeros((rows, cfg.attention.taps - 1, cfg.width), dtype)
)


def get_config():
    return {"model": {"attention": {"kind": "gated_conv"}, "positions": {"kind": "none"}}}
