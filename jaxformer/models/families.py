"""THE table of families of models, and what training and the programs need of each.

A config file adds a family of its own with one line, `FAMILIES["mine"] = Family(...)`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import DataConfig, ModelConfig, Permutation, registry
from jaxformer.config.registry import FamilyTraits, Registry
from jaxformer.functional.block import Terms
from jaxformer.functional.losses import VocabularyProjection
from jaxformer.functional.sublayers import MIXERS
from jaxformer.models import (
    backbone,
    bert,
    choice_head,
    classification_heads,
    encoder_decoder,
    funnel,
    gpt,
    regression_head,
    span_head,
    transformer_xl,
    xlnet,
)
from jaxformer.models.layer_flops import LayerFlops, layer_flops
from jaxformer.models.task_head import TaskHead, with_head
from jaxformer.parallel.pipeline import RowSharding
from jaxformer.types import Array, Batch, Sums


def token_batch_spec(cfg: ModelConfig, data: DataConfig, rows: int) -> Batch:
    """The batch of families that read nothing but tokens; see `Family.batch_spec`."""
    ids = jax.ShapeDtypeStruct((rows, cfg.context_length), jnp.int32)
    return Batch(ids, ids, jax.ShapeDtypeStruct(ids.shape, jnp.float32), ids, ids)


def gpt_batch_spec(cfg: ModelConfig, data: DataConfig, rows: int) -> Batch:
    """The batch of a GPT, with the tokens of prefixes where the objective has those; see `Family.batch_spec`."""
    batch = token_batch_spec(cfg, data, rows)
    if data.objective != "prefix_lm":
        return batch
    return batch._replace(inputs={"prefix": jax.ShapeDtypeStruct(batch.tokens.shape, jnp.bool_)})


def bert_batch_spec(cfg: ModelConfig, data: DataConfig, rows: int) -> Batch:
    """The batch of a BERT, with sentence types and labels where rows are pairs; see `Family.batch_spec`."""
    batch = token_batch_spec(cfg, data, rows)
    if not data.pairs:
        return batch
    return batch._replace(inputs={"token_types": batch.tokens, "pair_labels": jax.ShapeDtypeStruct((rows,), jnp.int32)})


def permutation_batch_spec(cfg: ModelConfig, data: DataConfig, rows: int) -> Batch:
    """The batch of an XLNet, with the order of each row and the places that are predicted; see `Family.batch_spec`."""
    batch = token_batch_spec(cfg, data, rows)
    number = (data.permutation or Permutation()).number(cfg.context_length)
    places = jax.ShapeDtypeStruct((rows, number), jnp.int32)
    return batch._replace(inputs={"order": batch.tokens, "predicted": places})


def recurrence_batch_spec(cfg: ModelConfig, data: DataConfig, rows: int) -> Batch:
    """The batch of a Transformer-XL, with the tokens before each row; see `Family.batch_spec`."""
    ids = jax.ShapeDtypeStruct((rows, cfg.memory or 0), jnp.int32)
    return token_batch_spec(cfg, data, rows)._replace(inputs=dict.fromkeys(transformer_xl.MEMORY, ids))


def pair_batch_spec(cfg: ModelConfig, data: DataConfig, rows: int) -> Batch:
    """The batch of families that read a source beside the target; see `Family.batch_spec`."""
    assert cfg.encoder is not None
    ids = jax.ShapeDtypeStruct((rows, cfg.encoder.source_length), jnp.int32)
    names = ("source_tokens", "source_positions", "source_segments")
    return token_batch_spec(cfg, data, rows)._replace(inputs=dict.fromkeys(names, ids))


def no_frozen(cfg: ModelConfig) -> None:
    """For families whose loss reads nothing but its trained parameters."""


class Family(NamedTuple):
    """One family of models.

    Attributes:
      traits: what configs know of it.
      specs: ``cfg -> tree of ParamSpec``; the blocks, stacked on a layer axis, under the name "blocks".
      apply: ``(params, tokens [B, T], cfg, **fields) -> logits [B, T, V]``; fields: positions, segments, rng,
        execution, and those of `Batch.inputs`.
      loss: ``(params, batch, cfg, loss_cfg, rng, execution, frozen) -> (objective, metrics)``, see `types.Model`.
      weights: ``(batch, cfg) -> {name: weight}``, see `types.Model`.
      batch_spec: ``(cfg, data, rows) -> Batch`` of `jax.ShapeDtypeStruct`: what it is trained on.
      head_flops: ``cfg -> float``: operations of the head at a position whose logits are needed, forward.
      layer_flops: as `layer_flops.layer_flops`.
      tasks: which programs can use it: "generate" (through `decode`, with the head of `gpt.output_table`), "fill_mask"
        (through `masked_states`, with that head and its bias).
      decode: as `backbone.decode`.
      encode: ``(params, tokens [B, S], lengths [B], cfg) -> backbone.EncodedSource``: what decoding reads of sources
        padded on the right; None: the family reads none.
      frozen: ``cfg -> tree of ParamSpec`` of arrays that the loss reads and nobody updates, or None.
      predict: as `loss`; returns the metrics, and predictions: arrays with the rows first, by name; None: none.
      masked_states: as `bert.masked_states`; None: the family restores no masked tokens.
      projection: ``(params, batch, cfg, rng, execution) -> (VocabularyProjection, RowSharding, terms)``: what the
        logits of the objective are made of, for teachers and students; None: the family can be neither.
    """

    traits: FamilyTraits
    specs: Callable[[ModelConfig], dict[str, Any]]
    apply: Callable[..., Array]
    loss: Callable[..., tuple[Sums, Sums]]
    weights: Callable[[Batch, ModelConfig], dict[str, Array]]
    batch_spec: Callable[[ModelConfig, DataConfig, int], Batch] = token_batch_spec
    head_flops: Callable[[ModelConfig], float] = gpt.head_flops
    tasks: tuple[str, ...] = ()
    layer_flops: Callable[[ModelConfig, int, float, str], LayerFlops] = layer_flops
    decode: Callable[..., tuple[Array, list[Any]]] = backbone.decode
    frozen: Callable[[ModelConfig], Any] = no_frozen
    encode: Callable[..., backbone.EncodedSource] | None = None
    predict: Callable[..., tuple[Sums, dict[str, Array]]] | None = None
    masked_states: Callable[..., Array] | None = None
    projection: Callable[..., tuple[VocabularyProjection, RowSharding, Terms]] | None = None


# The head of each task, by the objective that it is for; see `models.task_head`.
HEADS: Registry[TaskHead] = Registry("model.head.task", {}, {
    "sequence_classification": classification_heads.SEQUENCE,
    "token_classification": classification_heads.TOKEN,
    "regression": regression_head.VALUE,
    "extractive_qa": span_head.SPAN,
    "multiple_choice": choice_head.CHOICE,
})  # fmt: skip
FAMILIES: Registry[Family] = Registry("model.family", registry.FAMILIES, {
    "gpt": Family(
        registry.FAMILIES["gpt"], gpt.specs, gpt.apply, gpt.loss, gpt.weights, gpt_batch_spec, tasks=("generate",),
        projection=gpt.projection,
    ),
    "bert": Family(
        registry.FAMILIES["bert"], bert.specs, bert.apply, bert.loss, bert.weights, bert_batch_spec, bert.head_flops,
        tasks=("fill_mask",), masked_states=bert.masked_states, projection=bert.projection,
    ),
    "xlnet": Family(
        registry.FAMILIES["xlnet"], xlnet.specs, xlnet.apply, xlnet.loss, xlnet.weights, permutation_batch_spec,
        layer_flops=xlnet.layer_flops,
    ),
    "transformer_xl": Family(
        registry.FAMILIES["transformer_xl"], transformer_xl.specs, transformer_xl.apply, transformer_xl.loss,
        transformer_xl.weights, recurrence_batch_spec, tasks=("generate",), layer_flops=transformer_xl.layer_flops,
    ),
    "funnel": Family(
        registry.FAMILIES["funnel"], funnel.specs, funnel.apply, funnel.loss, gpt.weights, bert_batch_spec,
        tasks=("fill_mask",), masked_states=funnel.masked_states,
    ),
    "encoder_decoder": Family(
        registry.FAMILIES["encoder_decoder"], encoder_decoder.specs, encoder_decoder.apply, encoder_decoder.loss,
        encoder_decoder.weights, pair_batch_spec, tasks=("generate",), encode=encoder_decoder.encode,
    ),
    "recurrent": Family(
        registry.FAMILIES["recurrent"], gpt.specs, gpt.apply, gpt.loss, gpt.weights, tasks=("generate",)
    ),
    "recurrent_seq2seq": Family(
        registry.FAMILIES["recurrent_seq2seq"], encoder_decoder.specs, encoder_decoder.apply, encoder_decoder.loss,
        encoder_decoder.weights, pair_batch_spec, tasks=("generate",), encode=encoder_decoder.encode,
    ),
})  # fmt: skip


def families_for(task: str) -> list[str]:
    """Names of the families that can do a task, "generate" or "fill_mask"."""
    return [name for name, family in FAMILIES.items() if task in family.tasks]


def tasks_of(cfg: ModelConfig) -> list[str]:
    """What programs can do with a model: the tasks of its family, without "generate" if its mixer cannot decode."""
    decodes = MIXERS[cfg.attention.kind].init_cache is not None and cfg.attention.cannot_decode is None
    return [task for task in family_of(cfg).tasks if decodes or task != "generate"]


def family_of(cfg: ModelConfig) -> Family:
    """The family of a model, with the head of its task where it has one. Raises ConfigError: there is no such one."""
    family = FAMILIES[cfg.family]
    return family if cfg.head is None else with_head(family, HEADS[str(cfg.head.task)])
