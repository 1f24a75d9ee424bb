"""Adapters alone, in the format of the library peft: adapter_config.json and adapter_model.safetensors.

A module of theirs that holds several weights of ours (queries, keys and values in one matrix) has one A and one B. Ours
go into it as blocks: the ranks add up, as `rank_pattern` and `alpha_pattern` say. Read again, blocks are taken apart;
where B is no such block matrix, each of our weights gets the whole A.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig, TuneConfig
from jaxformer.config.fields import shown
from jaxformer.errors import ConfigError
from jaxformer.interchange.architectures import ARCHITECTURES, type_for
from jaxformer.interchange.exporting import check_new
from jaxformer.interchange.foreign import LAYER, Fields
from jaxformer.interchange.pattern import Pattern
from jaxformer.interchange.tensor_files import open_tensors, read_json, save_tensors
from jaxformer.low_rank import LowRank, is_low_rank
from jaxformer.models.families import family_of
from jaxformer.models.lora import sides, target_of, weights_of
from jaxformer.specs import ParamSpec
from jaxformer.storage import files
from jaxformer.types import Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
Keys = tuple[str, ...]


class AdaptedWeight(NamedTuple):
    """A weight of ours in a module of theirs.

    Attributes:
      path: of ours.
      layer: which of the stacked ones.
      pattern: how it lies there.
      spec: of ours.
    """

    path: Keys
    layer: int
    pattern: Pattern
    spec: ParamSpec


class AdaptedModule(NamedTuple):
    """A module of theirs: its name with LAYER, its outputs, and the weights of ours that it holds."""

    template: str
    outputs: int
    parts: list[AdaptedWeight]


def modules_of(cfg: ModelConfig, name: str, paths: Any) -> dict[str, AdaptedModule]:
    """Name -> module, of those that hold one of the weights at `paths`, in an architecture of transformers."""
    foreign, found, outputs = ARCHITECTURES[name], dict[str, AdaptedModule](), dict[str, int]()
    places, specs = foreign.all_places(cfg), weights_of(family_of(cfg).specs(cfg), cfg)
    for path, spec in specs.items():
        place = places[".".join(path)]
        inner = spec.shape[spec.num_stacked :]
        rows = math.prod(place.pattern.theirs(inner)) // sides(spec)[0]
        outputs[place.name] = max(outputs.get(place.name, 0), (place.pattern.start or 0) + rows)
        for layer in range(spec.shape[0]) if path in paths else ():
            module = foreign.prefix + place.name.replace(LAYER, str(layer)).removesuffix(".weight")
            template = foreign.prefix + place.name.removesuffix(".weight")
            had = found.setdefault(module, AdaptedModule(template, 0, []))
            had.parts.append(AdaptedWeight(path, layer, place.pattern, spec))
    prefix = len(foreign.prefix)
    return {key: of._replace(outputs=outputs[f"{of.template[prefix:]}.weight"]) for key, of in found.items()}


def export_adapter(
    config: ModelConfig, params: Params, directory: str | Path, tune: TuneConfig, *, model_type: str | None = None
) -> str:
    """Writes the adapters of a model for peft, and nothing else of it.

    Args:
      config: of the model.
      params: from `models.lora.with_adapters`.
      directory: is made if it is not there; must hold no adapter yet.
      tune: rank, alpha and scaling.
      model_type: as of `export_model`.

    Returns:
      The model_type of the model that they belong to.

    Raises:
      ConfigError: no architecture there is like this model, it has no adapters, or the folder cannot be written.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_low_rank)
    given = {tuple(str(key.key) for key in path): leaf for path, leaf in leaves if is_low_rank(leaf)}
    if not given:
        raise ConfigError("config.tune.lora_rank: 0; the model has no adapters; accepted: a run that learned some")
    name, folder = type_for(config, model_type), Path(directory)
    check_new(folder, (CONFIG, WEIGHTS))
    modules = modules_of(config, name, given)
    tensors, ranks = dict[str, np.ndarray](), dict[str, int]()
    host = jax.device_get(given)
    for module, of in modules.items():
        tensors |= {f"{PREFIX}{module}.{key}.weight": value for key, value in _factors(of, host).items()}
        ranks[of.template] = tune.lora_rank * len({part.path for part in of.parts})
    fused = {key: rank for key, rank in ranks.items() if rank != tune.lora_rank}
    power = 1.0 if tune.lora_scaling == "lora" else 0.5
    about = {
        "peft_type": "LORA", "base_model_name_or_path": None, "task_type": None, "inference_mode": True,
        "r": tune.lora_rank, "lora_alpha": tune.lora_alpha, "use_rslora": tune.lora_scaling == "rslora",
        "lora_dropout": 0.0, "bias": "none", "modules_to_save": None,
        "fan_in_fan_out": any(_inputs_first(part) for of in modules.values() for part in of.parts),
        "target_modules": "|".join(_expression(key) for key in ranks),
        "rank_pattern": {_expression(key): rank for key, rank in fused.items()},
        "alpha_pattern": {_expression(key): tune.lora_scale * rank**power for key, rank in fused.items()},
    }  # fmt: skip
    save_tensors(folder, WEIGHTS, tensors)
    files.write_atomically(folder / CONFIG, json.dumps(about, indent=2) + "\n")
    return name


