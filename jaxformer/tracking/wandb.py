"""Weights & Biases. Its own settings decide where the run goes: `wandb login`, or WANDB_MODE=offline for files only."""

import secrets
from collections.abc import Mapping
from typing import Any

from jaxformer.errors import ProgramError
from jaxformer.tracking.tracker import TrackedRun, named_fields

SECONDS = 60  # for the service to answer, at the start and at the end
EXIT_CODES = {"finished": 0, "interrupted": 0}


class Wandb:
    """Every field of every record is a value of the run's history, with the field `step` as its axis.

    The command line, the code and the environment are not sent: they may hold credentials.
    """

    def __init__(self, run: TrackedRun):
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_meta=True,
            init_timeout=SECONDS, reinit="create_new",
        )  # fmt: skip
        self.id: str | None = run.id or secrets.token_hex(8)
        try:
            self._run = wandb.init(
                dir=str(run.workdir), id=self.id, resume="allow", project=run.project, name=run.name,
                config=dict(run.config), allow_val_change=True, settings=settings,
            )  # fmt: skip
        except wandb.errors.UsageError as error:  # nobody is logged in
            raise ProgramError(f"{error} Or set WANDB_MODE=offline, for files alone") from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Mapping[str, Any]) -> None:
        """One row of the history; a final record is the run's summary as well."""
        fields = named_fields(record)
        self._run.log({"step": record["step"], **fields})
        if record["kind"] == "final":
            self._run.summary.update(fields)

    def close(self, status: str) -> None:
        """Sends the rest."""
        self._run.finish(exit_code=EXIT_CODES.get(status, 1))

    def abandon(self) -> None:
        """Ends the library's own process, for which Python would wait at its end; `wandb sync` can send its files."""
        import wandb

        service = getattr(getattr(wandb.setup(), "_connection", None), "_proc", None)
        process = getattr(service, "_process", None)
        if process is not None:
            process.kill()
            wandb.teardown(exit_code=1)  # raises, as the connection broke; the next run of this process makes another
