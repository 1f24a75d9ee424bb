"""A lock that allows one run at a time in a working directory, also on network file systems.

The lock is the file `.lock` in the directory: it names its holder (host, process, start time), who touches it every
10 s. What a new run does with an existing lock depends on its holder:

  a process of this machine            takes over at once if that process has ended, otherwise is refused at once
  the same SLURM job, requeued         takes over at once: SLURM has ended the processes of the earlier start
  another machine or container         is refused once the lock is touched; takes over if it was not for 60 s

So after `kill -9` the next start does not wait, and one on another machine waits at most a minute. A holder that was
suspended for longer than that exits when it wakes up and finds another holder, without writing to the directory.
A lock's age is measured by the file system's clock, because the clocks of two machines differ.

Where the file system supports `flock`, the holder keeps one as well: it shows whether a process in another container of
this machine is alive. Programs that only read (evaluate, generate, curves) take no lock.
"""

import contextlib
import errno
import json
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.runtime import console, coordination
from jaxformer.storage import files, json_checksum

FILE_NAME = ".lock"
TOUCH_SECONDS, DEAD_SECONDS = 10.0, 60.0


class WorkdirLock:
    """While entered, this process holds the lock of the working directory.

    Args:
      workdir: exists and is writable.
      environment: has the variables of a SLURM job, if any.
      touch_seconds, dead_seconds: how often a holder touches its lock; after how long without that it counts as dead.
      field: that an error names.

    Raises:
      ConfigError: on entering; another run holds it, or it cannot be created.
    """

    def __init__(
        self,
        workdir: str | Path,
        environment: Mapping[str, str] = os.environ,
        touch_seconds: float = TOUCH_SECONDS,
        dead_seconds: float = DEAD_SECONDS,
        field: str = "config.workdir",
    ):
        self._field = field
        self._path = Path(workdir) / FILE_NAME
        self._touch, self._dead = touch_seconds, dead_seconds
        self._mine = {**whoami(environment), "token": secrets.token_hex(8)}
        self._handle = -1
        self._stop = threading.Event()

    def __enter__(self) -> "WorkdirLock":
        half = self._path.with_name(f"{FILE_NAME}.{self._mine['token']}")
        try:
            self._handle = os.open(half, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            self._mine["flock"] = files.lock(self._handle)
            os.write(self._handle, json.dumps(self._mine).encode())
            self._take(half)
        except OSError as error:
            self._close()
            raise ConfigError(f"{self._field}: {self._path} cannot be written ({error.strerror or error})") from None
        except BaseException:
            self._close()
            raise
        finally:
            half.unlink(missing_ok=True)
        threading.Thread(target=self._keep, daemon=True, name="workdir lock").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            if self._holder().get("token") == self._mine["token"]:
                self._path.unlink()
        self._close()

    def _take(self, half: Path) -> None:
        """Gives this process's file `half` the lock's name. Raises ConfigError if another run holds the lock."""
        noted, seen, began = False, None, time.monotonic()
        while True:
            try:
                _link(half, self._path)
                return
            except FileExistsError:
                pass
            try:
                old = _open(self._path)
            except FileNotFoundError:
                continue  # released just now
            try:
                holder, about = self._holder(), os.fstat(old)
                os.utime(half)  # now, by the file system's clock
                age = os.stat(half).st_mtime - about.st_mtime
                touched = seen is not None and seen != (about.st_ino, about.st_mtime_ns)
                waited = time.monotonic() - began
                verdict = verdict_on(holder, self._mine, old, age > self._dead or waited > self._dead)
                if verdict == "ended" and files.lock(old) is None and waited < 1.0:
                    verdict = "unknown"  # another start is taking it over right now
                if verdict == "ended":
                    if os.stat(self._path).st_ino == about.st_ino:  # no other start took it over meanwhile
                        os.replace(half, self._path)
                        return
                    continue
                if verdict == "alive" or touched:
                    raise ConfigError(f"{self._field}: {self._path.parent} is in use by {who(holder)}")
                seen = seen or (about.st_ino, about.st_mtime_ns)
            except FileNotFoundError:
                continue
            finally:
                os.close(old)
            if not noted and waited > 1.0:
                noted = True
                print(
                    f"note: {self._path.parent} was in use by {who(holder)} {age:.0f} s ago; waiting up to "
                    f"{max(0.0, self._dead - age):.0f} s to see whether that process is still alive",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            time.sleep(min(0.2, self._dead / 10))

    def _keep(self) -> None:
        """Touches the lock while it is held; ends this process if another has taken it over."""
        while not self._stop.wait(self._touch):
            with contextlib.suppress(OSError):
                holder = self._holder()
                if holder and holder.get("token") != self._mine["token"] and not self._stop.is_set():
                    print(
                        f"error: {self._field}: {self._path.parent} was taken over by {who(holder)}, because this "
                        f"process did not touch its lock for {self._dead:g} s; exiting",
                        file=sys.stderr, flush=True,
                    )  # fmt: skip
                    coordination.leave(2)
                os.utime(self._path)

    def _holder(self) -> dict[str, Any]:
        """The lock's content, which describes its holder; empty if it cannot be read."""
        try:
            found = json_checksum.parse(files.read_bytes(self._path, 2**16))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            return {}
        return found if isinstance(found, dict) else {}

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def verdict_on(holder: Mapping[str, Any], mine: Mapping[str, Any], handle: int, silent: bool) -> str:
    """The state of a lock's holder: "alive", "ended" or "unknown".

    Args:
      holder: the lock's content.
      mine: what this process would write.
      handle: of the open lock.
      silent: True if the lock was not touched for too long.
    """
    if holder.get("machine") == mine["machine"] and mine["machine"]:
        if holder.get("processes") == mine["processes"]:  # the same process ids, so it can be looked up
            started = _started(holder.get("process"))
            if started is None or started != holder.get("started"):  # gone, or its id was reused
                return "ended"
            return "alive" if started else "ended" if silent else "unknown"
        if holder.get("flock") and mine["flock"]:  # in another container
            return "alive" if files.lock(handle) is None else "ended"
    if mine["slurm_job"] and holder.get("slurm_job") == mine["slurm_job"]:
        starts = holder.get("slurm_start")
        if isinstance(starts, int) and starts < mine["slurm_start"]:
            return "ended"
    return "ended" if silent else "unknown"


def who(holder: Mapping[str, Any]) -> str:
    """A lock's holder in words."""
    if not holder:
        return "another run, whose lock cannot be read"
    values = (str(holder.get(name))[:80] for name in ("process", "host", "since"))  # the file may hold anything
    return console.one_line("process {} on {} since {}".format(*values))


def whoami(environment: Mapping[str, str]) -> dict[str, Any]:
    """Identifies this process: the machine's boot id, the process id and its namespace, and when it started."""
    machine, processes = "", ""
    with contextlib.suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    return {
        "host": platform.node(),
        "process": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": machine or platform.node(),
        "processes": processes,
        "started": _started(os.getpid()),
        "slurm_job": environment.get("SLURM_JOB_ID"),
        "slurm_start": int(restarts) if restarts.isdecimal() else 0,
    }


def _started(process: Any) -> str | None:
    """A process's start time in the kernel's clock ticks; None if no such process runs; "" if unknown."""
    if not isinstance(process, int) or process <= 0:
        return None
    try:
        # The fields after the name, which is in brackets and may contain any text: state, ..., start time (the 22nd).
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except (OSError, IndexError):
        pass
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except (OSError, OverflowError):
        pass
    return ""


def _open(path: Path) -> int:
    """Opens an existing lock; another user's may only be readable."""
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, os.O_RDWR | flags)
    except PermissionError:
        return os.open(path, os.O_RDONLY | flags)


def _link(half: Path, path: Path) -> None:
    """Gives a file its final name if that is free; by a copy on file systems without hard links.

    Raises:
      FileExistsError: the name is taken.
    """
    try:
        os.link(half, path, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:
        with open(path, "xb") as file:
            file.write(half.read_bytes())
