"""What a tracker is: it gets a run's config when the run starts, and then every record."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxformer.storage.address import is_address


class TrackedRun(NamedTuple):
    """What a tracker is told of a run that starts or goes on.

    Attributes:
      workdir: folder of this machine for the tracker's own files, see `local_folder`; it exists.
      name: of the run.
      project: that it belongs to.
      config: nested plain values, credentials masked.
      step: of the newest checkpoint, from which the run is about to go on; 0 for a new one.
      id: that the tracker gave the run when it started; None if this is the start.
    """

    workdir: Path
    name: str
    project: str
    config: Mapping[str, Any]
    step: int
    id: str | None


class Tracker(Protocol):
    """A run that is being tracked. `log` and `close` are called from a thread of its own, one call after the other.

    It may have a method ``abandon()``, which is called when it failed or is not waited for any longer: so that nothing
    of it keeps the process from ending.

    Attributes:
      id: by which going on finds the same tracked run again; None: it needs none.
    """

    id: str | None

    def log(self, record: Mapping[str, Any]) -> None:
        """Takes one record. What it raises ends the tracking, and not the run."""

    def close(self, status: str) -> None:
        """Ends: "finished", "interrupted" (it will go on), "diverged" or "failed"."""


class TrackerKind(NamedTuple):
    """A kind of tracker: an entry of `TRACKERS`.

    Attributes:
      open: starts tracking a run, or goes on with it. Raises any exception if it cannot.
      package: what has to be installed; "": nothing.
      extra: of jaxformer, that installs it.
    """

    open: Callable[[TrackedRun], Tracker]
    package: str = ""
    extra: str = ""


def local_folder(workdir: Path) -> Path:
    """Where trackers and traces keep files of their own: the run's directory; of a run in a store, whose objects cannot
    be appended to, a folder below the current one.

    >>> from jaxformer.storage.address import place
    >>> local_folder(Path("runs/a")).as_posix(), local_folder(place("gs://bucket/team/a")).as_posix()
    ('runs/a', 'runs/bucket/team/a')
    """
    return Path("runs") / str(workdir).partition("://")[2] if is_address(workdir) else workdir


def named_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record but its kind and step, by names that tell where they are from.

    >>> named_fields({"kind": "eval", "step": 3, "split": "validation", "loss": 2.5})
    {'validation/split': 'validation', 'validation/loss': 2.5}
    >>> named_fields({"kind": "train", "step": 3, "loss": 2.5, "spent": {"total": 1.0}})
    {'train/loss': 2.5, 'train/spent/total': 1.0}
    """
    prefix = record["split"] if record["kind"] == "eval" else record["kind"]
    return flattened({name: value for name, value in record.items() if name not in ("kind", "step")}, f"{prefix}/")


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested mapping by their paths.

    >>> flattened({"a": {"b": 1}, "c": 2})
    {'a/b': 1, 'c': 2}
    """
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        inside = isinstance(value, Mapping)
        leaves |= flattened(value, f"{prefix}{name}/") if inside else {f"{prefix}{name}": value}
    return leaves
