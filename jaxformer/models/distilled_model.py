"""A model that learns from a teacher: the teacher's parameters are `TrainState.frozen`, which the loss reads and nobody
updates."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config import Config, DataConfig, ModelConfig
from jaxformer.config.registry import OBJECTIVES
from jaxformer.functional.distillation import cosine_distance, distillation_loss
from jaxformer.models.backbone import token_metrics
from jaxformer.models.families import family_of
from jaxformer.models.flops import flops_per_token
from jaxformer.models.gpt import with_weights
from jaxformer.models.tuning import without_gradients
from jaxformer.specs import freeze
from jaxformer.types import Array, Batch, Model, Params, Sums


def distilled(model: Model, config: Config, teacher: ModelConfig) -> Model:
    """The student `model` with the loss of `config.distill`, and the teacher's parameters as its frozen tree.

    The objective has the terms "loss" (soft and hard) and "cosine"; metrics have "divergence" beside the usual ones,
    KL(teacher || student) at the temperature.

    Args:
      model: of `make_model`, of `config.model`.
      config: of the run.
      teacher: of the same family and vocabulary.
    """
    student, distill, execution = config.model, config.distill, config.execution
    ours, theirs = (family_of(each).projection for each in (student, teacher))
    assert ours is not None and theirs is not None
    specs = family_of(teacher).specs(teacher)

    def loss(params: Params, batch: Batch, rng: Array | None, frozen: Any = None) -> tuple[Sums, Sums]:
        params = without_gradients(params, config.tune, student.num_blocks)
        of, sharding, terms = ours(params, batch, student, rng, execution)
        by, _, _ = theirs(jax.lax.stop_gradient(frozen), batch, teacher, None, execution)
        targets, weights = sharding.shard(batch.targets), sharding.shard(batch.weights)
        out = distillation_loss(
            of,
            by,
            targets,
            weights,
            temperature=distill.temperature,
            soft_weight=distill.soft_weight,
            hard_weight=distill.hard_weight,
            **vars(config.loss),
        )
        objective = {"loss": (out.total, out.weight)} | with_weights(terms, batch, student)
        if distill.cosine_weight:
            distance = cosine_distance(of.hidden, by.hidden, weights)
            objective["cosine"] = (distill.cosine_weight * distance, out.weight)
        divergence, weight = sharding.sum_shards(out.divergence_rows), sharding.sum_shards(out.weight_rows)
        return objective, token_metrics(out, sharding) | {"divergence": (divergence, weight)}

    def weights(batch: Batch) -> dict[str, Array]:
        found = model.weights(batch)
        return found | {"cosine": jnp.sum(batch.weights)} if distill.cosine_weight else found

    return model._replace(loss=loss, weights=weights, frozen=freeze(specs, list(specs)))


def teacher_flops(teacher: ModelConfig, data: DataConfig) -> float:
    """Operations per token of a row of the teacher, which has no backward pass."""
    return flops_per_token(teacher, head_fraction=OBJECTIVES[data.objective].share(data)).forward


def initial_layers(student: int, teacher: int) -> list[int]:
    """Which of a teacher's layers the student's begin as: evenly spaced, the first among them.

    >>> initial_layers(6, 12)
    [0, 2, 4, 6, 8, 10]
    """
    return [layer * teacher // student for layer in range(student)]
