"""A sweep's comparison as a table: Markdown, which reads as plain text too."""

import math
from collections.abc import Sequence
from typing import Any

from jaxformer.scaling.comparison import SEED, Lowest, Row, RunEnd

GENERIC = ("name", "kind", "weight", "width", "source")
MOST_NAMED = 8  # values in a sentence


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of the table: a row for each combination of values, then what its columns mean."""
    fields = list(rows[0].values)
    compared = any(row.basis for row in rows)
    heads = [*fields, "runs", "loss", "± s.e.", *(_heads(fields[0]) if compared else [])]
    cells = []
    for row in rows:
        cell = [value_text(value) for value in row.values.values()]
        cell += [str(len(row.losses)), number(row.loss), number(row.stderr)]
        cells.append(cell + (_difference(row) if compared else []))
    return [*aligned(heads, cells), "", f"Loss: final, on the validation text, nats per token. {meaning(rows)}"]


def differences(rows: Sequence[Row], field: str) -> list[str]:
    """Lines of a table of rows that are compared along another field than the first; none where nothing is."""
    compared = [row for row in rows if row.basis]
    if not compared:
        return []
    fields = [each for each in rows[0].values if each != field]
    cells = [[value_text(row.values[name]) for name in [*fields, field]] + _difference(row) for row in compared]
    return aligned([*fields, field, *_heads(field)], cells)


def best(found: Lowest | None) -> list[str]:
    """A line: which values have the lowest loss, and whether these runs tell them from the others."""
    if found is None:
        return []
    names = [_values(row) for row in found.alike]
    alike = "; ".join(names[:MOST_NAMED]) + (f"; and {len(names) - MOST_NAMED} more" if names[MOST_NAMED:] else "")
    told = f"These runs do not tell it from {alike}" if alike else "Lower than every other, by its 95 % interval"
    alone = "" if len(found.row.losses) > 1 else " (by the evaluation's error alone)"
    return ["", f"Lowest: {_values(found.row)}, {number(found.row.loss)}. {told}{alone}."]


def meaning(rows: Sequence[Row]) -> str:
    """What the standard errors are."""
    counts = {len(row.losses) for row in rows if row.losses}
    if not counts:
        return "No run has finished."
    if min(counts) > 1:
        return "s.e.: over seeds."
    one = "of the evaluation alone, which says nothing of how much seeds differ"
    if max(counts) > 1:
        return f"s.e.: over seeds; with one run, {one}."
    return f"s.e.: {one}; --over {SEED}=0..4 repeats each run."


def unfinished(rows: Sequence[Row]) -> list[str]:
    """A line for each run that has no final loss."""
    return [_line(end) for row in rows for end in row.others]


def _heads(field: str) -> list[str]:
    return [f"difference to first {short(field)}", "95 % interval", "interval from"]


def _difference(row: Row) -> list[str]:
    between = f"{row.low:+.4f} to {row.high:+.4f}" if row.basis and math.isfinite(row.low) else ""
    return [f"{row.difference:+.4f}" if row.basis else "", between, row.basis]


def _values(row: Row) -> str:
    return ", ".join(f"{short(field)}={value_text(value)}" for field, value in row.values.items())


def _line(end: RunEnd) -> str:
    why = f": {end.why}" if end.why and end.status == "failed" else f" {end.why}" if end.why else ""
    at = f" at step {end.step}" if end.status == "unfinished" and end.step else ""
    return f"- {end.name}: {end.status}{at}{why}"


def number(value: float) -> str:
    """Four decimals; nothing for a number that is not known."""
    return f"{value:.4f}" if math.isfinite(value) else ""


def value_text(value: Any) -> str:
    """A value of a field as one types it.

    >>> value_text(0.1), value_text(8.0), value_text(None), value_text(["a", "b"])
    ('0.1', '8', 'none', 'a,b')
    """
    if isinstance(value, list):
        return ",".join(map(value_text, value))
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        return str(int(value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def aligned(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns are aligned in plain text."""
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]

    def line(cell: Sequence[str]) -> str:
        return "| " + " | ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True)) + " |"

    return [line(heads), "| " + " | ".join("-" * width for width in widths) + " |", *map(line, cells)]


def short(field: str) -> str:
    """The last part of a field's name, with the one before it where that says nothing alone.

    >>> short("optimizer.weight_decay"), short("optimizer.name"), short("data.mixture.code.weight")
    ('weight_decay', 'optimizer.name', 'code.weight')
    """
    *_, before, last = "", *field.split(".")
    return f"{before}.{last}" if last in GENERIC and before else last
