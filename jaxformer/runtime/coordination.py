"""Cross-process agreement and the stall watchdog.

If one process meets an error alone (an unreadable file, a signal, a full disk), all must act on it, or the others wait
for ever. They exchange values through the key-value store of JAX's runtime, which needs no device and no compiled
program, and where a waiting process still ends if another one dies. With a single process nothing is exchanged.

>>> gather({"loss": 2.5}, "its loss")
[{'loss': 2.5}]
>>> raise_together(lambda: 7, "the preparation")
7
"""

import collections
import faulthandler
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from jaxformer.errors import ConfigError

T = TypeVar("T")

STALLED = 124  # exit code of a process that made no progress for too long
_calls: "collections.defaultdict[str, Iterator[int]]" = collections.defaultdict(itertools.count)
_timeout_seconds = 1800.0


def wait_at_most(seconds: float) -> None:
    """Sets how long this process waits for another before it exits with code 124."""
    global _timeout_seconds
    _timeout_seconds = seconds


def num_processes() -> int:
    """Number of processes of this run; unlike jax.process_count() it initializes no device."""
    return _state().num_processes if _state().client is not None else 1


def index() -> int:
    """Index of this process, from 0; initializes no device."""
    return _state().process_id if _state().client is not None else 0


def gather(value: Any, what: str, channel: str = "main") -> list[Any]:
    """The value of every process, by index. All processes must make the calls of a channel in the same order, one at a
    time; a thread that runs beside the main one has a channel of its own.

    Args:
      value: of this process, JSON-serializable.
      what: names the value in the message of a timeout.
      channel: see above.
    """
    count = num_processes()
    if count == 1:
        return [value]
    client, own, call = _state().client, index(), next(_calls[channel])
    place = f"jaxformer/{channel}"
    client.key_value_set(f"{place}/{call}/{own}", json.dumps(value))
    found = [
        value if other == own else json.loads(_wait(client, f"{place}/{call}/{other}", other, what))
        for other in range(count)
    ]
    if call:  # who has made this call has read everything of the one before
        client.key_value_delete(f"{place}/{call - 1}/{own}")
    return found


def raise_together(work: Callable[[], T], what: str, error: type[Exception] = ConfigError, channel: str = "main") -> T:
    """`work()`; if it raises `error` in any process, all processes raise it.

    Args:
      work: called by each process, each returning its own result; other exceptions propagate at once.
      what, channel: as in `gather`.
      error: constructed from a message; all raise the message of the first process that failed.

    Raises:
      error: its attribute `told_elsewhere` is False in the first process that failed, which reports it.
    """
    result, message = None, None
    try:
        result = work()
    except error as failure:
        if num_processes() == 1:
            raise
        message = str(failure)
    messages = gather(message, what, channel)
    for first, each in enumerate(messages):
        if each is not None:
            found = error(each if first == 0 else f"process {first}: {each}")
            found.told_elsewhere = first != index()  # type: ignore[attr-defined]
            raise found
    return result  # type: ignore[return-value]


def assert_same(about: Mapping[str, Any], what: str) -> None:
    """Raises ConfigError in every process unless `about` is the same in all."""
    everyone = gather(dict(about), what)

    def check() -> None:
        for number, other in enumerate(everyone):
            for name, value in everyone[0].items():
                if other[name] != value:
                    raise ConfigError(
                        f"process {number} has another {name} than process 0 ({other[name]}, not {value})"
                    )

    raise_together(check, what)


def broadcast_from_0(value: T, what: str) -> T:
    """Process 0's value, in every process."""
    return gather(value, what)[0]


class Watchdog:
    """While entered, ends the process with exit code 124 if `alive` is not called for too long.

    JAX's runtime notices a process that died or is frozen, but not one without progress (a file system that hangs,
    collectives entered in different orders). Does nothing in a single-process run.

    Args:
      seconds: the longest time between two calls of `alive`.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._stop = threading.Event()
        self._last = time.monotonic()

    def __enter__(self) -> "Watchdog":
        self.alive()
        if num_processes() > 1:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()

    def alive(self) -> None:
        """Reports progress."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._seconds / 4)):
            if time.monotonic() - self._last > self._seconds:
                _give_up(f"no progress for {self._seconds:g} s")


def leave(code: int) -> NoReturn:
    """Exits at once, without waiting for the other processes at the runtime's shutdown barrier."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(client: Any, key: str, other: int, what: str) -> str:
    """The value of a key that another process sets; waits in short intervals, so that Ctrl-C works."""
    until = time.monotonic() + _timeout_seconds
    while True:
        piece = min(2.0, max(0.1, until - time.monotonic()))
        try:
            return client.blocking_key_value_get(key, int(1000 * piece))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() >= until:
                _give_up(f"process {other} did not report {what} within {_timeout_seconds:g} s")


def _give_up(why: str) -> NoReturn:
    line = f"error: process {index()} ends: {why} (config.distributed.stall_timeout_seconds); its threads:"
    print(line, file=sys.stderr)
    faulthandler.dump_traceback(all_threads=True)
    leave(STALLED)


def _state() -> Any:
    """JAX's multi-process runtime. It has no public name; orbax imports it from the same module."""
    from jax._src import distributed

    return distributed.global_state
