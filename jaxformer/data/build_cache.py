"""Atomic, locked build cache: each folder is built once and is complete or absent, even if a builder is killed.

A folder is built under a temporary name and renamed when complete, which is atomic. A kernel lock, which ends with its
process, keeps a second process from doing the same work; on file systems without locks both build, and the first to
finish wins.

A cache may be shared, so its content is not trusted: a folder is used or removed only if jaxformer built it, which the
file MARKER in it shows, and no symbolic link inside the root is followed. The root itself may be a link.
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
DAMAGED = ".damaged"  # marks a folder that was found damaged while in use
_KEY = re.compile(r"[0-9a-f]{16}")
_BUILDING = re.compile(r"\.building-([0-9a-f]{16})-[0-9]+-[0-9a-f]{8}")

T = TypeVar("T")


def default_root() -> Path:
    """The folder for jaxformer in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxformer"


def is_key(text: object) -> bool:
    """True for 16 hexadecimal digits, the form of every folder's name.

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
    """Returns `opened(root/key)`; calls `build` first if that folder is missing or damaged.

    Args:
      root: the cache folder; created if missing.
      key: name of the folder, see `is_key`; must identify everything that its content depends on.
      build: writes the content into the folder it is given, which is empty except for MARKER.
      opened: opens a complete folder; raises DamagedCacheError if its content is not what was written.
      waiting: called once, before waiting for another process that is building the same folder.

    Raises:
      ConfigError: the folder cannot be written, or the disk is full (the unfinished folder is removed); or the name is
        taken by something that jaxformer did not build (it is left alone).
    """
    if not is_key(key):
        raise ValueError(f"key: {key!r}; accepted: 16 hexadecimal digits")
    final = root / key
    with contextlib.suppress(DamagedCacheError), errors_in_one_line(root):
        if os.path.lexists(final):
            return opened(_checked(final, root))
    with errors_in_one_line(root):
        root.mkdir(parents=True, exist_ok=True)
        with _lock_file(root, key) as lock_file:
            locked = files.lock(lock_file)
            if locked is None:
                waiting()
                locked = files.lock(lock_file, wait=True)
            if locked:
                _remove_leftovers(root, key)
            if os.path.lexists(final):
                try:
                    return opened(_checked(final, root))
                except DamagedCacheError as damage:
                    say(f"data.cache_dir: {final}: {damage}; it is rebuilt")
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
                    if not os.path.lexists(final):  # without locks another process may have been first
                        raise
                files.sync_folder(root)
            finally:
                with contextlib.suppress(OSError):
                    _remove(made, root)
            try:
                return opened(_checked(final, root))
            except DamagedCacheError as damage:
                raise ConfigError(f"config.data.cache_dir: {final}: {damage}, though it was just written") from None


def made_here(path: Path, root: Path) -> bool:
    """True for a folder directly in `root` that holds a file MARKER, none of them a symbolic link."""
    try:
        inside = not path.is_symlink() and path.is_dir() and path.resolve().parent == root.resolve()
        return inside and len(files.read_bytes(path / MARKER, 100)) > 0
    except OSError:
        return False


def mark_damaged(path: Path, root: Path) -> bool:
    """Marks a folder as damaged, so that the next start rebuilds it; False if that fails."""
    with contextlib.suppress(OSError):
        if made_here(path, root):
            files.write_atomically(path / DAMAGED, "")
            return True
    return False


@contextlib.contextmanager
def errors_in_one_line(root: Path) -> Iterator[None]:
    """Turns the operating system's errors into a ConfigError."""
    try:
        yield
    except (OSError, RecursionError) as error:  # RecursionError: from removing folders nested a thousand deep
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"config.data.cache_dir: {root}: {reason}; set data.cache_dir to a writable folder with free space"
        ) from None


def _checked(path: Path, root: Path) -> Path:
    """`path`, if jaxformer built it; ConfigError if not."""
    if not made_here(path, root):
        what = "is a symbolic link" if path.is_symlink() else f"holds no {MARKER}" if path.is_dir() else "is no folder"
        raise ConfigError(
            f"config.data.cache_dir: {path} {what}, so jaxformer did not make it and neither uses nor removes it; "
            "move it away, or set data.cache_dir to another folder"
        )
    return path


def _lock_file(root: Path, key: str) -> IO[bytes]:
    path = root / f"{key}.lock"
    try:
        return files.open_to_append(path)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO):
            raise
        reason = "is not a regular file" if error.errno != errno.ELOOP else "is a symbolic link"
        raise ConfigError(
            f"config.data.cache_dir: {path} {reason}, so jaxformer did not make it and does not open it; "
            "move it away, or set data.cache_dir to another folder"
        ) from None


def _building_name(key: str) -> str:
    return f".building-{key}-{os.getpid()}-{secrets.token_hex(4)}"


def _remove_leftovers(root: Path, own: str) -> None:
    """Removes what killed builders left: for key `own`, whose lock we hold, and for every key whose lock is free."""
    for path in sorted(root.iterdir()):
        match = _BUILDING.fullmatch(path.name)
        if match and match[1] == own:
            _remove(path, root)
        elif match:
            with contextlib.suppress(ConfigError), _lock_file(root, match[1]) as handle:
                if files.lock(handle):
                    _remove(path, root)


def _remove(path: Path, root: Path) -> None:
    """Removes a folder that jaxformer built, or an empty one (its builder was killed before it wrote the marker).

    A complete folder is renamed first and its marker deleted last, so that a kill leaves something `_remove_leftovers`
    recognises.
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
