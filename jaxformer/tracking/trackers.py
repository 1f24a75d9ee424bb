"""The trackers that there are, and how a run tells them what it records.

A config file adds one of its own by assignment: `TRACKERS["mine"] = TrackerKind(Mine)`.
"""

import contextlib
import importlib
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxformer.config import Config, registry, to_dict
from jaxformer.errors import ConfigError
from jaxformer.storage import credentials, files
from jaxformer.tracking.mlflow import Mlflow
from jaxformer.tracking.tensorboard import TensorBoard
from jaxformer.tracking.tracker import TrackedRun, Tracker, TrackerKind, local_folder
from jaxformer.tracking.wandb import Wandb

TRACKERS = registry.Registry("tracking.trackers", registry.TRACKERS, {
    "tensorboard": TrackerKind(TensorBoard, "tensorboardX", "tensorboard"),
    "wandb": TrackerKind(Wandb, "wandb", "wandb"),
    "mlflow": TrackerKind(Mlflow, "mlflow", "mlflow"),
})  # fmt: skip
IDS = "trackers.json"  # in a run's directory: tracker -> id that it gave the run
MOST_WAITING = 10_000  # records, for a tracker that is slower than the run
CLOSE_SECONDS = 90.0  # that a run waits for its trackers at the end


def check_installed(names: Sequence[str]) -> None:
    """Raises ConfigError: a tracker's package is not installed."""
    for name in names:
        kind = TRACKERS[name]
        try:
            if kind.package:
                importlib.import_module(kind.package)
        except ImportError:
            raise ConfigError(
                f"config.tracking.trackers: {name} needs the {kind.extra} extra: pip install 'jaxformer[{kind.extra}]'"
            ) from None


class Trackers:
    """The trackers of one run, each with a thread of its own, so that none of them slows the run or ends it. Processes
    other than 0 have none.

    Args:
      config: names them.
      workdir: of the run; it keeps the ids that they give the run.
      step: of the newest checkpoint; 0: there is none.
      fingerprint: of the run; ids that were kept for another one are not used.
      say: prints a line.

    Raises:
      ConfigError: one cannot start.
    """

    def __init__(self, config: Config, workdir: Path, step: int, fingerprint: str, say: Callable[[str], None]):
        self._senders: list[_Sender] = []
        names = config.tracking.trackers if jax.process_index() == 0 else ()
        check_installed(names)
        ids = _kept_ids(workdir / IDS, fingerprint) if names else {}
        told = credentials.mask(to_dict(config))
        name, project = config.tracking.run_name or workdir.absolute().name, config.tracking.project
        folder = local_folder(workdir)
        for each in names:
            run = TrackedRun(folder, name, project, told, step, ids.get(each))
            try:
                folder.mkdir(parents=True, exist_ok=True)
                tracker = TRACKERS[each].open(run)
                if tracker.id is not None and tracker.id != ids.get(each):
                    ids[each] = tracker.id
                    files.write_atomically(workdir / IDS, json.dumps({"fingerprint": fingerprint, "ids": ids}))
            except Exception as error:
                self.close()
                raise ConfigError(f"config.tracking.trackers: {each} cannot start ({_line(error)})") from error
            self._senders.append(_Sender(each, tracker, say))

    def log(self, record: Mapping[str, Any]) -> None:
        """Sends a record to all of them; returns at once."""
        for sender in self._senders:
            sender.log(record)

    def close(self) -> None:
        """Waits until all records have arrived, but no longer than `CLOSE_SECONDS`."""
        for sender in self._senders:
            sender.close()
        for sender in self._senders:
            sender.wait()


class _Sender:
    """One tracker, its thread and the records that wait for it."""

    def __init__(self, name: str, tracker: Tracker, say: Callable[[str], None]):
        self._name, self._tracker, self._say = name, tracker, say
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue()
        self._status, self._stopped = "failed", False
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"tracker {name}")
        self._thread.start()

    def log(self, record: Mapping[str, Any]) -> None:
        if record["kind"] in ("event", "final"):
            self._status = record.get("event", "finished")
        if self._waiting.qsize() >= MOST_WAITING:
            self._stop(f"{MOST_WAITING} records wait for it")
        if not self._stopped:
            self._waiting.put(dict(record))

    def close(self) -> None:
        self._waiting.put(None)

    def wait(self) -> None:
        self._thread.join(0.0 if self._stopped else CLOSE_SECONDS)
        if self._thread.is_alive():
            self._stop(f"it has not taken all records after {CLOSE_SECONDS:g} s")

    def _work(self) -> None:
        try:
            while (record := self._waiting.get()) is not None and not self._stopped:
                self._tracker.log(record)
            status = self._status if self._status in ("finished", "interrupted", "diverged") else "failed"
            self._tracker.close(status)
        except (Exception, SystemExit) as error:
            self._stop(_line(error))

    def _stop(self, why: str) -> None:
        """Gives up, and says so once."""
        if not self._stopped:
            self._stopped = True
            # Weights & Biases leaves by sys.exit with the code of its own process.
            with contextlib.suppress(Exception, SystemExit):
                getattr(self._tracker, "abandon", lambda: None)()
            self._say(f"note: {self._name} stopped tracking ({why}); the run goes on, records.jsonl has everything")


def _kept_ids(path: Path, fingerprint: str) -> dict[str, str]:
    """Tracker -> id, as an earlier start of the run kept them; empty if they are another run's."""
    try:
        found = json.loads(files.read_bytes(path, 2**16))
        if found["fingerprint"] == fingerprint:
            return {str(name): str(each) for name, each in found["ids"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return {}


def _line(error: BaseException) -> str:
    return credentials.mask_text(" ".join(str(error).split()))[:300] or type(error).__name__
