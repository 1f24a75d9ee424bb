"""Checkpoints in an object store: written to a folder of this machine, then uploaded; downloaded, then read.

So a store holds the same files as a disk, whatever its protocol, and a run's folder can be copied between them. Nothing
is renamed in a store, so a checkpoint is complete when its metadata is there, which are put last and deleted first. One
without was not finished, or is being deleted, and does not count; the next save removes it.

Several processes need not share a disk. Each puts the arrays that it wrote, a database of its own; then process 0 joins
the databases, for which it fetches their nodes, and puts the metadata. What fails in one process fails in all.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from jaxformer.config import CheckpointConfig
from jaxformer.errors import CheckpointError
from jaxformer.runtime import coordination
from jaxformer.storage import object_store, scratch, spool
from jaxformer.storage.address import DOWNLOAD_BYTES, Address
from jaxformer.training.checkpoint import ocdbt
from jaxformer.training.checkpoint.failures import reason_of
from jaxformer.training.checkpoint.layout import SEAL, is_step, list_steps

T = TypeVar("T")

AT_ONCE = 8  # requests in flight
GAP_BYTES = 1 << 18  # between what is needed of a file: fetched with it, which costs less than a request
_DATABASE = "ocdbt.process_*"  # of one process, in the folder of an item
_NODES = ("manifest.ocdbt", "d/*")  # of a database that joins others
_CHANNEL, _WHAT = "uploads", "its part of a checkpoint"


def kept(steps: Sequence[int], cfg: CheckpointConfig) -> set[int]:
    """The steps whose checkpoints are kept.

    >>> sorted(kept([5, 10, 15, 20, 25], CheckpointConfig(keep=2, keep_every_steps=10)))
    [10, 20, 25]
    """
    every = cfg.keep_every_steps
    return {*sorted(steps)[-cfg.keep :], *(step for step in steps if every is not None and step % every == 0)}


class StagedManager:
    """What orbax's manager is for a folder, for an address: saves into a local folder, and uploads in a thread.

    Args:
      target: the checkpoints' address.
      cfg: how many are kept.
      make: makes orbax's manager of a folder.

    Attributes:
      directory: the local folder.
    """

    def __init__(self, target: Address, cfg: CheckpointConfig, make: Callable[[Path], Any]):
        self._target, self._cfg, self._stack = target, cfg, ExitStack()
        self.directory = self._stack.enter_context(scratch.folder())
        self._inner = make(self.directory)
        self._thread = self._stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="upload"))
        self._uploading: Future[None] | None = None

    def save(self, step: int, **settings: Any) -> None:
        """Returns once the arrays are copied; the upload goes on."""
        try:
            self._inner.save(step, **settings)
        except Exception as error:
            self._thread.submit(self._finish, step, error)  # the others' threads wait for this one
            raise
        self._uploading = self._thread.submit(self._finish, step)

    def wait_until_finished(self) -> None:
        """Waits for the upload. Raises what it raised, once."""
        uploading, self._uploading = self._uploading, None
        if uploading is not None:
            uploading.result()

    def reload(self) -> None:
        """Nothing: what is in the store is looked up when it is needed."""

    def close(self) -> None:
        """Waits for the upload and removes the local folder. Raises as `wait_until_finished`."""
        with self._stack:
            try:
                self.wait_until_finished()
            finally:
                self._inner.close()

    def _finish(self, step: int, failed: Exception | None = None) -> None:
        """Puts the checkpoint of a step, once it is written here; every process does its part of each line."""
        folder, target = self.directory / str(step), self._target / str(step)
        _together(lambda: self._begin(step, failed))
        part = _together(lambda: _put_part(folder, target))
        parts = coordination.gather(part, _WHAT, _CHANNEL)
        _together(lambda: _complete(folder, target, parts))
        self._inner.delete(step)
        if coordination.index() == 0:
            self._keep(kept(list_steps(str(self._target)), self._cfg))

    def _begin(self, step: int, failed: Exception | None) -> None:
        if failed is not None:
            raise failed
        self._inner.wait_until_finished()
        if coordination.index() == 0:
            self._keep({*list_steps(str(self._target))} - {step})

    def _keep(self, steps: set[int]) -> None:
        """Removes all checkpoints but these, complete or not."""
        for path in self._target.iterdir():
            if is_step(path.name) and int(path.name) not in steps:
                path.remove_folder(self._target, seal=SEAL)


def _together(work: Callable[[], T]) -> T:
    """`work()`; if it fails in any process, all raise CheckpointError."""

    def said() -> T:
        try:
            return work()
        except Exception as error:
            raise CheckpointError(reason_of(error)) from error

    return coordination.raise_together(said, _WHAT, CheckpointError, _CHANNEL)


def _put_part(folder: Path, target: Address) -> dict[str, dict[str, int]]:
    """Puts what this process wrote of a checkpoint, the metadata of process 0 left out.

    Returns:
      database -> node file -> bytes, of each item: what process 0 needs to join them; nothing from process 0 itself.
    """
    own = coordination.index()
    if own == 0:
        _put({path: target / name for path, name in _files(folder).items() if name != SEAL})
        return {}
    parts: dict[str, dict[str, int]] = {}
    for item in sorted(path for path in folder.iterdir() if any(path.glob(_DATABASE))):
        # Joined here, so that its nodes lie in files without values; by a name that no earlier try can have used.
        ocdbt.join(item, [path.name for path in item.glob(_DATABASE)])
        database = f"{item.name}/ocdbt.process_{own}_{secrets.token_hex(4)}"
        nodes = [path for pattern in _NODES for path in item.glob(pattern)]
        values = [path for each in item.glob(_DATABASE) for path in each.rglob("*") if path.is_file()]
        _put({path: target / f"{database}/{path.relative_to(item).as_posix()}" for path in (*nodes, *values)})
        parts[database] = {path.relative_to(item).as_posix(): path.stat().st_size for path in nodes}
    _put({path: target / name for path, name in _files(folder).items() if "/array_metadatas/" in name})
    return parts


def _complete(folder: Path, target: Address, parts: Sequence[dict[str, dict[str, int]]]) -> None:
    """In process 0: joins what all processes put, then what was appended to the run's records, then the metadata."""
    if coordination.index() != 0:
        return
    joined = {database: nodes for each in parts for database, nodes in each.items()}
    fetched = [(f"{database}/{name}", size) for database, nodes in joined.items() for name, size in nodes.items()]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda each: (target / each[0]).download(folder / each[0], each[1]), fetched))
    if coordination.num_processes() > 1:
        for item in (path for path in folder.iterdir() if any(path.glob(_DATABASE))):
            ocdbt.join(item, [path.name for path in item.glob(_DATABASE)])
            nodes = [path for pattern in _NODES for path in item.glob(pattern)]
            _put({path: target / path.relative_to(folder).as_posix() for path in nodes})
    spool.sync_all(cast(Path, target.parent.parent))
    (target / SEAL).upload(folder / SEAL)


