"""What a checkpoint contains, whatever the storage library: its items, its metadata, and what makes it invalid."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxformer.errors import CheckpointError, InvalidCheckpointError
from jaxformer.storage import files, json_checksum
from jaxformer.storage.address import place
from jaxformer.training.checkpoint.checksum import checksums, leaf_name
from jaxformer.training.checkpoint.failures import REFUSALS
from jaxformer.training.state import TrainState

SEAL = "meta/metadata"  # the file of a checkpoint that is written last
TREES = ("params", "state", "ema", "frozen")  # the items that hold arrays
OLD_DIGITS = 16  # hex digits of earlier versions' fingerprints, which were hashes of the whole config


def is_step(name: str) -> bool:
    """True if a folder of this name is a checkpoint: a step number as we write it.

    >>> [name for name in ("0", "115", "0115", "²", "١", "-1", "115.tmp") if is_step(name)]
    ['0', '115']
    """
    return name.isascii() and name.isdecimal() and (name == "0" or name[0] != "0")


def list_steps(directory: str | Path) -> list[int]:
    """Steps that have a directory under `directory`, ascending; neither opens them nor follows links (see `links`)."""
    return sorted(int(path.name) for path in files.folders(directory, SEAL) if is_step(path.name))


def links(directory: str | Path) -> list[Path]:
    """The symbolic links that are named like a checkpoint."""
    directory = place(directory)
    found = directory.iterdir() if directory.is_dir() else ()
    return [path for path in found if is_step(path.name) and path.is_symlink()]


def items_of(state: TrainState) -> dict[str, Any]:
    """Item name -> tree to store. The optimizer's tuples become flat paths, which do not depend on library versions."""
    rest = state._replace(params=None, ema=None, frozen=None)
    items = {
        "params": state.params,
        "state": {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(rest)},
    }
    return items | {name: tree for name in ("ema", "frozen") if (tree := getattr(state, name)) is not None}


def state_of(items: dict[str, Any], like: TrainState) -> TrainState:
    """The inverse of `items_of`."""
    rest = like._replace(params=None, ema=None, frozen=None)
    leaves = [items["state"][leaf_name(path)] for path, _ in jax.tree_util.tree_leaves_with_path(rest)]
    state = jax.tree.unflatten(jax.tree.structure(rest), leaves)
    return state._replace(params=items["params"], ema=items.get("ema"), frozen=items.get("frozen"))


def describe(items: dict[str, Any]) -> dict[str, list[Any]]:
    """path -> [shape, dtype, checksum]."""
    sums = checksums(items)
    leaves = jax.tree_util.tree_leaves_with_path(items)
    return {leaf_name(path): [list(leaf.shape), str(leaf.dtype), sums[leaf_name(path)]] for path, leaf in leaves}


def read_meta(path: Path) -> dict[str, Any]:
    """The verified metadata of a step's directory: step, fingerprint, leaves.

    Raises:
      InvalidCheckpointError: it is missing or damaged, or the directory belongs to another step (copied or renamed) or
        contains something other than regular files.
      CheckpointError: this process may not read it.
    """
    try:
        meta = json_checksum.verified(json_checksum.read(path / SEAL))
    except OSError as error:
        if error.errno in REFUSALS:
            raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror}") from None
        raise InvalidCheckpointError(f"meta cannot be read ({error.strerror})") from None
    except ValueError:
        meta = None
    if meta is None or not isinstance(meta.get("leaves"), dict):
        raise InvalidCheckpointError("meta is damaged")
    if meta.get("step") != int(path.name):
        raise InvalidCheckpointError(f"it holds step {meta.get('step')}: the folder was copied or renamed")
    if (odd := files.irregular(path)) is not None:
        raise InvalidCheckpointError(f"{odd.relative_to(path)} is not a regular file")
    return meta


def irregular_steps(directory: Path, steps: Sequence[int]) -> list[tuple[int, str]]:
    """(step, a pipe, socket or device in its directory) for the steps that have one, see `files.irregular`."""
    found = ((step, files.irregular(directory / str(step))) for step in steps)
    return [(step, str(path)) for step, path in found if path is not None]


def check_fingerprint(path: Path, meta: dict[str, Any], expected: str, also: Sequence[str] = ()) -> str | None:
    """Checks that a checkpoint belongs to this run.

    Args:
      path: the step's directory.
      meta: its metadata.
      expected: the run's fingerprint, see `manifest.fingerprints`; "" skips the check.
      also: other accepted fingerprints of the same run.

    Returns:
      None, or a warning to print: both fingerprints come from an earlier version, which included the mesh and the
      working directory, so they may differ although the run is the same.

    Raises:
      CheckpointError: it belongs to another run.
    """
    found = meta.get("fingerprint", "")
    if not expected or found in (expected, *also):
        return None
    line = f"checkpoint {path} is of another run: its fingerprint is {found or 'empty'}, this run's {expected}"
    if len(expected) == OLD_DIGITS and len(found) in (0, OLD_DIGITS):
        return f"{line}; both are of an earlier version, whose fingerprints include the mesh and workdir: it is used"
    raise CheckpointError(line)


def check_compatible(path: Path, stored: dict[str, list[Any]], wanted: dict[str, Any]) -> None:
    """Raises CheckpointError if the stored leaves have other names, shapes or dtypes: those of another model."""

    def text(shape: Any, dtype: Any) -> str:
        return f"{dtype}[{','.join(map(str, shape))}]"

    need = {leaf_name(p): text(x.shape, x.dtype) for p, x in jax.tree_util.tree_leaves_with_path(wanted)}
    have = {k: text(*v[:2]) for k, v in stored.items() if k.split(".")[0] in wanted}
    differing = sorted(k for k in need.keys() | have.keys() if need.get(k) != have.get(k))
    if differing:
        k = differing[0]
        more = f" (and {len(differing) - 1} more differ)" if differing[1:] else ""
        raise CheckpointError(
            f"checkpoint {path} is of another model: {k} is {have.get(k, 'missing')} there, "
            f"{need.get(k, 'missing')} here{more}"
        )
