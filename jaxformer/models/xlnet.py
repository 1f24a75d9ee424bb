"""XLNet: permutation language modelling by two streams of attention.

Every token is predicted from those before it in an order that is drawn anew for every row, so the model learns to use
tokens on both sides, and no token is hidden. The content stream sees a token and those before it in the order. The
query stream predicts a token: it knows where it stands, and sees what the content stream holds of those before it. Only
the last tokens of the order are predicted, and only they have a query stream.

Source: Yang et al. 2019, "XLNet", sections 2.2 to 2.4.

>>> import jax
>>> from jaxformer.config import from_mapping
>>> from jaxformer.specs import abstract_params
>>> model = {"family": "xlnet", "positions": "relative", "num_layers": 1, "width": 32, "vocab_size": 64}
>>> cfg = from_mapping({"model": model, "data": {"objective": "permutation"}}).model
>>> jax.eval_shape(lambda p: apply(p, jnp.zeros((1, 16), int), cfg), abstract_params(specs(cfg))).shape
(1, 16, 64)
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import Execution, LossConfig, ModelConfig
from jaxformer.functional.block import Terms, block, stack
from jaxformer.functional.layer import Context, KeyInput
from jaxformer.functional.layers import unembed
from jaxformer.functional.losses import token_loss
from jaxformer.masks import Mask
from jaxformer.models import backbone, embedding, gpt
from jaxformer.models.backbone import DEFAULT_EXECUTION
from jaxformer.models.layer_flops import LayerFlops, key_products
from jaxformer.models.layer_flops import layer_flops as flops_of_layers
from jaxformer.parallel.constraints import constrain
from jaxformer.parallel.context import SequenceSharding
from jaxformer.specs import ParamSpec, normal, zeros
from jaxformer.types import Array, Batch, Params, Sums


def specs(cfg: ModelConfig) -> dict[str, Any]:
    """Every parameter of the model, by group: of `backbone.specs`, query (with which a query stream begins), head."""
    tree = backbone.specs(cfg)
    tree["query"] = {"start": ParamSpec((cfg.width,), ("norm",), normal(0.02), "bias")}
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
    order: Array | None = None,
    predicted: Array | None = None,
    rng: Array | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> tuple[Array, Terms]:
    """The query stream of some tokens, after the final norm.

    Args:
      params: as in `specs(cfg)`.
      tokens: [B, T] int.
      cfg: the model.
      positions, segments: as of `backbone.hidden_sharded`.
      order: [B, T] int, at least 0: a token sees those of a smaller number, its content stream also those of its own;
        0: context, which is not predicted. None: 1 to T, from left to right.
      predicted: [B, P] int, the places of the tokens that have a query stream; None: all of them.
      rng: for dropout; None: nothing is dropped.
      execution: how it is computed, not what.

    Returns:
      [B, P, D] in the compute dtype, and the terms that the blocks add to the objective.
    """
    batch, length = tokens.shape
    if order is None:
        order = jnp.broadcast_to(jnp.arange(1, length + 1), (batch, length))
    places = jnp.broadcast_to(jnp.arange(length), (batch, length)) if predicted is None else predicted
    rows = embedding.shard_rows(tokens, positions, segments, cfg)
    assert rows.sharding.parts == 1  # `config` refuses another mesh

    def at_places(x: Array | None) -> Any:
        return None if x is None else jnp.take_along_axis(x, places, axis=1)

    content = Mask(causal=True, query_index=order, key_index=order, query_segments=segments, key_segments=segments)
    asking = replace(content, query_index=at_places(order) - 1, query_segments=at_places(segments))
    layers = functools.partial(two_streams, params["query"]["start"], asking, places)
    x, terms = backbone.over_rows(params, rows._replace(mask=content), cfg, rng, execution, layers=layers)
    return x, terms


def two_streams(
    start: Array, mask: Mask, places: Array, params: Params, x: Array, cfg: ModelConfig, contexts: Sequence[Context]
) -> tuple[Array, None, Terms]:
    """All layers, each applied to both streams; as `block.stack`.

    Args:
      start: [D], what a query stream begins with.
      mask: which of the tokens a query stream sees.
      places: [B, P] int, its places in the row.
      params, x, cfg, contexts: as of `block.stack`, one context, of the content stream.

    Returns:
      The query stream [B, P, D], no cache, and terms of the objective.
    """

    (whole,) = contexts

    def layer(params: Params, streams: tuple[Array, Array], cfg: ModelConfig, context: Context) -> Any:
        held, asking = streams
        rngs = (None, None) if context.rng is None else jax.random.split(context.rng)
        new, _, terms = block(params, held, cfg, context._replace(rng=rngs[0]))
        reading = context._replace(mask=mask, key_input=KeyInput(held, places), rng=rngs[1])
        asking, _, more = block(params, asking, cfg, reading)
        return (new, asking), None, {name: value + more[name] for name, value in terms.items()}

    begun = constrain(jnp.broadcast_to(start.astype(x.dtype), (*places.shape, cfg.width)), "rows", None, None)
    (_, asking), _, terms = stack(params, (x, begun), cfg, whole, layer)
    return asking, None, terms


def apply(params: Params, tokens: Array, cfg: ModelConfig, **fields) -> Array:
    """Logits of each token from those before it in the order, [B, P, V] float32. Arguments as in `hidden`.

    Forward mode: see `gpt.apply`.
    """
    x, _ = hidden(params, tokens, cfg, **fields)
    return unembed(x, gpt.output_table(params), params["head"]["bias"])


def loss(
    params: Params,
    batch: Batch,
    cfg: ModelConfig,
    loss_cfg: LossConfig,
    rng: Array | None = None,
    execution: Execution = DEFAULT_EXECUTION,
    frozen: Any = None,
) -> tuple[Sums, Sums]:
    """(objective, metrics) of a batch with order and predicted among its inputs; see `types.Model`."""
    inputs = batch.inputs or {}
    x, terms = hidden(
        params,
        batch.tokens,
        cfg,
        positions=batch.positions,
        segments=batch.segments,
        order=inputs["order"],
        predicted=inputs["predicted"],
        rng=rng,
        execution=execution,
    )
    targets, counted = (jnp.take_along_axis(a, inputs["predicted"], axis=1) for a in (batch.targets, batch.weights))
    out = token_loss(x, gpt.output_table(params), targets, counted, params["head"]["bias"], **vars(loss_cfg))
    # Every layer has two streams: terms are means over the tokens of both.
    both = (batch.tokens.size + targets.size) / batch.tokens.size
    weights = gpt.with_weights(terms, batch, cfg)
    objective = {name: (total / both, weight) for name, (total, weight) in weights.items()}
    return {"loss": (out.total, out.weight)} | objective, backbone.token_metrics(out, SequenceSharding())


weights = gpt.weights


def layer_flops(cfg: ModelConfig, length: int, share: float, remat_policy: str) -> LayerFlops:
    """As `layer_flops.layer_flops`: the last layer's content stream makes keys and values only, and a query stream, of
    the predicted tokens, makes none."""
    one = flops_of_layers(cfg, length, share, remat_policy)
    times = 1 - 1 / cfg.num_layers + share
    of_keys = key_products(cfg) * (1 - share * cfg.num_layers)
    return LayerFlops(times * one.projections + of_keys, *(times * each for each in one[1:4]))
