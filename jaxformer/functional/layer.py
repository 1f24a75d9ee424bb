"""What the layers of a block share: initialisers, the norm that the config names, and how activations are laid out."""

import math

from jaxformer.config import ModelConfig
from jaxformer.functional.layers import layer_norm, rms_norm
from jaxformer.parallel.constraints import constrain
from jaxformer.specs import Initializer, ParamSpec, normal, ones, uniform, zeros
from jaxformer.types import Array, Params


def weight_init(cfg: ModelConfig, fan_in: int, fan_out: int, *, residual: bool = False) -> Initializer:
    """Initialiser of a [fan_in, fan_out] matrix; `residual` marks those that write into the residual stream.

    "gpt2": normal(0.02), residual ones divided by sqrt(2 L) (Radford et al. 2019, section 2.3). "glorot": uniform
    with limit sqrt(6 / (in + out)) (Glorot and Bengio 2010, section 4.2). "scaled": normal(in ** -0.5), residual ones
    divided by sqrt(2 L).
    """
    shrink = 1 / math.sqrt(2 * cfg.num_layers) if residual else 1.0
    if cfg.initializer == "glorot":
        return uniform(math.sqrt(6 / (fan_in + fan_out)))
    return normal((0.02 if cfg.initializer == "gpt2" else fan_in**-0.5) * shrink)


def norm_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Parameters of one norm."""
    specs = {"scale": ParamSpec((cfg.width,), ("norm",), ones)}
    if cfg.norm == "layer_norm" and cfg.use_bias:
        specs["bias"] = ParamSpec((cfg.width,), ("norm",), zeros)
    return specs


def norm(params: Params, x: Array, cfg: ModelConfig) -> Array:
    """The norm the config names. `x`: [..., D]."""
    if cfg.norm == "rms_norm":
        return rms_norm(x, params["scale"], cfg.norm_epsilon)
    return layer_norm(x, params["scale"], params.get("bias"), cfg.norm_epsilon)


def gather_sequence(x: Array) -> Array:
    """What a layer reads: whole tokens, all of a part."""
    return constrain(x, "rows", None, None)


def shard_residual(x: Array) -> Array:
    """What lies between layers, which `constraints.sequence_parallel` may split over the tensor axis."""
    return constrain(x, "rows", "tokens", None)
