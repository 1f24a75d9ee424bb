"""`tracking`: who else is told what a run records."""

from dataclasses import dataclass

from jaxformer.config.checks import each, one_of
from jaxformer.config.fields import Section
from jaxformer.config.registry import TRACKERS


@dataclass(frozen=True)
class TrackingConfig(Section, name="tracking", accepts={"trackers": each(one_of(TRACKERS))}):
    """Who else is told what a run records; records.jsonl is always written.

    Attributes:
      trackers: names of trackers; tensorboard, wandb and mlflow need the extra of the same name.
      project: what Weights & Biases calls project, and MLflow experiment.
      run_name: the run's name there; None: that of its directory.
    """

    trackers: tuple[str, ...] = ()
    project: str = "jaxformer"
    run_name: str | None = None
