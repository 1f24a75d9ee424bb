"""Run records: one JSON object per line, checked against a schema when written and when read.

Everything about a run is read from its records, never from a log. A record that lacks a field is refused with one line
that names the file, the line and the field: a curve fitted to incomplete data is worse than none. Each line ends with a
checksum of the rest of the line, so that a flipped digit is found too; files of older versions have none.

>>> import tempfile, os
>>> path = os.path.join(tempfile.mkdtemp(), "records.jsonl")
>>> append(path, {"kind": "train", "step": 1, "tokens": 768, "loss": 5.5, "grad_norm": 1.0, "learning_rate": 1e-3,
...               "skipped": 0, "seconds": 0.1})
>>> load(path, kind="train")[0]["loss"]
5.5
"""

import json
import math
import numbers
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from jaxformer.errors import RecordError
from jaxformer.storage import files
from jaxformer.storage.address import place

# kind -> fields that every record of that kind must have; it may have more.
SCHEMA: dict[str, frozenset[str]] = {
    "train": frozenset({"step", "tokens", "loss", "grad_norm", "learning_rate", "skipped", "seconds"}),
    "eval": frozenset({"step", "tokens", "loss", "loss_stderr", "split"}),
    "event": frozenset({"step", "event"}),
    "final": frozenset({"step", "tokens", "loss", "loss_stderr", "params", "params_non_embedding", "flops"}),
}

CHECKSUM = re.compile(rb', "crc": "([0-9a-f]{8})"}')  # at the end of a line: checksum of the line without it
# Types of fields, in records of any kind: counts, numbers (only flops may be null) and text.
COUNTS = frozenset(
    {
        "step",
        "tokens",
        "skipped",
        "params",
        "params_non_embedding",
        "params_active",
        "width",
        "num_layers",
        "seed",
        "branched_at",
        "restarts",
        "steps_redone",
        "peak_device_bytes",
        "peak_host_bytes",
    }
)
NUMBERS = frozenset(
    {"loss", "loss_stderr", "objective", "grad_norm", "learning_rate", "seconds", "flops", "epochs", "perplexity",
     "bits_per_byte", "bits_per_byte_stderr", "accuracy", "accuracy_stderr", "tokens_per_second", "utilisation",
     "flops_6nd_per_token", "floor", "floor_stderr", "productive_share", "productive_seconds", "wall_seconds",
     "startup_seconds", "compilation_seconds", "data_seconds", "evaluation_seconds", "checkpoint_seconds"}
)  # fmt: skip
WORDS = frozenset({"split", "event", "run", "trunk", "role", "status", "fingerprint", "row_losses", "row_targets"})
# name of a compressor -> bits per byte; what -> seconds of this start that were spent on it so far, and "total"
BY_NAME = frozenset({"compressed_bits_per_byte", "spent"})
# Text fields that become file names: a study copied from elsewhere must not point outside its folder.
NAMES = frozenset({"run", "trunk"})
# Additional fields of a study's records.
STUDY: dict[str, frozenset[str]] = {
    "train": frozenset({"run", "trunk"}),
    "final": frozenset({"run", "trunk", "role", "status", "seed", "width", "learning_rate", "branched_at"}),
}

# JSON has no such numbers, so they are written as strings.
NOT_FINITE = {str(x): x for x in (math.nan, math.inf, -math.inf)}
MOST_BYTES = 2**32  # of a file of records


def check(record: dict[str, Any], where: str, more: Mapping[str, frozenset[str]] | None = None) -> None:
    """Raises RecordError, one line starting with `where`, if the record's kind is unknown, or it lacks a field of that
    kind (in SCHEMA or `more`), or a field has the wrong type."""
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in SCHEMA:
        raise RecordError(f"{where}: kind {kind!r} is not one of {', '.join(sorted(SCHEMA))}")
    missing = sorted((SCHEMA[kind] | (more or {}).get(kind, frozenset())) - record.keys())
    if missing:
        raise RecordError(f"{where}: {kind} record lacks {', '.join(missing)}")
    for name, value in record.items():
        if wrong := _not_a(name, value):
            raise RecordError(f"{where}: {kind} record: {name}: {repr(value)[:60]} is not {wrong}")


