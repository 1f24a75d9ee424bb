"""Run records: one JSON object per line, checked against a schema when written and when read.

A run writes records; nothing is ever read back from a log. A record that lacks a field is refused, in one
line that names the file, the line and the field, because a curve fitted through holes is worse than none. A line
ends with a checksum of what stands before it, because a curve through a wrong digit is no better; older ones have none.

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
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO

# kind -> fields every record of that kind has; more are allowed.
SCHEMA: dict[str, frozenset[str]] = {
    "train": frozenset({"step", "tokens", "loss", "grad_norm", "learning_rate", "skipped", "seconds"}),
    "eval": frozenset({"step", "tokens", "loss", "loss_stderr", "split"}),
    "event": frozenset({"step", "event"}),
    "final": frozenset({"step", "tokens", "loss", "loss_stderr", "params", "params_non_embedding", "flops"}),
}

CHECKSUM = re.compile(r', "crc": "([0-9a-f]{8})"}')  # ends a line; of the line without it
# How JSON, which has no such numbers, says them here.
NOT_FINITE = {str(x): x for x in (math.nan, math.inf, -math.inf)}


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
    """Appends one record; a number that is not finite is written as a string ("nan", "inf"), which is valid JSON.

    A last line cut off by a kill is removed first, so that it cannot end up in the middle of the file.

    Raises:
      RecordError: if the record does not fit its kind's schema, or holds something that JSON cannot say.
    """
    check(record, str(path))
    clean = {k: str(float(v)) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    try:
        line = _sealed(json.dumps(clean, allow_nan=False)) + "\n"
    except (TypeError, ValueError) as error:
        raise RecordError(f"{path}: {record['kind']} record cannot be written as JSON ({error})") from None
    with open(path, "ab+") as file:
        _mend_end(file)
        file.write(line.encode())


def _mend_end(file: BinaryIO) -> None:
    """Ends the last line: with the newline it lacks if it is a whole record, otherwise by cutting it off."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    rest = file.read().rsplit(b"\n", 1)[-1]
    if _parse(rest.decode(errors="replace")) is None:
        file.truncate(size - len(rest))
    else:
        file.write(b"\n")


def _sealed(line: str) -> str:
    """A JSON object with the checksum of its text as its last field, `crc`."""
    return f'{line[:-1]}, "crc": "{zlib.crc32(line.encode()):08x}"}}'


def _parse(line: str) -> dict[str, Any] | None:
    """The record of a line; None if it is no JSON object, or not the one whose checksum it has."""
    *_, sealed = None, *CHECKSUM.finditer(line)
    if sealed is not None and not line[sealed.end() :].strip():
        line = line[: sealed.start()] + "}"
        if zlib.crc32(line.encode()) != int(sealed[1], 16):
            return None
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(record, dict):
        return None
    return {k: NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in record.items()}


def load(path: str | os.PathLike, kind: str | None = None) -> list[dict[str, Any]]:
    """All records of a file, or those of one kind, in the order written; "nan" and "inf" are numbers again.

    A last line cut off by a kill is dropped; a broken line anywhere else is an error, and so is one that is not what
    was written. Of records written twice (a killed run repeats the steps after its last checkpoint) the later one
    stands, see `latest`.

    Raises:
      RecordError: a broken line or a record that does not fit the schema; FileNotFoundError: no such file.
    """
    lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    out = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _parse(line)
        if record is None:
            if CHECKSUM.search(line):  # only a whole line ends so
                raise RecordError(f"{path}:{number}: damaged; it is not what was written")
            if number == len(lines):  # no newline after it: the write was cut off
                break
            raise RecordError(f"{path}:{number}: not a JSON object")
        check(record, f"{path}:{number}")
        if kind is None or record["kind"] == kind:
            out.append(record)
    return out


def latest(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record per (kind, step, split, event), the one written last, ordered by step."""
    by_key = {(r["kind"], r["step"], r.get("split"), r.get("event")): r for r in records}
    return sorted(by_key.values(), key=lambda r: r["step"])
