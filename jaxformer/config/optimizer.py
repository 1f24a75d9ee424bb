"""`optimizer`: the update rule and its schedule."""

from dataclasses import dataclass
from typing import Literal

from jaxformer.config.checks import above, at_least, between
from jaxformer.config.fields import Section


@dataclass(frozen=True)
class OptimizerConfig(Section, name="optimizer"):
    """The update rule and its schedule."""

    name: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    learning_rate: float = 1e-3
    schedule: Literal["cosine", "linear", "inverse_sqrt", "constant", "wsd"] = "cosine"
    warmup_steps: int = 100
    decay_steps: int | None = None  # length of wsd's final decay; None: a fifth of the steps
    final_fraction: float = 0.1  # of learning_rate, where the decay ends
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # matrices only
    clip_norm: float | None = 1.0  # global gradient norm; None: no clipping
    ema_decay: float | None = None  # exponential moving average of the weights, used for evaluation; None: none

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
