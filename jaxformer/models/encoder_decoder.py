"""Encoder-decoder: a bidirectional stack reads the source, a causal one that attends to it predicts the target.

The model of 2017, T5 and BART are settings of one `ModelConfig`; both stacks have the same kind of layers and share the
table of tokens, which is the output table as well where embeddings are tied.

  Vaswani et al. 2017   block post_norm, positions sinusoidal (which scale the embeddings by sqrt(D)), ReLU, biases
  T5 v1.0, v1.1         block pre_norm, norm rms_norm, no biases, attention.scale 1, positions t5 (one table for each
                        stack), initializer t5; v1.0 ReLU, tied, scale_output; v1.1 gated tanh-GELU, not tied
  BART                  block post_norm, positions learned, embedding_norm, GELU, biases

T5's own dropout after the final norms and inside the feed-forward layer is left out.

Source: Vaswani et al. 2017, section 3; Raffel et al. 2020, section 2.1; Shazeer 2020; Lewis et al. 2020, section 2.1.

>>> import jax
>>> from jaxformer.specs import abstract_params
>>> cfg = ModelConfig(family="encoder_decoder", encoder={"source_length": 24}, num_layers=1, width=32,
...                   context_length=16, vocab_size=64)
>>> params, targets, sources = abstract_params(specs(cfg)), jnp.zeros((1, 16), int), jnp.zeros((1, 24), int)
>>> jax.eval_shape(lambda p: apply(p, targets, cfg, source_tokens=sources), params).shape
(1, 16, 64)
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxformer import masks
from jaxformer.config import Execution, LossConfig, ModelConfig, encoder_of
from jaxformer.functional.block import Terms, term_weights
from jaxformer.functional.embedding_lookup import look_up
from jaxformer.functional.layer import Context
from jaxformer.functional.layers import unembed
from jaxformer.functional.losses import token_loss
from jaxformer.masks import Mask
from jaxformer.models import backbone, embedding, gpt
from jaxformer.models.backbone import DEFAULT_EXECUTION, EncodedSource, token_metrics
from jaxformer.models.embedding import ShardedRows
from jaxformer.parallel.pipeline import RowSharding
from jaxformer.types import Array, Batch, Params, Sums


def specs(cfg: ModelConfig) -> dict[str, Any]:
    """Every parameter of the model, by group: those of a GPT, whose layers have cross attention, and `encoder` with the
    same groups but for what the decoder's embedding shares."""
    tree = backbone.specs(encoder_of(cfg))
    tree["embedding"] = {name: spec for name, spec in tree["embedding"].items() if name != "tokens"}
    return gpt.specs(cfg) | {"encoder": {name: group for name, group in tree.items() if group}}


def encoder_params(params: Params) -> Params:
    """The parameters of the encoder as `backbone` takes them, with the shared table of tokens."""
    own = params["encoder"]
    return {**own, "embedding": {**own.get("embedding", {}), "tokens": params["embedding"]["tokens"]}}


def hidden(params: Params, tokens: Array, cfg: ModelConfig, **fields) -> Array:
    """The decoder's last hidden states. Arguments as in `hidden_sharded`; returns [B, T, D] in the compute dtype."""
    x, sharding, *_ = hidden_sharded(params, tokens, cfg, **fields)
    return sharding.unshard(x)


