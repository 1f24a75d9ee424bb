"""A recurrent layer as a sublayer: gates from the tokens, the recurrence, output projection; its cache is the state.

Decoding needs the state alone, whose size does not depend on how many tokens there were.
"""

from typing import Any

import jax.numpy as jnp

from jaxformer.config import Execution, ModelConfig
from jaxformer.functional.layer import Context, Cost, Sublayer, shard_residual, weight_init
from jaxformer.functional.layers import linear
from jaxformer.functional.recurrent import LstmState, gru, lstm
from jaxformer.specs import ParamSpec, uniform, zeros
from jaxformer.types import Array, Params


def specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Weights of the tokens and of the hidden state for all gates, biases, and the projection back to the width.

    An LSTM's forget gates begin with a bias of 1 (Jozefowicz et al. 2015, section 4).
    """
    d, units, gates = cfg.width, cfg.attention.hidden_units(cfg.width), cfg.attention.gates

    def forget(rng: Array, shape: tuple[int, ...]) -> Array:
        return zeros(rng, shape).at[units : 2 * units].set(1.0)

    tree = {
        "w_input": ParamSpec((d, gates * units), ("embed", None), weight_init(cfg, d, gates * units), "hidden"),
        "w_hidden": ParamSpec((units, gates * units), ("embed", None), uniform(units**-0.5), "hidden"),
        "bias": ParamSpec((gates * units,), ("norm",), forget if gates == 4 else zeros, "bias"),
        "w_out": ParamSpec((units, d), (None, "embed"), weight_init(cfg, units, d, residual=True), "hidden"),
    }
    if gates == 3:
        tree["bias_hidden"] = ParamSpec((gates * units,), ("norm",), zeros, "bias")
    if cfg.use_bias:
        tree["b_out"] = ParamSpec((d,), ("norm",), zeros, "bias")
    return tree


def apply(params: Params, x: Array, cfg: ModelConfig, context: Context) -> tuple[Array, Any, dict[str, Array]]:
    """[B, T, D] -> [B, T, D]; see `layer.Sublayer`."""
    kind, progress, mask = cfg.attention, context.progress, context.mask
    goes_on = progress is not None and progress.steps is not None
    about: dict[str, Any] = {
        "segments": None if mask is None else mask.query_segments,
        "state": context.cache if goes_on else None,
        "lengths": progress.starts if progress is not None and not goes_on else None,
    }
    weights = [params[name] for name in ("w_input", "w_hidden", "bias")]
    if kind.gates == 4:
        out, state = lstm(x, *weights, **about)
    else:
        out, state = gru(x, *weights, params["bias_hidden"], reset_after=kind.reset_after, **about)
    out = linear(out, params["w_out"], params.get("b_out"))
    return shard_residual(out), None if progress is None else state, {}


def cost(cfg: ModelConfig, length: int, execution: Execution) -> Cost:
    """See `layer.Cost`."""
    d, units, gates = cfg.width, cfg.attention.hidden_units(cfg.width), cfg.attention.gates
    return Cost(products=2 * (gates * units * (d + units) + units * d), last=2 * units * d, saved=(gates + 2) * units)


def init_lstm(cfg: ModelConfig, rows: int, length: int, dtype: Any) -> LstmState:
    """See `layer.Sublayer.init_cache`."""
    shape = rows, cfg.attention.hidden_units(cfg.width)
    return LstmState(jnp.zeros(shape, dtype), jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32)))


def init_gru(cfg: ModelConfig, rows: int, length: int, dtype: Any) -> Array:
    """See `layer.Sublayer.init_cache`."""
    return init_lstm(cfg, rows, length, dtype).hidden


LSTM = Sublayer(specs, apply, cost, init_lstm)
GRU = Sublayer(specs, apply, cost, init_gru)
