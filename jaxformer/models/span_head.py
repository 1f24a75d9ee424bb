"""The head of extractive_qa: how much each token looks like the first and like the last one of the answer.

The softmax of each goes over all tokens of a segment, a question and a window of its context; the loss is the mean of
both. Where a window holds no answer, both targets are its first token.

Source: Devlin et al. 2019, sections 4.2 and 4.3.
"""

import jax
import jax.numpy as jnp

from jaxformer.config import LossConfig, ModelConfig
from jaxformer.functional.layers import linear
from jaxformer.models import task_head
from jaxformer.models.classification_heads import project_flops
from jaxformer.models.task_head import Outcome, TaskHead
from jaxformer.types import Array, Batch, Params


def span_outputs(params: Params, x: Array, cfg: ModelConfig, rng: Array | None) -> Array:
    """[..., 2] float32 logits of first and last token, of hidden states [..., D]; nothing is dropped."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return linear(wide, params["task"]["w"], params["task"].get("b"))


def judge_spans(logits: Array, batch: Batch, cfg: ModelConfig, loss_cfg: LossConfig) -> Outcome:
    """Cross-entropy of first and last token, half of each; right is a window of which both have the largest logit."""
    inputs = batch.inputs or {}
    same = batch.segments[:, :, None] == batch.segments[:, None, :]
    asked = jnp.stack([inputs["starts"], inputs["ends"]], axis=-1).astype(logits.dtype)  # [B, T, 2]
    inside = jnp.where(same[..., None], logits[:, None], -jnp.inf)  # [B, T, S, 2]
    nll = (jax.nn.logsumexp(inside, axis=2) - logits) * asked
    hits = jnp.where(logits >= jnp.max(inside, axis=2), asked, 0)
    right = jnp.prod(jnp.einsum("bts,bsc->btc", same.astype(hits.dtype), hits), axis=-1)
    weights = batch.weights.astype(logits.dtype)
    counts, loss = jnp.sum(weights, axis=1), jnp.sum(nll, axis=(1, 2)) / 2
    metrics = {"loss": (loss, counts), "accuracy": (jnp.sum(right * weights, axis=1), counts)}
    told = {"segments": batch.segments, "examples": inputs["examples"], "places": inputs["places"]}
    return Outcome(jnp.sum(loss), metrics, {"start": logits[..., 0], "end": logits[..., 1], **told})


SPAN = TaskHead(
    lambda cfg: {"task": task_head.output_specs(cfg)},
    span_outputs,
    judge_spans,
    lambda ids: {"starts": ids, "ends": ids, "places": ids},
    project_flops,
    count=2,
)