def _expression(template: str) -> str:
    return re.escape(template).replace(re.escape(LAYER), r"\d+")


def _inputs_first(part: AdaptedWeight) -> bool:
    """Whether theirs has its inputs first, as GPT-2's."""
    words = re.findall(r"[^\s()]+", part.pattern.text.split("->")[0])
    names = part.pattern.text.split("->")[1].split()
    return words[0] in names[: part.spec.num_inputs]


def _thin(part: AdaptedWeight, rank: int) -> tuple[int, ...]:
    """The shape of our weight with `rank` inputs."""
    stacked, inputs = part.spec.num_stacked, part.spec.num_inputs
    return (rank, *[1] * (inputs - 1), *part.spec.shape[stacked + inputs :])


def _factors(of: AdaptedModule, given: dict[Keys, LowRank]) -> dict[str, np.ndarray]:
    """lora_A [R, inputs] and lora_B [outputs, R] of a module."""
    firsts, seconds = [], []
    for part in of.parts:
        a, b = (np.asarray(x[part.layer], np.float32) for x in (given[part.path].a, given[part.path].b))
        rank = a.shape[-1]
        out = np.zeros((rank, of.outputs) if _inputs_first(part) else (of.outputs, rank), np.float32)
        part.pattern.place(b.reshape(_thin(part, rank)), out)
        firsts.append(a.reshape(-1, rank).T)
        seconds.append(out.T if _inputs_first(part) else out)
    return {
        "lora_A": np.ascontiguousarray(np.concatenate(firsts)),
        "lora_B": np.ascontiguousarray(np.concatenate(seconds, axis=1)),
    }


def import_adapter(
    directory: str | Path, config: ModelConfig, model_type: str | None = None
) -> tuple[TuneConfig, dict[str, Any]]:
    """Reads adapters that peft wrote for a model of ours.

    Args:
      directory: with adapter_config.json and adapter_model.safetensors.
      config: of the model.
      model_type: what the model is there; None: the first architecture that can be it.

    Returns:
      Rank, alpha, scaling and targets; and the group "adapters" of the parameters, float32. Where their ranks differ,
      the rank is the largest, and the others have zeros.

    Raises:
      ConfigError: there are none, they are of another kind or of another model, or tensors are missing, unknown or of
        other shapes.
    """
    folder = Path(directory)
    about = read_json(folder / CONFIG)
    fields = Fields(about, CONFIG)
    fields.only("peft_type", "LORA")
    for name, accepted in (("use_dora", False), ("bias", "none"), ("modules_to_save", None), ("lora_bias", False)):
        fields.only(name, accepted)
    fields.only("init_lora_weights", True, False, "gaussian", "orthogonal", "eva")  # others change the weights as well
    fields.only("alora_invocation_tokens", None)
    default = _rank("r", fields.number("r")), float(fields.number("lora_alpha"))
    root = fields.only("use_rslora", False, True)
    ranks = {key: _rank("rank_pattern", rank) for key, rank in _pattern(fields, "rank_pattern").items()}
    alphas = _pattern(fields, "alpha_pattern")
    tensors = {name.removeprefix(PREFIX): value for name, value in open_tensors(folder, WEIGHTS).items()}
    every = weights_of(family_of(config).specs(config), config)
    modules = modules_of(config, type_for(config, model_type), every)
    adapted = {key: of for key, of in modules.items() if f"{key}.lora_A.weight" in tensors}
    wanted = {f"{key}.{which}.weight" for key in adapted for which in ("lora_A", "lora_B")}
    templates = {of.template for of in adapted.values()}
    whole = {f"{k}.{w}.weight" for k, of in modules.items() if of.template in templates for w in ("lora_A", "lora_B")}
    missing, unknown = sorted((whole | wanted) - tensors.keys()), sorted(tensors.keys() - wanted)
    if missing or unknown or not adapted:
        said = [f"{what} {names[0]}" for what, names in (("lacks", missing), ("has besides", unknown)) if names]
        raise ConfigError(
            f"{folder / WEIGHTS}: {' and '.join(said) or 'is empty'}; accepted: lora_A and lora_B of weights of the "
            "layers, in every layer"
        )
    taken: dict[tuple[Keys, int], tuple[np.ndarray, np.ndarray]] = {}
    moved = _moved(adapted, tensors)
    for key, of in adapted.items():
        rank = _by_pattern(ranks, key, default[0])
        scale = _by_pattern(alphas, key, default[1]) / (math.sqrt(rank) if root else rank)
        a, b = (np.asarray(tensors[f"{key}.{which}.weight"], np.float32) for which in ("lora_A", "lora_B"))
        inputs = sides(of.parts[0].spec)[0]
        if a.shape != (rank, inputs) or b.shape != (of.outputs, rank):
            raise ConfigError(
                f"{folder / WEIGHTS}: {key}: shapes {a.shape} and {b.shape}; accepted: {(rank, inputs)} and "
                f"{(of.outputs, rank)}"
            )
        own = of._replace(parts=[part for part in of.parts if part.path in moved] or of.parts)
        for part, first, second in _taken_apart(own, a, b):
            taken[part.path, part.layer] = first, second * np.float32(scale)
    rank = max(first.shape[-1] for first, _ in taken.values())
    smallest = min((min(sides(every[path])), path) for path, _ in taken)
    if rank > smallest[0]:
        raise ConfigError(f"{folder / CONFIG}: r: {rank}; accepted: at most {smallest[0]}")
    scale = default[1] / (math.sqrt(default[0]) if root else default[0])
    tune = TuneConfig(
        lora_rank=rank, lora_alpha=scale * (math.sqrt(rank) if root else rank),
        lora_scaling="rslora" if root else "lora", lora_targets=tuple(sorted({target_of(path) for path, _ in taken})),
    )  # fmt: skip
    return tune, _as_tree(taken, every, rank, tune.lora_scale)


