"""What a Transformer layer is made of: the protocol of its sublayers, and what they share.

A *sublayer* reads the residual stream and adds to it: attention, a feed-forward layer, or one of your own. `block`
puts norms, dropout and the residual sum around it. The tables in `functional.sublayers` list all kinds.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxformer.config import Execution, ModelConfig
from jaxformer.functional.layers import layer_norm, rms_norm
from jaxformer.functional.multipliers import base_width
from jaxformer.kernels.attention.xla import Bias
from jaxformer.masks import Mask
from jaxformer.parallel.constraints import constrain
from jaxformer.specs import Initializer, ParamSpec, normal, ones, uniform, zeros
from jaxformer.types import Array, Params


class Rotation(NamedTuple):
    """What rotary positions need in every layer: cos and sin [B, T, K / 2] or [T, K / 2], and yarn's factor."""

    cos: Array
    sin: Array
    scale: float


class DecodeProgress(NamedTuple):
    """How far the sequences of a batch are, in decoding.

    Attributes:
      starts: [B] int32, length of each row's prompt.
      steps: () int32, how many tokens every row has got since then; None: the present tokens are the prompts
        themselves, [B, T], of which the first `starts` count and the rest is padding.
      ancestors: of W beams of each row, [B, W, N] int32: which of them each beam goes on from, by the number of the new
        token, the present one included; `starts` is then of B * W rows. None: there are no beams.
    """

    starts: Array
    steps: Array | None = None
    ancestors: Array | None = None

    @property
    def beams(self) -> int:
        """W; 1 if there are no beams."""
        return 1 if self.ancestors is None else self.ancestors.shape[1]


class KeyInput(NamedTuple):
    """What keys and values are made of where it is not what the queries are made of: another stream of the same row, or
    one that begins earlier.

    Attributes:
      states: [B, S, D]; the block norms them as it norms its input.
      places: [B, T] int, the place in `states` of each token of the input; None: the last T.
    """

    states: Array
    places: Array | None = None


class Context(NamedTuple):
    """What a sublayer may look at beside its input.

    Attributes:
      mask: which of the T tokens see which; None: all see all.
      rotation: rotary angles of the T positions, or None.
      bias: score bias (ALiBi, T5): an array [1 or B, H, T, T] or a function of (query index, key index); or None.
      shared: what the positions of all layers share, `PositionEncoding.shared`; or None.
      key_input: what attention makes keys and values of; None: of its input.
      rng: for dropout, and for what is drawn anew in every update; None: nothing is dropped or drawn.
      execution: how it is computed, not what.
      cache: in decoding, what this sublayer keeps of earlier tokens, see `Sublayer.init_cache`; otherwise None.
      progress: in decoding, how far it is; otherwise None.
      source: [B, S, D], what an encoder made of the source, for cross attention; or None.
      source_mask: which of the T tokens see which of the S of the source; None: all see all.
      sides: what relative attention looks at of queries and keys, two `funnel_layer.Side`; or None.
      of_model: the parameters that all layers share, by name of the sublayer, see `Sublayer.model_specs`.
    """

    mask: Mask | None = None
    rotation: Rotation | None = None
    bias: Bias | None = None
    rng: Array | None = None
    execution: Execution = Execution()
    cache: Any = None
    progress: DecodeProgress | None = None
    source: Array | None = None
    source_mask: Mask | None = None
    shared: Any = None
    key_input: KeyInput | None = None
    sides: Any = None
    of_model: Params | None = None


NO_CONTEXT = Context()


class Cost(NamedTuple):
    """What one sublayer costs, each number for one token of a row.

    Attributes:
      products: floating-point operations (a multiply-add being two) of products with weights, forward.
      scores: those of products of activations with each other, forward.
      last: those of `products` whose result is only added to the residual stream, so that no gradient needs it.
      saved: numbers that products with weights leave for the backward pass, without the output [D]; sharded over the
        mesh's tensor axis.
      saved_scores: numbers that `scores` leave without rematerialisation; sharded over the tensor axis.
      kept_scores: those of `scores` that the remat policy "attention" does not compute again, because it keeps their
        result, `kept` numbers, sharded over the tensor axis.
      ring: under context parallelism, (parts, numbers in each) that go once around the ring of devices; a tensor axis
        shards the parts if it divides them.
    """

    products: float = 0.0
    scores: float = 0.0
    last: float = 0.0
    saved: float = 0.0
    saved_scores: float = 0.0
    ring: tuple[int, float] = (0, 0)
    kept_scores: float = 0.0
    kept: float = 0.0


