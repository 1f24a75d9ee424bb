"""Which tensors a model has elsewhere, of which shapes, and which of our parameters lie in each."""

import itertools
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.interchange.foreign import EXPERT, LAYER, Foreign, Place
from jaxformer.interchange.pattern import Pattern
from jaxformer.models.families import family_of
from jaxformer.specs import ParamSpec, is_spec, is_statistic


class TensorPart(NamedTuple):
    """A parameter of ours in a tensor of theirs: its dotted path, its layer if it is stacked, how it lies, its expert
    if it has several."""

    path: str
    layer: int | None
    pattern: Pattern
    expert: int | None = None

    def of(self, leaf: Any) -> Any:
        """That part of the parameter."""
        leaf = leaf if self.layer is None else leaf[self.layer]
        return leaf if self.expert is None else leaf[self.expert]


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
    places, found = foreign.all_places(cfg), dict[str, Layout]()
    for path, spec in jax.tree_util.tree_leaves_with_path(family_of(cfg).specs(cfg), is_leaf=is_spec):
        if is_statistic(spec):
            continue
        place = places[dotted(path)]
        shape = place.pattern.theirs(spec.shape[spec.num_stacked :])
        for (layer, expert), name in names_of(place, spec).items():
            had, parts = found.get(name, Layout((0,), []))
            rows = max(had[0], (place.pattern.start or 0) + shape[0])
            parts.append(TensorPart(dotted(path), layer, place.pattern, expert))
            found[name] = Layout((rows, *shape[1:]), parts)
    return found | {name: Layout(shape, []) for name, shape in foreign.zeros(cfg).items()}


def names_of(place: Place, spec: ParamSpec) -> dict[tuple[int | None, int | None], str]:
    """(layer, expert) -> the tensor of one parameter there, without prefix; None: it has none."""
    sizes = dict(zip(spec.axes, spec.shape, strict=True))
    ranges = [range(sizes[axis]) if mark in place.name else (None,) for axis, mark in
              (("layers", LAYER), ("experts", EXPERT))]  # fmt: skip
    return {
        (layer, expert): place.name.replace(LAYER, str(layer)).replace(EXPERT, str(expert))
        for layer, expert in itertools.product(*ranges)
    }


def written(layout: Layout, leaves: dict[str, Any], dtype: Any) -> np.ndarray:
    """A tensor of theirs, of our parameters by dotted path."""
    out = np.empty(layout.shape, dtype) if layout.parts else np.zeros(layout.shape, dtype)
    for part in layout.parts:
        part.pattern.place(np.asarray(part.of(leaves[part.path])).astype(dtype), out)
    return out


def dotted(path: Any) -> str:
    """A path of a tree in one text."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
