"""THE table of families of models, and what training and the programs need of each.

A config file adds a family of its own with one line, `FAMILIES["mine"] = Family(...)`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import DataConfig, ModelConfig, registry
from jaxformer.config.registry import FamilyTraits, Registry
from jaxformer.functional.sublayers import MIXERS
from jaxformer.models import backbone, bert, gpt
from jaxformer.types import Array, Batch, Sums


def token_batch_spec(cfg: ModelConfig, data: DataConfig, rows: int) -> Batch:
    """The batch of families that read nothing but tokens; see `Family.batch_spec`."""
    ids = jax.ShapeDtypeStruct((rows, cfg.context_length), jnp.int32)
    return Batch(ids, ids, jax.ShapeDtypeStruct(ids.shape, jnp.float32), ids, ids)


def bert_batch_spec(cfg: ModelConfig, data: DataConfig, rows: int) -> Batch:
    """The batch of a BERT, with sentence types and labels where rows are pairs; see `Family.batch_spec`."""
    batch = token_batch_spec(cfg, data, rows)
    if not data.pairs:
        return batch
    return batch._replace(inputs={"token_types": batch.tokens, "pair_labels": jax.ShapeDtypeStruct((rows,), jnp.int32)})


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
      tasks: which programs can use it: "generate" (through `decode`, with the head of `gpt.output_table`), "fill_mask"
        (with BERT's heads).
      decode: as `backbone.decode`.
      frozen: ``cfg -> tree of ParamSpec`` of arrays that the loss reads and nobody updates, or None.
    """

    traits: FamilyTraits
    specs: Callable[[ModelConfig], dict[str, Any]]
    apply: Callable[..., Array]
    loss: Callable[..., tuple[Sums, Sums]]
    weights: Callable[[Batch, ModelConfig], dict[str, Array]]
    batch_spec: Callable[[ModelConfig, DataConfig, int], Batch] = token_batch_spec
    head_flops: Callable[[ModelConfig], float] = gpt.head_flops
    tasks: tuple[str, ...] = ()
    decode: Callable[..., tuple[Array, list[Any]]] = backbone.decode
    frozen: Callable[[ModelConfig], Any] = no_frozen


FAMILIES: Registry[Family] = Registry("model.family", registry.FAMILIES, {
    "gpt": Family(registry.FAMILIES["gpt"], gpt.specs, gpt.apply, gpt.loss, gpt.weights, tasks=("generate",)),
    "bert": Family(
        registry.FAMILIES["bert"], bert.specs, bert.apply, bert.loss, bert.weights, bert_batch_spec, bert.head_flops,
        tasks=("fill_mask",),
    ),
})  # fmt: skip


def families_for(task: str) -> list[str]:
    """Names of the families that can do a task, "generate" or "fill_mask"."""
    return [name for name, family in FAMILIES.items() if task in family.tasks]


def tasks_of(cfg: ModelConfig) -> list[str]:
    """What programs can do with a model: the tasks of its family, without "generate" if its mixer keeps no cache."""
    decodes = MIXERS[cfg.attention.kind].init_cache is not None
    return [task for task in family_of(cfg).tasks if decodes or task != "generate"]


def family_of(cfg: ModelConfig) -> Family:
    """The family of a model. Raises ConfigError: there is no such family."""
    return FAMILIES[cfg.family]
