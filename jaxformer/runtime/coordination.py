"""What the processes of one run must say alike, and what ends one that waits in vain.

What one process finds out alone (a file it cannot read, a signal, a full disk) all must act on, or the others wait for
it for ever. They tell each other through the key-value store of JAX's runtime: it needs no device and no compiled
program, and while a process waits there, the death of another still ends it. With one process nothing is told.

>>> gather({"loss": 2.5}, "what it found")
[{'loss': 2.5}]
>>> raise_together(lambda: 7, "the preparation")
7
"""

import faulthandler
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from jaxformer.errors import ConfigError

T = TypeVar("T")

STALLED = 124  # exit code of a process that got nowhere for too long
_calls = itertools.count()
_patience_seconds = 1800.0


def wait_at_most(seconds: float) -> None:
    """How long this process waits for another from now on, before it gives up and ends with exit code 124."""
    global _patience_seconds
    _patience_seconds = seconds


def num_processes() -> int:
    """How many processes this run has; unlike jax.process_count() it touches no device."""
    return _state().num_processes if _state().client is not None else 1


def index() -> int:
    """Which of them this process is, from 0; touches no device."""
    return _state().process_id if _state().client is not None else 0


def gather(value: Any, what: str) -> list[Any]:
    """The value of every process, in their order. All call it, from one thread, in one order.

    Args:
      value: of this process; JSON can say it.
      what: for the line that tells what was waited for in vain.
    """
    count = num_processes()
    if count == 1:
        return [value]
    client, own, call = _state().client, index(), next(_calls)
    client.key_value_set(f"jaxformer/{call}/{own}", json.dumps(value))
    return [
        value if other == own else json.loads(_wait(client, f"jaxformer/{call}/{other}", other, what))
        for other in range(count)
    ]


def raise_together(work: Callable[[], T], what: str, error: type[Exception] = ConfigError) -> T:
    """`work()`, if it fails in no process; where it fails in one with `error`, it fails in all.

    Args:
      work: done by each process, each with its own result; other errors than `error` are not held back.
      what: as in `gather`.
      error: takes a message; the one of the first process that failed is that of all.

    Raises:
      error: with the attribute `told_elsewhere` in processes other than the first that failed.
    """
    result, message = None, None
    try:
        result = work()
    except error as failure:
        if num_processes() == 1:
            raise
        message = str(failure)
    messages = gather(message, what)
    for first, each in enumerate(messages):
        if each is not None:
            found = error(each if first == 0 else f"process {first}: {each}")
            found.told_elsewhere = first != index()  # type: ignore[attr-defined]
            raise found
    return result  # type: ignore[return-value]


def assert_same(about: Mapping[str, Any], what: str) -> None:
    """Raises ConfigError in every process if the processes do not say the same `about` themselves."""
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
    """While entered, ends the process (exit code 124) when `alive` was not called for too long.

    The runtime notices a process that died or was frozen, not one that lives and gets nowhere: a file system that
    answers no more, collectives entered in another order. Does nothing where there is one process: it keeps nobody
    waiting but its user.

    Args:
      seconds: that may pass between two calls of `alive`.
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
        """Something was done."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._seconds / 4)):
            if time.monotonic() - self._last > self._seconds:
                _give_up(f"nothing was done for {self._seconds:g} s")


def leave(code: int) -> NoReturn:
    """Ends this process at once, without waiting for the others at the runtime's last barrier."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(client: Any, key: str, other: int, what: str) -> str:
    """The value of a key that another process sets; waits in short pieces, so that Ctrl-C is heard."""
    until = time.monotonic() + _patience_seconds
    while True:
        piece = min(2.0, max(0.1, until - time.monotonic()))
        try:
            return client.blocking_key_value_get(key, int(1000 * piece))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() >= until:
                _give_up(f"process {other} did not tell of {what} in {_patience_seconds:g} s")


def _give_up(why: str) -> NoReturn:
    print(
        f"error: process {index()} ends: {why} (config.distributed.stall_timeout_seconds); where its threads stand:",
        file=sys.stderr,
    )
    faulthandler.dump_traceback(all_threads=True)
    leave(STALLED)


def _state() -> Any:
    """JAX's runtime of many processes. It has no public name; orbax takes it from the same place."""
    from jax._src import distributed

    return distributed.global_state
