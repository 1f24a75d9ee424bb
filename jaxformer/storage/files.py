"""Atomic writes, and safe opening and removal: symbolic links are not followed, and a folder is removed only if it lies
in the folder it should lie in.

>>> import tempfile
>>> folder = Path(tempfile.mkdtemp())
>>> write_atomically(folder / "note.txt", "to be")
>>> (folder / "link.txt").symlink_to(folder / "note.txt")
>>> open_to_append(folder / "link.txt")
Traceback (most recent call last):
...
OSError: [Errno 40] is a symbolic link, which is not followed: ...link.txt'
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from pathlib import Path
from typing import IO, BinaryIO

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Replaces a file atomically and durably: a kill or power loss leaves the old content or the new, never a mixture.

    A symbolic link at `path` is replaced by the file; its target is not changed.

    Args:
      path: in an existing folder.
      content: text is written as UTF-8.

    Raises:
      OSError: the file cannot be written; the old content is unchanged and no temporary file is left.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:  # x: fails if anything is there already, links included
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder durable; does nothing on file systems that cannot."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def open_to_append(path: str | os.PathLike, *, sole: bool = False) -> BinaryIO:
    """Opens a file for reading and appending; creates it if it does not exist.

    Args:
      path: the file.
      sole: if the file has other hard links (a backup made by `cp -al`), write to a copy that takes over this name, so
        that the other links keep the old content.

    Raises:
      OSError: it is a symbolic link, a folder, a pipe or a device, or it cannot be written.
    """
    handle = _open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    file = os.fdopen(handle, "ab+")
    if not sole or os.fstat(handle).st_nlink == 1:
        return file
    with file:
        file.seek(0)
        write_atomically(path, file.read())
    return open_to_append(path)


def open_to_read(path: str | os.PathLike, *, follow: bool = False) -> BinaryIO:
    """Opens a regular file for reading; never blocks, as opening a pipe would.

    Args:
      path: the file.
      follow: follow a symbolic link (for files that the user names) instead of refusing it.

    Raises:
      OSError: it does not exist, or is a folder, a pipe, a device or (without `follow`) a symbolic link.
    """
    return os.fdopen(_open_regular(path, os.O_RDONLY | getattr(os, "O_BINARY", 0), follow=follow), "rb")


def _open_regular(path: str | os.PathLike, flags: int, *, follow: bool = False) -> int:
    """A file descriptor of a regular file. Raises OSError for anything else, without waiting for it."""
    if not follow:
        _refuse_link(path)
        flags |= getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return handle


def _refuse_link(path: str | os.PathLike) -> None:
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", str(path))


def lock(file: IO[bytes] | int, *, wait: bool = False) -> bool | None:
    """Locks an open file until it is closed, or its process ends.

    Args:
      file: the file or its descriptor.
      wait: wait for the process that holds the lock.

    Returns:
      True if locked; None if another process holds the lock; False if the file system or the platform has no locks.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return None
    except OSError:
        return False
    return True


def irregular(folder: Path) -> Path | None:
    """A pipe, socket or device in a folder, or a link to one, on which another library would block; else None."""
    paths = (os.path.join(inside, name) for inside, _, names in os.walk(folder) for name in names)
    return next((Path(path) for path in paths if os.path.exists(path) and not os.path.isfile(path)), None)


def read_bytes(path: str | os.PathLike, most: int, *, follow: bool = False) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises OSError as `open_to_read`, or if it is longer."""
    with open_to_read(path, follow=follow) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is longer than {most} bytes", str(path))
    return content


def unusable(path: str) -> str | None:
    """Why no file can have this path, and what is accepted; None if one can.

    >>> unusable("runs/a"), unusable("runs/" + 300 * "a")
    (None, 'has a name of 300 bytes; accepted: at most 255')
    """
    try:
        names = path.encode().split(b"/")
    except UnicodeEncodeError:
        return "is not UTF-8 text; accepted: a path that is"
    if "\0" in path:
        return "holds the character \\0; accepted: a path without it"
    if re.match(r"[a-z][a-z0-9+.-]*://", path):
        return "is an address; accepted: a path of this machine, or one that is mounted here"
    most = max(map(len, names))
    if most > 255:
        return f"has a name of {most} bytes; accepted: at most 255"
    return f"has {len(path.encode())} bytes; accepted: at most 4095" if len(path.encode()) > 4095 else None


def make_folder(path: str | os.PathLike) -> Path:
    """Creates a folder inside an existing one unless it is there already; returns its path.

    Raises:
      OSError: a symbolic link or a file has that name, or the folder cannot be created.
    """
    path = Path(path)
    _refuse_link(path)
    path.mkdir(exist_ok=True)
    return path


def remove_folder(path: str | os.PathLike, inside: str | os.PathLike) -> None:
    """Removes a folder and everything in it; links in it are removed, not followed.

    Args:
      path: the folder; nothing happens if it does not exist.
      inside: its parent folder.

    Raises:
      OSError: `path` is a symbolic link, or does not really lie directly in `inside` ("..", an absolute path).
    """
    path, inside = Path(path), Path(inside)
    _refuse_link(path)
    if not path.exists():
        return
    if path.resolve().parent != inside.resolve() or path.name in ("", ".", ".."):
        raise OSError(errno.EPERM, f"does not lie in {inside} and is not removed", str(path))
    shutil.rmtree(path)
