"""THE table of position encodings: where each kind enters a model.

A config file adds a kind of its own with two lines, a config class and an entry here:

    class LearnedAlibi(PositionsConfig, kind="learned_alibi"): ...
    POSITIONS["learned_alibi"] = PositionEncoding(layer_specs=specs, bias=bias)
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.tree_util import Partial

from jaxformer import masks
from jaxformer.config import ModelConfig
from jaxformer.config.registry import Registry
from jaxformer.functional import positions as pos
from jaxformer.functional.embedding_lookup import look_up
from jaxformer.functional.layer import Rotation, table_spec
from jaxformer.kernels.attention.xla import Bias
from jaxformer.parallel.constraints import constrain
from jaxformer.specs import ParamSpec, normal
from jaxformer.types import Array, Params

T5_BUCKETS = 32


class PositionEncoding(NamedTuple):
    """Where one kind of positions enters a model; None where it does not.

    Attributes:
      specs: ``cfg -> {name: ParamSpec}``: parameters of the whole model, in its group "embedding".
      layer_specs: ``cfg -> {name: ParamSpec}``: parameters of every layer, in the group "positions" of its attention.
      embed: ``(params, x, positions, cfg) -> x``: changes the token embeddings [B, T, D]; `positions` are [T] or
        [B, T] int, `params` those of `specs`.
      rotation: ``(cfg, positions) -> Rotation``: the angles by which attention turns queries and keys.
      bias: ``(params, cfg) -> function of (query index, key index)``: what attention adds to its scores; `params` are
        the layer's where there are `layer_specs`, else those of `specs`. The indices are [T] and [S], or [B, 1] and
        [B, S] in decoding; the result is broadcastable to [B, H, T, S]. Its arrays must be those of a
        `jax.tree_util.Partial`, so that they can be sharded and have gradients.
      extends: False if there are no positions beyond model.context_length.
    """

    specs: Callable[[ModelConfig], dict[str, ParamSpec]] | None = None
    layer_specs: Callable[[ModelConfig], dict[str, ParamSpec]] | None = None
    embed: Callable[[Params, Array, Array, ModelConfig], Array] | None = None
    rotation: Callable[[ModelConfig, Array], Rotation] | None = None
    bias: Callable[[Params, ModelConfig], Callable[[Array, Array], Array]] | None = None
    extends: bool = True


def encoding_of(cfg: ModelConfig) -> PositionEncoding:
    """The functions of a config's kind of positions. Raises ConfigError: it has none."""
    return POSITIONS[cfg.positions.kind]


def rotation(cfg: ModelConfig, positions: Array) -> Rotation | None:
    """The rotary angles of `positions` ([T] or [B, T] int); None if the config's positions turn nothing."""
    of = encoding_of(cfg).rotation
    return None if of is None else of(cfg, positions)


def score_bias(params: Params, cfg: ModelConfig, mask: masks.Mask | None = None) -> Bias | None:
    """The score bias of a config's positions as a function of (query place, key place); None if they add none.

    Args:
      params: what `PositionEncoding.bias` takes.
      cfg: the model.
      mask: has the tokens' indices in the row if sharding has changed their order.
    """
    of = encoding_of(cfg).bias
    bias = None if of is None else of(params, cfg)
    if bias is None or mask is None or mask.key_index is None:
        return bias
    return Partial(_at_places, bias, mask.query_index, mask.key_index)


def _at_places(
    bias: Callable[..., Array], query_index: Array, key_index: Array, query_place: Array, key_place: Array
) -> Array:
    """The bias of tokens whose index in the row is not their place. Places beyond the end, in padding, get any bias."""
    return bias(jnp.take(query_index, query_place, mode="clip"), jnp.take(key_index, key_place, mode="clip"))


def _embed_learned(params: Params, x: Array, positions: Array, cfg: ModelConfig) -> Array:
    if positions.ndim == 2:
        return x + look_up(positions, params["positions"], "positions")
    of_a_row = constrain(pos.learned(params["positions"], positions), None, "looked_up_width")
    return x + constrain(jnp.broadcast_to(of_a_row, x.shape), "looked_up_rows", None, "looked_up_width")


def _embed_sinusoidal(params: Params, x: Array, positions: Array, cfg: ModelConfig) -> Array:
    # Vaswani et al. 2017, section 3.4: the token embeddings are scaled up so that positions do not dominate.
    return x * math.sqrt(cfg.width) + jnp.broadcast_to(pos.sinusoidal(positions, cfg.width), x.shape)


def _rotary(cfg: ModelConfig, positions: Array) -> Rotation:
    rotary: Any = cfg.positions
    original = rotary.original_length or round(cfg.context_length / rotary.factor)
    frequencies, scale = pos.rotary_frequencies(cfg.head_size, rotary.base, rotary.scaling, rotary.factor, original)
    return Rotation(*pos.rotary_angles(positions, frequencies), scale)


def _t5_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    shape = (T5_BUCKETS, cfg.attention.num_heads)
    return {"t5": ParamSpec(shape, ("positions", "heads"), normal(cfg.width**-0.5), "input")}


POSITIONS: Registry[PositionEncoding] = Registry("model.positions.kind", {}, {
    "learned": PositionEncoding(
        specs=lambda cfg: {"positions": table_spec(cfg, cfg.context_length, "positions")},
        embed=_embed_learned,
        extends=False,
    ),
    "sinusoidal": PositionEncoding(embed=_embed_sinusoidal),
    "rotary": PositionEncoding(rotation=_rotary),
    "alibi": PositionEncoding(
        bias=lambda params, cfg: Partial(functools.partial(pos.alibi, num_heads=cfg.attention.num_heads))
    ),
    "t5": PositionEncoding(
        specs=_t5_specs,
        bias=lambda params, cfg: Partial(functools.partial(pos.t5_bias, bidirectional=not cfg.causal), params["t5"]),
    ),
    "none": PositionEncoding(),
})  # fmt: skip
