"""Files written whole or not at all, and nothing of anybody else's touched: no link is followed, no folder removed that
does not lie where it should.

>>> import tempfile
>>> folder = Path(tempfile.mkdtemp())
>>> write_atomically(folder / "note.txt", "to be")
>>> (folder / "link.txt").symlink_to(folder / "note.txt")
>>> open_to_append(folder / "link.txt")
Traceback (most recent call last):
...
OSError: [Errno 40] is a symbolic link, which is not followed: ...link.txt'
"""

import errno
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Replaces a file, durably: after a kill or a loss of power there is the old content or the new, never a part.

    A link of that name is replaced by the file; what it points to stays as it is.

    Args:
      path: its folder exists.
      content: text is written as UTF-8.

    Raises:
      OSError: it cannot be written; the old content is untouched and no temporary file is left.
    """
    path = Path(path)
    half = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(half, "xb") as file:  # x: refuses whatever is there already, links included
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames inside a folder durable; does nothing where a file system cannot."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def open_to_append(path: str | os.PathLike, *, sole: bool = False) -> BinaryIO:
    """Opens a file for reading and appending; makes it if it is not there.

    Args:
      path: the file.
      sole: of a file that has other names (hard links, as of a backup by `cp -al`) a copy is written to, which takes
        this name; under the others it stays as it is.

    Raises:
      OSError: it is a link, a folder, a pipe or a device, or it cannot be written.
    """
    path = Path(path)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", str(path))
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    file = os.fdopen(handle, "ab+")
    if not sole or os.fstat(handle).st_nlink == 1:
        return file
    with file:
        file.seek(0)
        write_atomically(path, file.read())
    return open_to_append(path)


def open_to_read(path: str | os.PathLike, *, follow: bool = False) -> BinaryIO:
    """Opens a regular file for reading; never waits, as opening a pipe would.

    Args:
      path: the file.
      follow: a symbolic link is followed (for files that the user names); otherwise it is refused.

    Raises:
      OSError: it is not there, a folder, a pipe, a device or (without `follow`) a link.
    """
    path = Path(path)
    if not follow and path.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", str(path))
    no_follow = 0 if follow else getattr(os, "O_NOFOLLOW", 0)
    flags = os.O_RDONLY | no_follow | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def irregular(folder: Path) -> Path | None:
    """A pipe, socket or device in a folder, or a link to one, at which other libraries would wait; else None."""
    for inside, _, names in os.walk(folder):
        for path in (Path(inside, name) for name in names):
            if os.path.exists(path) and not os.path.isfile(path):  # which raise nothing
                return path
    return None


def read_bytes(path: str | os.PathLike, most: int, *, follow: bool = False) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises OSError as `open_to_read`, or if it is longer."""
    with open_to_read(path, follow=follow) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is longer than {most} bytes", str(path))
    return content


def unusable(path: str) -> str | None:
    """What is wrong with a path that no file can have, and what is accepted; None: nothing.

    >>> unusable("runs/a"), unusable("runs/" + 300 * "a")
    (None, 'has a name of 300 bytes; accepted: at most 255')
    """
    try:
        names = path.encode().split(b"/")
    except UnicodeEncodeError:
        return "is not UTF-8 text; accepted: a path that is"
    if "\0" in path:
        return "holds the character \\0; accepted: a path without it"
    most = max(map(len, names))
    if most > 255:
        return f"has a name of {most} bytes; accepted: at most 255"
    return f"has {len(path.encode())} bytes; accepted: at most 4095" if len(path.encode()) > 4095 else None


def make_folder(path: str | os.PathLike) -> Path:
    """Makes a folder, in one that exists, if it is not there; returns its path.

    Raises:
      OSError: a link of that name is there, or a file, or it cannot be made.
    """
    path = Path(path)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", str(path))
    path.mkdir(exist_ok=True)
    return path


def remove_folder(path: str | os.PathLike, inside: str | os.PathLike) -> None:
    """Removes a folder and all in it; links in it are removed, not followed.

    Args:
      path: the folder; nothing happens if it is not there.
      inside: the folder that it must lie in, directly.

    Raises:
      OSError: `path` is a link, or lies elsewhere, whatever its name says ("..", an absolute path).
    """
    path, inside = Path(path), Path(inside)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", str(path))
    if not path.exists():
        return
    if path.resolve().parent != inside.resolve() or path.name in ("", ".", ".."):
        raise OSError(errno.EPERM, f"does not lie in {inside} and is not removed", str(path))
    shutil.rmtree(path)
