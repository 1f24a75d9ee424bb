"""What a model's width and depth multiply: initial values, learning rates and activations, by a parameter's role.

With m the width over that of the base and l the layers over the base's, and exponents of the config written out at
their defaults:

    what                       rate              decay   epsilon        initial values
    tables                     1                 1       1 / m          sigma
    hidden matrices            l**(a - 1) / m    m       l**-a / m      sigma / sqrt(m)
    norms, biases of blocks    l**(a - 1)        0       l**-a / m
    other norms and biases     1                 0       1 / m

Logits are multiplied by 1 / m, what a sublayer adds to the residual stream by l**-a, and scores by sqrt(K0 / K), so by
sqrt(K0) / K in all, where heads are K / K0 times wider. sigma is the initial standard deviation at the base's width. Of
the standard parametrisation all of these are 1.

Sources: Yang et al. 2022, table 8; Dey et al. 2025, table 1 and appendix on Adam's epsilon, with a = alpha.

>>> from jaxformer.config import ModelConfig, MuP
>>> cfg = ModelConfig(width=256, num_layers=8, parametrization=MuP(base_width=64, base_layers=2))
>>> multipliers("hidden", True, cfg), multipliers("norm", False, cfg)
(Multipliers(rate=0.25, decay=4.0, epsilon=0.0625), Multipliers(rate=1.0, decay=1.0, epsilon=0.25))
>>> branch_scale(cfg), logit_scale(cfg)
(0.25, 0.25)
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax

from jaxformer.config import ModelConfig
from jaxformer.specs import ParamSpec, is_spec, multiply_rate
from jaxformer.types import Array


class Multipliers(NamedTuple):
    """Of the learning rate, the weight decay and Adam's epsilon of a parameter; as in `specs.ParamSpec`."""

    rate: float
    decay: float
    epsilon: float


def multipliers(role: str, in_block: bool, cfg: ModelConfig) -> Multipliers:
    """The row of the table for a parameter.

    Args:
      role: of the parameter, as in `specs.ParamSpec`. The decay of norms and biases is 0 already.
      in_block: whether every layer has it.
      cfg: the model.
    """
    kind = cfg.parametrization
    width, depth = kind.width_ratio(cfg), kind.depth_ratio(cfg)
    of_depth = (
        Multipliers(depth ** (kind.alpha - 1), 1.0, depth**-kind.alpha) if in_block else Multipliers(1.0, 1.0, 1.0)
    )
    of_width = Multipliers(1.0, 1.0, 1 / width)
    if role == "hidden":
        of_width = Multipliers(1 / width, width**kind.decay_exponent, 1 / width)
    elif role in ("input", "output"):
        of_width = Multipliers(width**kind.embedding_rate_exponent, 1.0, 1 / width)
    return Multipliers(*(a * b for a, b in zip(of_width, of_depth, strict=True)))


def parametrized(specs: dict[str, Any], cfg: ModelConfig) -> dict[str, Any]:
    """`specs` of a model, by group, with the multipliers of each parameter; those of the group "blocks" are of depth.

    >>> from jaxformer.config import MuP
    >>> from jaxformer.specs import ones
    >>> cfg = ModelConfig(width=256, parametrization=MuP(base_width=64))
    >>> specs = {"blocks": {"w": ParamSpec((4, 256, 64), ("layers", "embed", "mlp"), ones, "hidden")}}
    >>> parametrized(specs, cfg)["blocks"]["w"].rate
    0.25
    """

    def multiplied(in_block: bool, spec: ParamSpec) -> ParamSpec:
        by = multipliers(spec.role, in_block, cfg)
        assert spec.decay is not None
        spec = replace(spec, decay=spec.decay * by.decay, epsilon=spec.epsilon * by.epsilon)
        return multiply_rate(spec, by.rate)

    return {
        name: jax.tree.map(lambda spec, inside=name == "blocks": multiplied(inside, spec), group, is_leaf=is_spec)
        for name, group in specs.items()
    }


def base_width(cfg: ModelConfig) -> float:
    """The model's width at its base, of which initial values of tables are made."""
    return cfg.width / cfg.parametrization.width_ratio(cfg)


def branch_scale(cfg: ModelConfig) -> float:
    """What multiplies the output of a sublayer before it is added to the residual stream."""
    return cfg.parametrization.depth_ratio(cfg) ** -cfg.parametrization.alpha


def logit_scale(cfg: ModelConfig) -> float:
    """What multiplies the last hidden states, and so the logits that are made of them."""
    return (cfg.width**-0.5 if cfg.scale_output else 1.0) / cfg.parametrization.width_ratio(cfg)


def score_scale(cfg: ModelConfig) -> float:
    """What multiplies attention's scores beside its own scale."""
    return cfg.parametrization.head_ratio(cfg) ** -0.5


def scaled(x: Array, by: float) -> Array:
    """`x * by` in the dtype of x, and x itself where that changes nothing."""
    return x if by == 1 else x * by
