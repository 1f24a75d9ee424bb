"""The dense feed-forward layer as a sublayer: each token alone through a hidden layer (Vaswani et al. 2017, 3.3)."""

from jaxformer.config import Execution, ModelConfig
from jaxformer.functional.layer import Context, Cost, Sublayer, shard_residual, weight_init
from jaxformer.functional.layers import mlp
from jaxformer.specs import ParamSpec, zeros
from jaxformer.types import Array, Params


def specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Up and down projection, a gate where the activation has one, biases."""
    d, f = cfg.width, cfg.feed_forward.hidden_width(cfg.width)
    tree = {
        "w_up": ParamSpec((d, f), ("embed", "mlp"), weight_init(cfg, d, f), "hidden"),
        "w_down": ParamSpec((f, d), ("mlp", "embed"), weight_init(cfg, f, d, residual=True), "hidden"),
    }
    if cfg.feed_forward.gated:
        tree["w_gate"] = ParamSpec((d, f), ("embed", "mlp"), weight_init(cfg, d, f), "hidden")
    if cfg.use_bias:
        tree |= {
            "b_up": ParamSpec((f,), ("mlp",), zeros, "bias"),
            "b_down": ParamSpec((d,), ("norm",), zeros, "bias"),
        }
    return tree


def apply(params: Params, x: Array, cfg: ModelConfig, context: Context) -> tuple[Array, None, dict[str, Array]]:
    """[B, T, D] -> [B, T, D]; see `layer.Sublayer`."""
    out = mlp(x, **params, activation=cfg.feed_forward.activation)
    return shard_residual(out) if x.ndim == 3 else out, None, {}


def cost(cfg: ModelConfig, length: int, execution: Execution) -> Cost:
    """See `layer.Cost`."""
    d, f = cfg.width, cfg.feed_forward.hidden_width(cfg.width)
    matrices = 3 if cfg.feed_forward.gated else 2
    return Cost(products=2 * d * f * matrices, last=2 * d * f, saved=f * (matrices - 1))


DENSE = Sublayer(specs, apply, cost, low_rank=("w_up", "w_gate", "w_down"))
