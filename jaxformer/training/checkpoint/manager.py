"""Checkpoints: saved in the background, verified when read, never trusted. The only file that imports orbax.

A step's directory holds four items:

  params   the parameters, a nested dict
  ema      their moving average, if there is one
  state    the rest of the state, flat: path -> array
  meta     JSON: step, fingerprint of the run, and shape, dtype and checksum of every leaf

We verify because orbax does not: with a flipped byte it restores wrong numbers without an error.
"""

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax

from jaxformer.config import CheckpointConfig
from jaxformer.errors import CheckpointError, InvalidCheckpointError
from jaxformer.runtime import coordination
from jaxformer.storage import files, json_checksum
from jaxformer.storage.address import Address, place
from jaxformer.training.checkpoint import staging
from jaxformer.training.checkpoint.checksum import checksums
from jaxformer.training.checkpoint.failures import check_space, reason_of, refused_here
from jaxformer.training.checkpoint.layout import (
    TREES,
    check_compatible,
    check_fingerprint,
    describe,
    irregular_steps,
    items_of,
    links,
    list_steps,
    read_meta,
    state_of,
)
from jaxformer.training.checkpoint.orbax_logging import Quiet, quiet_call, settle
from jaxformer.training.checkpoint.staging import StagedManager
from jaxformer.training.state import TrainState
from jaxformer.types import Params


