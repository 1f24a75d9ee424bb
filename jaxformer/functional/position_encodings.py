"""THE table of position encodings: where each kind enters a model.

A config file adds a kind of its own with two lines, a config class and an entry here:

    class LearnedAlibi(PositionsConfig, kind="learned_alibi"): ...
    POSITIONS["learned_alibi"] = PositionEncoding(layer_specs=specs, bias=bias)
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from jaxformer import masks
from jaxformer.config import ModelConfig
from jaxformer.config.registry import Registry
from jaxformer.functional import disentangled, relative_positions
from jaxformer.functional import positions as pos
from jaxformer.functional.embedding_lookup import look_up
from jaxformer.functional.layer import Rotation, norm_specs, table_spec, weight_init
from jaxformer.functional.multipliers import base_width, score_scale
from jaxformer.kernels.attention import distance_bias
from jaxformer.kernels.attention.content_bias import ContentBias
from jaxformer.kernels.attention.xla import Bias
from jaxformer.parallel.constraints import constrain
from jaxformer.specs import ParamSpec, normal, zeros
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
      content: ``(params, shared, query, key, cfg, scale, places) -> ContentBias``: a bias that depends on the queries
        [B, T, H, K] and keys [B, S, G, K] of a layer; `params` are all of its attention, with the group "positions"
        where there are `layer_specs`; scale: of its scores; places: [B, T] int, of each query among the keys, or None:
        they are the last T.
      query: ``(params, query) -> query``: the queries that are multiplied with the keys.
      shared: ``(params, cfg) -> tree``: what `content` of every layer reads, made once of those of `specs`; without
        it `content` gets None.
      scale: ``cfg -> float``: of the scores, unless model.attention.scale says it; None: K ** -0.5.
      flops: ``(cfg, length) -> float``: operations of `content` for a token in rows of `length`, forward.
      extends: False if there are no positions beyond model.context_length.
    """

    specs: Callable[[ModelConfig], dict[str, ParamSpec]] | None = None
    layer_specs: Callable[[ModelConfig], dict[str, ParamSpec]] | None = None
    embed: Callable[[Params, Array, Array, ModelConfig], Array] | None = None
    rotation: Callable[[ModelConfig, Array], Rotation] | None = None
    bias: Callable[[Params, ModelConfig], Callable[[Array, Array], Array]] | None = None
    content: Callable[..., ContentBias] | None = None
    shared: Callable[[Params, ModelConfig], Any] | None = None
    query: Callable[[Params, Array], Array] | None = None
    scale: Callable[[ModelConfig], float] | None = None
    flops: Callable[[ModelConfig, int], float] | None = None
    extends: bool = True

    @property
    def biases(self) -> bool:
        """True if it adds a bias to the scores."""
        return self.bias is not None or self.content is not None


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


def shared_positions(params: Params, cfg: ModelConfig) -> Any:
    """What the content biases of all layers read, or None. `params`: those of `PositionEncoding.specs`."""
    of = encoding_of(cfg).shared
    return None if of is None else of(params, cfg)


def self_scale(cfg: ModelConfig) -> float:
    """What multiplies query . key in self-attention."""
    more = score_scale(cfg)
    if cfg.attention.scale is not None:
        return cfg.attention.scale * more
    of = encoding_of(cfg).scale
    return (1 / math.sqrt(cfg.head_size) if of is None else of(cfg)) * more


def is_of_distance(cfg: ModelConfig) -> bool:
    """True if the config's positions add a `DistanceBias`, which a kernel can compute inside."""
    encoding = encoding_of(cfg)
    if encoding.bias is None:
        return False
    specs = (encoding.layer_specs or encoding.specs or (lambda cfg: {}))(cfg)
    shapes = {name: jax.ShapeDtypeStruct(spec.shape, jnp.float32) for name, spec in specs.items()}
    found = jax.eval_shape(lambda params: encoding.bias(params, cfg), shapes)  # type: ignore[misc]
    return isinstance(found, distance_bias.DistanceBias)