def hidden_sharded(
    params: Params,
    tokens: Array,
    cfg: ModelConfig,
    *,
    source_tokens: Array,
    source_positions: Array | None = None,
    source_segments: Array | None = None,
    positions: Array | None = None,
    segments: Array | None = None,
    rng: Array | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> tuple[Array, RowSharding, Terms, Terms]:
    """`hidden`, with rows sharded over the context axis of the mesh in use.

    Args:
      params: as in `specs(cfg)`.
      tokens: [B, T] int, a start token and the target shifted right.
      cfg: the model.
      source_tokens: [B, S] int.
      source_positions, source_segments: [B, S] int, or None, as `positions` and `segments` of the target. A token of
        the target sees the source tokens of its own segment, and all of them where there are no segments.
      positions, segments, rng, execution: as of `backbone.hidden_sharded`.

    Returns:
      As `backbone.hidden_sharded`, and the terms of the encoder.

    Raises:
      ValueError: segments on one side only; a context axis that divides one side only.
    """
    stack = encoder_of(cfg)
    read = embedding.shard_rows(source_tokens, source_positions, source_segments, stack)
    rows = embedding.shard_rows(tokens, positions, segments, cfg)
    mask = _cross_mask(rows, segments, read, source_segments)
    rngs = (None, None) if rng is None else jax.random.split(rng)
    # Looked up at once, so that devices sum the gradient of the shared table once for both.
    both = look_up(jnp.concatenate([read.tokens, rows.tokens], axis=1), params["embedding"]["tokens"], "vocab")
    source, target = jnp.split(both, [read.tokens.shape[1]], axis=1)
    states, of_encoder = backbone.over_rows(encoder_params(params), read, stack, rngs[0], execution, looked_up=source)
    # For its gradient, the sum over all layers of the decoder: XLA would add them up again, turned, for a weight's.
    states = jax.lax.optimization_barrier(states)
    x, terms = backbone.over_rows(params, rows, cfg, rngs[1], execution, source=(states, mask), looked_up=target)
    return x, rows.sharding, terms, of_encoder


def _cross_mask(rows: ShardedRows, segments: Array | None, read: ShardedRows, source_segments: Array | None) -> Mask:
    """Which source tokens each token of the target sees. Raises as `hidden_sharded`."""
    if (segments is None) != (source_segments is None):
        raise ValueError("segments: given for one of source and target; accepted: for both, or for neither")
    if rows.sharding.parts != read.sharding.parts:
        raise ValueError(
            f"context parallelism: the target is cut into {rows.sharding.parts} parts and the source into "
            f"{read.sharding.parts}; accepted: lengths that both divide"
        )
    mask = Mask(parts=rows.sharding.parts)
    if segments is None:
        return mask
    return mask & masks.segments(rows.sharding.arrange(segments), read.sharding.arrange(source_segments))


def apply(params: Params, tokens: Array, cfg: ModelConfig, **fields) -> Array:
    """Logits of the next token of the target, [B, T, V] float32. Arguments as in `hidden_sharded`.

    Forward mode and token ids outside [0, V): see `gpt.apply`.
    """
    return unembed(hidden(params, tokens, cfg, **fields), gpt.output_table(params), soft_cap=cfg.logit_soft_cap)


def encode(params: Params, tokens: Array, lengths: Array, cfg: ModelConfig) -> EncodedSource:
    """What decoding reads of sources.

    Args:
      params: as in `specs(cfg)`.
      tokens: [B, S] int, padded on the right with any ids.
      lengths: [B] int, tokens of each source, 1 to S.
      cfg: the model.
    """
    there = jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]
    stack = encoder_of(cfg)
    context = Context(Mask(window=cfg.attention.window, keys=there))
    x, _, _ = backbone.run(encoder_params(params), tokens, jnp.arange(tokens.shape[1]), stack, context)
    return EncodedSource(x, there)


def loss(
    params: Params,
    batch: Batch,
    cfg: ModelConfig,
    loss_cfg: LossConfig,
    rng: Array | None = None,
    execution: Execution = DEFAULT_EXECUTION,
    frozen: Any = None,
) -> tuple[Sums, Sums]:
    """(objective, metrics) of a batch with source_tokens, source_positions and source_segments among its inputs; see
    `types.Model`."""
    x, sharding, terms, of_encoder = hidden_sharded(
        params,
        batch.tokens,
        cfg,
        **_source(batch),
        positions=batch.positions,
        segments=batch.segments,
        rng=rng,
        execution=execution,
    )
    targets, weights = sharding.shard(batch.targets), sharding.shard(batch.weights)
    out = token_loss(x, gpt.output_table(params), targets, weights, soft_cap=cfg.logit_soft_cap, **vars(loss_cfg))
    totals = {name: total + of_encoder.get(name, 0) for name, total in terms.items()}
    both = _term_weights(batch, cfg)
    objective = {"loss": (out.total, out.weight)} | {name: (total, both[name]) for name, total in totals.items()}
    return objective, token_metrics(out, sharding)


def weights(batch: Batch, cfg: ModelConfig) -> dict[str, Array]:
    """The weights of `loss`'s objective, without running the model."""
    return {"loss": jnp.sum(batch.weights), **_term_weights(batch, cfg)}


def _source(batch: Batch) -> dict[str, Array]:
    inputs = batch.inputs or {}
    return {name: inputs[name] for name in ("source_tokens", "source_positions", "source_segments")}


def _term_weights(batch: Batch, cfg: ModelConfig) -> Terms:
    """The weights of the terms of both stacks together."""
    of_encoder = term_weights(encoder_of(cfg), _source(batch)["source_segments"])
    return {name: each + of_encoder.get(name, 0) for name, each in term_weights(cfg, batch.segments).items()}
