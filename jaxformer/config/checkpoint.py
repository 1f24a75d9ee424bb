"""`checkpoint`: what is saved, and when."""

from dataclasses import dataclass

from jaxformer.config.checks import above, at_least
from jaxformer.config.fields import Section


@dataclass(frozen=True)
class CheckpointConfig(
    Section,
    name="checkpoint",
    accepts={
        **dict.fromkeys(("save_every_steps", "keep", "keep_every_steps"), at_least(1)),
        "save_every_minutes": above(0),
    },
):
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
