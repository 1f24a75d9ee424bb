"""A lock that allows one run at a time in a folder of an object store.

The lock is the object `.lock`: it names its holder as the file of `workdir_lock` does, who puts it anew every 10 s. A
new run takes it over at once if the holder was a process of this machine that has ended, or an earlier start of
the same SLURM job; otherwise it is refused as soon as the object changes, and takes over once it has not changed for
60 s, by this machine's clock.

Every put names the version that it replaces (GCS: ifGenerationMatch; S3: If-None-Match and If-Match), so that of
several starts one wins. In stores of other protocols that is checked just before the put, and two starts in the same
moment may both win. A holder that was cut off for longer than 60 s exits when it finds another holder in its place;
until then, at most 10 s after it can reach the store again, it may still write.
"""

import contextlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from jaxformer.errors import ConfigError
from jaxformer.runs import workdir_lock
from jaxformer.runtime import coordination
from jaxformer.storage import json_checksum, object_store, spool
from jaxformer.storage.address import Address, is_address


def lock_of(workdir: str, field: str = "config.workdir") -> "workdir_lock.WorkdirLock | StoreLock":
    """The lock of a working directory, wherever that is; errors name `field`."""
    if is_address(workdir):
        return StoreLock(Address(workdir), field=field)
    return workdir_lock.WorkdirLock(workdir, field=field)


class StoreLock:
    """While entered, this process holds the lock of the working directory; in the end, what was appended is put.

    Args:
      workdir: the address.
      environment: has the variables of a SLURM job, if any.
      touch_seconds, dead_seconds: how often a holder puts its lock; after how long without that it counts as dead.
      field: that an error names.

    Raises:
      ConfigError: on entering; another run holds it, or it cannot be put.
    """

    def __init__(
        self,
        workdir: Address,
        environment: Mapping[str, str] = os.environ,
        touch_seconds: float = workdir_lock.TOUCH_SECONDS,
        dead_seconds: float = workdir_lock.DEAD_SECONDS,
        field: str = "config.workdir",
    ):
        self._field = field
        self._workdir, self._path = workdir, str(workdir / workdir_lock.FILE_NAME)
        self._touch, self._dead = touch_seconds, dead_seconds
        self._mine = {**workdir_lock.whoami(environment), "token": secrets.token_hex(8), "flock": False, "puts": 0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True, name="workdir lock")

    def __enter__(self) -> "StoreLock":
        try:
            self._take()
        except OSError as error:
            raise ConfigError(f"{self._field}: {self._path} cannot be written ({error.strerror})") from None
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            spool.sync_all(cast(Path, self._workdir), end=True)
        with contextlib.suppress(OSError):
            self._thread.join(self._dead)
            if self._read()[0].get("token") == self._mine["token"]:
                object_store.request("rm_file", self._path)

    def _take(self) -> None:
        """Puts this process's lock. Raises ConfigError if another run holds it, OSError if the store refuses."""
        noted, seen, since = False, None, time.monotonic()
        while True:
            holder, version = self._read()
            if holder.get("token") == self._mine["token"]:
                return
            waited = time.monotonic() - since
            verdict = "ended"
            if version is not None:
                if seen is not None and version != seen:
                    raise ConfigError(f"{self._field}: {self._workdir} is in use by {workdir_lock.who(holder)}")
                seen = version
                verdict = workdir_lock.verdict_on(holder, self._mine, -1, waited > self._dead)
            if verdict == "alive":
                raise ConfigError(f"{self._field}: {self._workdir} is in use by {workdir_lock.who(holder)}")
            if verdict == "ended":
                with contextlib.suppress(FileExistsError):  # another start was faster; or this put, tried twice, was
                    self._put(version)
                continue  # to read who holds it now
            if not noted and waited > 1.0:
                noted = True
                print(
                    f"note: {self._workdir} was in use by {workdir_lock.who(holder)}; waiting up to {self._dead:.0f} s "
                    "to see whether that process is still alive",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
            time.sleep(min(1.0, self._dead / 10))

    def _keep(self) -> None:
        """Puts the lock anew while it is held; ends this process if another has taken it over."""
        while not self._stop.wait(self._touch):
            with contextlib.suppress(OSError):
                holder, version = self._read()
                if holder and holder.get("token") != self._mine["token"] and not self._stop.is_set():
                    print(
                        f"error: {self._field}: {self._workdir} was taken over by {workdir_lock.who(holder)}, because "
                        f"this process did not reach its lock for {self._dead:g} s; exiting",
                        file=sys.stderr, flush=True,
                    )  # fmt: skip
                    coordination.leave(2)
                    return
                self._put(version)

    def _put(self, version: str | None) -> None:
        self._mine["puts"] += 1  # so that its content differs, of which S3 makes the version
        object_store.put_if(self._path, json.dumps(self._mine).encode(), version)

    def _read(self) -> tuple[dict[str, Any], str | None]:
        """The holder, empty if it cannot be read, and the lock's version, None if there is no lock."""
        try:
            version = object_store.version_of(object_store.request("info", self._path))
            found = json_checksum.parse(object_store.request("cat_file", self._path))
        except FileNotFoundError:
            return {}, None
        except ValueError:
            return {}, version
        return (found if isinstance(found, dict) else {}), version
