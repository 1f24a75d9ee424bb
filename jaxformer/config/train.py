"""`train`: how long, how often, when to stop."""

from dataclasses import dataclass

from jaxformer.config.checks import at_least
from jaxformer.config.fields import Section


@dataclass(frozen=True)
class TrainConfig(Section, name="train", most={"global_batch_size": 2**24}):
    """The loop: how long, how often, when to stop.

    Attributes:
      steps: updates.
      global_batch_size: rows of context_length tokens in one update, all hosts and micro-batches together.
      log_every_steps: steps between two training records.
      eval_every_steps: steps between two evaluations.
      eval_rows: held-out rows in each evaluation on the way; None: all, as at the end.
      max_bad_steps: in a row, not finite: skipped each, then the run stops.
      early_stop_evals: stop after so many evaluations without a better loss; None: never.
    """

    steps: int = 1000
    global_batch_size: int = 16
    log_every_steps: int = 10
    eval_every_steps: int = 500
    eval_rows: int | None = None
    max_bad_steps: int = 20
    early_stop_evals: int | None = None

    def _check(self):
        for name in (
            "steps", "global_batch_size", "log_every_steps", "eval_every_steps",
            "max_bad_steps",
        ):  # fmt: skip
            at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("eval_rows", "early_stop_evals"):
            if getattr(self, name) is not None:
                at_least(f"train.{name}", getattr(self, name), 1)
