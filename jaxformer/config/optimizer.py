"""`optimizer`: the update rule and its schedule."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from jaxformer.config.checks import above, at_least, between
from jaxformer.config.fields import Section


@dataclass(frozen=True)
class OptimizerConfig(
    Section,
    name="optimizer",
    accepts={
        **dict.fromkeys(("learning_rate", "epsilon", "clip_norm"), above(0)),
        **dict.fromkeys(("beta1", "beta2", "ema_decay"), between(0.0, 0.999999)),
        "warmup_steps": at_least(0),
        "decay_steps": at_least(1),
        "final_fraction": between(0.0, 1.0),
        "weight_decay": at_least(0.0),
    },
):
    """The update rule and its schedule.

    Attributes:
      name: the update rule, see `training.optim.make_optimizer`.
      learning_rate: the peak of the schedule.
      schedule: see `training.optim.make_schedule`.
      warmup_steps: in which the learning rate grows from 0 to its peak. A warm-up and decay that do not fit in the
        train.steps of the command line, which leaves them as they were, become shorter in proportion.
      decay_steps: length of wsd's final decay; None: a fifth of the steps.
      final_fraction: of learning_rate, where the decay ends.
      beta1: decay of the mean of the gradients.
      beta2: decay of the mean of their squares.
      epsilon: added to the root of that mean.
      weight_decay: matrices only.
      clip_norm: global gradient norm; None: no clipping.
      ema_decay: exponential moving average of the weights, used for evaluation; None: none.
      freeze: parameters that are not trained, by path: embedding, or embedding.positions; FLOPs count all the same.
    """

    name: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    learning_rate: float = 1e-3
    schedule: Literal["cosine", "linear", "inverse_sqrt", "constant", "wsd"] = "cosine"
    warmup_steps: int = 100
    decay_steps: int | None = None
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    ema_decay: float | None = None
    freeze: tuple[str, ...] = ()


def settle_schedule(tree: dict[str, Any], before: int, steps: int, given: Collection[str]) -> None:
    """Lets the command line make a run shorter than the warm-up and the decay that its config file was made with.

    Args:
      tree: the sections of a config; changed in place.
      before: the steps of the config file.
      steps: those of the command line.
      given: dotted fields that the command line sets; they stay.
    """
    optimizer = tree.setdefault("optimizer", {})
    if not isinstance(optimizer, dict):
        return  # refused by the section itself
    names = ("warmup_steps", "decay_steps") if optimizer.get("schedule") == "wsd" else ("warmup_steps",)
    lengths = {name: optimizer.get(name, getattr(OptimizerConfig, name)) for name in names}
    present = {name: length for name, length in lengths.items() if length is not None}
    if not all(type(each) is int for each in (before, steps, *present.values())) or not 0 < steps < before:
        return
    if sum(present.values()) > steps:
        optimizer |= {
            name: min(steps - 1, max(1, length * steps // before)) if length else 0
            for name, length in present.items()
            if f"optimizer.{name}" not in given
        }
