"""BERT: a bidirectional Transformer that restores masked tokens and may predict whether two spans belong together.

Source: Devlin et al. 2019, sections 3 and A.2. A norm follows the summed embeddings, as published; blocks are as the
`ModelConfig` says, post-norm in the paper.

>>> import jax
>>> from jaxformer.specs import abstract_params
>>> cfg = ModelConfig(family="bert", block="post_norm", num_layers=2, width=32, context_length=16, vocab_size=64)
>>> jax.eval_shape(lambda p: apply(p, jnp.zeros((1, 16), int), cfg), abstract_params(specs(cfg))).shape
(1, 16, 64)
"""

import functools
from typing import Any

import jax.numpy as jnp

from jaxformer.config import Execution, LossConfig, ModelConfig
from jaxformer.functional import layers
from jaxformer.functional.block import Terms, stack
from jaxformer.functional.layer import norm, norm_specs, weight_init
from jaxformer.functional.losses import VocabularyProjection, cross_entropy
from jaxformer.functional.masked_loss import masked_token_loss
from jaxformer.models import backbone, embedding, gpt, mask_decoder
from jaxformer.models.backbone import DEFAULT_EXECUTION, token_metrics
from jaxformer.parallel.pipeline import RowSharding
from jaxformer.specs import ParamSpec, zeros
from jaxformer.types import Array, Batch, Params, Sums

hidden = backbone.hidden  # the states of the encoder alone, whatever the mask decoder


def specs(cfg: ModelConfig) -> dict[str, Any]:
    """Every parameter of the model, by group: embedding, embedding_norm, blocks, head, final_norm (not post_norm),
    mask_decoder, pooler and next_sentence (if the config has them)."""
    d = cfg.width
    tree = backbone.specs(cfg, embedding_norm=True)
    final_norm = tree.pop("final_norm", None)
    dense = {
        "w": ParamSpec((d, d), ("embed", None), weight_init(cfg, d, d), "hidden"),
        "b": ParamSpec((d,), ("norm",), zeros, "bias"),
    }
    bias = ParamSpec((embedding.vocab(cfg),), ("vocab",), zeros, "bias")
    tree["head"] = {**dense, "norm": norm_specs(cfg), "bias": bias}
    if not cfg.tie_embeddings:
        tree["head"]["table"] = embedding.output_table_spec(cfg)
    if cfg.enhanced_mask_decoder:
        tree["mask_decoder"] = mask_decoder.specs(cfg)
    if final_norm is not None:  # after the head, because a Flax module's initial values depend on the order
        tree["final_norm"] = final_norm
    if cfg.next_sentence:
        tree["pooler"] = dense
        tree["next_sentence"] = {
            "w": ParamSpec((d, 2), ("embed", None), weight_init(cfg, d, 2), "output"),
            "b": ParamSpec((2,), (None,), zeros, "bias"),
        }
    return tree


