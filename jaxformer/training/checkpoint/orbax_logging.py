"""What orbax and tensorstore say of a failure from their own threads, after the exception has said it all: nothing.

Of one failed write that is 250 lines of log; of one damaged array a traceback for every other array that was being read
(their coroutines are still running when the first one fails, and Python tells of each when it is thrown away).
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


class Quiet:
    """While entered, what comes out of orbax's own files is dropped, and nothing else; may be entered several times.

    Messages of others pass, whatever their path, and `sys.unraisablehook` is the one that was there before once the
    last one has left.
    """

    _lock = threading.Lock()
    _entered = 0
    _before: Any = None

    def __enter__(self) -> "Quiet":
        with Quiet._lock:
            Quiet._entered += 1
            if Quiet._entered == 1:
                for name in ("absl", "asyncio"):
                    logging.getLogger(name).addFilter(_not_orbax)
                Quiet._before, sys.unraisablehook = sys.unraisablehook, _hook
        return self

    def __exit__(self, *_) -> None:
        with Quiet._lock:
            Quiet._entered -= 1
            if Quiet._entered == 0:
                for name in ("absl", "asyncio"):
                    logging.getLogger(name).removeFilter(_not_orbax)
                if sys.unraisablehook is _hook:
                    sys.unraisablehook = Quiet._before


@contextlib.contextmanager
def quiet_call() -> Iterator[None]:
    """`Quiet` for a call in this thread: coroutines that it begins and nobody awaits are not warned of either."""
    with Quiet(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)
        yield


def settle() -> None:
    """Throws away what a failed call left behind, while it is still quiet; its exception must be forgotten by then."""
    for _ in range(3):
        gc.collect()
        time.sleep(0.02)  # for reads in tensorstore's threads to end


def _folder() -> str:
    found = sys.modules.get("orbax.checkpoint")
    return "" if found is None or found.__file__ is None else str(Path(found.__file__).parent)


def _not_orbax(record: logging.LogRecord) -> bool:
    folder = _folder()
    if not folder:
        return True
    if record.name == "asyncio" and "exception was never retrieved" in record.getMessage():  # of a task or a future
        told = record.getMessage()
        if record.exc_info:
            told += "".join(traceback.format_exception(*record.exc_info))
        return not any(word in told for word in (folder, ".orbax-checkpoint-tmp", "TensorStore", "OCDBT"))
    return not record.pathname.startswith(folder)


def _hook(unraisable: Any) -> None:
    """`sys.unraisablehook` for all but orbax's coroutines, and event loops that have ended or could not be made."""
    code = getattr(unraisable.object, "cr_code", None)
    folder = _folder()
    if folder and code is not None and code.co_filename.startswith(folder):
        return
    if getattr(unraisable.object, "__qualname__", "") == "BaseEventLoop.__del__":
        return
    error = unraisable.exc_value
    if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
        return
    Quiet._before(unraisable)
