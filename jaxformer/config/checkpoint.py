"""`checkpoint`: what is saved, and when."""

from dataclasses import dataclass

from jaxformer.config.checks import above, at_least
from jaxformer.config.fields import Section


@dataclass(frozen=True)
class CheckpointConfig(Section, name="checkpoint"):
    """What is saved, and when.

    Attributes:
      save_every_steps: steps between two checkpoints; None: only by the clock, and at the end.
      save_every_minutes: minutes between two; None: only by steps, and at the end.
      keep: newest checkpoints kept.
      keep_every_steps: multiples of this are kept for good; None: none.
    """

    save_every_steps: int | None = None
    save_every_minutes: float | None = 5.0
    keep: int = 2
    keep_every_steps: int | None = None

    def _check(self):
        for name in ("save_every_steps", "keep", "keep_every_steps"):
            if getattr(self, name) is not None:
                at_least(f"checkpoint.{name}", getattr(self, name), 1)
        if self.save_every_minutes is not None:
            above("checkpoint.save_every_minutes", self.save_every_minutes, 0)
