"""Folders that are made once: whole or not there, whoever starts at the same time and whenever a maker is killed.

A folder is made under a name of its own and renamed when complete, which is atomic. A lock, held by the kernel so that
it ends with its process, keeps a second process from doing the same work; where the file system has no locks, both
work, and the first to finish wins.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from jaxformer.config import ConfigError

_BUILDING = ".building-"


def default_root() -> Path:
    """jaxformer's folder in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxformer"


def kept(
    root: Path,
    key: str,
    build: Callable[[Path], None],
    sound: Callable[[Path], bool],
    waiting: Callable[[], None] = lambda: None,
) -> Path:
    """The folder `root/key`, made by `build` if it is not there or not sound.

    Args:
      root: the cache folder; made if missing.
      key: name of the folder; says all that its content depends on.
      build: writes the content into the empty folder it is given.
      sound: whether a folder of that name holds what it should; reads little.
      waiting: called once if another process is found making the same folder, before waiting for it.

    Raises:
      ConfigError: the folder cannot be written, or the disk is full; what was begun is removed.
    """
    final = root / key
    if sound(final):
        return final
    with errors_in_one_line(root):
        root.mkdir(parents=True, exist_ok=True)
        with _only_maker(root, key, waiting) as locked:
            if sound(final):
                return final
            if locked:
                _remove_leftovers(root, key)
            if final.exists():
                shutil.rmtree(final)
            made = root / f"{_BUILDING}{key}-{os.getpid()}-{secrets.token_hex(4)}"
            made.mkdir()
            try:
                build(made)
                for file in made.iterdir():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
                try:
                    made.rename(final)
                except OSError:
                    if not sound(final):  # otherwise another process was first, without locks
                        raise
            finally:
                shutil.rmtree(made, ignore_errors=True)
    return final


@contextlib.contextmanager
def errors_in_one_line(root: Path) -> Iterator[None]:
    """Turns what the operating system says about writing into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"config.data.cache_dir: {root}: {error.strerror or error}; set data.cache_dir to a folder with room that "
            "can be written"
        ) from None


@contextlib.contextmanager
def _only_maker(root: Path, key: str, waiting: Callable[[], None]) -> Iterator[bool]:
    """Holds the lock of one key; gives False where there are no locks."""
    with (root / f"{key}.lock").open("ab") as handle:
        try:
            locked = _lock(handle, wait=False)
        except BlockingIOError:
            waiting()
            locked = _lock(handle, wait=True)
        yield locked


def _lock(handle: IO[bytes], *, wait: bool) -> bool:
    """True if locked (until the handle is closed), False if this system cannot; BlockingIOError if another has it."""
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _remove_leftovers(root: Path, own: str) -> None:
    """Removes what killed makers left: of `own`, whose lock we hold, and of every key whose lock nobody holds."""
    for path in root.glob(f"{_BUILDING}*"):
        key = path.name.removeprefix(_BUILDING).partition("-")[0]
        if key == own:
            shutil.rmtree(path, ignore_errors=True)
            continue
        with (root / f"{key}.lock").open("ab") as handle, contextlib.suppress(BlockingIOError):
            if _lock(handle, wait=False):
                shutil.rmtree(path, ignore_errors=True)
