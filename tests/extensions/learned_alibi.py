"""ALiBi whose slopes are learned, one for each head of each layer: a kind of positions from outside."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax.tree_util import Partial

from jaxformer import ParamSpec, alibi_slopes
from jaxformer.config import PositionsConfig
from jaxformer.functional.position_encodings import POSITIONS, PositionEncoding


@dataclass(frozen=True)
class LearnedAlibi(PositionsConfig, kind="learned_alibi"):
    """ALiBi with learned slopes.

    Attributes:
      scale: of the slopes at the start.
    """

    scale: float = 1.0
    needs_heads: ClassVar[bool] = True


def specs(cfg):
    def those_of_alibi(rng, shape):
        return jnp.broadcast_to(cfg.positions.scale * alibi_slopes(shape[-1]), shape)

    return {"slopes": ParamSpec((cfg.attention.num_heads,), ("heads",), those_of_alibi, "bias")}


def penalty(slopes, query_index, key_index):
    distance = jnp.abs(query_index[..., :, None] - key_index[..., None, :])
    return -jnp.einsum("H,...TS->...HTS", slopes, distance.astype(slopes.dtype))


POSITIONS["learned_alibi"] = PositionEncoding(
    layer_specs=specs, bias=lambda params, cfg: Partial(penalty, params["slopes"])
)


def get_config():
    return {"model": {"positions": {"kind": "learned_alibi"}}}
