"""The folder in which `jaxformer import` makes a run: an empty one, or what an import left that was stopped."""

import contextlib
from collections.abc import Iterator

from jaxformer.data.tokenizers import FILE_NAME
from jaxformer.errors import ConfigError
from jaxformer.runs.store_lock import lock_of
from jaxformer.storage import files
from jaxformer.storage.address import place

MARK = ".import"  # is there while an import writes
CONFIG, CHECKPOINTS = "config.py", "checkpoints"
WRITTEN = (CONFIG, FILE_NAME, CHECKPOINTS)


def check_empty(workdir: str) -> None:
    """Raises ConfigError: the directory holds what no import left, or cannot be made or written."""
    try:
        names = files.open_folder(place(workdir))
    except OSError as error:
        raise ConfigError(f"--workdir: {workdir} cannot be used ({error.strerror})") from None
    left = WRITTEN if MARK in names else ()
    there = sorted(name for name in names if not name.startswith(".") and name not in left)
    if there:
        raise ConfigError(
            f"--workdir: {workdir} is not empty ({', '.join(there[:3])}); accepted: a new or empty folder"
        )


@contextlib.contextmanager
def begun(workdir: str) -> Iterator[None]:
    """The locked folder, empty but for a mark, which goes when everything is written; whatever stops the process
    before leaves the mark, and the next import begins anew.

    Raises:
      ConfigError: as `check_empty`, or another process holds the folder.
    """
    out = place(workdir)
    with lock_of(workdir, "--workdir"):
        check_empty(workdir)
        try:
            if (out / MARK).exists():
                files.remove_folder(out / CHECKPOINTS, out)
                for name in (CONFIG, FILE_NAME):
                    (out / name).unlink(missing_ok=True)
            files.write_atomically(out / MARK, "")
        except OSError as error:
            raise ConfigError(f"--workdir: {workdir} cannot be written ({error.strerror})") from None
        yield
        (out / MARK).unlink(missing_ok=True)
