"""TensorBoard: event files in WORKDIR/tensorboard."""

import json
import math
from collections.abc import Mapping
from typing import Any

from jaxformer.tracking.tracker import TrackedRun, named_fields


class TensorBoard:
    """Numbers as scalars, the config and events as text. Going on hides what was written after the checkpoint."""

    id: str | None = None

    def __init__(self, run: TrackedRun):
        from tensorboardX import SummaryWriter

        purge = run.step + 1 if run.step else None
        self._writer = SummaryWriter(str(run.workdir / "tensorboard"), purge_step=purge)
        self._text("config", run.config, run.step)

    def log(self, record: Mapping[str, Any]) -> None:
        """A point for each number that is finite."""
        step = record["step"]
        if record["kind"] in ("event", "final"):
            self._text(record.get("event", "final"), record, step)
        for name, value in named_fields(record).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self, status: str) -> None:
        """Flushes and closes the file."""
        self._writer.close()

    def _text(self, name: str, value: Mapping[str, Any], step: int) -> None:
        self._writer.add_text(name, f"```\n{json.dumps(value, indent=1)}\n```", step)