class Checkpoints:
    """The checkpoints of one run.

    Args:
      directory: created by the first save.
      cfg: how many are kept.
      fingerprint: of the run, stored with each checkpoint and checked when one is read; "" skips the check.
      warn: prints a line; standard error by default.
      also: other accepted fingerprints of this run, see `check_fingerprint`.
    """

    def __init__(
        self,
        directory: str | Path,
        cfg: CheckpointConfig,
        fingerprint: str = "",
        warn: Callable[[str], None] | None = None,
        also: Sequence[str] = (),
    ):
        self.directory = place(directory).absolute()
        self._cfg, self._fingerprint, self._also = cfg, fingerprint, tuple(also)
        self._warn = warn or (lambda text: print(text, file=sys.stderr, flush=True))
        self._invalid: list[int] = []
        self._saved: int | None = None  # newest step known to be valid
        self._writing: int | None = None
        self._manager: Any = None
        self._quiet = ExitStack()
        self._broken = False  # a save has failed

    def steps(self) -> list[int]:
        """Steps that have a directory, valid or not, ascending."""
        return list_steps(self.directory)

    def start(self) -> None:
        """Imports orbax in a background thread, so that neither the run's start nor the first save waits for it."""
        threading.Thread(target=_orbax, daemon=True).start()

    def save(self, step: int, state: TrainState) -> None:
        """Saves; returns once the arrays are copied off the devices, so that the state may be donated.

        Waits for the previous save first. Does nothing if `step` is the one saved or restored last.

        Raises:
          CheckpointError: this or the previous save failed (a full disk); older checkpoints are untouched.
        """
        if step in (self._saved, self._writing):
            return
        self.wait()
        self._remove_invalid()
        ocp = _orbax()
        items = items_of(state)
        meta = json_checksum.add_checksum({"step": step, "fingerprint": self._fingerprint, "leaves": describe(items)})
        args = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        self._writing = step
        self._quiet.enter_context(Quiet())  # until it is written
        self._together(lambda: check_space(self._open().directory, state, shared=isinstance(self.directory, Path)))
        self._together(
            lambda: self._manager.save(step, args=ocp.args.Composite(**args, meta=ocp.args.JsonSave(meta)), force=True)
        )

    def wait(self) -> None:
        """Waits until the last save is on disk. Raises CheckpointError if it failed."""
        if self._writing is None:
            return
        self._together(lambda: self._manager.wait_until_finished())
        self._quiet.close()
        self._saved, self._writing = self._writing, None

    def _together(self, work: Callable[[], Any]) -> None:
        """One phase of a save; if it fails in any process, all raise CheckpointError."""

        def quietly() -> Any:
            with quiet_call():
                try:
                    return work()
                except Exception as error:
                    failed = self._failed(error)
                settle()
            raise failed

        try:
            coordination.raise_together(quietly, f"its part of the checkpoint of step {self._writing}", CheckpointError)
        except CheckpointError:
            self._writing, self._broken = None, True
            self._quiet.close()
            raise

    def restore(self, abstract: TrainState) -> tuple[TrainState, int] | None:
        """The newest valid checkpoint and its step; None if there is no checkpoint at all.

        An invalid one (a flipped byte, a missing or truncated file, an empty directory, a copy of another step) is
        reported in one line on standard error, and the next older one is tried. Invalid ones are deleted by the next
        save, not here.

        Args:
          abstract: shapes, dtypes and shardings, as from `state.abstract_state`; on any mesh.

        Raises:
          CheckpointError: none is valid, a valid one belongs to another run or has other shapes or dtypes, or this
            process may not read it.
        """
        wanted = items_of(abstract)
        for step in reversed(self.steps()):
            try:
                note, found = _read(self.directory / str(step), wanted, self._fingerprint, self._also)
            except InvalidCheckpointError as reason:
                self._invalid.append(step)
                self._warn(f"checkpoint {self.directory / str(step)} is not valid: {reason}; trying an older one")
                continue
            if note:
                self._warn(note)
            # The next save would hang: orbax opens files of every checkpoint and blocks at a pipe.
            older = [each for each in self.steps() if each < step]
            for each, path in coordination.broadcast_from_0(irregular_steps(self.directory, older), "steps"):
                self._invalid.append(each)
                self._warn(f"checkpoint {self.directory / str(each)} is not valid: {path} is not a regular file")
            self._saved = step
            return state_of(found, abstract), step
        if self._invalid:
            raise CheckpointError(f"no checkpoint in {self.directory} is valid ({len(self._invalid)} tried)")
        return None

    def close(self, failed: bool = False) -> None:
        """Waits for the last save and closes orbax. Raises as `wait`; after a `failed` run no process is waited for."""
        try:
            if not failed:
                self.wait()
            elif self._writing is not None:
                self._manager.wait_until_finished()
        finally:
            self._close_manager(failed or self._broken)
            self._quiet.close()

    def _close_manager(self, failed: bool) -> None:
        """Ends orbax's threads; after a failure, which was already reported, its errors are ignored."""
        with quiet_call():
            try:
                if self._manager is not None:
                    self._manager.close()
            except Exception:
                if not failed:
                    raise
            finally:
                self._manager = None
            if failed:
                settle()

    def _open(self) -> Any:
        if self._manager is None:
            ocp = _orbax()
            from orbax.checkpoint.checkpoint_managers import preservation_policy as keep

            # Not max_to_keep with best_fn: that deletes the newest checkpoint when it is not among the best.
            policies: list[Any] = [keep.LatestN(self._cfg.keep)]
            if self._cfg.keep_every_steps is not None:
                policies.append(keep.EveryNSteps(self._cfg.keep_every_steps))
            options = ocp.CheckpointManagerOptions(
                preservation_policy=keep.AnyPreservationPolicy(policies), cleanup_tmp_directories=True
            )
            folder: Any = self.directory
            settings = _own_disk(options) if staging.in_parts(folder) else {"options": options}
            make = functools.partial(ocp.CheckpointManager, **settings)
            self._manager = StagedManager(folder, self._cfg, make) if isinstance(folder, Address) else make(folder)
        return self._manager

    def _remove_invalid(self) -> None:
        """Deletes the invalid checkpoints; called by `save`, when a valid state is in memory."""
        for step in self._invalid:
            if jax.process_index() == 0:
                self._warn(f"deleting the invalid checkpoint {self.directory / str(step)}")
                files.remove_folder(self.directory / str(step), self.directory)
        if self._invalid and jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("jaxformer: invalid checkpoints deleted")
        if self._invalid and self._manager is not None:
            self._manager.reload()
        self._invalid = []

    def _failed(self, error: BaseException) -> CheckpointError:
        step = self._writing
        try:
            intact = [s for s in self.steps() if s != step]
            rest = f"older checkpoints are intact: {', '.join(map(str, intact))}" if intact else "there is no older one"
        except OSError:  # a store that does not answer
            rest = "older checkpoints are as they were"
        return CheckpointError(f"checkpoint of step {step} in {self.directory} not written: {reason_of(error)}; {rest}")


