"""Our models as folders that the library transformers opens: config.json, safetensors, tokenizer.json."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.interchange.architectures import ARCHITECTURES, type_for, write_model
from jaxformer.interchange.tensor_files import SHARD_BYTES, write_tensors
from jaxformer.interchange.tensor_layout import dotted, layout_of, written
from jaxformer.storage import files
from jaxformer.types import Params

NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # or transformers has its own for them
DTYPES = ("float32", "bfloat16", "float16")


def export_model(
    config: ModelConfig,
    params: Params,
    directory: str | Path,
    *,
    dtype: str = "float32",
    model_type: str | None = None,
    special_tokens: dict[str, int] | None = None,
    shard_bytes: int = SHARD_BYTES,
    labels: Sequence[str] = (),
) -> str:
    """Writes a model for transformers.

    Args:
      config: of the model, its vocabulary size filled in.
      params: as `family.specs(config)` says, on any devices of this process.
      directory: is made if it is not there; must hold no model yet.
      dtype: of the tensors.
      model_type: what it is there, if its config.json can say all of this model; None, or if it cannot: the first that
        can.
      special_tokens: fields of config.json that name token ids: {"eos_token_id": 0}.
      shard_bytes: of one file.
      labels: names, where the model has the head of a task with labels; (): LABEL_0, LABEL_1, ...

    Returns:
      The model_type that it has there.

    Raises:
      ConfigError: no architecture there is like this model, or the folder is not empty of models or cannot be written.
    """
    name = type_for(config, model_type)
    foreign, folder = ARCHITECTURES[name], Path(directory)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None
    leaves = {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    prefixed = {foreign.full_name(key, config): of for key, of in layout_of(config, foreign).items()}
    kind = jnp.dtype(dtype)
    sizes = {key: kind.itemsize * math.prod(of.shape) for key, of in prefixed.items()}
    write_tensors(folder, sizes, ((key, written(of, leaves, kind)) for key, of in prefixed.items()), shard_bytes)
    about = {
        "dtype": dtype, "torch_dtype": dtype, **(NO_TOKENS if special_tokens is None else special_tokens),
        **write_model(name, config, labels),
    }  # fmt: skip
    files.write_atomically(folder / "config.json", json.dumps(about, indent=2) + "\n")
    return name


def check_folder(directory: str | Path) -> None:
    """Raises ConfigError: the folder holds a model already, or is a file."""
    check_new(directory, ("*.safetensors*", "config.json"))


def check_new(directory: str | Path, patterns: Sequence[str]) -> None:
    """Raises ConfigError: the folder holds a file like one of these, or is a file."""
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is not a directory")
    if (folder / "manifest.json").exists():
        raise ConfigError(f"{folder}: holds a run (manifest.json); accepted: a new folder")
    taken = [each.name for pattern in patterns for each in folder.glob(pattern)]
    if taken:
        unfinished = all(each.endswith((".safetensors", ".part")) for each in taken)
        what = " and no config.json, as an export leaves that was stopped" if unfinished else ""
        raise ConfigError(f"{folder}: holds {taken[0]}{what}; accepted: a folder without a model")
