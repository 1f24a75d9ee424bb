"""Linformer's attention as a sublayer: softmax attention's projections, and those of the row. It cannot decode."""

from typing import Any

import jax.numpy as jnp

from jaxformer.config import Execution, ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.functional.attention_layer import PROJECTIONS, project_out, projection_specs
from jaxformer.functional.layer import Context, Cost, Sublayer
from jaxformer.functional.linear_layer import rotated
from jaxformer.functional.linformer import linformer_attention
from jaxformer.masks import Mask
from jaxformer.specs import ParamSpec, normal
from jaxformer.types import Array, Params


def row_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """The projections of the row. Their mixtures begin as large as what they mix."""
    kind, length = cfg.attention, cfg.context_length
    heads = (kind.kv_heads,) if kind.sharing == "none" else ()
    axes = ("positions", *["kv_heads"] * len(heads), None)
    spec = ParamSpec((length, *heads, kind.projected_length), axes, normal(length**-0.5), "hidden")
    return {"w_row": spec} if kind.sharing in ("key_value", "layerwise") else {"w_row_key": spec, "w_row_value": spec}


def specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Those of a layer."""
    return projection_specs(cfg) | ({} if cfg.attention.sharing == "layerwise" else row_specs(cfg))


def model_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Those that all layers share."""
    return row_specs(cfg) if cfg.attention.sharing == "layerwise" else {}


def apply(params: Params, x: Array, cfg: ModelConfig, context: Context) -> tuple[Array, None, dict[str, Array]]:
    """[B, T, D] -> [B, T, D]; see `layer.Sublayer`. Tokens of other documents than the row's first neither see nor are
    seen: packed rows are refused where data is chosen, and padding has a document of its own.

    Raises:
      ConfigError: the mask is of another kind.
    """
    query, key, value = rotated(params, x, cfg, context)
    of_row = params
    if cfg.attention.sharing == "layerwise":
        if context.of_model is None:
            raise ConfigError(
                "config.model.attention.sharing: layerwise has a projection of the whole model, which a part does not "
                "own; accepted: others, or functional.block with a Context"
            )
        of_row = context.of_model["attention"]
    w_key, w_value = (of_row.get(f"w_row_{name}", of_row.get("w_row")) for name in ("key", "value"))
    mask, there = Mask() if context.mask is None else context.mask, None
    if mask.causal or mask.prefix_keys is not None:
        raise ConfigError("config.model.attention.kind: linformer mixes a whole row, later tokens too")
    if mask.query_segments is not None:
        there = jnp.broadcast_to(mask.query_segments == mask.query_segments[:, :1], x.shape[:2])
    out = linformer_attention(
        query, key, value, w_key, w_value, Mask(keys=there), implementation=context.execution.attention
    )
    out = out if there is None else jnp.where(there[..., None, None], out, 0)
    return project_out(params, out, cfg), None, {}


def cost(cfg: ModelConfig, length: int, execution: Execution) -> Cost:
    """See `layer.Cost`. The mixtures are products with weights."""
    d, h, g, k = cfg.width, cfg.attention.num_heads, cfg.attention.kv_heads, cfg.head_size
    mixtures: Any = cfg.attention.projected_length
    return Cost(
        products=2 * d * k * (2 * h + 2 * g) + 2 * 2 * g * k * mixtures,
        scores=2 * 2 * h * k * mixtures,
        last=2 * d * k * h,
        saved=(h + 2 * g) * k + 2 * g * k * mixtures / length,
        saved_scores=2 * h * mixtures,
    )


LINFORMER = Sublayer(specs, apply, cost, model_specs=model_specs, low_rank=PROJECTIONS)
