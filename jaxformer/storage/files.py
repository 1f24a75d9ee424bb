"""Atomic writes, and safe opening and removal: symbolic links are not followed, and a folder is removed only if it lies
in the folder it should lie in. What is decorated by `addressed` does the same in object stores.

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
import secrets
import shutil
import stat
from pathlib import Path
from typing import IO, BinaryIO

from jaxformer.storage.address import addressed, is_address, like_an_address
from jaxformer.storage.address import unusable as unusable_address
from jaxformer.storage.spool import Spool

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


@addressed
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


@addressed
def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder durable; does nothing on file systems that cannot."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync(file: IO[bytes]) -> None:
    """Makes what was written to a file of `open_to_append` durable. Raises OSError."""
    if isinstance(file, Spool):
        file.sync()
        return
    file.flush()
    os.fsync(file.fileno())


@addressed
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


@addressed
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


@addressed
def move_here(path: str | os.PathLike, file: Path) -> None:
    """Gives a complete file of this machine this name, in place of what has it; the file is then gone. Its content is
    durable; the name is so after `sync_folder`, or after the next atomic write in that folder.

    Args:
      path: on the disk of `file`, or an address.
      file: see above.

    Raises:
      OSError: it cannot; what has the name is unchanged.
    """
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())
    os.replace(file, path)


@addressed
def look(path: str | os.PathLike) -> list[int]:
    """Size, mtime, ctime and inode number of a file, which differ when the content does. Raises OSError.

    A changed file with all four the same (a clock set back, a write within one clock tick) counts as unchanged.
    """
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


@addressed
def folders(folder: str | os.PathLike, seal: str) -> list[Path]:
    """The complete folders in a folder, links left out; none if there is no such folder.

    Args:
      folder: their parent.
      seal: a file that each has. On disk a folder gets its name when it is complete, so this one is not looked for; in
        a store it is put last and deleted first.
    """
    found = Path(folder).iterdir() if os.path.isdir(folder) else ()
    return [path for path in found if not path.is_symlink() and path.is_dir()]


@addressed
def open_folder(path: str | os.PathLike) -> list[str]:
    """Creates a folder to write into, and its parents, unless it is there; returns the names in it. Raises OSError."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    return [each.name for each in path.iterdir()]


@addressed
def writable(folder: str | os.PathLike) -> bool:
    """True if this user may write into an existing folder; of a store only the first write tells."""
    return os.access(folder, os.W_OK | os.X_OK)


@addressed
def irregular(folder: Path) -> Path | None:
    """A pipe, socket or device in a folder, or a link to one, on which another library would block; else None."""
    paths = (os.path.join(inside, name) for inside, _, names in os.walk(folder) for name in names)
    return next((Path(path) for path in paths if os.path.exists(path) and not os.path.isfile(path)), None)


@addressed
def read_bytes(path: str | os.PathLike, most: int, *, follow: bool = False) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises OSError as `open_to_read`, or if it is longer."""
    with open_to_read(path, follow=follow) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is longer than {most} bytes", str(path))
    return content


def unusable(path: str, *, addresses: bool = False) -> str | None:
    """Why no file can have this path, and what is accepted; None if one can.

    Args:
      path: as the user wrote it.
      addresses: True if an object store's is accepted.

    >>> unusable("runs/a"), unusable("runs/" + 300 * "a")
    (None, 'has a name of 300 bytes; accepted: at most 255')
    """
    try:
        names = path.encode().split(b"/")
    except UnicodeEncodeError:
        return "is not UTF-8 text; accepted: a path that is"
    if "\0" in path:
        return "holds the character \\0; accepted: a path without it"
    if is_address(path):
        here = "is an address; accepted: a path of this machine, or one that is mounted here"
        return unusable_address(path) if addresses else here
    if like_an_address(path):
        return "is no address; accepted: gs://BUCKET/NAME, s3://BUCKET/NAME, one scheme in small letters, or a path"
    most = max(map(len, names))
    if most > 255:
        return f"has a name of {most} bytes; accepted: at most 255"
    return f"has {len(path.encode())} bytes; accepted: at most 4095" if len(path.encode()) > 4095 else None


@addressed
def make_folder(path: str | os.PathLike) -> Path:
    """Creates a folder inside an existing one unless it is there already; returns its path.

    Raises:
      OSError: a symbolic link or a file has that name, or the folder cannot be created.
    """
    path = Path(path)
    _refuse_link(path)
    path.mkdir(exist_ok=True)
    return path


@addressed
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
