"""Silences what orbax and tensorstore log from their threads about a failure that was already raised as an exception.

One failed write logs hundreds of lines. One damaged array prints a traceback for every other array being read: their
coroutines are still running when the first one fails, and Python reports each of them when it is deleted.
"""

import contextlib
import gc
import logging
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LOGGERS = ("absl", "asyncio")


class Quiet:
    """While entered, messages from orbax's own files are dropped, and no others; may be entered several times.

    `sys.unraisablehook` is restored when the last one exits.
    """

    _lock = threading.Lock()
    _entered = 0
    _before: Any = None

    def __enter__(self) -> "Quiet":
        with Quiet._lock:
            Quiet._entered += 1
            if Quiet._entered == 1:
                for name in _LOGGERS:
                    logging.getLogger(name).addFilter(_not_orbax)
                Quiet._before, sys.unraisablehook = sys.unraisablehook, _hook
        return self

    def __exit__(self, *_) -> None:
        with Quiet._lock:
            Quiet._entered -= 1
            if Quiet._entered == 0:
                for name in _LOGGERS:
                    logging.getLogger(name).removeFilter(_not_orbax)
                if sys.unraisablehook is _hook:
                    sys.unraisablehook = Quiet._before


@contextlib.contextmanager
def quiet_call() -> Iterator[None]:
    """`Quiet` for a call in this thread, without warnings about coroutines that it starts and nobody awaits."""
    with Quiet(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
        yield


def settle() -> None:
    """Collects what a failed call left behind while `Quiet` still applies; no variable may hold its exception."""
    for _ in range(3):
        gc.collect()
        time.sleep(0.02)  # until reads in tensorstore's threads have ended


def _folder() -> str:
    found = sys.modules.get("orbax.checkpoint")
    return "" if found is None or found.__file__ is None else str(Path(found.__file__).parent)


def _not_orbax(record: logging.LogRecord) -> bool:
    folder = _folder()
    if not folder:
        return True
    if record.name == "asyncio" and "exception was never retrieved" in record.getMessage():  # of a task or a future
        text = record.getMessage()
        if record.exc_info:
            text += "".join(traceback.format_exception(*record.exc_info))
        return not any(word in text for word in (folder, ".orbax-checkpoint-tmp", "TensorStore", "OCDBT"))
    return not record.pathname.startswith(folder)


def _hook(unraisable: Any) -> None:
    """`sys.unraisablehook` that ignores orbax's coroutines and event loops that were closed or could not be created."""
    code, error, folder = getattr(unraisable.object, "cr_code", None), unraisable.exc_value, _folder()
    orbax = folder and code is not None and code.co_filename.startswith(folder)
    no_loop = getattr(unraisable.object, "__qualname__", "") == "BaseEventLoop.__del__"
    closed_loop = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    if not (orbax or no_loop or closed_loop):
        Quiet._before(unraisable)
