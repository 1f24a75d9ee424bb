"""DeBERTa's enhanced mask decoder: absolute positions enter just before the masked tokens are restored.

The last layer is applied twice in place of once. Its keys and values are the states before it, its queries those states
plus a learned embedding of absolute positions, and then its own output:

    y = layer(query = H + P, keys and values = H),   output = layer(query = y, keys and values = H)

Source: He et al. 2021, "DeBERTa", section 3.2, and its released code.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.functional.block import Terms, stack
from jaxformer.functional.embedding_lookup import look_up
from jaxformer.functional.layer import Context, KeyInput, table_spec
from jaxformer.specs import ParamSpec
from jaxformer.types import Array, Params


def specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """The embeddings of absolute positions."""
    return {"positions": table_spec(cfg, cfg.context_length, "positions")}


def layers(
    decoder: Params, positions: Array, params: Params, x: Array, cfg: ModelConfig, contexts: Sequence[Context]
) -> tuple[Array, None, Terms]:
    """All layers of a model, the last one twice; as `block.stack`.

    Args:
      decoder: as in `specs(cfg)`.
      positions: [T] or [B, T] int.
      params, x, cfg, contexts: as of `block.stack`, one context; without a cache.
    """
    (context,) = contexts
    split = [jax.lax.split(leaf, (cfg.num_layers - 1, 1), axis=0) for leaf in jax.tree.leaves(params)]
    first, last = (jax.tree.unflatten(jax.tree.structure(params), part) for part in zip(*split, strict=True))
    terms: Terms = {}
    if cfg.num_layers > 1:
        x, _, terms = stack(first, x, cfg, context)
    places = jnp.broadcast_to(positions, x.shape[:2])
    query = x + look_up(places, decoder["positions"], "positions").astype(x.dtype)
    rng = None if context.rng is None else jax.random.fold_in(context.rng, cfg.num_layers)
    again = [jax.tree.map(lambda leaf: leaf[0], last)] * 2
    out, _, more = stack(again, query, cfg, context._replace(key_input=KeyInput(x), rng=rng))
    return out, None, {name: value + terms.get(name, 0) for name, value in more.items()}
