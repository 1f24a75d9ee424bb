"""Where the wall time of one start of a run goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

# What is no training: reading the text and preparing, compiling and first values, devices that wait for a batch,
# evaluating, saving and reading checkpoints.
ASIDE = ("startup", "compilation", "data", "evaluation", "checkpoint")


class Stopwatch:
    """Seconds since this start began, and those of them that were not spent on training.

    Args:
      began: when it did, by `time.perf_counter`; None: now.
    """

    def __init__(self, began: float | None = None):
        self._began = time.perf_counter() if began is None else began
        self._aside = dict.fromkeys(ASIDE, 0.0)

    def add(self, what: str, seconds: float) -> None:
        """Counts `seconds` as spent on `what`, one of `ASIDE`."""
        self._aside[what] += seconds

    @contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Counts the time inside as spent on `what`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - began)

    def aside(self) -> float:
        """Seconds so far that were not spent on training."""
        return sum(self._aside.values())

    def spent(self) -> dict[str, float]:
        """Seconds so far: in total, and on each of `ASIDE`; to the millisecond."""
        now = {"total": time.perf_counter() - self._began, **self._aside}
        return {name: round(seconds, 3) for name, seconds in now.items()}
