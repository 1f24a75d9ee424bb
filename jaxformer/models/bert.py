"""BERT: a bidirectional Transformer that restores masked tokens; optionally, whether two spans belong together.

Source: Devlin et al. 2019, sections 3 and A.2. Norm after the summed embeddings and post-norm blocks as published;
any other arrangement a `ModelConfig` can say works as well.

>>> import jax
>>> from jaxformer.specs import init_params
>>> cfg = ModelConfig(family="bert", block="post_norm", num_layers=2, width=32, context_length=16, vocab_size=64)
>>> params = init_params(specs(cfg), jax.random.key(0))
>>> apply(params, jnp.zeros((1, 16), int), cfg).shape
(1, 16, 64)
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import Execution, LossConfig, ModelConfig
from jaxformer.functional import layers
from jaxformer.functional.block import AS_USUAL, block_specs, rotation, stack
from jaxformer.functional.layer import norm, norm_specs, weight_init
from jaxformer.functional.losses import cross_entropy
from jaxformer.functional.masked_loss import masked_token_loss
from jaxformer.models import embedding
from jaxformer.models.gpt import loss_options, token_metrics
from jaxformer.parallel.context import SequenceSharding
from jaxformer.specs import ParamSpec, stack_specs, zeros
from jaxformer.types import Array, Batch, Params, Sums


def specs(cfg: ModelConfig) -> dict[str, Any]:
    """Every parameter of the model, by group: embedding, embedding_norm, blocks, final_norm (not post_norm), head,
    pooler and next_sentence (if the config has them)."""
    d = cfg.width
    head: dict[str, Any] = {
        "w": ParamSpec((d, d), ("embed", None), weight_init(cfg, d, d)),
        "b": ParamSpec((d,), ("norm",), zeros),
        "norm": norm_specs(cfg),
        "bias": ParamSpec((embedding.vocab(cfg),), ("vocab",), zeros),
    }
    if not cfg.tie_embeddings:
        head["table"] = ParamSpec((embedding.vocab(cfg), d), ("vocab", "embed"), embedding.table_init(cfg))
    tree: dict[str, Any] = {
        "embedding": embedding.specs(cfg),
        "embedding_norm": norm_specs(cfg),
        "blocks": stack_specs(block_specs(cfg), cfg.num_layers),
        "head": head,
    }
    if cfg.block != "post_norm":
        tree["final_norm"] = norm_specs(cfg)
    if cfg.next_sentence:
        tree["pooler"] = {
            "w": ParamSpec((d, d), ("embed", None), weight_init(cfg, d, d)),
            "b": ParamSpec((d,), ("norm",), zeros),
        }
        tree["next_sentence"] = {
            "w": ParamSpec((d, 2), ("embed", None), weight_init(cfg, d, 2)),
            "b": ParamSpec((2,), (None,), zeros),
        }
    return tree


def hidden(params: Params, tokens: Array, cfg: ModelConfig, **fields) -> Array:
    """The last hidden states.

    Arguments as in `hidden_sharded`. Returns [B, T, D] in the compute dtype.
    """
    x, cut = hidden_sharded(params, tokens, cfg, **fields)
    return cut.unshard(x)


def hidden_sharded(
    params: Params,
    tokens: Array,
    cfg: ModelConfig,
    *,
    positions: Array | None = None,
    segments: Array | None = None,
    token_types: Array | None = None,
    rng: Array | None = None,
    execution: Execution = AS_USUAL,
) -> tuple[Array, SequenceSharding]:
    """`hidden`, with rows cut into parts as the mesh in use cuts them.

    Args:
      params: as in `specs(cfg)`.
      tokens: [B, T] int.
      cfg: the model.
      positions: [B, T] int, position in the document; None: 0, 1, 2, ...
      segments: [B, T] int, document of each token (padding a number of its own); None: one document per row.
      token_types: [B, T] int, sentence A or B; None: all 0.
      rng: dropout; None: nothing is dropped.
      execution: how it is computed, not what.

    Returns:
      [parts * B, T / parts, D] in the compute dtype, and the cut; [B, T, D] where the mesh has no context axis.
    """
    cut, mask, tokens, positions = embedding.shard_rows(tokens, positions, segments, cfg)
    rngs = (None, None) if rng is None else jax.random.split(rng)
    x = embedding.embed(params["embedding"], tokens, positions, cfg, None, cut.shard(token_types))
    # Devlin et al. drop after the norm, so the embedding's own dropout stays off.
    x = layers.dropout(norm(params["embedding_norm"], x, cfg), cfg.dropout, rngs[0])
    bias = embedding.score_bias(params["embedding"], cfg, mask)
    rotate = rotation(cfg, positions)
    x, _ = stack(params["blocks"], x, cfg, mask, rotate=rotate, bias=bias, rng=rngs[1], execution=execution)
    return (norm(params["final_norm"], x, cfg) if "final_norm" in params else x), cut


def transform(params: Params, x: Array, cfg: ModelConfig) -> Array:
    """The masked-token head before the vocabulary projection: dense, GELU, norm. [B, T, D] -> [B, T, D]."""
    return norm(params["head"]["norm"], layers.gelu(layers.linear(x, params["head"]["w"], params["head"]["b"])), cfg)


def output_table(params: Params) -> Array:
    """The [V, D] table of the vocabulary projection: the head's own, or the embedding's if tied."""
    return params["head"]["table"] if "table" in params["head"] else params["embedding"]["tokens"]


def apply(params: Params, tokens: Array, cfg: ModelConfig, **fields) -> Array:
    """Logits of the original token at every position, [B, T, V] float32. Arguments as in `hidden`.

    Forward mode: see `gpt.apply`.
    """
    x = transform(params, hidden(params, tokens, cfg, **fields), cfg)
    return layers.unembed(x, output_table(params), params["head"]["bias"])


def next_sentence_logits(params: Params, x: Array) -> Array:
    """[B, 2] logits (follows, random) from the hidden states [B, T, D], by way of the pooled first token."""
    pooled = jnp.tanh(layers.linear(x[:, 0], params["pooler"]["w"], params["pooler"]["b"]))
    out = layers.linear(pooled, params["next_sentence"]["w"], params["next_sentence"]["b"])
    return out.astype(jnp.promote_types(x.dtype, jnp.float32))


def loss(
    params: Params,
    batch: Batch,
    cfg: ModelConfig,
    loss_cfg: LossConfig,
    rng: Array | None = None,
    execution: Execution = AS_USUAL,
) -> tuple[Sums, Sums]:
    """(objective, metrics) of a batch; see `types.Model`. With next-sentence labels their loss is a second term.

    The masked-token head runs on the selected positions (weight > 0) and few others, see `masked_token_loss`.
    """
    x, cut = hidden_sharded(
        params,
        batch.tokens,
        cfg,
        positions=batch.positions,
        segments=batch.segments,
        token_types=batch.token_types,
        rng=rng,
        execution=execution,
    )
    head = params["head"]
    out = masked_token_loss(
        x,
        output_table(params),
        cut.shard(batch.targets),
        cut.shard(batch.weights),
        head["bias"],
        transform=lambda p, x_ND: transform({"head": p}, x_ND, cfg),
        transform_params={name: head[name] for name in ("w", "b", "norm")},
        **loss_options(loss_cfg),
    )
    objective, metrics = {"loss": (out.total, out.weight)}, token_metrics(out, cut)
    if cfg.next_sentence and batch.pair_labels is not None:
        # The first rows are the first parts of all rows.
        logits = next_sentence_logits(params, x[: batch.tokens.shape[0]])
        each, _ = cross_entropy(logits, batch.pair_labels)
        there = (batch.pair_labels >= 0).astype(each.dtype)  # -1: a row without a label
        objective["next_sentence"] = (jnp.sum(each * there), jnp.sum(there))
        metrics["next_sentence_loss"] = (each * there, there)
        right = (jnp.argmax(logits, axis=-1) == batch.pair_labels).astype(each.dtype)
        metrics["next_sentence_accuracy"] = (right, there)
    return objective, metrics


def weights(batch: Batch) -> dict[str, Array]:
    """The weights of `loss`'s objective, without running the model."""
    out = {"loss": jnp.sum(batch.weights)}
    if batch.pair_labels is not None:
        out["next_sentence"] = jnp.sum((batch.pair_labels >= 0).astype(batch.weights.dtype))
    return out
