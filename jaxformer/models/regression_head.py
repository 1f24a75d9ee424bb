"""The head of regression: one number for each example, read where `classification_heads` reads a label; the loss is the
squared error."""

import jax
import jax.numpy as jnp

from jaxformer.config import LossConfig, ModelConfig
from jaxformer.models import task_head
from jaxformer.models.classification_heads import pooled_flops, pooled_outputs, pooled_specs
from jaxformer.models.task_head import Outcome, TaskHead
from jaxformer.types import Array, Batch


def judge_values(outputs: Array, batch: Batch, cfg: ModelConfig, loss_cfg: LossConfig) -> Outcome:
    """The squared error at the first token of each example."""
    inputs = batch.inputs or {}
    if cfg.causal:
        outputs = task_head.at_places(outputs, task_head.last_of_segment(batch.segments))
    found, weights = outputs[..., 0], batch.weights.astype(outputs.dtype)
    squares = jnp.sum(jnp.square(found - inputs["values"]) * weights, axis=1)
    told = {"targets": inputs["values"], "weights": batch.weights, "examples": inputs["examples"]}
    metrics = {"loss": (squares, jnp.sum(weights, axis=1))}
    return Outcome(jnp.sum(squares), metrics, {"predicted": found, **told})


VALUE = TaskHead(
    pooled_specs,
    pooled_outputs,
    judge_values,
    lambda ids: {"values": jax.ShapeDtypeStruct(ids.shape, jnp.float32)},
    pooled_flops,
    count=1,
)
