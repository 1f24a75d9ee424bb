"""What orbax and tensorstore say of a failure from their own threads, after the exception has said it all: nothing."""

import logging
import sys


def silence() -> None:
    """Drops it, from now on in this process: of one failed write 250 lines of log, and what asyncio finds left over.

    Tensorstore's futures may end after the event loop that orbax ran for them: then each would print a traceback.
    """
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if _not_orbax not in logger.filters:
            logger.addFilter(_not_orbax)
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)


def _not_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname and not (record.name == "asyncio" and "orbax" in record.getMessage())


class _Hook:
    """`sys.unraisablehook` for all but the futures of an event loop that has ended."""

    def __init__(self, others):
        self._others = others

    def __call__(self, unraisable) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self._others(unraisable)
