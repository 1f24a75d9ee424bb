"""Attention by features as a sublayer: softmax attention's projections, and for a cache the sums over earlier keys.

Their size does not depend on how many tokens there were.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxformer import masks
from jaxformer.config import Execution, ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.functional import positions as pos
from jaxformer.functional.attention_layer import PROJECTIONS, project, project_out, projection_specs
from jaxformer.functional.layer import Context, Cost, Sublayer
from jaxformer.functional.linear_attention import ELU, FeatureMaps, attend, favor_maps, orthogonal_directions
from jaxformer.functional.position_encodings import encoding_of
from jaxformer.kernels.feature_sums import CHUNK, FeatureSums
from jaxformer.specs import ParamSpec
from jaxformer.types import Array, Params


def performer_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """The projections, and the random directions of the features, which are drawn and not trained."""
    shape = cfg.attention.num_directions(cfg.width), cfg.head_size
    directions = ParamSpec(
        shape, (None, "head_width"), lambda rng, shape: orthogonal_directions(rng, *shape), "norm", trained=False
    )
    return {**projection_specs(cfg), "directions": directions}


def rotated(params: Params, x: Array, cfg: ModelConfig, context: Context) -> tuple[Array, Array, Array]:
    """Queries [B, T, H, K], keys and values [B, T, G, K], with rotary positions.

    Raises:
      ConfigError: the positions add to scores.
    """
    query, key, value = project(params, x, x, cfg)
    if encoding_of(cfg).bias is not None:
        raise ConfigError(
            f"config.model.positions.kind: {cfg.positions.kind} adds to scores, which "
            f"model.attention.kind={cfg.attention.kind} has not; accepted there: others"
        )
    if context.rotation is not None:
        query, key = (pos.rotary(each, *context.rotation) for each in (query, key))
    return query, key, value


def _sublayer(
    specs: Callable[[ModelConfig], dict[str, ParamSpec]],
    maps: Callable[[Params, ModelConfig, Context], FeatureMaps],
    features: Callable[[ModelConfig], int],
    feature_cost: Callable[[ModelConfig], int],
) -> Sublayer:
    """A mixer by features.

    Args:
      specs: its parameters.
      maps: its features.
      features: how many a head has.
      feature_cost: operations of those of one head.
    """

    def apply(params: Params, x: Array, cfg: ModelConfig, context: Context) -> tuple[Array, Any, dict[str, Array]]:
        """[B, T, D] -> [B, T, D]; see `layer.Sublayer`."""
        query, key, value = rotated(params, x, cfg, context)
        progress, mask, state = context.progress, context.mask, None
        if progress is not None:
            state, mask = context.cache, masks.causal()
            if progress.steps is None:
                there = jnp.arange(x.shape[1])[None] < progress.starts[:, None]
                state, mask = None, (mask if context.mask is None else context.mask) & masks.padding(there)
        out, sums = attend(query, key, value, maps(params, cfg, context), mask, state=state)
        return project_out(params, out, cfg), None if progress is None else sums, {}

    def cost(cfg: ModelConfig, length: int, execution: Execution) -> Cost:
        """See `layer.Cost`. In a chunk every token counts with every other; sums are read and added to where there
        are several chunks, from both sides if the model is bidirectional."""
        d, h, g, k = cfg.width, cfg.attention.num_heads, cfg.attention.kv_heads, cfg.head_size
        m, chunks = features(cfg), -(-length // CHUNK)
        sums = 0 if chunks == 1 else 2 * m * (k + 1) * (1 if cfg.causal else 2)
        inside = -(-length // chunks)
        return Cost(
            products=2 * d * k * (2 * h + 2 * g),
            scores=2 * h * inside * (m + k + 1) + (h + g) * (sums + feature_cost(cfg)),
            last=2 * d * k * h,
            saved=(h + 2 * g) * k,
            saved_scores=h * (2 * inside + m) + g * m if chunks == 1 else g * m * (k + 1) / inside,
        )

    def init_cache(cfg: ModelConfig, rows: int, length: int, dtype: Any) -> FeatureSums:
        """See `layer.Sublayer.init_cache`: sums over no keys."""
        wide, groups = jnp.promote_types(dtype, jnp.float32), cfg.attention.kv_heads
        sums = jnp.zeros((rows, groups, features(cfg), cfg.head_size + 1), wide)
        return FeatureSums(sums, jnp.zeros((rows, groups), wide), jnp.zeros(rows, bool))

    return Sublayer(specs, apply, cost, init_cache, low_rank=PROJECTIONS)


def _favor(params: Params, cfg: ModelConfig, context: Context) -> FeatureMaps:
    kind, directions = cfg.attention, params["directions"]
    if kind.redraw and context.rng is not None:
        directions = orthogonal_directions(context.rng, *directions.shape)
    return favor_maps(directions, kind.feature_kind, cfg.head_size)


LINEAR = _sublayer(projection_specs, lambda params, cfg, context: ELU, lambda cfg: cfg.head_size, lambda cfg: 0)
PERFORMER = _sublayer(
    performer_specs,
    _favor,
    lambda cfg: cfg.attention.num_features(cfg.width),
    lambda cfg: 2 * cfg.attention.num_directions(cfg.width) * cfg.head_size,
)