def decoded(
    params: Params,
    tokens: Array,
    cfg: ModelConfig,
    *,
    positions: Array | None = None,
    segments: Array | None = None,
    token_types: Array | None = None,
    rng: Array | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> tuple[Array, RowSharding, Terms]:
    """What the masked-token head reads: `backbone.hidden_sharded`, or with an enhanced mask decoder its output.

    Arguments and results as of `backbone.hidden_sharded`.
    """
    rows = embedding.shard_rows(tokens, positions, segments, cfg, execution=execution)
    layers = stack
    if cfg.enhanced_mask_decoder:
        layers = functools.partial(mask_decoder.layers, params["mask_decoder"], rows.positions)
    x, terms = backbone.over_rows(params, rows, cfg, rng, execution, token_types=token_types, layers=layers)
    return x, rows.sharding, terms


def transform(params: Params, x: Array, cfg: ModelConfig) -> Array:
    """The masked-token head before the vocabulary projection: dense, GELU, norm. [B, T, D] -> [B, T, D]."""
    return norm(params["head"]["norm"], layers.gelu(layers.linear(x, params["head"]["w"], params["head"]["b"])), cfg)


def masked_states(
    params: Params, tokens: Array, cfg: ModelConfig, rows: Array, positions: Array, **fields: Array | None
) -> Array:
    """[M, D]: what the vocabulary projection reads at some positions; `rows`, `positions`: [M] each.

    `fields`: segments and token_types, as of `decoded`.
    """
    x, sharding, _ = decoded(params, tokens, cfg, **fields)  # type: ignore[arg-type]
    return transform(params, sharding.unshard(x)[rows, positions], cfg)


def apply(params: Params, tokens: Array, cfg: ModelConfig, **fields) -> Array:
    """Logits of the original token at every position, [B, T, V] float32. Arguments as in `decoded`.

    Forward mode: see `gpt.apply`.
    """
    x, sharding, _ = decoded(params, tokens, cfg, **fields)
    x = transform(params, sharding.unshard(x), cfg)
    return layers.unembed(x, gpt.output_table(params), params["head"]["bias"])


def next_sentence_logits(params: Params, x: Array) -> Array:
    """[B, 2] logits (follows, random) from the pooled first token of the hidden states [B, T, D]."""
    pooled = jnp.tanh(layers.linear(x[:, 0], params["pooler"]["w"], params["pooler"]["b"]))
    out = layers.linear(pooled, params["next_sentence"]["w"], params["next_sentence"]["b"])
    return out.astype(jnp.promote_types(x.dtype, jnp.float32))


def loss(
    params: Params,
    batch: Batch,
    cfg: ModelConfig,
    loss_cfg: LossConfig,
    rng: Array | None = None,
    execution: Execution = DEFAULT_EXECUTION,
    frozen: Any = None,
) -> tuple[Sums, Sums]:
    """(objective, metrics) of a batch; see `types.Model`. With next-sentence labels, their loss is a second term.

    The masked-token head runs on the selected positions (weight > 0) and few others, see `masked_token_loss`.
    """
    of, sharding, terms = projection(params, batch, cfg, rng, execution)
    out = masked_token_loss(
        of.hidden,
        of.table,
        sharding.shard(batch.targets),
        sharding.shard(batch.weights),
        of.bias,
        transform=of.transform,
        transform_params=of.params,
        **vars(loss_cfg),
    )
    objective = {"loss": (out.total, out.weight)} | gpt.with_weights(terms, batch, cfg)
    metrics = token_metrics(out, sharding)
    labels = (batch.inputs or {}).get("pair_labels")
    if cfg.next_sentence and labels is not None:
        logits = next_sentence_logits(params, sharding.first_tokens(of.hidden))
        each, _ = cross_entropy(logits, labels)
        there = (labels >= 0).astype(each.dtype)  # -1: a row without a label
        objective["next_sentence"] = (jnp.sum(each * there), jnp.sum(there))
        metrics |= {
            "next_sentence_loss": (each * there, there),
            "next_sentence_accuracy": ((jnp.argmax(logits, axis=-1) == labels).astype(each.dtype), there),
        }
    return objective, metrics


def projection(
    params: Params, batch: Batch, cfg: ModelConfig, rng: Array | None, execution: Execution
) -> tuple[VocabularyProjection, RowSharding, Terms]:
    """What the logits of a batch are made of; see `Family.projection`."""
    x, sharding, terms = decoded(
        params,
        batch.tokens,
        cfg,
        positions=batch.positions,
        segments=batch.segments,
        token_types=(batch.inputs or {}).get("token_types"),
        rng=rng,
        execution=execution,
    )
    head = params["head"]
    made = VocabularyProjection(
        x,
        gpt.output_table(params),
        head["bias"],
        lambda p, x_ND: transform({"head": p}, x_ND, cfg),
        {name: head[name] for name in ("w", "b", "norm")},
    )
    return made, sharding, terms


def weights(batch: Batch, cfg: ModelConfig) -> dict[str, Array]:
    """The weights of `loss`'s objective, without running the model."""
    out = gpt.weights(batch, cfg)
    labels = (batch.inputs or {}).get("pair_labels")
    if cfg.next_sentence and labels is not None:
        out["next_sentence"] = jnp.sum((labels >= 0).astype(batch.weights.dtype))
    return out


def head_flops(cfg: ModelConfig) -> float:
    """Operations of the transform and the vocabulary projection at one position, forward."""
    return gpt.head_flops(cfg) + 2 * cfg.width * cfg.width
