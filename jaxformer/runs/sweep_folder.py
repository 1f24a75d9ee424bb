"""A sweep's folder: `sweep.json` says which runs it holds, each in a folder of its own; how each of them ended."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformer import records
from jaxformer.config import diff, to_dict
from jaxformer.errors import ConfigError, RecordError
from jaxformer.runs import changes, manifest
from jaxformer.runs.grid import GridRun
from jaxformer.scaling.comparison import RunEnd
from jaxformer.storage import credentials, files, json_checksum

FILE_NAME = "sweep.json"


def read(folder: Path) -> dict[str, Any]:
    """What `sweep.json` says: "runs", name -> field -> value; "config" without those fields; "failed", name -> line.

    Raises:
      ConfigError: there is no sweep in this folder, or its file is damaged.
    """
    path = folder / FILE_NAME
    try:
        found = json_checksum.verified(json_checksum.read(path))
    except FileNotFoundError:
        raise ConfigError(f"--workdir: {folder} holds no sweep (no {FILE_NAME})") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--workdir: {path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if found is None or not all(isinstance(found.get(name), dict) for name in ("runs", "config", "failed")):
        raise ConfigError(f"--workdir: {path} is damaged or was edited; accepted: the file as it was written")
    return found


def check(folder: Path, runs: Sequence[GridRun]) -> None:
    """Checks, before anything is trained, that the folder is this sweep's or empty, and that the runs which it has
    begun are of the configs wanted. Writes nothing.

    Raises:
      ConfigError: they are not.
    """
    try:
        if not folder.exists():
            return
    except OSError as error:  # a store that cannot be reached
        raise ConfigError(f"--workdir: {folder} cannot be used ({error.strerror})") from None
    if not folder.is_dir():
        raise ConfigError(f"--workdir: {folder} is not a folder")
    if not (folder / FILE_NAME).exists():
        if others := sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")):
            raise ConfigError(
                f"--workdir: {folder} is not empty and holds no sweep ({', '.join(others[:3])}); accepted: a new or "
                "empty folder, or that of a sweep"
            )
        return
    before = read(folder)
    fields, known = list(runs[0].values), list(next(iter(before["runs"].values()), runs[0].values))
    if fields != known:
        raise ConfigError(
            f"--over: {', '.join(fields)}; {folder} holds a sweep over {', '.join(known)}; accepted: those, or another "
            "--workdir"
        )
    if changed := diff(before["config"], base_of(runs)):
        raise ConfigError(
            f"--workdir: {folder} holds a sweep of another config ({'; '.join(changed)}); accepted: that config, or "
            "another --workdir"
        )
    for run in runs:
        if (folder / run.name / manifest.FILE_NAME).exists():
            manifest.check_workdir(run.parsed.config, changes.MAY_CHANGE)


def base_of(runs: Sequence[GridRun]) -> dict[str, Any]:
    """What all runs of a sweep have in common: the config without the fields that are swept or may change."""
    config = credentials.mask(to_dict(runs[0].parsed.config))
    return manifest.essential(config, (*changes.MAY_CHANGE, *runs[0].values))


def make(folder: Path) -> None:
    """Makes the folder unless it is there. Raises ConfigError: it cannot be used."""
    try:
        files.open_folder(folder)
    except OSError as error:
        raise ConfigError(f"--workdir: {folder} cannot be used ({error.strerror})") from None


def write(folder: Path, runs: Sequence[GridRun], failed: Mapping[str, str]) -> None:
    """Adds `runs` to those of `sweep.json`, and `failed`, name -> why, in place of what it said.

    Raises:
      ConfigError: it cannot be written.
    """
    before = read(folder)["runs"] if (folder / FILE_NAME).exists() else {}
    about = {
        "config_file": credentials.mask_text(runs[0].parsed.source),
        "config": base_of(runs),
        "runs": before | {run.name: run.values for run in runs},
        "failed": dict(failed),
    }
    try:
        files.open_folder(folder)
        files.write_atomically(folder / FILE_NAME, json.dumps(json_checksum.add_checksum(about), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--workdir: {folder / FILE_NAME} cannot be written ({error.strerror})") from None


def failures(folder: Path) -> dict[str, str]:
    """Name -> why of the runs that failed, as `sweep.json` says; empty if there is none yet."""
    return read(folder)["failed"] if (folder / FILE_NAME).exists() else {}


def ends(folder: Path) -> list[RunEnd]:
    """How each run of the sweep ended so far, in the order in which they were asked for."""
    about = read(folder)
    return [end_of(folder / name, values, about["failed"].get(name)) for name, values in about["runs"].items()]


def end_of(workdir: Path, values: Mapping[str, Any], failed: str | None = None) -> RunEnd:
    """How the run in `workdir` ended: by its records, or as `failed` says."""
    begun = RunEnd(workdir.name, dict(values), "failed" if failed else "unfinished", why=failed or "")
    try:
        found = records.load(workdir / "records.jsonl")
    except FileNotFoundError:
        return begun if failed else begun._replace(status="not started")
    except RecordError as error:
        return begun._replace(status="failed", why=str(error))
    last = found[-1] if found else {}
    if last.get("kind") == "final":
        seconds = float(last.get("wall_seconds", 0.0))
        return begun._replace(
            status="finished", why="", step=last["step"], tokens=last["tokens"], loss=float(last["loss"]),
            stderr=float(last["loss_stderr"]), seconds=seconds,
        )  # fmt: skip
    if last.get("event") == "diverged":
        return begun._replace(status="diverged", why=f"at step {last['step']}", step=last["step"])
    return begun._replace(step=max((record["step"] for record in found), default=0))
