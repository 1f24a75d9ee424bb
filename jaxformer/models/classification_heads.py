"""The heads of sequence_classification and token_classification.

A sequence: a bidirectional model reads the state of the example's first token through a dense layer, BERT's pooler; a
causal one the state of its last token. A token: its own state. Both then project to as many logits as there are labels.

Source: Devlin et al. 2019, section 4; Radford et al. 2018, section 3.2.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import LossConfig, ModelConfig
from jaxformer.functional.layers import gelu, linear
from jaxformer.functional.losses import cross_entropy
from jaxformer.models import task_head
from jaxformer.models.task_head import Outcome, TaskHead
from jaxformer.types import Array, Batch, Params

ACTIVATIONS = {"tanh": jnp.tanh, "gelu": gelu, "relu": jax.nn.relu}


def judge_tokens(logits: Array, batch: Batch, cfg: ModelConfig, loss_cfg: LossConfig) -> Outcome:
    """Cross-entropy where the batch has weight, and the label of the largest logit at every token."""
    each, nll = cross_entropy(logits, batch.targets, loss_cfg.label_smoothing, loss_cfg.z_loss)
    weights, found = batch.weights.astype(each.dtype), jnp.argmax(logits, axis=-1).astype(jnp.int32)
    counts, correct = jnp.sum(weights, axis=1), jnp.where(found == batch.targets, weights, 0)
    metrics = {"loss": (jnp.sum(nll * weights, axis=1), counts), "accuracy": (jnp.sum(correct, axis=1), counts)}
    asked = {"targets": batch.targets, "weights": batch.weights, "examples": (batch.inputs or {})["examples"]}
    sure = jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)
    return Outcome(jnp.sum(each * weights), metrics, {"predicted": found, "probability": sure, **asked})


def judge_sequences(logits: Array, batch: Batch, cfg: ModelConfig, loss_cfg: LossConfig) -> Outcome:
    """`judge_tokens` of logits that stand at the token which is read, where the label stands at the first."""
    if cfg.causal:
        logits = task_head.at_places(logits, task_head.last_of_segment(batch.segments))
    return judge_tokens(logits, batch, cfg, loss_cfg)


def pooled_specs(cfg: ModelConfig) -> dict[str, Any]:
    """The pooler of a bidirectional model, and the projection `task`."""
    pooler = {} if cfg.causal else {"pooler": task_head.dense_specs(cfg)}
    return {**pooler, "task": task_head.output_specs(cfg)}


def pooled_outputs(params: Params, x: Array, cfg: ModelConfig, rng: Array | None) -> Array:
    """[..., C] of hidden states [..., D], each pooled by itself."""
    if "pooler" in params:
        x = ACTIVATIONS[task_head.head_of(cfg).activation](linear(x, params["pooler"]["w"], params["pooler"]["b"]))
    return task_head.project(params["task"], x, cfg, rng)


def pooled_flops(cfg: ModelConfig) -> float:
    """Operations of pooler and projection for a token, forward; they run at every token."""
    return project_flops(cfg) + (0 if cfg.causal else 2 * cfg.width**2)


def project_flops(cfg: ModelConfig) -> float:
    """Operations of the projection for a token, forward."""
    return 2.0 * cfg.width * task_head.head_of(cfg).outputs


SEQUENCE = TaskHead(pooled_specs, pooled_outputs, judge_sequences, lambda ids: {}, pooled_flops)
TOKEN = TaskHead(
    lambda cfg: {"task": task_head.output_specs(cfg)},
    lambda params, x, cfg, rng: task_head.project(params["task"], x, cfg, rng),
    judge_tokens,
    lambda ids: {},
    project_flops,
)
