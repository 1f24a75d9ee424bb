"""What a checkpoint holds, apart from how it is stored: its items, its meta data, and what makes it unsound."""

import json
import zlib
from pathlib import Path
from typing import Any

import jax

from jaxformer.training.checksum import checksums, leaf_name
from jaxformer.training.state import TrainState


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message is one line, ready to print."""


class UnsoundError(Exception):
    """Why a checkpoint cannot be trusted; a few words."""


def list_steps(directory: str | Path) -> list[int]:
    """Steps that have a directory under `directory`, ascending; does not look inside them, does not need orbax."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit() and path.is_dir())


def items_of(state: TrainState) -> dict[str, Any]:
    """What is stored under which name. The optimizer's tuples become flat paths, which no library version changes."""
    rest = state._replace(params=None, ema=None)
    items = {
        "params": state.params,
        "state": {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(rest)},
    }
    return items if state.ema is None else {**items, "ema": state.ema}


def state_of(items: dict[str, Any], like: TrainState) -> TrainState:
    """The inverse of `items_of`."""
    rest = like._replace(params=None, ema=None)
    leaves = [items["state"][leaf_name(path)] for path, _ in jax.tree_util.tree_leaves_with_path(rest)]
    state = jax.tree.unflatten(jax.tree.structure(rest), leaves)
    return state._replace(params=items["params"], ema=items.get("ema"))


def describe(items: dict[str, Any]) -> dict[str, list[Any]]:
    """path -> [shape, dtype, checksum]."""
    sums = checksums(items)
    leaves = jax.tree_util.tree_leaves_with_path(items)
    return {leaf_name(path): [list(leaf.shape), str(leaf.dtype), sums[leaf_name(path)]] for path, leaf in leaves}


def seal(meta: dict[str, Any]) -> dict[str, Any]:
    """`meta` with a checksum of itself."""
    return {**meta, "seal": zlib.crc32(json.dumps(meta, sort_keys=True).encode())}


def read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / "meta" / "metadata").read_text(encoding="utf-8"))
        body = {k: v for k, v in meta.items() if k != "seal"}
        if seal(body) == meta:
            return body
    except OSError as error:
        raise UnsoundError(f"meta cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError):
        pass
    raise UnsoundError("meta is damaged")


def compare(path: Path, stored: dict[str, list[Any]], wanted: dict[str, Any]) -> None:
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
