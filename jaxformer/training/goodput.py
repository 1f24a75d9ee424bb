"""How much of a run's wall time went into steps that count, over all of its starts, from its records alone.

A start that was killed leaves records up to the last one that it wrote; what it did after that is not seen. Starts of
versions that recorded no times are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxformer.training.stopwatch import ASIDE

MOST_INTEGER = 2**63
Record = Mapping[str, Any]
STARTS = ("started", "resumed")


class Goodput(NamedTuple):
    """Where the wall time of a run went.

    Attributes:
      productive_share: productive_seconds / wall_seconds.
      productive_seconds: in training steps that no later start had to make again.
      wall_seconds: of all starts.
      startup_seconds: reading the text, preparing, starting trackers.
      compilation_seconds: and making the first values.
      data_seconds: that the devices had nothing to do because the next batch was not there, at most.
      evaluation_seconds: on the held-out split.
      checkpoint_seconds: reading and saving.
      restarts: starts after the first.
      steps_redone: made again after a kill.
    """

    productive_share: float
    productive_seconds: float
    wall_seconds: float
    startup_seconds: float
    compilation_seconds: float
    data_seconds: float
    evaluation_seconds: float
    checkpoint_seconds: float
    restarts: int
    steps_redone: int


def goodput(records: Sequence[Record]) -> Goodput | None:
    """The goodput of a run.

    Args:
      records: of the run, in the order written. Their field `spent` holds the seconds of that start so far: "total",
        and those that were no training, by name.

    Returns:
      None if no record says how time was spent.

    >>> def at(seconds, aside=0.0):
    ...     return {"spent": {"total": seconds, "compilation": aside}}
    >>> found = goodput([
    ...     {"kind": "event", "event": "started", "step": 0, **at(2.0, 2.0)},
    ...     {"kind": "train", "step": 10, **at(12.0, 2.0)},  # killed; its checkpoint is of step 5
    ...     {"kind": "event", "event": "resumed", "step": 5, **at(3.0, 3.0)},
    ...     {"kind": "train", "step": 10, **at(8.0, 3.0)},
    ... ])
    >>> found.productive_seconds, found.wall_seconds, found.restarts, found.steps_redone
    (10.0, 20.0, 1, 5)
    """
    starts = [start for start in _starts(records) if any("spent" in record for record in start)]
    if not starts:
        return None
    spent: dict[str, float] = {}
    productive, redone = 0.0, 0
    for number, start in enumerate(starts):
        last = [record["spent"] for record in start if "spent" in record][-1]
        spent = {name: spent.get(name, 0.0) + last.get(name, 0.0) for name in spent | last}
        kept = min((later[0]["step"] for later in starts[number + 1 :]), default=MOST_INTEGER)
        redone += max(0, max(record["step"] for record in start) - max(kept, start[0]["step"]))
        productive += sum(
            seconds * min(1.0, max(0.0, (kept - begin) / (end - begin)))
            for begin, end, seconds in _intervals(start)
        )  # fmt: skip
    total = spent.pop("total")
    return Goodput(
        productive_share=productive / total if total else 0.0,
        productive_seconds=productive,
        wall_seconds=total,
        **{f"{name}_seconds": spent.get(name, 0.0) for name in ASIDE},
        restarts=len(starts) - 1,
        steps_redone=redone,
    )


def _starts(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each start."""
    starts: list[list[Record]] = []
    for record in records:
        if record["kind"] == "event" and record["event"] in STARTS:
            starts.append([])
        if starts:
            starts[-1].append(record)
    return starts


def _intervals(start: Sequence[Record]) -> Iterator[tuple[int, int, float]]:
    """(first step, last step, seconds of training) between one train record of a start and the next."""
    step, before = start[0]["step"], _training(start[0])
    for record in start:
        if record["kind"] == "train" and record["step"] > step and "spent" in record:
            now = _training(record)
            yield step, record["step"], max(0.0, now - before)
            step, before = record["step"], now


def _training(record: Record) -> float:
    """Seconds of training so far."""
    spent = record.get("spent", {"total": 0.0})
    return 2 * spent["total"] - sum(spent.values())
