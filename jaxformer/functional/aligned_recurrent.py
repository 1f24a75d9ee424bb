"""Recurrent encoders and decoders with attention between them, as sublayers: Bahdanau's and Luong's models.

The encoder reads its rows both ways. The decoder is one cell whose state is compared with the states of the source:

  bahdanau  scores of the state before a token give the context c, which goes into the cell beside the token; the output
            is a maxout of that state, the token and c (Bahdanau et al. 2015, sections 3.1, A.1.2 and A.2.2)
  luong     scores of the state after a token give c; the output is tanh(W [c; h]), which with input feeding goes into
            the cell at the next token (Luong et al. 2015, sections 3, 3.1 and 3.3)

Its first state is tanh(W h), h being the encoder's backward state at the source's first token (A.2.2). Without a score,
c is the same at all tokens: the last forward and the last backward state of the source (Cho et al. 2014, section 2.2).

In packed rows a target sees the source of its own segment alone, and begins with that one's state.
"""

from typing import Any

import jax.numpy as jnp

from jaxformer.config import Execution, ModelConfig
from jaxformer.functional.aligned_decoder import AlignedCache, decode
from jaxformer.functional.layer import Context, Cost, Sublayer, shard_residual, weight_init
from jaxformer.functional.recurrent import gru, lstm
from jaxformer.specs import ParamSpec, uniform, zeros
from jaxformer.types import Array, Params


def specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Of an encoder's layer the cells of both directions; of a decoder's the cell, its first state, scores, output."""
    return _decoder_specs(cfg) if cfg.causal else _encoder_specs(cfg)


def _cell_specs(cfg: ModelConfig, units: int, prefix: str = "") -> dict[str, ParamSpec]:
    d, wide = cfg.width, cfg.attention.gates * units
    tree = {
        "w_input": ParamSpec((d, wide), ("embed", None), weight_init(cfg, d, wide), "hidden"),
        "w_hidden": ParamSpec((units, wide), ("embed", None), uniform(units**-0.5), "hidden"),
        "bias": ParamSpec((wide,), ("norm",), zeros, "bias"),
    }
    if cfg.attention.cell == "gru":
        tree["bias_hidden"] = ParamSpec((wide,), ("norm",), zeros, "bias")
    return {prefix + name: spec for name, spec in tree.items()}


def _encoder_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    half = cfg.width // 2
    return _cell_specs(cfg, half, "forward_") | _cell_specs(cfg, half, "backward_")


def _decoder_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    kind, d = cfg.attention, cfg.width

    def matrix(rows: int, columns: int) -> ParamSpec:
        return ParamSpec((rows, columns), ("embed", None), weight_init(cfg, rows, columns), "hidden")

    def vector(init=zeros, size=d) -> ParamSpec:
        return ParamSpec((size,), ("norm",), init, "bias")

    tree = _cell_specs(cfg, d) | {"w_start": matrix(d // 2, d), "b_start": vector()}
    if kind.decoder == "bahdanau" or kind.input_feeding:
        tree["w_fed"] = matrix(d, kind.gates * d)
    if kind.score in ("additive", "concat"):
        tree |= {"w_target": matrix(d, d), "w_source": matrix(d, d), "v": vector(uniform(d**-0.5))}
    if kind.score == "general":
        tree["w_score"] = matrix(d, d)
    if kind.local == "predicted":
        tree |= {"w_place": matrix(d, d), "v_place": vector(uniform(d**-0.5))}
    if kind.decoder == "bahdanau":
        tree |= {f"w_out_{name}": matrix(d, 2 * d) for name in ("state", "token", "context")}
        tree["b_out"] = vector(size=2 * d)
    else:
        tree["w_out"] = matrix(2 * d, d)
    return tree


def apply(params: Params, x: Array, cfg: ModelConfig, context: Context) -> tuple[Array, Any, dict[str, Array]]:
    """[B, T, D] -> [B, T, D]; see `layer.Sublayer`. A decoder reads `context.source`, or in decoding what the cache has
    of it."""
    if not cfg.causal:
        return shard_residual(_encode(params, x, cfg, context)), None, {}
    out, cache, _ = decode(params, x, cfg, context)
    return shard_residual(out), cache, {}


def _encode(params: Params, x: Array, cfg: ModelConfig, context: Context) -> Array:
    """Both directions side by side, [B, S, D]; padding at the end is not read."""
    mask = context.mask
    segments = None if mask is None else mask.query_segments
    if mask is not None and mask.keys is not None:  # padding as a segment of its own
        segments = mask.keys.astype(jnp.int32)
    layer = lstm if cfg.attention.cell == "lstm" else gru
    out = []
    for direction in ("forward", "backward"):
        names = ("w_input", "w_hidden", "bias", *(("bias_hidden",) if layer is gru else ()))
        weights = [params[f"{direction}_{name}"] for name in names]
        out.append(layer(x, *weights, segments=segments, reverse=direction == "backward")[0])
    return jnp.concatenate(out, axis=-1)


def cost(cfg: ModelConfig, length: int, execution: Execution) -> Cost:
    """See `layer.Cost`."""
    d, gates = cfg.width, cfg.attention.gates
    if not cfg.causal:
        half = d // 2
        return Cost(products=2 * 2 * gates * half * (d + half), saved=2 * (gates + 2) * half)
    assert cfg.encoder is not None
    kind, keys = cfg.attention, cfg.encoder.source_length
    products = 2 * gates * d * (2 * d)
    if kind.decoder == "bahdanau" or kind.input_feeding:
        products += 2 * gates * d * d
    products += 2 * (6 * d * d if kind.decoder == "bahdanau" else 2 * d * d)
    scores = 0.0 if kind.score == "none" else 2.0 * 2 * d * keys
    if kind.score in ("additive", "concat"):
        products += 2 * d * d * (1 + keys / length)
    if kind.score == "general":
        products += 2 * d * d
    kept = keys * d if kind.score in ("additive", "concat") else 0
    return Cost(products=products, scores=scores, saved=(gates + 4) * d, saved_scores=kept + keys)


def init_cache(cfg: ModelConfig, rows: int, length: int, dtype: Any) -> AlignedCache:
    """See `layer.Sublayer.init_cache`."""
    assert cfg.encoder is not None
    d, keys = cfg.width, cfg.encoder.source_length
    state, states = jnp.zeros((rows, d), dtype), jnp.zeros((rows, keys, d), dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    cell = jnp.zeros((rows, d if cfg.attention.cell == "lstm" else 1), wide)
    return AlignedCache(state, cell, state, states, states, jnp.zeros((rows, keys), bool))


ALIGNMENT = Sublayer(specs, apply, cost, init_cache)
