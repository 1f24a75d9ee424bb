"""JAX's persistent compilation cache with a checksum for every entry.

XLA does not check what it loads: one flipped bit can crash the process, without a message and at every start, or change
a result. So each entry written gets a mark, an empty file named after the hashes of the entry's key and bytes. An entry
without a matching mark is not loaded; its program is compiled again. The entries themselves keep JAX's format, so other
programs can share the folder.

A process that crashes while XLA loads an entry leaves its journal behind; the next process that opens the folder names
the program and removes that entry.

The checksums protect against accidents only. An entry is machine code: share a folder only with people you trust.

>>> import tempfile
>>> from types import SimpleNamespace
>>> folder = Path(tempfile.mkdtemp())
>>> cache = CheckedCache(SimpleNamespace(eviction_enabled=False), folder)
>>> cache.put("jit_f-1", b"a program")
>>> cache.get("jit_f-1")
b'a program'
>>> _ = (folder / "jit_f-1-cache").write_bytes(b"a pr0gram")
>>> cache.get("jit_f-1") is None, (folder / "jit_f-1-cache").exists()
(True, False)
"""

import atexit
import contextlib
import faulthandler
import functools
import hashlib
import os
import re
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import jax

from jaxformer.storage import files

MARKS, NOW = ".checked", "now"  # the marks' folder inside the cache; inside it, temporary files and journals
HIT = "/jax/compilation_cache/cache_hits"  # JAX's event after loading an entry
LEFT_OVER_SECONDS = 3600.0  # a temporary file this old was abandoned by its writer


def guard() -> bool:
    """Makes JAX check its persistent compilation cache from now on, in any local folder; may be called repeatedly.

    Caches in remote stores (gs://) are left alone: those keep checksums themselves.

    Returns:
      False, with nothing changed, if this version of jax lacks the functions to replace.
    """
    try:
        from jax._src import compilation_cache

        make, reset = compilation_cache.get_file_cache, compilation_cache.reset_cache
    except (ImportError, AttributeError):
        return False
    if getattr(make, "checked", False):
        return True

    @functools.wraps(make)
    def checked(*args: Any, **kwargs: Any) -> Any:
        found = make(*args, **kwargs)
        if found is None or "://" in str(found[1]) or not hasattr(found[0], "eviction_enabled"):
            return found
        try:
            return CheckedCache(found[0], Path(found[1])), found[1]
        except NotADirectoryError as error:
            _say(f"note: {error.filename} {error.strerror}; compiled programs are not kept")
            return None

    checked.checked = True  # type: ignore[attr-defined]
    compilation_cache.get_file_cache = checked
    reset()  # reopens a cache that is open already
    return True


