"""A sweep's results: one file of records per finished run, written whole or not at all."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformer import records
from jaxformer.errors import RecordError
from jaxformer.storage import files
from jaxformer.storage.address import place
from jaxformer.training.reporter import train_fields, windows
from jaxformer.training.step import StepMetrics
from jaxformer.training.sweep.trunks import Member


def run_path(workdir: str | Path, name: str) -> Path:
    """The file of a run."""
    return place(workdir) / "runs" / f"{name}.jsonl"


def finals(workdir: str | Path, members: Iterable[Member], fingerprint: str = "") -> dict[str, dict[str, Any]]:
    """Name -> final record of the members that have finished (or diverged)."""
    return {
        member.name: record
        for member in members
        if (record := final_of(run_path(workdir, member.name), fingerprint)) is not None
    }


def final_of(path: Path, fingerprint: str = "") -> dict[str, Any] | None:
    """The final record in a run's file; None if the file is missing or damaged, does not end with one, or belongs to
    another run or (if it names its sweep) to a sweep with another fingerprint."""
    try:
        found = records.load(path)
        records.check_run(path, found, fingerprint)
    except (FileNotFoundError, RecordError):
        return None
    mine = bool(found) and all(record.get("run") == path.stem for record in found)
    return found[-1] if mine and found[-1]["kind"] == "final" else None


def set_aside_damaged(workdir: str | Path, log: Callable[[str], None], fingerprint: str = "") -> None:
    """Renames the run files in which `final_of` finds no record, so that those runs train again.

    Raises:
      RecordError: one of them cannot be renamed.
    """
    for path in sorted((place(workdir) / "runs").glob("*.jsonl")):
        if path.name[0] == "." or final_of(path, fingerprint) is not None:
            continue
        aside = path.with_suffix(".damaged")
        try:
            path.replace(aside)
        except OSError as error:
            raise RecordError(f"{path}: damaged, and cannot be renamed ({error.strerror})") from None
        files.sync_folder(path.parent)
        log(f"note: {path} is damaged, has no final record or is another run's; set aside as {aside.name}")


def settled(
    ask: Callable[[Mapping[str, dict[str, Any]]], Sequence[Member]], workdir: str | Path, fingerprint: str = ""
) -> tuple[Sequence[Member], dict[str, dict[str, Any]]]:
    """All members that `ask` wants given the finished ones, and the final records of these.

    Finished runs may make `ask` want more members, of which some have finished too: so it repeats until none is new.
    """
    found: dict[str, dict[str, Any]] = {}
    while True:
        members = ask(found)
        now = finals(workdir, members, fingerprint)
        if now.keys() == found.keys():
            return members, found
        found = now


def curve(found: StepMetrics, first: int, every: int, tokens: int) -> list[dict[str, Any]]:
    """Train records of one run.

    Args:
      found: metrics [n] of the updates after `first`.
      first: updates before them.
      every: a record ends at each multiple of this, and at the end.
      tokens: per batch.
    """
    return [
        {"kind": "train", "step": step, "tokens": step * tokens, **train_fields(window), "seconds": 0.0}
        for step, window in windows(found, first, first + len(found.loss), every)
    ]
