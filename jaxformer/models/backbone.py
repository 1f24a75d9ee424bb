"""What all Transformers share: a stack over one sequence of tokens, from embeddings to the final norm. GPT and BERT add
heads to one of them; an encoder-decoder has two."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxformer import masks
from jaxformer.config import Execution, ModelConfig, period_of
from jaxformer.functional import pipelined_stack
from jaxformer.functional.block import Terms, block_specs, model_specs, stack
from jaxformer.functional.layer import Context, DecodeProgress, norm, norm_specs
from jaxformer.functional.layers import dropout
from jaxformer.functional.losses import TokenLoss
from jaxformer.functional.multipliers import logit_scale, scaled
from jaxformer.functional.position_encodings import encoding_of, rotation, score_bias, shared_positions
from jaxformer.masks import Mask
from jaxformer.models import embedding
from jaxformer.models.embedding import ShardedRows
from jaxformer.parallel.pipeline import MicroBatches, RowSharding, stages
from jaxformer.specs import stack_specs
from jaxformer.types import Array, Params, Sums

DEFAULT_EXECUTION = Execution()


class EncodedSource(NamedTuple):
    """What decoding reads of the sources.

    Attributes:
      states: [B, S, D], the encoder's hidden states.
      there: [B, S] bool; False for padding.
    """

    states: Array
    there: Array


def specs(cfg: ModelConfig, *, embedding_norm: bool = False) -> dict[str, Any]:
    """Parameters by group: embedding, embedding_norm (if asked for), blocks, what all of those share (if anything),
    final_norm (not post_norm)."""
    tree: dict[str, Any] = {"embedding": embedding.specs(cfg)}
    if embedding_norm or cfg.embedding_norm:
        tree["embedding_norm"] = norm_specs(cfg)
    tree["blocks"] = stack_specs(block_specs(cfg), cfg.num_blocks)
    if shared := model_specs(cfg):
        tree["shared"] = shared
    if cfg.block not in ("post_norm", "plain"):
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
    prefix: Array | None = None,
    rng: Array | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> tuple[Array, RowSharding, Terms]:
    """`hidden`, with rows sharded over the context axis of the mesh in use.

    Args:
      params: as in `specs(cfg)`.
      tokens: [B, T] int in [0, V). Others are not refused, as a compiled program cannot do that; `look_up` says what
        becomes of them.
      cfg: the model.
      positions: [B, T] int, position in the document; None: 0, 1, 2, ...
      segments: [B, T] int, document of each token (padding has its own number); None: one document per row.
      token_types: [B, T] int, sentence A or B; None: all 0.
      prefix: [B, T] bool, tokens that all tokens of their document see (prefix LM); None: there are none.
      rng: for dropout; None: nothing is dropped.
      execution: how it is computed, not what.

    Returns:
      [parts * B, T / parts, D] in the compute dtype ([B, T, D] without a context axis); how rows are sharded; and the
      terms that the blocks add to the objective.
    """
    rows = embedding.shard_rows(tokens, positions, segments, cfg, prefix, execution)
    x, terms = over_rows(params, rows, cfg, rng, execution, token_types=token_types)
    return x, rows.sharding, terms


def over_rows(
    params: Params,
    rows: ShardedRows,
    cfg: ModelConfig,
    rng: Array | None,
    execution: Execution,
    *,
    source: tuple[Array, Mask] | None = None,
    token_types: Array | None = None,
    looked_up: Array | None = None,
    layers: Callable[..., Any] = stack,
) -> tuple[Array, Terms]:
    """One stack over rows that are sharded already.

    Args:
      params, cfg, rng, execution: as of `hidden_sharded`.
      rows: from `embedding.shard_rows`.
      source: an encoder's states [parts * B, S / parts, D] and which of them each token sees, for cross attention.
      token_types: [B, T] int, as of `hidden_sharded`.
      looked_up: [parts * B, T / parts, D], as of `embedding.embed`.
      layers: a function as `block.stack`, in its place.

    Returns:
      [parts * B, T / parts, D] in the compute dtype, and the terms that the blocks add to the objective.
    """
    if isinstance(rows.sharding, MicroBatches):
        return _in_stages(params, rows, rows.sharding, cfg, rng, execution, token_types)
    embed_rng, blocks_rng = (None, None) if rng is None else _two_keys(rng)
    context = Context(rows.mask, rng=blocks_rng, execution=execution)
    if source is not None:
        context = context._replace(source=source[0], source_mask=source[1])
    types = rows.sharding.shard(token_types)
    x, _, terms = run(params, rows.tokens, rows.positions, cfg, context, embed_rng, types, looked_up, layers)
    return x, terms


def _in_stages(
    params: Params,
    rows: ShardedRows,
    lie: MicroBatches,
    cfg: ModelConfig,
    rngs: Array | None,
    execution: Execution,
    token_types: Array | None,
) -> tuple[Array, Terms]:
    """`over_rows` in a pipeline: embeddings and final norm of all rows at once, `stage` being one more axis of rows.

    `rngs`: a key for each micro-batch, [M], or None.
    """
    embed_rngs, blocks_rngs = (None, None) if rngs is None else jax.vmap(_two_keys)(rngs)
    x = _embedded(params, rows.tokens, rows.positions, cfg, lie.arrange(token_types))
    if cfg.dropout and embed_rngs is not None:
        x = lie.map(lambda x, rng: dropout(x, cfg.dropout, rng), x, embed_rngs)
    read: Params = {"embedding": {}}
    encoding = encoding_of(cfg)
    if encoding.biases and encoding.specs is not None:
        read["embedding"] = {name: params["embedding"][name] for name in encoding.specs(cfg)}
    if "shared" in params:
        read["shared"] = params["shared"]
    context = Context(rows.mask, rng=blocks_rngs, execution=execution)
    contexts = functools.partial(_contexts, cfg)
    x, terms = pipelined_stack.stack(params["blocks"], x, cfg, context, rows.positions, contexts, read, lie)
    return _finished(params, x, cfg), terms


def decode(
    params: Params,
    tokens: Array,
    cfg: ModelConfig,
    cache: list[Any],
    progress: DecodeProgress,
    positions: Array,
    source: EncodedSource | None = None,
    prefix: Array | None = None,
) -> tuple[Array, list[Any]]:
    """Hidden states of more tokens, given the cache of earlier ones; the basis of `decoding`.

    Args:
      params, cfg: a causal model; params["blocks"] stacked or a list (see `stack`).
      tokens: [B, T] int, the new tokens: prompts padded on the right, or one token of each row.
      cache: from `block.init_cache`, or what the last call returned.
      progress: how far the sequences are: whether these are prompts or next tokens.
      positions: [T] or [B, T] int, of the new tokens.
      source: with prompts, what an encoder made of the sources; afterwards the cache has what is needed of it.
      prefix: with prompts, [B] int: the first so many tokens of each are seen by all of it (prefix LM); None: none.

    Returns:
      [B, T, D] hidden states after the final norm, and the cache with the new tokens added.

    Raises:
      ValueError: the mesh in use has stages.
    """
    if stages() > 1:
        raise ValueError(f"decoding on a mesh of {stages()} stages, of which one would work at a time; accepted: 1")
    mask = masks.causal() if prefix is None else masks.prefix(prefix)
    context = Context(mask & Mask(window=cfg.attention.window), cache=cache, progress=progress)
    if source is not None:
        context = context._replace(source=source.states, source_mask=Mask(keys=source.there))
    x, cache, _ = run(params, tokens, positions, cfg, context)
    return x, cache


def run(
    params: Params,
    tokens: Array,
    positions: Array,
    cfg: ModelConfig,
    context: Context,
    rng: Array | None = None,
    types: Array | None = None,
    looked_up: Array | None = None,
    layers: Callable[..., Any] = stack,
) -> tuple[Array, Any, Terms]:
    """From tokens through all blocks and the final norm.

    Args:
      params, cfg: of the stack.
      tokens, positions, types, looked_up: as of `embedding.embed`.
      context: of the blocks.
      rng: for the dropout of embeddings.
      layers: a function as `block.stack`, in its place.

    Returns:
      Hidden states [B, T, D], the cache of each block, and terms of the objective.
    """
    x = dropout(_embedded(params, tokens, positions, cfg, types, looked_up), cfg.dropout, rng)
    x, cache, terms = layers(params["blocks"], x, cfg, _contexts(cfg, params, context, positions))
    return _finished(params, x, cfg), cache, terms


def _two_keys(rng: Array) -> tuple[Array, Array]:
    """Those of the embeddings and of the blocks."""
    embed_rng, blocks_rng = jax.random.split(rng)
    return embed_rng, blocks_rng


def _embedded(
    params: Params,
    tokens: Array,
    positions: Array,
    cfg: ModelConfig,
    types: Array | None,
    looked_up: Array | None = None,
) -> Array:
    """What the first layer reads, before dropout: Devlin et al. 2019 drop after the norm."""
    x = embedding.embed(params["embedding"], tokens, positions, cfg, types, looked_up)
    return norm(params["embedding_norm"], x, cfg) if "embedding_norm" in params else x


def _contexts(cfg: ModelConfig, params: Params, context: Context, positions: Array) -> list[Context]:
    """`context` with what positions give the layers, one for each of a period."""
    # A bias of every layer's own parameters is the layer's to make.
    bias = None if encoding_of(cfg).layer_specs else score_bias(params["embedding"], cfg, context.mask)
    shared = shared_positions(params["embedding"], cfg)
    context = context._replace(bias=bias, of_model=params.get("shared"), shared=shared)
    rotations = {one.positions: rotation(one, positions) for one in period_of(cfg)}
    return [context._replace(rotation=rotations[one.positions]) for one in period_of(cfg)]


def _finished(params: Params, x: Array, cfg: ModelConfig) -> Array:
    """What the last layer returned, as the heads read it."""
    x = norm(params["final_norm"], x, cfg) if "final_norm" in params else x
    return scaled(x, logit_scale(cfg))


def token_metrics(out: TokenLoss, sharding: RowSharding) -> Sums:
    """Per-row sums of negative log-likelihood and accuracy."""
    nll, correct, weight = (sharding.sum_shards(x) for x in (out.nll_rows, out.correct_rows, out.weight_rows))
    return {"loss": (nll, weight), "accuracy": (correct, weight)}