class CheckedCache:
    """JAX's cache of compiled programs with a checksum for every entry; implements JAX's CacheInterface.

    Args:
      inner: JAX's own cache of the same folder; used only if the cache has a size limit, which it enforces.
      folder: where the entries are.

    Raises:
      NotADirectoryError: the folder for the marks is a link or not a folder.
    """

    def __init__(self, inner: Any, folder: Path):
        self._inner, self._path = inner, folder
        self._marks, self._now = folder / MARKS, folder / MARKS / NOW
        self._reported: set[str] = set()
        for each in (self._marks, self._now):
            if each.is_symlink() or (each.exists() and not each.is_dir()):
                raise NotADirectoryError(0, "is a link or no folder", str(each))
        with contextlib.suppress(OSError):
            self._now.mkdir(parents=True, exist_ok=True)
        self._journal = _Journal(self._now) if os.access(self._now, os.W_OK) else None
        if self._journal is not None:
            self._clear_up()

    def get(self, key: str) -> bytes | None:
        """The entry of a key; None if there is none or it is damaged."""
        value = self._read(key)
        if value is None:
            return None
        if not _is_file(self._marks / _mark(key, value)):
            if self._marks_of(key):
                self._say_once(f"{self._path}: a compiled program was damaged and is compiled again")
                self._drop(key)
                return None
            if self._journal is not None:  # written by another program or an older version: compile it again, mark it
                return None
        if self._inner.eviction_enabled:
            self._inner.get(key)  # records the time of use
        if self._journal is not None:
            self._journal.begin(key)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Stores an entry and its mark; prints a note, once, if that fails."""
        try:
            if self._inner.eviction_enabled:
                self._drop(key)  # JAX's cache does not overwrite an entry
            self._write(self._marks / _mark(key, value), b"")  # first, so that no entry is without a mark
            if self._inner.eviction_enabled:
                self._inner.put(key, value)
            else:
                self._write(self._entry(key), value)
        except OSError as error:
            self._say_once(f"{self._path}: compiled programs cannot be kept ({error.strerror or error})")

    def _entry(self, key: str) -> Path:
        return self._path / f"{key}-cache"

    def _read(self, key: str) -> bytes | None:
        """The bytes of an entry; None, with a note, if it is a link or not a regular file."""
        try:
            with files.open_to_read(self._entry(key)) as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say_once(f"{self._entry(key)}: not read ({error.strerror or error}); its program is compiled again")
            return None

    def _write(self, path: Path, value: bytes) -> None:
        """Writes a file atomically. Not synced: after a power loss, the checksum finds what is incomplete."""
        half = self._now / f"{secrets.token_hex(8)}.half"
        try:
            with open(half, "xb") as file:
                file.write(value)
            os.replace(half, path)
        except BaseException:
            half.unlink(missing_ok=True)
            raise

    def _marks_of(self, key: str) -> list[Path]:
        begin = _hash(key.encode(), 10)
        try:
            return [self._marks / each.name for each in os.scandir(self._marks) if each.name.startswith(begin)]
        except OSError:
            return []

    def _drop(self, key: str) -> None:
        with contextlib.suppress(OSError):
            for path in (self._entry(key), *self._marks_of(key)):
                path.unlink(missing_ok=True)

    def _clear_up(self) -> None:
        """Removes files that dead processes left, and the entries they were loading when they crashed."""
        dropped = []
        for path in self._now.iterdir():
            with contextlib.suppress(OSError):
                if path.suffix == ".half" and time.time() - path.stat().st_mtime > LEFT_OVER_SECONDS:
                    path.unlink()
                elif path.suffix == ".journal" and _is_file(path):
                    if (fatal := _fatal_loads(path)) is None:
                        continue
                    for key in fatal:
                        self._drop(key)
                        dropped.append(key.rpartition("-")[0] or key)
                    path.unlink()
        if dropped:
            self._say_once(
                f"{self._path}: a process died by a signal while it loaded {', '.join(sorted(set(dropped)))} "
                "from here; it is compiled again"
            )

    def _say_once(self, line: str) -> None:
        """Prints one note for each kind of problem, however many entries have it."""
        kind = re.sub(r".*?: ", "", line, count=1)
        if kind not in self._reported:
            self._reported.add(kind)
            _say(f"note: {line}")


class _Journal:
    """A file that lists what this process is loading, locked while it lives; faulthandler writes crashes to it."""

    def __init__(self, folder: Path):
        self._path = folder / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.journal"
        self._file: IO[bytes] | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._loading: dict[int, str] = {}  # thread -> key
        self._watching = False

    def begin(self, key: str) -> None:
        """Call it before XLA loads an entry."""
        self.end()  # this thread's previous entry is loaded by now, or JAX has given up on it
        with self._lock, contextlib.suppress(OSError, ValueError):
            if self._file is None:
                self._open()
            self._loading[threading.get_ident()] = key
            self._note(f"+{key}")
            if not faulthandler.is_enabled():
                faulthandler.enable(self._file)  # type: ignore[arg-type]
                self._watching = True
            elif not self._watching:
                self._note("unwatched")  # the user enabled faulthandler: crashes are reported elsewhere

    def end(self) -> None:
        """Call it after loading, in the same thread; does nothing if nothing was being loaded."""
        if threading.get_ident() not in self._loading:
            return
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._note(f"-{self._loading.pop(threading.get_ident())}")
            if not self._loading and self._watching:
                self._watching = False
                faulthandler.disable()

    def _heard(self, event: str, **_: Any) -> None:
        if event == HIT:
            self.end()

    def _open(self) -> None:
        self._file = open(self._path, "xb", buffering=0)  # noqa: SIM115  held until the process ends
        files.lock(self._file)
        atexit.register(self._close)
        jax.monitoring.register_event_listener(self._heard)

    def _note(self, text: str) -> None:
        if self._file is not None:
            os.write(self._file.fileno(), f"{text}\n".encode())

    def _close(self) -> None:
        if os.getpid() != self._owner:  # a child of fork
            return
        if self._watching:
            faulthandler.disable()
            self._watching = False
        if self._file is not None:
            self._file.close()
            self._file = None
        with contextlib.suppress(OSError):
            self._path.unlink()


def _fatal_loads(path: Path) -> list[str] | None:
    """Keys that a process was loading when it crashed; None if it is alive or that cannot be determined.

    Empty for a process that was killed from outside (SIGKILL), which says nothing about the entry.
    """
    with open(path, "rb+") as file:
        if not files.lock(file):
            return None
        lines = file.read(2**20).decode(errors="replace").splitlines()
    ended = {line[1:] for line in lines if line.startswith("-")}
    begun = [line[1:] for line in lines if line.startswith("+")]
    fatal = any(line.startswith("Fatal Python error") or line == "unwatched" for line in lines)
    # A key must be a file name, not a path out of the folder.
    return [key for key in begun if key not in ended and not {"/", os.sep, "\0"} & set(key)] if fatal else []


def _is_file(path: Path) -> bool:
    """True for a regular file, but not for a link to one."""
    return os.path.isfile(path) and not os.path.islink(path)


def _hash(content: bytes, size: int) -> str:
    return hashlib.blake2b(content, digest_size=size).hexdigest()


def _mark(key: str, value: bytes) -> str:
    return f"{_hash(key.encode(), 10)}-{_hash(value, 16)}"


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(line, file=sys.stderr, flush=True)
