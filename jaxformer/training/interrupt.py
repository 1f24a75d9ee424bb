"""SIGTERM and Ctrl-C: the first asks the loop to stop, a second Ctrl-C exits at once."""

import os
import signal
import socket
import threading
from collections.abc import Callable


class StopSignal:
    """While entered, SIGTERM and SIGINT set `requested` (the signal's name, or None) instead of ending the process.

    Python runs signal handlers only between bytecode instructions, and a dispatch can take minutes. So a thread reads
    the bytes that the interpreter's C handler writes for each signal, and a second Ctrl-C works at any time. Does
    nothing outside the main thread, where Python handles no signals.

    Args:
      tell: prints a line when the first signal arrives.
    """

    def __init__(self, tell: Callable[[str], None]):
        self.requested: str | None = None
        self._tell = tell
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, lambda *_: None)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        if not self._before:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before = {}
        signal.set_wakeup_fd(self._wakeup)
        self._writer.close()  # ends the thread's read
        self._thread.join()
        self._reader.close()

    def _watch(self) -> None:
        while received := self._reader.recv(1):
            number = received[0]
            if self.requested is None and number in (signal.SIGTERM, signal.SIGINT):
                self.requested = signal.Signals(number).name
                self._tell(f"{self.requested}: finishing this dispatch, then saving (Ctrl-C now: exit at once)")
            elif number == signal.SIGINT:
                os._exit(130)
