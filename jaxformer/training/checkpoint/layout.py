"""What a checkpoint holds, apart from how it is stored: its items, its meta data, and what makes it invalid."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxformer.errors import CheckpointError, InvalidCheckpointError
from jaxformer.storage import files, json_checksum
from jaxformer.training.checkpoint.checksum import checksums, leaf_name
from jaxformer.training.checkpoint.failures import REFUSALS
from jaxformer.training.state import TrainState

OLD_DIGITS = 16  # of fingerprints over the whole config, until manifests had one


def is_step(name: str) -> bool:
    """Whether a folder of this name is a checkpoint's: its step as we write it.

    >>> [name for name in ("0", "115", "0115", "²", "١", "-1", "115.tmp") if is_step(name)]
    ['0', '115']
    """
    return name.isascii() and name.isdecimal() and (name == "0" or name[0] != "0")


def list_steps(directory: str | Path) -> list[int]:
    """Steps that have a directory under `directory`, ascending; does not look inside them, does not need orbax.

    Links are not followed: see `links`.
    """
    return sorted(int(path.name) for path in _steps(directory) if not path.is_symlink() and path.is_dir())


def links(directory: str | Path) -> list[Path]:
    """What is named like a checkpoint and is a symbolic link."""
    return [path for path in _steps(directory) if path.is_symlink()]


def _steps(directory: str | Path) -> list[Path]:
    directory = Path(directory)
    return [path for path in directory.iterdir() if is_step(path.name)] if directory.is_dir() else []


def items_of(state: TrainState) -> dict[str, Any]:
    """What is stored under which name. The optimizer's tuples become flat paths, which no library version changes."""
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
    """The meta data of a step's directory, verified: step, fingerprint, leaves.

    Raises:
      InvalidCheckpointError: it is gone or damaged, or the directory is that of another step, copied or renamed, or
        holds what is no file.
      CheckpointError: this process may not read it.
    """
    try:
        meta = json_checksum.verified(json_checksum.read(path / "meta" / "metadata"))
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
    """(step, a path in its directory that is no file, see `files.irregular`) of the steps that have one."""
    found = ((step, files.irregular(directory / str(step))) for step in steps)
    return [(step, str(path)) for step, path in found if path is not None]


def check_fingerprint(path: Path, meta: dict[str, Any], expected: str, also: Sequence[str] = ()) -> str | None:
    """Looks whether a checkpoint is of this run.

    Args:
      path: of the step's directory.
      meta: its meta data.
      expected: fingerprint of the run, see `manifest.fingerprint`; "" where nothing is known of it.
      also: others that stand for the same run.

    Returns:
      A line to print where that cannot be told: the checkpoint and the run are of a version whose fingerprints told
      the mesh and the working directory as well, which may change between two starts. Otherwise None.

    Raises:
      CheckpointError: it is of another run.
    """
    found = meta.get("fingerprint", "")
    if not expected or found in (expected, *also):
        return None
    line = f"checkpoint {path} is of another run: its fingerprint is {found or 'empty'}, this run's {expected}"
    if len(expected) == OLD_DIGITS and len(found) in (0, OLD_DIGITS):
        return f"{line}; both are of an earlier version, which changed it with the mesh and the workdir: going on"
    raise CheckpointError(line)


def check_compatible(path: Path, stored: dict[str, list[Any]], wanted: dict[str, Any]) -> None:
    """Raises CheckpointError if the stored leaves are not the wanted ones: another model, not a damaged file."""

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
