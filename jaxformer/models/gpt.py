"""GPT: a causal Transformer over tokens. GPT-2 and Llama are settings of one `ModelConfig`.

>>> import jax
>>> from jaxformer.specs import init_params
>>> cfg = ModelConfig(num_layers=1, width=32, context_length=16, vocab_size=64)
>>> params = init_params(specs(cfg), jax.random.key(0))
>>> jax.jit(apply, static_argnames="cfg")(params, jnp.zeros((1, 16), int), cfg).shape
(1, 16, 64)
"""

from typing import Any

import jax.numpy as jnp

from jaxformer.config import Execution, LossConfig, ModelConfig
from jaxformer.functional.block import Terms, term_weights
from jaxformer.functional.layers import unembed
from jaxformer.functional.losses import VocabularyProjection, token_loss
from jaxformer.functional.multipliers import parametrized
from jaxformer.models import backbone, embedding
from jaxformer.models.backbone import DEFAULT_EXECUTION, hidden, hidden_sharded, token_metrics
from jaxformer.parallel.pipeline import RowSharding
from jaxformer.types import Array, Batch, Params, Sums


def specs(cfg: ModelConfig) -> dict[str, Any]:
    """Every parameter of the model, by group: embedding, blocks, final_norm (not post_norm), head (if not tied)."""
    tree = backbone.specs(cfg)
    tree = tree if cfg.tie_embeddings else {**tree, "head": {"table": embedding.output_table_spec(cfg)}}
    return parametrized(tree, cfg)


def output_table(params: Params) -> Array:
    """The [V, D] table that turns hidden states into logits: the head's, or the embedding's if tied."""
    return params.get("head", {}).get("table", params["embedding"]["tokens"])


def apply(params: Params, tokens: Array, cfg: ModelConfig, **fields) -> Array:
    """Logits of the next token, [B, T, V] float32. Arguments as in `backbone.hidden_sharded`.

    Token ids outside [0, V) are not refused: those from -V to -1 count from the end of the embedding, beyond that they
    are clipped to its first or last row, and where a mesh splits the vocabulary all of them are looked up as zeros.

    `jax.jvp` and `jax.hessian` of this and of `loss` need `execution.attention` "xla" or "chunked"; the kernels that
    "auto" takes on TPUs and GPUs support only `jax.grad`.
    """
    return unembed(hidden(params, tokens, cfg, **fields), output_table(params), soft_cap=cfg.logit_soft_cap)


def loss(
    params: Params,
    batch: Batch,
    cfg: ModelConfig,
    loss_cfg: LossConfig,
    rng: Array | None = None,
    execution: Execution = DEFAULT_EXECUTION,
    frozen: Any = None,
) -> tuple[Sums, Sums]:
    """(objective, metrics) of a batch; see `types.Model`."""
    of, sharding, terms = projection(params, batch, cfg, rng, execution)
    targets, weights = sharding.shard(batch.targets), sharding.shard(batch.weights)
    out = token_loss(of.hidden, of.table, targets, weights, soft_cap=of.soft_cap, **vars(loss_cfg))
    objective = {"loss": (out.total, out.weight)} | with_weights(terms, batch, cfg)
    return objective, token_metrics(out, sharding)


def projection(
    params: Params, batch: Batch, cfg: ModelConfig, rng: Array | None, execution: Execution
) -> tuple[VocabularyProjection, RowSharding, Terms]:
    """What the logits of a batch are made of; see `Family.projection`."""
    x, sharding, terms = hidden_sharded(
        params,
        batch.tokens,
        cfg,
        positions=batch.positions,
        segments=batch.segments,
        prefix=(batch.inputs or {}).get("prefix"),
        rng=rng,
        execution=execution,
    )
    return VocabularyProjection(x, output_table(params), soft_cap=cfg.logit_soft_cap), sharding, terms


def with_weights(terms: dict[str, Array], batch: Batch, cfg: ModelConfig) -> Sums:
    """The terms that blocks add to the objective, with their weights."""
    weights = term_weights(cfg, batch.segments)
    return {name: (total, weights[name]) for name, total in terms.items()}


def weights(batch: Batch, cfg: ModelConfig) -> dict[str, Array]:
    """The weights of `loss`'s objective, without running the model."""
    return {"loss": jnp.sum(batch.weights), **term_weights(cfg, batch.segments)}


def head_flops(cfg: ModelConfig) -> float:
    """Operations of the vocabulary projection at one position, forward."""
    return 2 * cfg.width * (cfg.vocab_size or 0)
