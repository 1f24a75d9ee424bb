"""Funnel-Transformer: a bidirectional model that pools its tokens between blocks, and restores masked ones.

Each block but the first begins with half as many tokens: the mean of two neighbours attends, as a query, to the tokens
that were there before. At the end the last block's tokens are repeated, the first block's are added, and a decoder of
few layers runs over all of them again.

Source: Dai et al. 2020, section 2.

>>> import jax
>>> from jaxformer.config import FunnelAttention, NoPositions
>>> from jaxformer.specs import abstract_params
>>> cfg = ModelConfig(family="funnel", attention=FunnelAttention(), positions=NoPositions(), block="post_norm",
...                   num_layers=5, width=32, context_length=16, vocab_size=64)
>>> params = abstract_params(specs(cfg))
>>> jax.eval_shape(lambda p, tokens: apply(p, tokens, cfg), params, jnp.zeros((1, 16), int)).shape
(1, 16, 64)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer import masks
from jaxformer.config import Execution, LossConfig, ModelConfig, stacks_of
from jaxformer.functional import layers
from jaxformer.functional.block import Terms, stack
from jaxformer.functional.funnel_layer import Side
from jaxformer.functional.layer import Context, norm
from jaxformer.functional.masked_loss import masked_token_loss
from jaxformer.functional.pooling import first_of_pairs, mean_pool, repeat_pooled
from jaxformer.functional.relative_terms import Places
from jaxformer.models import backbone, embedding, gpt
from jaxformer.models.backbone import DEFAULT_EXECUTION, token_metrics
from jaxformer.parallel.context import SequenceSharding
from jaxformer.specs import ParamSpec, zeros
from jaxformer.types import Array, Batch, Params, Sums


class Pooled(NamedTuple):
    """Tokens, pooled some times: [B, T, D], their documents [B, T] or None, and what attention looks at."""

    x: Array
    segments: Array | None
    side: Side


def specs(cfg: ModelConfig) -> dict[str, Any]:
    """Every parameter of the model, by group: embedding, embedding_norm, blocks (all layers, the decoder's last) and
    head."""
    tree = backbone.specs(cfg, embedding_norm=True)
    tree["head"] = {"bias": ParamSpec((embedding.vocab(cfg),), ("vocab",), zeros, "bias")}
    if not cfg.tie_embeddings:
        tree["head"]["table"] = embedding.output_table_spec(cfg)
    return tree


def hidden(
    params: Params,
    tokens: Array,
    cfg: ModelConfig,
    *,
    positions: Array | None = None,
    segments: Array | None = None,
    token_types: Array | None = None,
    rng: Array | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> tuple[Array, Terms]:
    """The decoder's last hidden states [B, T, D] in the compute dtype, and the terms that layers add to the objective.

    Arguments as of `backbone.hidden_sharded`; positions are not read, distances count from the start of the row.

    Raises:
      ValueError: a number of tokens that cannot be halved between all blocks.
    """
    parts, pooled = stacks_of(cfg), len(cfg.funnel.layers(cfg.num_layers)) - 1
    length, first = tokens.shape[1], cfg.funnel.separate_cls
    if length % 2**pooled:
        raise ValueError(f"funnel: rows of {length} tokens; accepted: multiples of {2**pooled}")
    rngs = [None] * (len(parts) + 1) if rng is None else list(jax.random.split(rng, len(parts) + 1))
    x = embedding.embed(params["embedding"], tokens, jnp.arange(length), cfg)
    x = layers.dropout(norm(params["embedding_norm"], x, cfg), cfg.dropout, rngs[0])
    types = jnp.zeros_like(tokens) if token_types is None else token_types
    start = Pooled(x, segments, _side(types, 0, first))
    rows, level, kept, terms = start, 0, None, Terms()
    own = _split(params["blocks"], [part.num_layers for part in parts])
    for number, part in enumerate(parts):
        before = rows
        if part.pools:
            level, kept = level + 1, kept or rows
            of_pairs = [None if a is None else first_of_pairs(a, first) for a in (rows.segments, rows.side.types)]
            rows = Pooled(mean_pool(rows.x, rows.segments, first), of_pairs[0], _side(of_pairs[1], level, first))
        elif number == len(parts) - 1:
            up = repeat_pooled(rows.x, length, segments, rows.segments, first)
            rows = before = start._replace(x=(kept or rows).x + up)
        mask = None
        if rows.segments is not None:
            mask = masks.segments(rows.segments, before.segments)
        context = Context(mask, rng=rngs[number + 1], execution=execution, sides=(rows.side, before.side))
        context = context._replace(source=before.x) if part.pools else context
        x, _, more = stack(own[number], rows.x, part, context)
        rows = rows._replace(x=x)
        terms = {name: value + terms.get(name, 0) for name, value in more.items()}
    return rows.x, terms


def _side(types: Array, level: int, separate_first: bool) -> Side:
    """Of tokens pooled `level` times: each stands where the first token of it does, a separate first one before all."""
    stride = 2**level
    places = Places(1 - stride if separate_first else 0, stride)
    return Side(places, types, jnp.arange(types.shape[1]) > 0 if separate_first else None)


def _split(tree: Params, sizes: list[int]) -> list[Params]:
    """The layers of each part; by `lax.split`, whose gradient is one concatenation."""
    leaves, structure = jax.tree.flatten(tree)
    split = [jax.lax.split(leaf, sizes, axis=0) for leaf in leaves]
    return [jax.tree.unflatten(structure, [parts[i] for parts in split]) for i in range(len(sizes))]


def masked_states(
    params: Params, tokens: Array, cfg: ModelConfig, rows: Array, positions: Array, **fields: Array | None
) -> Array:
    """[M, D]: what the vocabulary projection reads at some positions, as `bert.masked_states`; of rows of any length.

    They are padded to the context length, as in training: with a separate first token a full row's last tokens are left
    out, so a row's result would depend on how much it is padded.
    """
    length, pooled = tokens.shape[1], len(cfg.funnel.layers(cfg.num_layers)) - 1
    more = max(cfg.context_length, length + -length % 2**pooled) - length
    padded = {name: each if each is None else jnp.pad(each, ((0, 0), (0, more))) for name, each in fields.items()}
    return hidden(params, jnp.pad(tokens, ((0, 0), (0, more))), cfg, **padded)[0][rows, positions]


def apply(params: Params, tokens: Array, cfg: ModelConfig, **fields) -> Array:
    """Logits of the original token at every position, [B, T, V] float32. Arguments as of `hidden`."""
    return layers.unembed(hidden(params, tokens, cfg, **fields)[0], gpt.output_table(params), params["head"]["bias"])


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
    types = (batch.inputs or {}).get("token_types")
    x, terms = hidden(
        params, batch.tokens, cfg, segments=batch.segments, token_types=types, rng=rng, execution=execution
    )
    out = masked_token_loss(
        x, gpt.output_table(params), batch.targets, batch.weights, params["head"]["bias"], **vars(loss_cfg)
    )
    objective = {"loss": (out.total, out.weight)} | gpt.with_weights(terms, batch, cfg)
    return objective, token_metrics(out, SequenceSharding())
