"""Tells a damaged checkpoint from a failure of the machine, and says in one line what went wrong."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

# Failures of the machine, not of the checkpoint: these must not mark it as invalid, because invalid ones are deleted.
REFUSALS = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EACCES,
    errno.EPERM,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ETIMEDOUT,
    errno.EOPNOTSUPP,
}  # the last two: of `errors.StoreError`
_REFUSAL_TEXTS = ("Too many open files", "Permission denied", "Cannot allocate memory")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what caused it, and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def refused_here(error: BaseException) -> bool:
    """True if the machine refused and another try may succeed: too many open files, no permission, no memory."""
    return any(
        isinstance(each, MemoryError)
        or (isinstance(each, OSError) and each.errno in REFUSALS)
        or any(text in str(each) for text in _REFUSAL_TEXTS)
        for each in _chain(error)
    )


def reason_of(error: BaseException) -> str:
    """One short line about what went wrong, in the operating system's words where it has some."""
    text = " ".join(str(error).split())
    full = any(isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT) for each in _chain(error))
    if "Too many open files" in text and not full:
        return "too many open files (see ulimit -n)"
    if full or "No space left" in text or "RESOURCE_EXHAUSTED" in text:
        return "no space left on the disk"
    return (text[:160] + " ...") if len(text) > 160 else text or type(error).__name__


def check_space(directory: Path, state: Any, *, shared: bool) -> None:
    """Raises OSError if a state would not fit on the disk, before anything is written.

    0.8, because numbers compress by a tenth or so. Another program may still fill the disk during the save.

    Args:
      directory: to write into.
      state: a tree of arrays.
      shared: all processes write to this disk, and process 0 looks; False: each writes its part to a disk of its own.
    """
    free = shutil.disk_usage(directory).free
    if shared and jax.process_index() != 0:
        return
    leaves = jax.tree.leaves(state)
    if free < 0.8 * sum(x.nbytes if shared else x.nbytes * _own_share(x) for x in leaves):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _own_share(x: Any) -> float:
    """The part of an array that this process writes."""
    return len(x.addressable_shards) / len(x.sharding.device_set) if isinstance(x, jax.Array) else 1.0
