"""`train`: how long, how often, when to stop."""

from dataclasses import dataclass

from jaxformer.config.checks import at_least, first_and_last
from jaxformer.config.fields import Section
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class TrainConfig(
    Section,
    name="train",
    accepts=dict.fromkeys(
        ("steps", "global_batch_size", "log_every_steps", "eval_every_steps", "eval_rows", "max_bad_steps",
         "early_stop_evals"), at_least(1)
    ) | {"profile_steps": first_and_last},
    most={"global_batch_size": 2**24},
):  # fmt: skip
    """The loop: how long, how often, when to stop.

    Attributes:
      steps: updates.
      global_batch_size: rows of context_length tokens in one update, all hosts and micro-batches together.
      log_every_steps: steps between two training records.
      eval_every_steps: steps between two evaluations.
      eval_rows: held-out rows in each evaluation on the way, of all sources together; None: all, as at the end.
      max_bad_steps: in a row, not finite: skipped each, then the run stops.
      early_stop_evals: stop after so many evaluations without a better loss; None: never.
      noise_scale: record the gradient noise scale, see `training.noise_scale`; it needs at least two micro-batches.
      profile_steps: first and last update to trace, as 100,105; whole dispatches are traced, into WORKDIR/profile (of a
        run in a store: runs/BUCKET/NAME/profile).
    """

    steps: int = 1000
    global_batch_size: int = 16
    log_every_steps: int = 10
    eval_every_steps: int = 500
    eval_rows: int | None = None
    max_bad_steps: int = 20
    early_stop_evals: int | None = None
    noise_scale: bool = False
    profile_steps: tuple[int, ...] | None = None

    def _check(self):
        if self.profile_steps is not None and self.profile_steps[1] > self.steps:
            raise ConfigError(
                f"config.train.profile_steps: {self.profile_steps}; accepted: up to train.steps {self.steps}"
            )
