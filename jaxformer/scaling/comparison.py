"""What a sweep found: the loss of each value with its standard error, and its difference to the first value.

Runs that differ in their seed alone are repetitions. With two or more seeds the standard error is that over seeds, and
the difference to another value is paired: the mean of the differences between runs of the same seed, with Student's t
interval. With one seed only the evaluation's own standard error is known, which leaves out how much seeds differ.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformer.scaling.bootstrap import special

SEED = "seed"


class RunEnd(NamedTuple):
    """How a run ended.

    Attributes:
      name: of the run.
      values: field -> value of what was swept.
      status: finished, diverged, failed, unfinished or "not started".
      step, tokens: made so far.
      loss, stderr: of the final evaluation, nats per token.
      seconds: wall time of all starts.
      why: of a run that did not finish.
    """

    name: str
    values: Mapping[str, Any]
    status: str
    step: int = 0
    tokens: int = 0
    loss: float = math.nan
    stderr: float = math.nan
    seconds: float = 0.0
    why: str = ""


class Row(NamedTuple):
    """What is known of one combination of values.

    Attributes:
      values: field -> value, without the seed.
      losses: seed (None: there is no such field) -> final loss of the finished runs.
      others: runs that diverged, failed or have not finished.
      loss: mean over seeds; nan if none has finished.
      stderr: of it: over seeds, or with one seed the evaluation's.
      difference: to the row of the first value of a field whose other values are the same; nan in that row.
      low, high: its 95 % interval.
      basis: what the interval is made from.
    """

    values: dict[str, Any]
    losses: dict[Any, float]
    others: list[RunEnd]
    loss: float
    stderr: float
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    basis: str = ""


class Lowest(NamedTuple):
    """The row of the lowest loss, and those that may be as low: the 95 % interval of the difference holds 0."""

    row: Row
    alike: list[Row]


def compare(ends: Sequence[RunEnd], along: str | None = None) -> list[Row]:
    """A row for each combination of values but the seed, in the order of the runs.

    Args:
      ends: how the runs ended.
      along: the field to whose first value each row is compared, at equal other values; None: the first field.

    >>> rows = compare([RunEnd("", {"width": w, "seed": s}, "finished", loss=loss) for w, s, loss in
    ...                 [(8, 0, 3.0), (8, 1, 3.4), (16, 0, 2.9), (16, 1, 3.2)]])
    >>> [(row.values, round(row.loss, 2), round(row.difference, 2), row.basis) for row in rows]
    [({'width': 8}, 3.2, nan, ''), ({'width': 16}, 3.05, -0.15, '2 pairs of seeds')]
    """
    groups = _groups(ends)
    rows = {key: _row(group) for key, group in groups.items()}
    for key, row in rows.items():
        if not row.values:
            continue
        first = next(iter(row.values)) if along is None else along
        alike = [other for other in rows if _others(rows[other], first) == _others(row, first)]
        if alike[0] != key:
            rows[key] = _compared(row, rows[alike[0]], groups[key], groups[alike[0]])
    return list(rows.values())


def lowest(ends: Sequence[RunEnd]) -> Lowest | None:
    """The values of the lowest loss, and those that these runs cannot tell from them; None: fewer than two are known.

    >>> found = lowest([RunEnd("", {"width": w, "seed": s}, "finished", loss=loss) for w, s, loss in
    ...                 [(8, 0, 3.0), (8, 1, 3.4), (16, 0, 2.9), (16, 1, 3.2), (32, 0, 3.1), (32, 1, 3.41)]])
    >>> found.row.values, [row.values for row in found.alike]
    ({'width': 16}, [{'width': 8}])
    """
    groups = _groups(ends)
    known = {key: row for key, row in ((key, _row(group)) for key, group in groups.items()) if math.isfinite(row.loss)}
    if len(known) < 2:
        return None
    best = min(known, key=lambda key: known[key].loss)
    others = [_compared(row, known[best], groups[key], groups[best]) for key, row in known.items() if key != best]
    return Lowest(known[best], [row for row in others if not row.low > 0])


def student(share: float, freedom: float) -> float:
    """The quantile of Student's t distribution below which `share` of it lies."""
    return float(special().stdtrit(freedom, share))


def _groups(ends: Sequence[RunEnd]) -> dict[str, list[RunEnd]]:
    """Runs that differ in their seed alone, together."""
    groups: dict[str, list[RunEnd]] = {}
    for end in ends:
        groups.setdefault(repr(_without_seed(end)), []).append(end)
    return groups


def _row(group: Sequence[RunEnd]) -> Row:
    finished = [end for end in group if end.status == "finished"]
    losses = {end.values.get(SEED): end.loss for end in finished}
    found = np.array(list(losses.values()))
    stderr = math.nan
    if len(found) > 1:
        stderr = float(found.std(ddof=1) / math.sqrt(len(found)))
    elif len(found):
        stderr = finished[0].stderr
    loss = float(found.mean()) if len(found) else math.nan
    others = [end for end in group if end.status != "finished"]
    return Row(_without_seed(group[0]), losses, others, loss, stderr)


def _compared(row: Row, first: Row, group: Sequence[RunEnd], firsts: Sequence[RunEnd]) -> Row:
    """`row` with its difference to `first`."""
    if not row.losses or not first.losses:
        return row
    shared = [seed for seed in row.losses if seed in first.losses]
    counts = len(row.losses), len(first.losses)
    if len(shared) > 1:
        each = np.array([row.losses[seed] - first.losses[seed] for seed in shared])
        difference, error = float(each.mean()), float(each.std(ddof=1)) / math.sqrt(len(each))
        half, basis = student(0.975, len(each) - 1) * error, f"{len(each)} pairs of seeds"
    elif min(counts) > 1:  # Welch's interval
        variances = row.stderr**2, first.stderr**2
        total = sum(variances)
        freedom = total**2 / sum(v**2 / (n - 1) for v, n in zip(variances, counts, strict=True)) if total else 1.0
        difference, half = row.loss - first.loss, student(0.975, freedom) * math.sqrt(total)
        basis = f"{counts[0]} and {counts[1]} seeds, none shared by two runs"
    else:
        difference, half = row.loss - first.loss, 1.96 * math.hypot(_evaluation(group), _evaluation(firsts))
        basis = "one seed: the evaluation's error alone"
    return row._replace(difference=difference, low=difference - half, high=difference + half, basis=basis)


def _evaluation(group: Sequence[RunEnd]) -> float:
    """The evaluation's standard error of the mean loss of some runs, which are evaluated on the same rows."""
    return max((end.stderr for end in group if end.status == "finished"), default=math.nan)


def _without_seed(end: RunEnd) -> dict[str, Any]:
    return {field: value for field, value in end.values.items() if field != SEED}


def _others(row: Row, first: str) -> dict[str, Any]:
    return {field: value for field, value in row.values.items() if field != first}
