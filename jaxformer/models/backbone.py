"""What all Transformers over one sequence of tokens share: embeddings, blocks, final norm. GPT and BERT add heads."""

from typing import Any

import jax

from jaxformer.config import Execution, ModelConfig
from jaxformer.functional.block import Terms, block_specs, stack
from jaxformer.functional.layer import Context, DecodeProgress, norm, norm_specs
from jaxformer.functional.layers import dropout
from jaxformer.functional.losses import TokenLoss
from jaxformer.functional.position_encodings import encoding_of, rotation, score_bias
from jaxformer.masks import Mask
from jaxformer.models import embedding
from jaxformer.parallel.context import SequenceSharding
from jaxformer.specs import stack_specs
from jaxformer.types import Array, Params, Sums

DEFAULT_EXECUTION = Execution()


def specs(cfg: ModelConfig, *, embedding_norm: bool = False) -> dict[str, Any]:
    """Parameters by group: embedding, embedding_norm (if asked for), blocks, final_norm (not post_norm)."""
    tree: dict[str, Any] = {"embedding": embedding.specs(cfg)}
    if embedding_norm:
        tree["embedding_norm"] = norm_specs(cfg)
    tree["blocks"] = stack_specs(block_specs(cfg), cfg.num_layers)
    if cfg.block != "post_norm":
        tree["final_norm"] = norm_specs(cfg)
    return tree


def hidden(params: Params, tokens: Array, cfg: ModelConfig, **fields) -> Array:
    """The last hidden states, after the final norm.

    Arguments as in `hidden_sharded`. Returns [B, T, D] in the compute dtype.
    """
    x, sharding, _ = hidden_sharded(params, tokens, cfg, **fields)
    return sharding.unshard(x)


def hidden_sharded(
    params: Params,
    tokens: Array,
    cfg: ModelConfig,
    *,
    positions: Array | None = None,
    segments: Array | None = None,
    token_types: Array | None = None,
    rng: Array | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> tuple[Array, SequenceSharding, Terms]:
    """`hidden`, with rows sharded over the context axis of the mesh in use.

    Args:
      params: as in `specs(cfg)`.
      tokens: [B, T] int in [0, V). Others are not refused, as a compiled program cannot do that; `look_up` says what
        becomes of them.
      cfg: the model.
      positions: [B, T] int, position in the document; None: 0, 1, 2, ...
      segments: [B, T] int, document of each token (padding has its own number); None: one document per row.
      token_types: [B, T] int, sentence A or B; None: all 0.
      rng: for dropout; None: nothing is dropped.
      execution: how it is computed, not what.

    Returns:
      [parts * B, T / parts, D] in the compute dtype ([B, T, D] without a context axis); how rows are sharded; and the
      terms that the blocks add to the objective.
    """
    sharding, mask, tokens, positions = embedding.shard_rows(tokens, positions, segments, cfg)
    embed_rng, blocks_rng = (None, None) if rng is None else jax.random.split(rng)
    context = Context(mask, rng=blocks_rng, execution=execution)
    x, _, terms = _run(params, tokens, positions, cfg, context, embed_rng, sharding.shard(token_types))
    return x, sharding, terms


def decode(
    params: Params, tokens: Array, cfg: ModelConfig, cache: list[Any], progress: DecodeProgress, positions: Array
) -> tuple[Array, list[Any]]:
    """Hidden states of more tokens, given the cache of earlier ones; the basis of `decoding`.

    Args:
      params, cfg: a causal model; params["blocks"] stacked or a list (see `stack`).
      tokens: [B, T] int, the new tokens: prompts padded on the right, or one token of each row.
      cache: from `block.init_cache`, or what the last call returned.
      progress: how far the sequences are: whether these are prompts or next tokens.
      positions: [T] or [B, T] int, of the new tokens.

    Returns:
      [B, T, D] hidden states after the final norm, and the cache with the new tokens added.
    """
    context = Context(Mask(causal=True, window=cfg.attention.window), cache=cache, progress=progress)
    x, cache, _ = _run(params, tokens, positions, cfg, context)
    return x, cache


def _run(
    params: Params, tokens, positions, cfg: ModelConfig, context: Context, rng: Array | None = None, types=None
) -> tuple[Array, Any, Terms]:
    """From tokens through all blocks and the final norm. `rng`: for the dropout of embeddings."""
    x = embedding.embed(params["embedding"], tokens, positions, cfg, types)
    if "embedding_norm" in params:  # Devlin et al. 2019 drop after the norm
        x = norm(params["embedding_norm"], x, cfg)
    x = dropout(x, cfg.dropout, rng)
    # A bias of every layer's own parameters is the layer's to make.
    bias = None if encoding_of(cfg).layer_specs else score_bias(params["embedding"], cfg, context.mask)
    context = context._replace(rotation=rotation(cfg, positions), bias=bias)
    x, cache, terms = stack(params["blocks"], x, cfg, context)
    return norm(params["final_norm"], x, cfg) if "final_norm" in params else x, cache, terms


def token_metrics(out: TokenLoss, sharding: SequenceSharding) -> Sums:
    """Per-row sums of negative log-likelihood and accuracy."""
    nll, correct, weight = (sharding.sum_shards(x) for x in (out.nll_rows, out.correct_rows, out.weight_rows))
    return {"loss": (nll, weight), "accuracy": (correct, weight)}
