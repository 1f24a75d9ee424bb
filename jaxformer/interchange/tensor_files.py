"""Folders of safetensors files, as the Hugging Face libraries write them: one file, or several and an index."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.storage import files

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_BYTES = 1 << 26  # of a JSON file
SHARD_BYTES = 5_000_000_000  # of tensors in one file


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError: it cannot be read, or is none."""
    try:
        found = json.loads(files.read_bytes(path, MOST_BYTES))
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply to be read") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or 'is not JSON'}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds {type(found).__name__}; accepted: a JSON object")
    return found


def open_tensors(folder: Path, name: str) -> dict[str, np.ndarray]:
    """All tensors of one small file. Raises ConfigError: it is not there, or damaged, or the library is missing."""
    if not (folder / name).is_file():
        raise ConfigError(f"{folder}: has no {name}; accepted: safetensors files")
    file = _open(folder / name)
    return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def save_tensors(folder: Path, name: str, tensors: dict[str, np.ndarray]) -> None:
    """One file, in a folder that is made. Raises ConfigError: the library is missing, or it cannot be written."""
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise ConfigError("weights for others need the hf extra: pip install 'jaxformer[hf]'") from None
    part = folder / f"{name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode  # as the user's other files, where the library would let nobody else read it
        save_file(tensors, part, {"format": "pt"})
        part.chmod(mode)
        os.replace(part, folder / name)
    except Exception as error:  # the library has errors of its own for a full disk
        with contextlib.suppress(OSError):
            part.unlink()
        raise ConfigError(f"{folder / name}: {' '.join(str(error).split())}") from None


def _open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError("weights of others need the hf extra: pip install 'jaxformer[hf]'") from None
    try:
        return safe_open(path, "np").__enter__()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file, though {INDEX} names it") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: is damaged, or no safetensors file ({' '.join(str(error).split())})") from None


class TensorFolder:
    """The tensors of a folder, by name; each is read in slices, straight from its file.

    Raises:
      ConfigError: the library is not installed, there are no safetensors files, or one that the index names is missing
        or damaged.
    """

    def __init__(self, folder: Path):
        self._folder, self._files = folder, {}
        if (folder / INDEX).is_file():
            weights = read_json(folder / INDEX).get("weight_map")
            if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
                raise ConfigError(f"{folder / INDEX}: has no weight_map")
            for name in sorted(set(weights.values())):
                if name != Path(name).name:
                    raise ConfigError(f"{folder / INDEX}: weight_map: {name!r}; accepted: names of files beside it")
                self._files[name] = _open(folder / name)
            self.names = {key: name for key, name in weights.items()}
            for key, name in weights.items():
                if key not in self._files[name].keys():  # noqa: SIM118
                    raise ConfigError(f"{folder / name}: has no tensor {key}, which {INDEX} says it has")
        elif (folder / WHOLE).is_file():
            self._files[WHOLE] = _open(folder / WHOLE)
            self.names = dict.fromkeys(self._files[WHOLE].keys(), WHOLE)
        else:
            others = sorted(
                path.name for pattern in ("*.bin", "*.pt", "*.ckpt", "*.h5") for path in folder.glob(pattern)
            )
            why = f"; {others[0]} may run code when it is read, and is not opened" if others else ""
            raise ConfigError(f"{folder}: has no {WHOLE} and no {INDEX}{why}; accepted: safetensors files")

    def __getitem__(self, name: str) -> Any:
        """What gives an array when it is indexed with slices."""
        return self._files[self.names[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return tuple(self[name].get_shape())

    def dtype(self, name: str) -> str:
        """Of one tensor, as the format writes it: F32, BF16, ..."""
        return self[name].get_dtype()


def write_tensors(
    folder: Path, names: Mapping[str, int], tensors: Iterator[tuple[str, np.ndarray]], shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes tensors in the order in which they come, and an index if they need several files.

    Args:
      folder: exists.
      names: of every tensor, with its bytes.
      tensors: (name, array); at most `shard_bytes` of them are in memory at a time, or one.
      shard_bytes: of one file.

    Raises:
      ConfigError: the library is not installed, or the disk is full.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in names.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    found = dict[str, str]()
    for number, shard in enumerate(shards, 1):
        file = WHOLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        arrays = dict(next(tensors) for _ in shard)
        assert list(arrays) == shard
        save_tensors(folder, file, arrays)
        found |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(names.values())}, "weight_map": found}
        files.write_atomically(folder / INDEX, json.dumps(index, indent=2))
