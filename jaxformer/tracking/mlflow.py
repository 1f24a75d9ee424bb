"""MLflow: the server in MLFLOW_TRACKING_URI, or WORKDIR/mlflow.db."""

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from jaxformer.tracking.tracker import TrackedRun, flattened, named_fields

# MLflow's limits: of a value, and of values in one request.
LONGEST, MOST_AT_ONCE = 5000, 100
RETRIES = "3"  # of a request; MLflow's own 7 take four minutes, in which a run cannot start
STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


class Mlflow:
    """The config as parameters, numbers as metrics, anything else as tags; what changed in the config since as tags."""

    def __init__(self, run: TrackedRun):
        import mlflow
        from mlflow.entities import Param, RunTag

        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", RETRIES)
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells each table of the database that it makes
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.workdir.absolute() / 'mlflow.db'}"
        self._client, self._entities = mlflow.MlflowClient(tracking_uri=uri), mlflow.entities
        known = self._client.get_experiment_by_name(run.project)
        if run.id is None or not self._has(run.id):
            where = self._client.create_experiment(run.project) if known is None else known.experiment_id
            found = self._client.create_run(where, run_name=run.name).info.run_id
        else:
            found = run.id
            self._client.update_run(found, status="RUNNING")
        self.id: str | None = found
        self._run: str = found
        before = self._client.get_run(found).data.params
        now = {name: str(value)[:LONGEST] for name, value in flattened(run.config).items()}
        new = [Param(name, value) for name, value in now.items() if name not in before]
        for start in range(0, len(new), MOST_AT_ONCE):
            self._client.log_batch(self._run, params=new[start : start + MOST_AT_ONCE])
        changed = [RunTag(f"changed/{n}", v) for n, v in now.items() if before.get(n, v) != v]
        self._client.log_batch(self._run, tags=changed[:MOST_AT_ONCE])

    def _has(self, run: str) -> bool:
        """False if the database is another one, as where a run in a store goes on on another machine."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.get_run(run)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True

    def log(self, record: Mapping[str, Any]) -> None:
        """All fields of the record in one request."""
        at, step = int(1000 * time.time()), record["step"]
        metrics, tags = [], []
        for name, value in named_fields(record).items():
            name = "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
            if isinstance(value, int | float):
                metrics.append(self._entities.Metric(name, float(value), at, step))
            else:
                name = f"{name}/{record['event']}/{step}" if record["kind"] == "event" else name
                tags.append(self._entities.RunTag(name, str(value)[:LONGEST]))
        self._client.log_batch(self._run, metrics=metrics, tags=tags)

    def close(self, status: str) -> None:
        """Says how the run ended."""
        self._client.set_terminated(self._run, STATUS.get(status, "FAILED"))
