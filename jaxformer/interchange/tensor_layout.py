"""Which tensors a model has elsewhere, of which shapes, and which of our parameters lie in each."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.interchange.foreign import LAYER, Foreign, Place
from jaxformer.interchange.pattern import Pattern
from jaxformer.models.families import family_of
from jaxformer.specs import ParamSpec, is_spec


class TensorPart(NamedTuple):
    """A parameter of ours in a tensor of theirs: its dotted path, its layer if it is stacked, and how it lies."""

    path: str
    layer: int | None
    pattern: Pattern


class Layout(NamedTuple):
    """A tensor of theirs.

    Attributes:
      shape: of all of its parts together.
      parts: what it holds, in order; none: zeros.
    """

    shape: tuple[int, ...]
    parts: list[TensorPart]


def layout_of(cfg: ModelConfig, foreign: Foreign) -> dict[str, Layout]:
    """Name without prefix -> tensor, in the order of our parameters, layer by layer."""
    places, found = foreign.places(cfg), dict[str, Layout]()
    for path, spec in jax.tree_util.tree_leaves_with_path(family_of(cfg).specs(cfg), is_leaf=is_spec):
        place = places[dotted(path)]
        shape = place.pattern.theirs(spec.shape[spec.num_stacked :])
        for layer, name in enumerate(names_of(place, spec)):
            had, parts = found.get(name, Layout((0,), []))
            rows = max(had[0], (place.pattern.start or 0) + shape[0])
            parts.append(TensorPart(dotted(path), layer if LAYER in place.name else None, place.pattern))
            found[name] = Layout((rows, *shape[1:]), parts)
    return found | {name: Layout(shape, []) for name, shape in foreign.zeros(cfg).items()}


def names_of(place: Place, spec: ParamSpec) -> list[str]:
    """The tensors of one parameter, without prefix."""
    layers = range(spec.shape[0]) if LAYER in place.name else (0,)
    return [place.name.replace(LAYER, str(layer)) for layer in layers]


def written(layout: Layout, leaves: dict[str, Any], dtype: Any) -> np.ndarray:
    """A tensor of theirs, of our parameters by dotted path."""
    out = np.empty(layout.shape, dtype) if layout.parts else np.zeros(layout.shape, dtype)
    for path, layer, pattern in layout.parts:
        leaf = leaves[path] if layer is None else leaves[path][layer]
        pattern.place(np.asarray(leaf).astype(dtype), out)
    return out


def dotted(path: Any) -> str:
    """A path of a tree in one text."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
