"""The head of multiple_choice: the language model's own, whose log-probabilities are summed over each continuation."""

import jax.numpy as jnp

from jaxformer.config import LossConfig, ModelConfig
from jaxformer.functional.layers import unembed
from jaxformer.functional.losses import cross_entropy
from jaxformer.models import embedding, gpt
from jaxformer.models.task_head import Outcome, TaskHead
from jaxformer.types import Array, Batch, Params


def judge_choices(logits: Array, batch: Batch, cfg: ModelConfig, loss_cfg: LossConfig) -> Outcome:
    """Cross-entropy of the right continuation, and the log-probability of each at every token that is asked of it."""
    inputs = batch.inputs or {}
    each, nll = cross_entropy(logits, batch.targets, loss_cfg.label_smoothing, loss_cfg.z_loss)
    weights = batch.weights.astype(each.dtype)
    counts, hits = jnp.sum(weights, axis=1), jnp.argmax(logits, axis=-1) == batch.targets
    same = batch.segments[:, :, None] == batch.segments[:, None, :]
    asked = jnp.where(inputs["choices"] > 0, -nll, 0)
    told = {name: inputs[name] for name in ("examples", "choices", "sizes")}
    metrics = {
        "loss": (jnp.sum(nll * weights, axis=1), counts),
        "accuracy": (jnp.sum(jnp.where(hits, weights, 0), axis=1), counts),
    }
    score = jnp.einsum("bts,bs->bt", same.astype(asked.dtype), asked)
    return Outcome(jnp.sum(each * weights), metrics, {"score": score, **told})


def language_outputs(params: Params, x: Array, cfg: ModelConfig, rng: Array | None) -> Array:
    """Logits of the next token, [..., V]; nothing is dropped."""
    return unembed(x, gpt.output_table(params))


CHOICE = TaskHead(
    lambda cfg: {} if cfg.tie_embeddings else {"head": {"table": embedding.output_table_spec(cfg)}},
    language_outputs,
    judge_choices,
    lambda ids: {"choices": ids, "sizes": ids},
    gpt.head_flops,
    count=1,
)
