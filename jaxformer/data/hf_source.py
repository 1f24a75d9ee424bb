"""Hugging Face datasets that `save_to_disk` wrote, read without the library `datasets`.

Such a folder holds the rows as Arrow streams, shards in the order that state.json lists, a shuffle or a selection
already applied; a folder of several splits holds one such folder for each, and dataset_dict.json.
"""

import json
from pathlib import Path
from typing import Any

from jaxformer.config import DataConfig
from jaxformer.errors import ConfigError
from jaxformer.storage import files
from jaxformer.storage.address import place

_MOST_BYTES = 1 << 26


def find(data: DataConfig) -> tuple[list[Path], list[Path]]:
    """(training files, held-out files) of data.hf_dir; none are held out where the end of the training text is.

    Raises:
      ConfigError: the folder is none that save_to_disk wrote, lacks a file or a split, or is of a version that kept
        shuffles beside the rows.
    """
    root = place(str(data.hf_dir)).expanduser()
    try:
        return _find(data, root, f"config.data.hf_dir: {root}")
    except OSError as error:
        raise ConfigError(f"config.data.hf_dir: {root}: {error.strerror or error}") from None


def _find(data: DataConfig, root: Path, where: str) -> tuple[list[Path], list[Path]]:
    if not root.is_dir():
        raise ConfigError(f"{where} is not a directory")
    if not (root / "dataset_dict.json").is_file():
        if data.hf_validation_split is not None:
            raise ConfigError(
                f"config.data.hf_validation_split: {data.hf_validation_split!r}; {root} has no splits; accepted: none, "
                "which holds out data.validation_fraction of it"
            )
        return _shards(root, where), []
    splits = _read(root / "dataset_dict.json", where).get("splits")
    if not isinstance(splits, list) or not all(isinstance(each, str) and each == Path(each).name for each in splits):
        raise ConfigError(f"{where}: dataset_dict.json lists no splits")
    held_out = data.hf_validation_split or ("validation" if "validation" in splits else None)
    for field, name in (("hf_train_split", data.hf_train_split), ("hf_validation_split", held_out)):
        if name is not None and name not in splits:
            raise ConfigError(f"config.data.{field}: {name!r} is no split of {root}; it has {', '.join(splits)}")
    if held_out == data.hf_train_split:
        raise ConfigError(f"config.data.hf_validation_split: {held_out!r} is also data.hf_train_split")
    training = _shards(root / data.hf_train_split, where)
    return training, [] if held_out is None else _shards(root / held_out, where)


def _shards(folder: Path, where: str) -> list[Path]:
    """The files of one split, in order."""
    state = _read(folder / "state.json", where)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ConfigError(
            f"{where}: {folder} was saved by a version of datasets that kept the order of the rows beside them; load "
            "it with that version and save it with a newer one"
        )
    try:
        names = [each["filename"] for each in state["_data_files"]]
        paths = [folder / name for name in names if name == Path(name).name]
    except (KeyError, TypeError):
        names, paths = [], []
    if not paths or len(paths) != len(names):
        raise ConfigError(f"{where}: {folder / 'state.json'} lists no files of its own folder")
    if missing := [path for path in paths if not path.is_file()]:
        raise ConfigError(f"{where}: {missing[0]} is missing")
    return paths


def _read(path: Path, where: str) -> dict[str, Any]:
    try:
        found = json.loads(files.read_bytes(path, _MOST_BYTES, follow=True))
    except FileNotFoundError:
        raise ConfigError(
            f"{where}: there is no {path.name} in {path.parent}; accepted: a folder that save_to_disk of the library "
            "datasets wrote"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return found if isinstance(found, dict) else {}
