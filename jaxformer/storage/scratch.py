"""Folders of this process on a disk of this machine, removed when it ends; what a killed one left, by the next.

>>> with folder(Path(tempfile.mkdtemp())) as made:
...     made.is_dir()
True
>>> made.exists()
False
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from jaxformer.storage import files
from jaxformer.storage.address import is_address

OLD_SECONDS = 3600.0
_LOCK, _CONTENT = ".lock", "content"  # locked while its process lives; the folder that is handed out


@contextlib.contextmanager
def folder(root: Path | None = None) -> Iterator[Path]:
    """A new empty folder, removed in the end.

    Args:
      root: the folder to make it in, created if missing; None: "staging" in this user's cache folder.
    """
    root = root or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxformer" / "staging"
    root.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(root)
    made = Path(tempfile.mkdtemp(dir=root))
    with open(made / f"{_LOCK}.new", "wb") as file:
        files.lock(file)
        os.replace(file.name, made / _LOCK)  # never seen unlocked
        try:
            inside = made / _CONTENT
            inside.mkdir()
            yield inside
        finally:
            _remove(made)


def beside(target: Path) -> contextlib.AbstractContextManager[Path]:
    """Where files are written that `files.move_here` then moves into a folder: that folder, or one of this process for
    a store."""
    return folder() if is_address(target) else contextlib.nullcontext(target)


def _remove_abandoned(root: Path) -> None:
    """Removes folders whose process has ended; of those that have no lock, the old ones."""
    for path in root.iterdir():
        with contextlib.suppress(OSError):
            try:
                with open(path / _LOCK, "rb") as file:
                    ended = files.lock(file)
            except FileNotFoundError:  # being made, or its maker was killed
                ended = time.time() - path.stat().st_mtime > OLD_SECONDS
            if ended:
                _remove(path)


def _remove(path: Path) -> None:
    """The lock last, so that what a kill leaves of it is known to be abandoned."""
    shutil.rmtree(path / _CONTENT, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)
