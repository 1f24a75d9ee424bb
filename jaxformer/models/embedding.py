"""What GPT and BERT share below the first block: the embeddings of tokens, positions and types, and how rows lie."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxformer import masks
from jaxformer.config import Execution, ModelConfig
from jaxformer.functional.embedding_lookup import look_up
from jaxformer.functional.layer import table_spec
from jaxformer.functional.position_encodings import encoding_of
from jaxformer.parallel import context, pipeline
from jaxformer.parallel.constraints import constrain
from jaxformer.specs import ParamSpec
from jaxformer.types import Array, Params


def vocab(cfg: ModelConfig) -> int:
    """The vocabulary size.

    Raises:
      ValueError: the config leaves it open; it has to be set from the data's tokenizer first.
    """
    if cfg.vocab_size is None:
        raise ValueError("ModelConfig.vocab_size is None; set it, or let the tokenizer set it")
    return cfg.vocab_size


def specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Parameters of the embedding: `tokens`, those of the positions, and `types` where the config has them."""
    tree = {"tokens": table_spec(cfg, vocab(cfg), "vocab")}
    of_positions = encoding_of(cfg).specs
    if of_positions is not None:
        tree |= of_positions(cfg)
    if cfg.token_types:
        tree["types"] = table_spec(cfg, cfg.token_types, "types")
    return tree


def output_table_spec(cfg: ModelConfig) -> ParamSpec:
    """The [V, D] table that turns hidden states into logits, if it is not the embedding's."""
    return table_spec(cfg, vocab(cfg), "vocab", "output")


def embed(
    params: Params,
    tokens: Array,
    positions: Array,
    cfg: ModelConfig,
    types: Array | None = None,
    looked_up: Array | None = None,
) -> Array:
    """Sum of the token, position and type embeddings.

    Args:
      params: as in `specs(cfg)`.
      tokens: [B, T] int.
      positions: [T] or [B, T] int.
      cfg: the model.
      types: [B, T] int; None: all of type 0, where the config has types.
      looked_up: [B, T, D], the rows of the table for `tokens`, where they are there already.

    Returns:
      [B, T, D] in the compute dtype.
    """
    x = look_up(tokens, params["tokens"], "vocab") if looked_up is None else looked_up
    x = x * math.sqrt(cfg.width) if cfg.scale_embeddings else x
    of_positions = encoding_of(cfg).embed
    if of_positions is not None:
        x = of_positions(params, x, positions, cfg)
    if cfg.token_types:
        x = x + look_up(jnp.zeros_like(tokens) if types is None else types, params["types"], "types")
    # Every device looks up its part of the width for the rows of its group; then rows are sharded instead of the width.
    x = constrain(x.astype(cfg.dtype), "looked_up_rows", None, "looked_up_width")
    return constrain(x, "rows", None, None)


class ShardedRows(NamedTuple):
    """Rows as a stack of layers takes them: how they are sharded, which tokens see which, tokens and positions."""

    sharding: pipeline.RowSharding
    mask: masks.Mask
    tokens: Array
    positions: Array


def shard_rows(
    tokens: Array,
    positions: Array | None,
    segments: Array | None,
    cfg: ModelConfig,
    prefix: Array | None = None,
    execution: Execution | None = None,
) -> ShardedRows:
    """Rows sharded over the context axis of the mesh in use, or split into micro-batches for its stages; and the mask.

    Args:
      tokens: [B, T] int.
      positions, segments: [B, T] int, or None.
      cfg: the model.
      prefix: [B, T] bool, tokens that all tokens of their segment see, also those before them; or None.
      execution: says how many micro-batches there are; None: the stack has no stages.

    Returns:
      How rows are sharded; the mask (causality and window of the config, segments); tokens and positions, sharded
      (positions are [T] if they were None and rows are whole).

    Raises:
      ValueError: no positions are given, and rows are longer than the learned table; rows do not divide into the
        micro-batches, or those over the stages.
    """
    # With a window, shards in the plain order have about equal work, and the ring can stop early.
    length, longest = tokens.shape[1], cfg.context_length
    cut: Any = context.sequence_sharding(length, zigzag=cfg.causal and cfg.attention.window is None)
    if execution is not None and pipeline.stages() > 1:
        cut = pipeline.micro_batches(len(tokens), execution.gradient_accumulation_steps, execution.pipeline_repeats)
    index = None if cut.order is None else jnp.asarray(cut.order)
    mask = masks.Mask(
        causal=cfg.causal and prefix is None,
        window=cfg.attention.window,
        query_index=index,
        key_index=index,
        prefix_keys=cut.arrange(prefix),
        parts=cut.parts,
    )
    if segments is not None:
        mask = mask & masks.segments(cut.arrange(segments))
    if positions is None:
        if length > longest and not encoding_of(cfg).extends:
            raise ValueError(f"{length} tokens are more than the {longest} positions of model.context_length")
        positions = jnp.arange(length)
        positions = positions if cut.parts == 1 else jnp.broadcast_to(positions, tokens.shape)
    return ShardedRows(cut, mask, cut.shard(tokens), cut.shard(positions) if positions.ndim == 2 else positions)