def _moved(modules: dict[str, AdaptedModule], tensors: dict[str, np.ndarray]) -> set[Keys]:
    """The weights of ours that B changes in some layer: of a module that holds several, perhaps not all are targets."""
    found = set()
    for key, of in modules.items():
        b = tensors[f"{key}.lora_B.weight"]
        for part in of.parts if b.shape[:1] == (of.outputs,) else ():
            thin = part.pattern.read(b.T if _inputs_first(part) else b, _thin(part, b.shape[1]))
            found |= {part.path} if np.any(thin) else set()
    return found


def _rank(name: str, value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{CONFIG}: {name}: {value!r}; accepted: an integer of at least 1")
    return value


def _pattern(fields: Fields, name: str) -> dict[str, float]:
    """A pattern of theirs: regular expression -> number. Raises ConfigError: it is none."""
    found = fields.get(name, {})
    try:
        for key, value in found.items():
            re.compile(key)
            if isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError
    except (AttributeError, TypeError, ValueError, re.error):
        raise ConfigError(
            f"{CONFIG}: {name}: {shown(found)}; accepted: {{regular expression: finite number above 0}}"
        ) from None
    return found


def _by_pattern(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """What a pattern of theirs says of a module: a regular expression for the end of its name."""
    return next((each for key, each in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _taken_apart(of: AdaptedModule, a: np.ndarray, b: np.ndarray) -> list[tuple[AdaptedWeight, np.ndarray, np.ndarray]]:
    """Ours of a module: A [*inputs, r] and B [r, *outputs] of each."""
    found = []
    for part in of.parts:
        stacked, middle = part.spec.num_stacked, part.spec.num_stacked + part.spec.num_inputs
        rank = a.shape[0]
        thin = part.pattern.read(b.T if _inputs_first(part) else b, _thin(part, rank))
        first = a.T.reshape(*part.spec.shape[stacked:middle], rank)
        found.append((part, first, thin.reshape(rank, *part.spec.shape[middle:])))
    count = len(found)
    size = a.shape[0] // count
    blocks = [slice(number * size, number * size + size) for number in range(count)]
    others = [np.delete(second, own, axis=0) for (_, _, second), own in zip(found, blocks, strict=True)]
    if size * count != a.shape[0] or any(np.any(each) for each in others):
        return found
    return [(part, x[..., own], y[own]) for (part, x, y), own in zip(found, blocks, strict=True)]


def _as_tree(taken: Any, every: dict[Keys, ParamSpec], rank: int, scale: float) -> dict[str, Any]:
    """The group of adapters."""

    def wider(x: np.ndarray, axis: int) -> np.ndarray:
        return np.pad(x, [(0, rank - x.shape[axis] if i == axis % x.ndim else 0) for i in range(x.ndim)])

    tree: dict[str, Any] = {}
    for path in dict.fromkeys(path for path, _ in taken):
        layers = [taken[path, layer] for layer in range(every[path].shape[0])]
        inner = tree
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = {
            "a": jnp.asarray(np.stack([wider(first, -1) for first, _ in layers])),
            "b": jnp.asarray(np.stack([wider(second, 0) / np.float32(scale) for _, second in layers])),
        }
    return tree
