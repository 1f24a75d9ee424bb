"""What GPT and BERT share below the first block: token, position and type embeddings, and score biases."""

import math

import jax.numpy as jnp

from jaxformer import masks
from jaxformer.config import ModelConfig
from jaxformer.functional import layers
from jaxformer.functional import positions as pos
from jaxformer.kernels.xla import Bias
from jaxformer.layout import pin
from jaxformer.specs import Initializer, ParamSpec, normal
from jaxformer.types import Array, Params

T5_BUCKETS = 32


def vocab(cfg: ModelConfig) -> int:
    """The vocabulary size.

    Raises:
      ValueError: if the config leaves it open; the data's tokenizer fills it in before a model is built.
    """
    if cfg.vocab_size is None:
        raise ValueError("ModelConfig.vocab_size is None; set it, or let the tokenizer set it")
    return cfg.vocab_size


def table_init(cfg: ModelConfig) -> Initializer:
    """Initialiser of the [V, D] tables: 0.02 for "gpt2", else D ** -0.5, so that tied logits start at unit size."""
    return normal(0.02 if cfg.initializer == "gpt2" else 1 / math.sqrt(cfg.width))


def specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Parameters of the embedding: `tokens`, and `positions`, `types`, `t5` where the config has them."""
    tree = {"tokens": ParamSpec((vocab(cfg), cfg.width), ("vocab", "embed"), table_init(cfg))}
    if cfg.positions == "learned":
        tree["positions"] = ParamSpec((cfg.context_length, cfg.width), ("positions", "embed"), table_init(cfg))
    if cfg.positions == "t5":
        tree["t5"] = ParamSpec((T5_BUCKETS, cfg.num_heads), ("positions", "heads"), normal(cfg.width**-0.5))
    if cfg.token_types:
        tree["types"] = ParamSpec((cfg.token_types, cfg.width), ("types", "embed"), table_init(cfg))
    return tree


def embed(
    params: Params,
    tokens: Array,
    positions: Array,
    cfg: ModelConfig,
    rng: Array | None,
    types: Array | None = None,
) -> Array:
    """Sum of the token, position and type embeddings, with dropout.

    Args:
      params: as in `specs(cfg)`.
      tokens: [B, T] int.
      positions: [T] or [B, T] int.
      cfg: the model.
      rng: dropout; None: none.
      types: [B, T] int; None: all of type 0, where the config has types.

    Returns:
      [B, T, D] in the compute dtype.
    """
    x = layers.embed(tokens, params["tokens"])
    if cfg.positions == "learned":
        x = x + jnp.broadcast_to(pos.learned(params["positions"], positions), x.shape)
    elif cfg.positions == "sinusoidal":
        # Source: Vaswani et al. 2017, section 3.4: the table is scaled up so that positions do not drown it.
        x = x * math.sqrt(cfg.width) + jnp.broadcast_to(pos.sinusoidal(positions, cfg.width), x.shape)
    if cfg.token_types:
        x = x + layers.embed(jnp.zeros_like(tokens) if types is None else types, params["types"])
    # Every device looks up its part of the width for the rows of its group, then rows and widths change places.
    x = pin(x.astype(cfg.dtype), "looked_up_rows", "sequence", "looked_up_width")
    return layers.dropout(pin(x, "rows", "sequence", None), cfg.dropout, rng)


def row_positions(tokens: Array, cfg: ModelConfig) -> Array:
    """Positions 0, 1, 2, ... of a row that is one document, [T].

    Raises:
      ValueError: the row is longer than a learned table reaches.
    """
    length = tokens.shape[1]
    if cfg.positions == "learned" and length > cfg.context_length:
        raise ValueError(f"{length} tokens are more than the {cfg.context_length} positions of model.context_length")
    return jnp.arange(length)


def score_bias(params: Params, cfg: ModelConfig, mask: masks.Mask | None = None) -> Bias | None:
    """The score bias of ALiBi or T5 positions as a function of (query index, key index), or None.

    `mask` gives the indices where they are not 0, 1, 2, ... (a decoder's cache): then the bias is an array.
    """
    if cfg.positions == "alibi":

        def bias(query_index: Array, key_index: Array) -> Array:
            return pos.alibi(query_index, key_index, cfg.num_heads)
    elif cfg.positions == "t5":

        def bias(query_index: Array, key_index: Array) -> Array:
            return pos.t5_bias(params["t5"], query_index, key_index, bidirectional=not cfg.causal)
    else:
        return None
    if mask is not None and mask.key_index is not None:
        return bias(mask.query_index, mask.key_index)
    return bias