def _at_places(
    bias: Callable[..., Array], query_index: Array, key_index: Array, query_place: Array, key_place: Array
) -> Array:
    """The bias of tokens whose index in the row is not their place. Places beyond the end, in padding, get any bias."""
    return bias(jnp.take(query_index, query_place, mode="clip"), jnp.take(key_index, key_place, mode="clip"))


def _embed_learned(params: Params, x: Array, positions: Array, cfg: ModelConfig) -> Array:
    if cfg.positions.offset:
        positions = positions + cfg.positions.offset
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
    width = rotary.turned(cfg.head_size)
    frequencies, scale = pos.rotary_frequencies(width, rotary.base, rotary.scaling, rotary.factor, original)
    return Rotation(*pos.rotary_angles(positions, frequencies), scale)


def _disentangled_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    tree = {"distances": table_spec(cfg, 2 * cfg.positions.span, "positions")}
    if cfg.positions.norm:
        tree |= {f"distance_{name}": spec for name, spec in norm_specs(cfg).items()}
    return tree


def _disentangled_layer_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Projections of the distances, where they are not those of the tokens."""
    d, h, k, kind = cfg.width, cfg.attention.num_heads, cfg.head_size, cfg.positions
    names = [] if kind.shared_projections else [
        name for name, term in (("key", "c2p"), ("query", "p2c")) if kind.terms in ("both", term)
    ]  # fmt: skip
    axes = ("embed", "heads", "head_width")
    tree = {f"w_{name}": ParamSpec((d, h, k), axes, weight_init(cfg, d, h * k), "hidden") for name in names}
    if cfg.use_bias:
        tree |= {f"b_{name}": ParamSpec((h, k), axes[1:], zeros, "bias") for name in names}
    return tree


def _t5_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    shape = (T5_BUCKETS, cfg.attention.num_heads)
    return {"t5": ParamSpec(shape, ("positions", "heads"), normal(base_width(cfg) ** -0.5), "input")}


POSITIONS: Registry[PositionEncoding] = Registry("model.positions.kind", {}, {
    "learned": PositionEncoding(
        specs=lambda cfg: {"positions": table_spec(cfg, cfg.context_length + cfg.positions.offset, "positions")},
        embed=_embed_learned,
        extends=False,
    ),
    "sinusoidal": PositionEncoding(embed=_embed_sinusoidal),
    "rotary": PositionEncoding(rotation=_rotary),
    "alibi": PositionEncoding(
        bias=lambda params, cfg: distance_bias.linear(
            functools.partial(pos.alibi, num_heads=cfg.attention.num_heads), pos.alibi_slopes(cfg.attention.num_heads)
        )
    ),
    "t5": PositionEncoding(
        specs=_t5_specs,
        bias=lambda params, cfg: distance_bias.stepwise(
            functools.partial(pos.t5_bias, bidirectional=not cfg.causal), params["t5"], *pos.t5_steps(not cfg.causal)
        ),
    ),
    "disentangled": PositionEncoding(
        specs=_disentangled_specs,
        layer_specs=_disentangled_layer_specs,
        content=disentangled.layer_bias,
        shared=disentangled.normed_table,
        scale=lambda cfg: (cfg.positions.num_terms * cfg.head_size) ** -0.5,
        flops=lambda cfg, length: (
            (cfg.positions.num_terms - 1) * 4 * length * cfg.attention.num_heads * cfg.head_size
        ),
    ),
    "relative": PositionEncoding(
        layer_specs=relative_positions.layer_specs,
        content=relative_positions.layer_bias,
        query=relative_positions.shifted_query,
        flops=lambda cfg, length: 2 * 2 * length * cfg.attention.num_heads * cfg.head_size,
    ),
    "none": PositionEncoding(),
})  # fmt: skip
