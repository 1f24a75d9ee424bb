"""GPT: a causal Transformer over tokens. GPT-2 and Llama are settings of one `ModelConfig`.

>>> import jax
>>> from jaxformer.specs import init_params
>>> cfg = ModelConfig(num_layers=2, width=32, context_length=16, vocab_size=64)
>>> params = init_params(specs(cfg), jax.random.key(0))
>>> apply(params, jnp.zeros((1, 16), int), cfg).shape
(1, 16, 64)
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxformer import masks
from jaxformer.config import Execution, LossConfig, ModelConfig
from jaxformer.functional import layers
from jaxformer.functional.block import AS_USUAL, LayerCache, block_specs, rotation, stack
from jaxformer.functional.layer import norm, norm_specs
from jaxformer.functional.losses import TokenLoss, token_loss
from jaxformer.models import embedding
from jaxformer.parallel.context import SequenceSharding
from jaxformer.specs import ParamSpec, stack_specs
from jaxformer.types import Array, Batch, Params, Sums


def specs(cfg: ModelConfig) -> dict[str, Any]:
    """Every parameter of the model, by group: embedding, blocks, final_norm (not post_norm), head (if not tied)."""
    tree: dict[str, Any] = {
        "embedding": embedding.specs(cfg),
        "blocks": stack_specs(block_specs(cfg), cfg.num_layers),
    }
    if cfg.block != "post_norm":
        tree["final_norm"] = norm_specs(cfg)
    if not cfg.tie_embeddings:
        shape = (embedding.vocab(cfg), cfg.width)
        tree["head"] = {"table": ParamSpec(shape, ("vocab", "embed"), embedding.table_init(cfg))}
    return tree


def hidden(params: Params, tokens: Array, cfg: ModelConfig, **fields) -> Array:
    """The last hidden states, after the final norm.

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
    rng: Array | None = None,
    execution: Execution = AS_USUAL,
) -> tuple[Array, SequenceSharding]:
    """`hidden`, with rows cut into parts as the mesh in use cuts them.

    Args:
      params: as in `specs(cfg)`.
      tokens: [B, T] int.
      cfg: the model.
      positions: [B, T] int, position in the document; None: 0, 1, 2, ...
      segments: [B, T] int, document of each token; None: one document per row.
      rng: dropout; None: nothing is dropped.
      execution: how it is computed, not what.

    Returns:
      [parts * B, T / parts, D] in the compute dtype, and the cut; [B, T, D] where the mesh has no context axis.
    """
    cut, mask, tokens, positions = embedding.shard_rows(tokens, positions, segments, cfg)
    rngs = (None, None) if rng is None else jax.random.split(rng)
    x = embedding.embed(params["embedding"], tokens, positions, cfg, rngs[0])
    bias = embedding.score_bias(params["embedding"], cfg, mask)
    rotate = rotation(cfg, positions)
    x, _ = stack(params["blocks"], x, cfg, mask, rotate=rotate, bias=bias, rng=rngs[1], execution=execution)
    return (norm(params["final_norm"], x, cfg) if "final_norm" in params else x), cut


def output_table(params: Params) -> Array:
    """The [V, D] table that turns hidden states into logits: the head's, or the embedding's if tied."""
    return params["head"]["table"] if "head" in params else params["embedding"]["tokens"]


def apply(params: Params, tokens: Array, cfg: ModelConfig, **fields) -> Array:
    """Logits of the next token, [B, T, V] float32. Arguments as in `hidden`.

    `jax.jvp` and `jax.hessian` go through this and through `loss`, with `execution.attention` "xla" or "chunked": the
    kernels that "auto" takes on TPUs and GPUs have `jax.grad` alone.
    """
    return layers.unembed(hidden(params, tokens, cfg, **fields), output_table(params))


def loss(
    params: Params,
    batch: Batch,
    cfg: ModelConfig,
    loss_cfg: LossConfig,
    rng: Array | None = None,
    execution: Execution = AS_USUAL,
) -> tuple[Sums, Sums]:
    """(objective, metrics) of a batch; see `types.Model`."""
    x, cut = hidden_sharded(
        params, batch.tokens, cfg, positions=batch.positions, segments=batch.segments, rng=rng, execution=execution
    )
    targets, weights = cut.shard(batch.targets), cut.shard(batch.weights)
    out = token_loss(x, output_table(params), targets, weights, **loss_options(loss_cfg))
    return {"loss": (out.total, out.weight)}, token_metrics(out, cut)


def loss_options(cfg: LossConfig) -> dict[str, Any]:
    """The keyword arguments of `token_loss` that a LossConfig holds."""
    return {"label_smoothing": cfg.label_smoothing, "z_loss": cfg.z_loss, "chunk_tokens": cfg.chunk_tokens}


def token_metrics(out: TokenLoss, cut: SequenceSharding) -> Sums:
    """Per-row sums of negative log-likelihood and accuracy."""
    nll, correct, weight = (cut.sum_shards(x) for x in (out.nll_rows, out.correct_rows, out.weight_rows))
    return {"loss": (nll, weight), "accuracy": (correct, weight)}


def weights(batch: Batch) -> dict[str, Array]:
    """The weights of `loss`'s objective, without running the model."""
    return {"loss": jnp.sum(batch.weights)}


def step(
    params: Params, tokens: Array, cfg: ModelConfig, cache: list[LayerCache], mask: masks.Mask, positions: Array
) -> tuple[Array, list[LayerCache]]:
    """Hidden states of some more tokens, given the cache of those before; what `decoding` is made of.

    Args:
      params, cfg: the model; params["blocks"] stacked or a list (see `stack`).
      tokens: [B, T] int, the new tokens.
      cache: one for each layer; empty ones if nothing came before.
      mask: over [T, S], S the slots of the cache (T if empty).
      positions: [T] or [B, T] int, of the new tokens.

    Returns:
      [B, T, D] hidden states after the final norm, and the cache with the new tokens in it.
    """
    x = embedding.embed(params["embedding"], tokens, positions, cfg, None)
    bias = embedding.score_bias(params["embedding"], cfg, mask)
    x, cache = stack(params["blocks"], x, cfg, mask, rotate=rotation(cfg, positions), bias=bias, cache=cache)
    return (norm(params["final_norm"], x, cfg) if "final_norm" in params else x), cache