class Sublayer(NamedTuple):
    """One kind of sublayer. A new kind is one file that makes one of these, and one entry in a table.

    Attributes:
      specs: ``cfg -> {name: ParamSpec}``.
      apply: ``(params, x, cfg, context) -> (output, cache, terms)``: [B, T, D] -> [B, T, D], the cache with these
        tokens added (None if the context has none), and terms of the objective: name -> () float32, the sum over the
        tokens of something to minimise beside the loss, as a mean over tokens and layers.
      cost: ``(cfg, length, execution) -> Cost`` of a token in rows of `length` tokens.
      init_cache: ``(cfg, rows, length, dtype) -> cache``: zeros in the shapes of what decoding keeps for sequences of
        at most `length` tokens: any tree of arrays whose first axis is a multiple of `rows`. Beams of a row share
        each `key_value_cache.LayerCache` in it; other arrays are copied when a beam goes on from another one. None: a
        mixer cannot decode; a feed-forward layer keeps nothing.
      terms: the names of the terms; none is called "loss".
      measured: those of the terms that are only recorded, as means over tokens and layers, and not minimised.
      terms_of_padding: False if padding (segment 0) is left out of the terms; they are then means over other tokens.
      per_source: True if what it keeps in decoding is the same for all continuations of a row, as the keys and values
        of a source are: its cache then has the rows of the sources, while `x` may have several rows for each.
      model_specs: ``cfg -> {name: ParamSpec}``: parameters that all layers share; `apply` finds them in
        ``context.of_model`` under the sublayer's name. None: there are none.
      low_rank: names of those weights that it multiplies by with `layers.linear` or `layers.mlp` alone; so a
        `low_rank.LowRank` may stand in their place.
    """

    specs: Callable[[ModelConfig], dict[str, ParamSpec]]
    apply: Callable[[Params, Array, ModelConfig, Context], tuple[Array, Any, dict[str, Array]]]
    cost: Callable[[ModelConfig, int, Execution], Cost]
    init_cache: Callable[[ModelConfig, int, int, Any], Any] | None = None
    terms: tuple[str, ...] = ()
    per_source: bool = False
    model_specs: Callable[[ModelConfig], dict[str, ParamSpec]] | None = None
    low_rank: tuple[str, ...] = ()
    terms_of_padding: bool = True
    measured: tuple[str, ...] = ()


def weight_init(
    cfg: ModelConfig, fan_in: int, fan_out: int, *, residual: bool = False, query: bool = False
) -> Initializer:
    """Initialiser of a [fan_in, fan_out] matrix; `residual` marks those that write into the residual stream, `query`
    those that make queries.

    "gpt2": normal(0.02), residual ones divided by sqrt(2 L) (Radford et al. 2019, section 2.3). "glorot": uniform
    with limit sqrt(6 / (in + out)) (Glorot and Bengio 2010, section 4.2). "scaled": normal(in ** -0.5), residual ones
    divided by sqrt(2 L). "t5": normal(in ** -0.5), for queries divided by sqrt(K), because T5's scores are not (Raffel
    et al. 2020, the released code; Mesh TensorFlow's default).

    Under muP no matrix is divided by sqrt(2 L), and normal(0.02) is that of the base: it is divided by sqrt(m), as the
    others are by their inputs; see `functional.multipliers`.
    """
    kind = cfg.parametrization
    if cfg.initializer == "t5":
        return normal((fan_in * (cfg.head_size / kind.head_ratio(cfg) if query else 1)) ** -0.5)
    shrink = 1 / math.sqrt(2 * cfg.num_layers) if residual and kind.shrinks_residual else 1.0
    if cfg.initializer == "glorot":
        return uniform(math.sqrt(6 / (fan_in + fan_out)))
    return normal((0.02 / math.sqrt(kind.width_ratio(cfg)) if cfg.initializer == "gpt2" else fan_in**-0.5) * shrink)


def table_spec(cfg: ModelConfig, size: int, axis: str, role: str = "input") -> ParamSpec:
    """A table [size, D]; normal(0.02) for "gpt2", else normal(D ** -0.5) of the base, so that tied logits start at
    unit size; for "t5" normal(1) where it is looked up."""
    scale = 0.02 if cfg.initializer == "gpt2" else 1 / math.sqrt(base_width(cfg))
    scale = 1.0 if cfg.initializer == "t5" and role == "input" else scale
    return ParamSpec((size, cfg.width), (axis, "embed"), normal(scale), role)


def norm_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Parameters of one norm."""
    specs = {"scale": ParamSpec((cfg.width,), ("norm",), scale_init(cfg), "norm")}
    if cfg.norm == "layer_norm" and cfg.use_bias:
        specs["bias"] = ParamSpec((cfg.width,), ("norm",), zeros, "bias")
    return specs


def norm(params: Params, x: Array, cfg: ModelConfig) -> Array:
    """The norm the config names. `x`: [..., D]."""
    if cfg.norm == "layer_norm":
        return layer_norm(x, params["scale"], params.get("bias"), cfg.norm_epsilon)
    return rms_norm(x, scale_of(params["scale"], cfg), cfg.norm_epsilon)


def scale_init(cfg: ModelConfig) -> Initializer:
    """How the scale of a norm begins, so that it multiplies by 1."""
    return zeros if cfg.norm == "rms_norm_plus_one" else ones


def scale_of(parameter: Array, cfg: ModelConfig) -> Array:
    """What a norm multiplies by."""
    return 1 + parameter if cfg.norm == "rms_norm_plus_one" else parameter


def gather_sequence(x: Array) -> Array:
    """What a sublayer reads: every token of this device's part of the row."""
    return constrain(x, "rows", None, None)


def shard_residual(x: Array) -> Array:
    """The residual stream between sublayers; `constraints.sequence_parallel` shards its tokens over the tensor axis."""
    return constrain(x, "rows", "tokens", None)
