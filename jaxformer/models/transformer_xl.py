"""Transformer-XL: a causal Transformer whose rows go on from a memory, the states of the M tokens before them.

In every layer, queries of the row's T tokens see keys and values of the memory and of the row. The memory runs through
the same layers, and no gradient goes through it. It is computed from the M tokens that lie before the row, which are
part of the batch: so a batch is a pure function of its number, and a run goes on without a state. (The published
program carries the states over from one step to the next instead; they then go back further, and belong to older
weights.)

Source: Dai et al. 2019, "Transformer-XL", section 3.2.

>>> import jax
>>> from jaxformer.config import ModelConfig, Relative
>>> from jaxformer.specs import abstract_params
>>> cfg = ModelConfig("transformer_xl", 1, 32, 16, 64, memory=8, positions=Relative())
>>> params, tokens, before = abstract_params(specs(cfg)), jnp.zeros((1, 16), int), jnp.ones((1, 8), int)
>>> jax.eval_shape(lambda p: apply(p, tokens, cfg, memory_tokens=before), params).shape
(1, 16, 64)
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from jaxformer.config import Execution, LossConfig, ModelConfig
from jaxformer.functional.block import Terms, block, stack
from jaxformer.functional.layer import Context, KeyInput
from jaxformer.functional.layers import unembed
from jaxformer.functional.losses import token_loss
from jaxformer.masks import crop
from jaxformer.models import backbone, embedding, gpt
from jaxformer.models.backbone import DEFAULT_EXECUTION
from jaxformer.models.layer_flops import LayerFlops, key_products
from jaxformer.models.layer_flops import layer_flops as flops_of_layers
from jaxformer.parallel.context import SequenceSharding
from jaxformer.types import Array, Batch, Params, Sums

MEMORY = ("memory_tokens", "memory_positions", "memory_segments")  # of `Batch.inputs`
specs = gpt.specs
weights = gpt.weights


def hidden(
    params: Params,
    tokens: Array,
    cfg: ModelConfig,
    *,
    positions: Array | None = None,
    segments: Array | None = None,
    memory_tokens: Array | None = None,
    memory_positions: Array | None = None,
    memory_segments: Array | None = None,
    rng: Array | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> tuple[Array, Terms]:
    """The last hidden states of a row, after the final norm.

    Args:
      params: as in `specs(cfg)`.
      tokens: [B, T] int.
      cfg: the model.
      positions, segments: [B, T] int, as of `backbone.hidden_sharded`.
      memory_tokens, memory_positions, memory_segments: [B, M] int, of the tokens just before the row; segments are
        numbered as the row's. None: there is no memory; or, of positions and segments, where the row's are None.
      rng: for dropout; None: nothing is dropped.
      execution: how it is computed, not what.

    Returns:
      [B, T, D] in the compute dtype, and the terms that the blocks add to the objective.
    """
    if memory_tokens is None:
        rows = embedding.shard_rows(tokens, positions, segments, cfg)
        return backbone.over_rows(params, rows, cfg, rng, execution)

    def whole(before: Array | None, own: Array | None) -> Array | None:
        return None if before is None or own is None else jnp.concatenate([before, own], axis=1)

    both = jnp.concatenate([memory_tokens, tokens], axis=1)
    rows = embedding.shard_rows(both, whole(memory_positions, positions), whole(memory_segments, segments), cfg)
    assert rows.sharding.parts == 1  # `config` refuses another mesh
    layers = functools.partial(with_memory, memory_tokens.shape[1])
    return backbone.over_rows(params, rows, cfg, rng, execution, layers=layers)


def with_memory(
    length: int, params: Params, x: Array, cfg: ModelConfig, contexts: Sequence[Context]
) -> tuple[Array, None, Terms]:
    """All layers over a row and the memory before it; as `block.stack`.

    Args:
      length: M, tokens of the memory.
      params, cfg, contexts: as of `block.stack`, one context, of memory and row together.
      x: [B, M + T, D].

    Returns:
      The row's states [B, T, D], no cache, and terms of the objective.
    """
    (context,) = contexts
    total, mask, rotation = x.shape[1], context.mask, context.rotation
    assert mask is not None
    before, own = slice(0, length), slice(length, total)
    if rotation is not None:
        cos, sin = (angles[..., before, :] for angles in (rotation.cos, rotation.sin))
        rotation = rotation._replace(cos=cos, sin=sin)
    first = replace(crop(mask, total, total, before, before), query_index=None, key_index=None)
    remembered = context._replace(mask=first, rotation=rotation, rng=None)
    bias = context.bias if context.bias is None else Partial(_later, context.bias, jnp.asarray(length))
    reading = context._replace(mask=crop(mask, total, total, own, slice(0, total)), bias=bias)

    def layer(params: Params, streams: tuple[Array, Array], cfg: ModelConfig, context: Context) -> Any:
        memory, x = jax.lax.stop_gradient(streams[0]), streams[1]
        new, _, _ = block(jax.lax.stop_gradient(params), memory, cfg, remembered)
        keys = KeyInput(jnp.concatenate([memory, x], axis=1))
        x, _, terms = block(params, x, cfg, reading._replace(key_input=keys, rng=context.rng))
        return (new, x), None, terms

    (_, x), _, terms = stack(params, (x[:, before], x[:, own]), cfg, context, layer)
    return x, None, terms


def _later(bias: Any, length: Array, query_place: Array, key_place: Array) -> Array:
    """The bias of queries that begin behind the memory."""
    return bias(query_place + length, key_place)


def apply(params: Params, tokens: Array, cfg: ModelConfig, **fields) -> Array:
    """Logits of the next token, [B, T, V] float32. Arguments as in `hidden`.

    Forward mode: see `gpt.apply`.
    """
    x, _ = hidden(params, tokens, cfg, **fields)
    return unembed(x, gpt.output_table(params), soft_cap=cfg.logit_soft_cap)


def loss(
    params: Params,
    batch: Batch,
    cfg: ModelConfig,
    loss_cfg: LossConfig,
    rng: Array | None = None,
    execution: Execution = DEFAULT_EXECUTION,
    frozen: Any = None,
) -> tuple[Sums, Sums]:
    """(objective, metrics) of a batch with the `MEMORY` among its inputs; see `types.Model`."""
    memory = {name: x for name, x in (batch.inputs or {}).items() if name in MEMORY}
    fields = {"positions": batch.positions, "segments": batch.segments, **memory}
    x, terms = hidden(params, batch.tokens, cfg, rng=rng, execution=execution, **fields)
    out = token_loss(
        x, gpt.output_table(params), batch.targets, batch.weights, soft_cap=cfg.logit_soft_cap, **vars(loss_cfg)
    )
    objective = {"loss": (out.total, out.weight)} | gpt.with_weights(terms, batch, cfg)
    return objective, backbone.token_metrics(out, SequenceSharding())


def layer_flops(cfg: ModelConfig, length: int, share: float, remat_policy: str) -> LayerFlops:
    """As `layer_flops.layer_flops`: the row's tokens see the memory too, and the memory runs through all layers but the
    last."""
    memory = cfg.memory or 0
    each = memory / length  # for each token of the row
    own = flops_of_layers(cfg, length + memory, share, remat_policy)
    before = flops_of_layers(cfg, memory, share, "none")
    of_keys = each * cfg.num_layers * key_products(cfg)
    frozen = each * (1 - 1 / cfg.num_layers) * sum(before[:3])
    return own._replace(projections=own.projections + of_keys, frozen=frozen)
