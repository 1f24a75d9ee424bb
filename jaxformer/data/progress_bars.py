"""Progress bars on standard error for one-time work, such as tokenising a corpus."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

Advance = Callable[[int], None]
Bar = Callable[[str, int | None], Advance]


@contextlib.contextmanager
def bars(show: bool) -> Iterator[Bar]:
    """Yields `bar(description, total) -> advance(amount)`; amounts are bytes, a total of None means unknown.

    Nothing is imported or drawn before the first bar. If standard error is not a terminal, each bar is one plain line.
    """
    with contextlib.ExitStack() as stack:
        drawn: Any = None

        def bar(description: str, total: int | None) -> Advance:
            nonlocal drawn
            if not show or not sys.stderr.isatty():
                if show:
                    say(description)
                return lambda amount: None
            if drawn is None:
                from rich.console import Console
                from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

                columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
                drawn = stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
            task = drawn.add_task(description, total=total)
            return lambda amount: drawn.update(task, advance=amount)

        yield bar


def say(line: str) -> None:
    """Prints one plain line on standard error."""
    print(line, file=sys.stderr, flush=True)
