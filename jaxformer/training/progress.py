"""Progress of a run: a bar on a terminal, otherwise a plain line every few seconds."""

import math
import sys
import time
from collections.abc import Callable
from typing import Any

PLAIN_SECONDS = 10.0  # between two lines when there is no bar


class Progress:
    """Shows the run's state.

    Args:
      total: steps of the whole run.
      log: prints a line.
      show: False to show nothing (processes other than 0).
      bar: True for a bar, False for lines, None: a bar if stderr is a terminal.
      unit: of `total`.
    """

    def __init__(
        self,
        total: int,
        log: Callable[[str], None],
        *,
        show: bool = True,
        bar: bool | None = None,
        unit: str = "step",
    ):
        self._total, self._log, self._show, self._unit = total, log, show, unit
        self._first: tuple[int, float] | None = None  # step and time of the first update, after compiling
        self._printed = -math.inf  # time of the last line
        self._bar: Any = None
        if show and (sys.stderr.isatty() if bar is None else bar):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), refresh_per_second=2, transient=True)
            self._task = self._bar.add_task("compiling", total=total)
            self._bar.start()

    def expect(self, total: int) -> None:
        """Changes the total."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def update(
        self, step: int, loss: float, tokens_per_second: float | None = None, mfu: float | None = None, label: str = ""
    ) -> None:
        """Shows that the run is at `step`; `label` goes before the loss."""
        if not self._show:
            return
        if self._first is None:
            self._first = (step, time.monotonic())
        first, since = self._first
        parts = [f"{label} loss {loss:.4f}".strip()]
        if tokens_per_second is not None:
            parts.append(f"{tokens_per_second:,.0f} tokens/s")
        if mfu is not None:
            parts.append(f"MFU {mfu:.1%}")
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=", ".join(parts))
        elif time.monotonic() - self._printed >= PLAIN_SECONDS:
            self._printed = time.monotonic()
            if step > first:
                parts.append(f"{duration((self._printed - since) / (step - first) * (self._total - step))} left")
            self._log(f"{self._unit} {step} of {self._total}: {', '.join(parts)}")

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._show:
            self._log(text)

    def close(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.stop()


def duration(seconds: float) -> str:
    """A length of time as text.

    >>> duration(42), duration(3700)
    ('42 s', '1 h 02 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
