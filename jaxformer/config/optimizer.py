"""`optimizer`: the update rule and its schedule."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.config.checks import above, at_least, between
from jaxformer.config.fields import Section


@dataclass(frozen=True)
class OptimizerConfig(Section, name="optimizer"):
    """The update rule and its schedule.

    Attributes:
      name: the update rule, see `training.optim.make_optimizer`.
      learning_rate: the peak of the schedule.
      schedule: see `training.optim.make_schedule`.
      warmup_steps: in which the learning rate grows from 0 to its peak.
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

    def _check(self):
        above("optimizer.learning_rate", self.learning_rate, 0)
        at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        if self.decay_steps is not None:
            at_least("optimizer.decay_steps", self.decay_steps, 1)
        for name in ("beta1", "beta2"):
            between(f"optimizer.{name}", getattr(self, name), 0.0, 0.999999)
        between("optimizer.final_fraction", self.final_fraction, 0.0, 1.0)
        at_least("optimizer.weight_decay", self.weight_decay, 0.0)
        above("optimizer.epsilon", self.epsilon, 0)
        if self.clip_norm is not None:
            above("optimizer.clip_norm", self.clip_norm, 0)
        if self.ema_decay is not None:
            between("optimizer.ema_decay", self.ema_decay, 0.0, 0.999999)
