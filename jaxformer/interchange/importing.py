"""Models of the library transformers, from a folder with config.json and safetensors, as ours.

Every device reads of every tensor only its part, straight from the file: no whole tensor of a sharded model is ever in
the host's memory.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxformer.config import ModelConfig
from jaxformer.errors import ConfigError
from jaxformer.interchange.architectures import architecture_of, is_left_out, read_model
from jaxformer.interchange.foreign import Foreign, Place
from jaxformer.interchange.task_heads import LABELLED, labels_of
from jaxformer.interchange.tensor_files import TensorFolder, read_json
from jaxformer.interchange.tensor_layout import Layout, dotted, layout_of, names_of
from jaxformer.models.families import family_of
from jaxformer.parallel.mesh import param_shardings
from jaxformer.specs import ParamSpec, is_spec, is_statistic
from jaxformer.types import Params

OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # the first BERTs have these


class Imported(NamedTuple):
    """A model of others.

    Attributes:
      config: of our model.
      params: as `family.specs(config)` says, float32 or what was asked for.
      tokenizer: path of its tokenizer.json, or None where there is none.
      dtype: of the tensors in the files ("F32", "BF16", ...); of the first, if they differ.
      labels: names, where the model has the head of a task with labels; () elsewhere.
    """

    config: ModelConfig
    params: Params
    tokenizer: Path | None
    dtype: str
    labels: tuple[str, ...] = ()


def import_model(directory: str | Path, mesh: Mesh | None = None, dtype: Any = None) -> Imported:
    """Reads a model.

    Args:
      directory: with config.json and model.safetensors, or several files and their index.
      mesh: where its parameters go, sharded as in training; None: the first device.
      dtype: of the parameters; None: float32.

    Raises:
      ConfigError: there is no such model here, or tensors are missing, unknown, of other shapes or not finite; names
        them.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a directory")
    about = read_json(folder / "config.json")
    foreign, tensors = architecture_of(about.get("model_type")), TensorFolder(folder)
    by_name = _by_name(folder, tensors.names, foreign)
    config = read_model(foreign, about, by_name)
    specs, places, layout = family_of(config).specs(config), foreign.all_places(config), layout_of(config, foreign)
    _check_names(folder, by_name, foreign, layout, config)
    _check_shapes(tensors, by_name, layout)
    leaves, structure = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)
    shardings = [None] * len(leaves) if mesh is None else jax.tree.leaves(param_shardings(specs, mesh))
    found = []
    for (path, spec), sharding in zip(leaves, shardings, strict=True):
        if is_statistic(spec):
            found.append(jnp.zeros(spec.shape, dtype or "float32", device=sharding))
            continue
        found.append(_read(tensors, by_name, places[dotted(path)], spec, sharding, jnp.dtype(dtype or "float32")))
    params = jax.tree.unflatten(structure, found)
    _check_copies(folder, tensors, by_name, foreign, places)
    tokenizer = folder / "tokenizer.json"
    first = tensors.dtype(next(iter(tensors.names)))
    named = config.head is not None and config.head.task in LABELLED
    labels = labels_of(about) if named else ()
    return Imported(config, params, tokenizer if tokenizer.is_file() else None, first, labels)


def _by_name(folder: Path, names: Collection[str], foreign: Foreign) -> dict[str, str]:
    """Name without prefix, as the tensor is called today -> name."""
    found: dict[str, str] = {}
    for name in names:
        bare = name
        for old, new in OLD_NAMES.items():
            bare = bare.removesuffix(old) + new if bare.endswith(old) else bare
        bare = bare.removeprefix(foreign.prefix)
        bare = foreign.old_names.get(bare, bare)
        if bare in found:
            raise ConfigError(f"{folder}: has {found[bare]} and {name}, two names of one tensor; accepted: one of them")
        found[bare] = name
    return found


def _check_names(
    folder: Path, by_name: dict[str, str], foreign: Foreign, layout: dict[str, Layout], cfg: ModelConfig
) -> None:
    """Every tensor is used and every parameter is there."""
    missing = sorted((name for name, of in layout.items() if of.parts and name not in by_name), key=_natural)
    unknown = sorted(
        (n for n in by_name.keys() - layout.keys() if not is_left_out(n, foreign.left_out) and n not in foreign.copies),
        key=_natural,
    )
    if missing or unknown:
        parts = [f"{what} {_few(names)}" for what, names in (("lacks", missing), ("has besides", unknown)) if names]
        raise ConfigError(
            f"{folder}: {' and '.join(parts)}; accepted: all tensors of {foreign.class_of(cfg)}, and no others"
        )


def _check_shapes(tensors: TensorFolder, by_name: dict[str, str], layout: dict[str, Layout]) -> None:
    for name, of in layout.items():
        if name not in by_name:  # zeros, which need not be there
            continue
        full, had = by_name[name], tensors.shape(by_name[name])
        if had != of.shape:
            raise ConfigError(f"{full}: shape {had}; accepted with this config.json: {of.shape}")
        if not of.parts and np.any(tensors[full][:]):
            raise ConfigError(f"{full}: is not zero; accepted: zeros")


def _natural(name: str) -> tuple[int, str]:
    digits = [int(part) for part in name.split(".") if part.isdigit()]
    return (digits[0] if digits else -1, name)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read(
    tensors: TensorFolder, by_name: dict[str, str], place: Place, spec: ParamSpec, sharding: Any, dtype: Any
) -> jax.Array:
    """One parameter, each device's part by itself."""
    stacked = spec.num_stacked
    shape = spec.shape[stacked:]
    names = np.array([by_name[name] for name in names_of(place, spec).values()]).reshape(spec.shape[:stacked] or (1,))

    def part(index: Any) -> np.ndarray:
        some = names[index[:stacked]]
        inner = index[stacked:]
        out = None
        for number, name in np.ndenumerate(some):
            one = place.pattern.read(tensors[str(name)], shape, inner)
            if not np.isfinite(one).all():
                raise ConfigError(f"{name}: has numbers that are not finite; accepted: finite weights")
            if not stacked:
                return one.astype(dtype)
            out = np.empty((*some.shape, *one.shape), dtype) if out is None else out
            out[number] = one
        assert out is not None
        return out

    if sharding is None:
        return jnp.asarray(part((slice(None),) * len(spec.shape)))
    return jax.make_array_from_callback(spec.shape, sharding, part)


def _check_copies(
    folder: Path, tensors: TensorFolder, by_name: dict[str, str], foreign: Foreign, places: dict[str, Place]
) -> None:
    """What a checkpoint holds once more is what we read, compared piece by piece."""
    placed = {place.name for place in places.values()}
    for name, path in foreign.copies.items():
        if name not in by_name or name in placed:
            continue
        other, original = tensors[by_name[name]], tensors[by_name[places[path].name]]
        shape = tuple(other.get_shape())
        rows = max(1, 2**22 // max(1, int(np.prod(shape[1:]))))
        same = shape == tuple(original.get_shape()) and all(
            np.array_equal(*(each[at : min(at + rows, shape[0])] for each in (other, original)))
            for at in range(0, shape[0], rows)
        )
        if not same:
            raise ConfigError(
                f"{folder}: {by_name[name]} differs from {by_name[places[path].name]}; accepted: equal, as config.json "
                "says that they are tied"
            )