def restore_params(
    directory: str | Path,
    abstract: Params,
    *,
    item: str | None = None,
    step: int | None = None,
    fingerprint: str = "",
    also: Sequence[str] = (),
) -> tuple[Params, int]:
    """Only the parameters of the newest valid checkpoint, verified; safe while the run is still writing.

    Args:
      directory: of the checkpoints.
      abstract: tree of ShapeDtypeStruct; leaves without a sharding go to the first device.
      item: "params", "ema" (their moving average) or "frozen"; None: the average where there is one, else "params".
      step: that step only.
      fingerprint, also: of the run, as for `Checkpoints`.

    Raises:
      CheckpointError: no checkpoint is valid, or one belongs to another run, has other shapes or dtypes, or no average.
    """
    directory = place(directory).absolute()
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or first), abstract)
    tried = 0
    for path in links(directory):
        print(f"checkpoint {path} is a symbolic link, which is not followed", file=sys.stderr, flush=True)
    for found in reversed(list_steps(directory) if step is None else [step]):
        path = directory / str(found)
        try:
            items = {name.split(".")[0] for name in read_meta(path)["leaves"]}
            if item is not None and item not in items:
                raise CheckpointError(f"checkpoint {path} has no {item}; it holds {', '.join(sorted(items))}")
            wanted = item or ("ema" if "ema" in items else "params")
            said, values = _read(path, {wanted: abstract}, fingerprint, also)
            for note in filter(None, (tried and f"the checkpoint of step {found} is taken instead", said)):
                print(note, file=sys.stderr, flush=True)
            return values[wanted], found
        except InvalidCheckpointError as reason:
            tried += 1
            print(f"checkpoint {path} is not valid: {reason}", file=sys.stderr, flush=True)
    raise CheckpointError(f"no checkpoint in {directory}" + (f" is valid ({tried} tried)" if tried else ""))


def _orbax() -> Any:
    import orbax.checkpoint as ocp

    return ocp


def _own_disk(options: Any) -> dict[str, Any]:
    """Settings of a manager of a folder that no other process sees. What all of them write `staging` joins."""
    ocp = _orbax()
    alone = ocp.options.MultiprocessingOptions(primary_host=None, active_processes={jax.process_index()})
    handlers = {name: ocp.StandardCheckpointHandler(multiprocessing_options=alone) for name in TREES}
    for handler in handlers.values():
        handler.finalize = lambda directory: None
    handlers["meta"] = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
    quiet = ocp.options.AsyncOptions(create_directories_asynchronously=False)  # otherwise by messages to all processes
    options = dataclasses.replace(options, create=False, multiprocessing_options=alone, async_options=quiet)
    return {"options": options, "item_handlers": handlers}


def _read(
    path: Path, wanted: dict[str, Any], fingerprint: str, also: Sequence[str]
) -> tuple[str | None, dict[str, Any]]:
    """A warning or None, and the `wanted` items of one step, verified; if one process fails, all do."""

    def checked_meta() -> tuple[str | None, dict[str, Any]]:
        meta = read_meta(path)
        note = check_fingerprint(path, meta, fingerprint, also)
        check_compatible(path, meta["leaves"], wanted)
        return note, meta["leaves"]

    note, leaves = coordination.raise_together(checked_meta, f"checkpoint {path}", InvalidCheckpointError)
    found = coordination.raise_together(lambda: _restored(path, wanted), f"checkpoint {path}", InvalidCheckpointError)
    wrong = [name for name, value in checksums(found).items() if value != leaves[name][2]]
    if wrong:
        raise InvalidCheckpointError(
            f"checksum of {wrong[0]} differs" + (f" (and of {len(wrong) - 1} more)" if wrong[1:] else "")
        )
    return note, found


def _restored(path: Path, wanted: dict[str, Any], whole: bool = False) -> dict[str, Any]:
    """This process's shards. Uses orbax's handler because its checkpointer would wait for the other processes."""
    with quiet_call():
        handler, args = _orbax().StandardCheckpointHandler(), _orbax().args.StandardRestore
        try:
            with staging.local(path, wanted, whole=whole) as here:
                found = {name: handler.restore(here / name, args=args(abstract)) for name, abstract in wanted.items()}
                return jax.block_until_ready(found)
        except Exception as error:  # a damaged file surfaces as any of a dozen types
            reason, refused = reason_of(error), refused_here(error)
        finally:
            handler.close()
        settle()
    if refused:
        raise CheckpointError(f"checkpoint {path} cannot be read: {reason}")
    if staging.in_parts(path) and not whole:  # before it counts as damaged
        return _restored(path, wanted, whole=True)
    raise InvalidCheckpointError(f"cannot be read ({reason})")
