"""Folders that are made once: whole or not there, whoever starts at the same time and whenever a maker is killed.

A folder is made under a name of its own and renamed when complete, which is atomic. A lock, held by the kernel so that
it ends with its process, keeps a second process from doing the same work; where the file system has no locks, both
work, and the first to finish wins.

A cache may be shared, so what lies in it is not trusted: a folder is used or removed only if it was made here, which
the file MARKER in it says, and no symbolic link inside the root is followed. The root itself may be a link.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from jaxformer.data.progress_bars import say
from jaxformer.errors import ConfigError, DamagedCacheError
from jaxformer.storage import files

MARKER = ".made-by-jaxformer"
DAMAGED = ".damaged"  # in a folder whose damage was found while it was used
_KEY = re.compile(r"[0-9a-f]{16}")
_BUILDING = re.compile(r"\.building-([0-9a-f]{16})-[0-9]+-[0-9a-f]{8}")

T = TypeVar("T")


def default_root() -> Path:
    """jaxformer's folder in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxformer"


def is_key(text: object) -> bool:
    """True of 16 hexadecimal digits, the only names of folders here.

    >>> is_key("0123456789abcdef"), is_key("../../../victim"), is_key("/home/me"), is_key(7)
    (True, False, False, False)
    """
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def get_or_build(
    root: Path,
    key: str,
    build: Callable[[Path], None],
    opened: Callable[[Path], T],
    waiting: Callable[[], None] = lambda: None,
) -> T:
    """What `opened` makes of the folder `root/key`, which `build` makes if it is not there or damaged.

    Args:
      root: the cache folder; made if missing.
      key: name of the folder, see `is_key`; says all that its content depends on.
      build: writes the content into the folder it is given, which holds nothing but MARKER.
      opened: opens a complete folder; raises DamagedCacheError if it does not hold what it should.
      waiting: called once if another process is found making the same folder, before waiting for it.

    Raises:
      ConfigError: the folder cannot be written, or the disk is full (what was begun is removed); or something of that
        name is there that was not made here (it is left alone).
    """
    if not is_key(key):
        raise ValueError(f"key: {key!r}; accepted: 16 hexadecimal digits")
    final = root / key
    with contextlib.suppress(DamagedCacheError), errors_in_one_line(root):
        if os.path.lexists(final):
            return opened(_checked(final, root))
    with errors_in_one_line(root):
        root.mkdir(parents=True, exist_ok=True)
        with _only_maker(root, key, waiting) as locked:
            if locked:
                _remove_leftovers(root, key)
            if os.path.lexists(final):
                try:
                    return opened(_checked(final, root))
                except DamagedCacheError as damage:
                    say(f"data.cache_dir: {final}: {damage}; it is made again")
                    _remove(final, root)
            made = root / _building_name(key)
            made.mkdir()
            try:
                files.write_atomically(made / MARKER, f"{key}\n")
                build(made)
                for file in made.iterdir():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
                files.sync_folder(made)
                try:
                    made.rename(final)
                except OSError:
                    if not os.path.lexists(final):  # otherwise another process was first, without locks
                        raise
                files.sync_folder(root)
            finally:
                with contextlib.suppress(OSError):
                    _remove(made, root)
            try:
                return opened(_checked(final, root))
            except DamagedCacheError as damage:
                raise ConfigError(f"config.data.cache_dir: {final}: {damage}, though it was only just made") from None


def made_here(path: Path, root: Path) -> bool:
    """True of a folder, no link, that lies directly in `root` and holds MARKER, a file and no link."""
    try:
        if path.is_symlink() or not path.is_dir() or path.resolve().parent != root.resolve():
            return False
        return len(files.read_bytes(path / MARKER, 100)) > 0
    except OSError:
        return False


def mark_damaged(path: Path, root: Path) -> bool:
    """Says in a kept folder that it is damaged, so that the next start makes it again; False if that fails."""
    with contextlib.suppress(OSError):
        if made_here(path, root):
            files.write_atomically(path / DAMAGED, "")
            return True
    return False


@contextlib.contextmanager
def errors_in_one_line(root: Path) -> Iterator[None]:
    """Turns what the operating system says about writing into a ConfigError."""
    try:
        yield
    except (OSError, RecursionError) as error:  # folders in folders a thousand deep cannot be removed
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"config.data.cache_dir: {root}: {reason}; set data.cache_dir to a folder with room that can be written"
        ) from None


def _checked(path: Path, root: Path) -> Path:
    """`path`, if it was made here; ConfigError if not."""
    if not made_here(path, root):
        what = "is a symbolic link" if path.is_symlink() else f"holds no {MARKER}" if path.is_dir() else "is no folder"
        raise ConfigError(
            f"config.data.cache_dir: {path} {what}, so it was not made here and is neither used nor removed; "
            "move it away, or set data.cache_dir to another folder"
        )
    return path


@contextlib.contextmanager
def _only_maker(root: Path, key: str, waiting: Callable[[], None]) -> Iterator[bool]:
    """Holds the lock of one key; gives False where there are no locks."""
    with _lock_file(root, key) as handle:
        try:
            locked = _lock(handle, wait=False)
        except BlockingIOError:
            waiting()
            locked = _lock(handle, wait=True)
        yield locked


def _lock_file(root: Path, key: str) -> IO[bytes]:
    path = root / f"{key}.lock"
    try:
        return files.open_to_append(path)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO):
            raise
        reason = "is not a regular file" if error.errno != errno.ELOOP else "is a symbolic link"
        raise ConfigError(
            f"config.data.cache_dir: {path} {reason}, so it was not made here and is not opened; "
            "move it away, or set data.cache_dir to another folder"
        ) from None


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


def _building_name(key: str) -> str:
    return f".building-{key}-{os.getpid()}-{secrets.token_hex(4)}"


def _remove_leftovers(root: Path, own: str) -> None:
    """Removes what killed makers left: of `own`, whose lock we hold, and of every key whose lock nobody holds."""
    for path in sorted(root.iterdir()):
        match = _BUILDING.fullmatch(path.name)
        if match is None:
            continue
        if match[1] == own:
            _remove(path, root)
            continue
        with contextlib.suppress(BlockingIOError, ConfigError), _lock_file(root, match[1]) as handle:
            if _lock(handle, wait=False):
                _remove(path, root)


def _remove(path: Path, root: Path) -> None:
    """Removes a folder that was made here; of others only an empty one (a maker killed before it had a marker).

    A complete folder is renamed first, and the marker goes last, so that what a kill leaves is a leftover of ours.
    """
    with contextlib.suppress(OSError):
        if not path.is_symlink():
            path.rmdir()
    if not made_here(path, root):
        return
    if _BUILDING.fullmatch(path.name) is None:
        path = path.rename(root / _building_name(path.name))
    for each in path.iterdir():
        if each.name != MARKER:
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
    files.remove_folder(path, root)