def _files(folder: Path) -> dict[Path, str]:
    return {path: path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _put(files: dict[Path, Address]) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda path: files[path].upload(path), files))


@contextmanager
def local(path: Path, wanted: Mapping[str, Any], *, whole: bool = False) -> Iterator[Path]:
    """A checkpoint's folder on this machine: itself, or a copy of some of its items.

    Args:
      path: of the checkpoint.
      wanted: item -> shapes and shardings of its arrays.
      whole: copy the items as they are, even if this process needs less of them.

    Raises:
      OSError: the store does not answer, or the disk is full.
    """
    if not isinstance(path, Address):
        yield path
        return
    with scratch.folder() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        copy = folder / path.name
        for item, tree in wanted.items():
            sizes = {str(each).removeprefix(f"{path}/"): size for each, size in (path / item).objects().items()}
            part = in_parts(path) and not whole and f"{item}/manifest.ocdbt" in sizes
            files = {name: size for name, size in sizes.items() if not part or name.count("/") == 1}
            list(pool.map(lambda name, size: (path / name).download(copy / name, size), files, files.values()))
            if part:
                _fetch_part(path / item, copy / item, tree, pool)
        yield copy


def in_parts(path: Path) -> bool:
    """True if each process copies only what its devices need of this checkpoint."""
    return isinstance(path, Address) and coordination.num_processes() > 1


def _fetch_part(item: Address, copy: Path, tree: Any, pool: ThreadPoolExecutor) -> None:
    """Copies of the files of values and nodes what this process's devices need; the rest are holes."""

    def fetch(place: ocdbt.ByteRange) -> bytes:
        content = object_store.part(str(item / place.file), place.begin, place.end)
        (copy / place.file).parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(copy / place.file, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(handle, content, place.begin)
        finally:
            os.close(handle)
        return content

    places = ocdbt.needed(ocdbt.values(copy, fetch), tree, fetch)
    list(pool.map(fetch, ocdbt.spans(places, GAP_BYTES, DOWNLOAD_BYTES)))
