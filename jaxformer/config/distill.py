"""`distill`: the teacher of a model, and what it says beside the text."""

from dataclasses import dataclass, fields

from jaxformer.config.checks import above, at_least
from jaxformer.config.fields import Section
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class DistillConfig(
    Section, name="distill", paths=("teacher",), addresses=("teacher",),
    accepts={"temperature": above(0.0), "soft_weight": at_least(0.0), "hard_weight": at_least(0.0),
             "cosine_weight": at_least(0.0)},
):  # fmt: skip
    """What a student learns from its teacher. The weights' defaults are DistilBERT's (Sanh et al. 2019, section 3).

    Attributes:
      teacher: a run's directory, of the same family and tokenizer; None: there is no teacher.
      temperature: divides the logits of both.
      soft_weight: of temperature^2 KL(teacher || student) at the tokens that are predicted.
      hard_weight: of the loss of the text itself.
      cosine_weight: of 1 - cosine of the angle between the last hidden states there; more than 0 needs one width.
      initial_layers: begin with layers of the teacher that are evenly spaced, and with all else that it has; false:
        as any run.
    """

    teacher: str | None = None
    temperature: float = 2.0
    soft_weight: float = 5.0
    hard_weight: float = 2.0
    cosine_weight: float = 1.0
    initial_layers: bool = True

    def _check(self):
        if not self.soft_weight and not self.cosine_weight:
            raise ConfigError(
                "config.distill.soft_weight: 0.0, and cosine_weight is 0.0: nothing is learned from the teacher; "
                "accepted: one of them above 0"
            )
        given = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if self.teacher is None and given:
            raise ConfigError(
                f"config.distill.{given[0]}: {getattr(self, given[0])}; distill.teacher is none, and nothing reads it; "
                "accepted: with a teacher"
            )
