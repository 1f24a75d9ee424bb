"""`tune`: what of a model that was trained before learns, and how fast."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from jaxformer.config.checks import above, at_least, between
from jaxformer.config.fields import Section
from jaxformer.errors import ConfigError

LORA = ("lora_alpha", "lora_scaling", "lora_targets")


@dataclass(frozen=True)
class TuneConfig(
    Section,
    name="tune",
    accepts={
        **dict.fromkeys(("trained_layers", "lora_rank"), at_least(0)), "lora_alpha": above(0),
        "layer_decay": between(0.01, 1.0),
    },
):  # fmt: skip
    """How a model is tuned that `init_from` names.

    Attributes:
      trained_layers: blocks from the top that learn, with what stands above them; the others and the embeddings stay,
        and no gradient of theirs is computed. None: all.
      layer_decay: multiplies the learning rate once for each block that stands above a parameter (Clark et al. 2020,
        appendix B).
      metric: early stopping looks at this field of an evaluation, more being better; None: at the loss.
      lora_rank: of two thin matrices beside each weight that is adapted; they learn, with the head of a task, and all
        else stays (LoRA, Hu et al. 2022). 0: the weights learn themselves.
      lora_alpha: what the product of the two is multiplied by, before it is divided as `lora_scaling` says.
      lora_scaling: lora divides by the rank; rslora by its square root, so that larger ranks learn as fast as small
        ones (Kalajdzievski 2023).
      lora_targets: weights of the layers that are adapted: query, key, value, out, up, gate, down; None: all of those
        that the model has.
    """

    trained_layers: int | None = None
    layer_decay: float = 1.0
    metric: str | None = None
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_scaling: Literal["lora", "rslora"] = "lora"
    lora_targets: tuple[str, ...] | None = None

    @property
    def lora_scale(self) -> float:
        """What multiplies A B."""
        return self.lora_alpha / (self.lora_rank if self.lora_scaling == "lora" else math.sqrt(self.lora_rank))

    @property
    def of_weights(self) -> "TuneConfig":
        """What still matters of it where the weights are used and nothing learns."""
        return replace(TuneConfig(), lora_rank=self.lora_rank, **{name: getattr(self, name) for name in LORA})

    def _check(self):
        given = [name for name in LORA if getattr(self, name) != getattr(TuneConfig, name)]
        if given and not self.lora_rank:
            raise ConfigError(
                f"config.tune.{given[0]}: {getattr(self, given[0])!r}; tune.lora_rank is 0, and nothing reads it; "
                "accepted: with a rank of at least 1"
            )
        if self.lora_targets is not None and len(set(self.lora_targets)) < max(1, len(self.lora_targets)):
            raise ConfigError(
                f"config.tune.lora_targets: {self.lora_targets}; accepted: none, or at least one name, each once"
            )