def _not_a(name: str, value: Any) -> str | None:
    """The type that a field should have, if its value does not have it."""
    if name in COUNTS:
        # JSON has no integers, so another writer may have written 3 as 3.0.
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return None if whole and not isinstance(value, bool) and 0 <= value < 2**63 else "a count"
    if name in NUMBERS and not (name == "flops" and value is None):
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not real or (isinstance(value, int) and abs(value) > 2**1000):
            return "a number"
        return "a number of at least 0" if name.endswith("_stderr") and value < 0 else None
    if name in BY_NAME:
        whole = isinstance(value, dict) and all(isinstance(each, int | float) for each in value.values())
        return None if whole and (name != "spent" or "total" in value) else "numbers by name"
    if name not in WORDS:
        return None
    if not isinstance(value, str):
        return "text"
    if name in NAMES and (value[:1] in ("", ".") or {"/", "\\"} & set(value) or files.unusable(f"{value}.jsonl")):
        return "a name that a file can have"
    return None if value.isprintable() else "text without control characters"


def append(path: str | os.PathLike, record: dict[str, Any]) -> None:
    """Appends one record; a number that is not finite is written as a string ("nan", "inf"), which is valid JSON.

    An incomplete last line, left by a killed process, is removed first.

    Raises:
      RecordError: the record does not fit its kind's schema or cannot be written as JSON, or the file cannot be written
        (a full disk, a symbolic link).
    """
    line = _line(path, record)
    try:
        with files.open_to_append(path, sole=True) as file:
            _repair_end(file)
            file.write(line.encode())
            if record["kind"] != "train":  # these are many; the next record of another kind syncs them too
                files.sync(file)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror})") from None


def write(path: str | os.PathLike, records: Sequence[dict[str, Any]]) -> None:
    """Replaces a file by these records, atomically and durably. Raises as `append`."""
    content = "".join(_line(path, record) for record in records)
    try:
        files.write_atomically(path, content)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror})") from None


def _line(path: str | os.PathLike, record: dict[str, Any]) -> str:
    """A record as a line of the file `path`, checked."""
    try:
        line = _sealed(as_json(record)) + "\n"
    except (TypeError, ValueError) as error:
        raise RecordError(f"{path}: {record.get('kind')} record cannot be written as JSON ({error})") from None
    check(record, str(path))
    return line


