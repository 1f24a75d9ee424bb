"""`train`: how long, how often, when to stop."""

from dataclasses import dataclass

from jaxformer.config.checks import at_least
from jaxformer.config.fields import Section


@dataclass(frozen=True)
class TrainConfig(
    Section,
    name="train",
    accepts=dict.fromkeys(
        ("steps", "global_batch_size", "log_every_steps", "eval_every_steps", "eval_rows", "max_bad_steps",
         "early_stop_evals"), at_least(1)
    ),
    most={"global_batch_size": 2**24},
):  # fmt: skip
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
