"""Run records: one JSON object per line, checked against a schema when written and when read.

A run writes records; nothing is ever read back from a log. A record that lacks a field is refused, in one
line that names the file, the line and the field, because a curve fitted through holes is worse than none.

>>> import tempfile, os
>>> path = os.path.join(tempfile.mkdtemp(), "records.jsonl")
>>> append(path, {"kind": "train", "step": 1, "tokens": 768, "loss": 5.5, "grad_norm": 1.0, "learning_rate": 1e-3,
...               "skipped": 0, "seconds": 0.1})
>>> load(path, kind="train")[0]["loss"]
5.5
"""

import json
import math
import os
from pathlib import Path
from typing import Any

# kind -> fields every record of that kind has; more are allowed.
SCHEMA: dict[str, frozenset[str]] = {
    "train": frozenset({"step", "tokens", "loss", "grad_norm", "learning_rate", "skipped", "seconds"}),
    "eval": frozenset({"step", "tokens", "loss", "loss_stderr", "split"}),
    "event": frozenset({"step", "event"}),
    "final": frozenset({"step", "tokens", "loss", "loss_stderr", "params", "params_non_embedding", "flops"}),
}


class RecordError(ValueError):
    """A record that does not fit the schema."""


def check(record: dict[str, Any], where: str) -> None:
    """Raises RecordError, in one line starting with `where`, if the record lacks a field or its kind is unknown."""
    kind = record.get("kind")
    if kind not in SCHEMA:
        raise RecordError(f"{where}: kind {kind!r} is not one of {', '.join(sorted(SCHEMA))}")
    missing = sorted(SCHEMA[kind] - record.keys())
    if missing:
        raise RecordError(f"{where}: {kind} record lacks {', '.join(missing)}")


def append(path: str | os.PathLike, record: dict[str, Any]) -> None:
    """Appends one record; a value that is not finite is written as a string ("nan", "inf"), which is valid JSON.

    Raises:
      RecordError: if the record does not fit its kind's schema.
    """
    check(record, str(path))
    clean = {k: repr(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(clean, allow_nan=False) + "\n")


def load(path: str | os.PathLike, kind: str | None = None) -> list[dict[str, Any]]:
    """All records of a file, or those of one kind, in the order written.

    A last line cut off by a kill is dropped; a broken line anywhere else is an error. Of records written twice
    (a killed run repeats the steps after its last checkpoint) the later one stands, see `latest`.

    Raises:
      RecordError: a broken line or a record that does not fit the schema; FileNotFoundError: no such file.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    out = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):  # no newline after it: the write was cut off
                break
            raise RecordError(f"{path}:{number}: not a JSON object") from None
        check(record, f"{path}:{number}")
        if kind is None or record["kind"] == kind:
            out.append(record)
    return out


def latest(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record per (kind, step, split), the one written last, ordered by step."""
    by_key = {(r["kind"], r["step"], r.get("split"), r.get("event")): r for r in records}
    return sorted(by_key.values(), key=lambda r: r["step"])