def as_json(record: Mapping[str, Any]) -> str:
    """A record as valid JSON: a number that is not finite is a string ("nan", "inf").

    >>> as_json({"loss": 1.5, "loss_stderr": math.nan})
    '{"loss": 1.5, "loss_stderr": "nan"}'
    """
    clean = {k: str(float(v)) if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(clean, allow_nan=False)


def _repair_end(file: BinaryIO) -> None:
    """If the last line lacks its newline: adds it to a complete record, removes anything else."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    if file.read(1) in (b"", b"\n"):
        return
    file.seek(0)
    rest = file.read().rsplit(b"\n", 1)[-1]
    if _parse(rest) is None:
        file.truncate(size - len(rest))
    else:
        file.write(b"\n")


def _sealed(line: str) -> str:
    """A JSON object with the checksum of its text as an additional last field, `crc`."""
    return f'{line[:-1]}, "crc": "{zlib.crc32(line.encode()):08x}"}}'


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if the line is not a JSON object in UTF-8 or does not match its checksum."""
    *_, sealed = None, *CHECKSUM.finditer(line)
    if sealed is not None and not line[sealed.end() :].strip():
        line = line[: sealed.start()] + b"}"
        if zlib.crc32(line) != int(sealed[1], 16):
            return None
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    return {k: NOT_FINITE.get(v, v) if isinstance(v, str) else v for k, v in record.items()}


def _record(line: bytes, where: str, more: Mapping[str, frozenset[str]] | None) -> dict[str, Any]:
    """The record of a line. Raises RecordError, in one line starting with `where`."""
    record = _parse(line)
    if record is None:
        whole = CHECKSUM.search(line)  # only a complete line has one
        raise RecordError(f"{where}: " + ("damaged; it does not match its checksum" if whole else "not a JSON object"))
    check(record, where, more)
    return record


def _lines(path: str | os.PathLike) -> list[bytes]:
    """The lines of a file. Raises FileNotFoundError, RecordError."""
    try:
        return files.read_bytes(path, MOST_BYTES, follow=True).split(b"\n")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from None


def load(
    path: str | os.PathLike, kind: str | None = None, more: Mapping[str, frozenset[str]] | None = None
) -> list[dict[str, Any]]:
    """All records of a file, or those of one kind, in the order written; "nan" and "inf" are numbers again.

    An incomplete last line, left by a killed process, is ignored; any other broken line is an error, and so is a wrong
    checksum. A killed run repeats the steps after its last checkpoint, so records may occur twice: see `latest`.

    Args:
      path: the file.
      kind: return only these; the others are checked too.
      more: kind -> fields required in addition to SCHEMA, such as STUDY.

    Raises:
      RecordError: a broken line, a record that does not fit the schema, or not a regular file; FileNotFoundError: no
        such file.
    """
    lines = _lines(path)
    out = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if number == len(lines) and _parse(line) is None and not CHECKSUM.search(line):
            break  # no newline and no checksum at its end: an incomplete write
        record = _record(line, f"{path}:{number}", more)
        if kind is None or record["kind"] == kind:
            out.append(record)
    return out


def set_aside(path: str | os.PathLike, more: Mapping[str, frozenset[str]] | None = None) -> str | None:
    """Moves broken lines of a run's file into NAME.damaged.jsonl, so that the run can continue.

    An incomplete last line, left by a killed process, stays: `append` removes it.

    Returns:
      A line to print; None if nothing was moved.

    Raises:
      RecordError: not a regular file, or it cannot be written.
    """
    path = place(path)
    try:
        lines = _lines(path)
    except FileNotFoundError:
        return None
    good, bad, first = [], [], None
    for number, line in enumerate(lines[:-1], 1):
        try:
            if line.strip():
                _record(line, f"{path}:{number}", more)
            good.append(line)
        except RecordError as error:
            first = first or str(error)
            bad.append(line)
    if not bad:
        return None
    damaged = path.with_suffix(f".damaged{path.suffix}")
    try:
        with files.open_to_append(damaged, sole=True) as file:
            file.write(b"".join(line + b"\n" for line in bad))
            files.sync(file)
        files.write_atomically(path, b"\n".join([*good, lines[-1]]))
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror})") from None
    count = "1 line is" if len(bad) == 1 else f"{len(bad)} lines are"
    return f"{first}; {count} set aside in {damaged.name}, and the run goes on"


def check_run(path: str | os.PathLike, found: Sequence[dict[str, Any]], fingerprint: str) -> None:
    """Checks that records belong to the run or study in the same folder; records of earlier versions do not say.

    Args:
      path: the file they were read from, for the message.
      found: records; a run's started events and a study's final records have a field `fingerprint`.
      fingerprint: of the run, see `manifest.fingerprints`; "" skips the check.

    Raises:
      RecordError: they belong to another run.
    """
    for record in found if fingerprint else ():
        if record.get("fingerprint", fingerprint) != fingerprint:
            raise RecordError(
                f"{path}: belongs to another run: its fingerprint is {record['fingerprint']}, this run's {fingerprint}"
            )


def latest(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record per (kind, step, split, event), the one written last; ordered by step."""
    by_key = {(r["kind"], r["step"], r.get("split"), r.get("event")): r for r in records}
    return sorted(by_key.values(), key=lambda r: r["step"])
