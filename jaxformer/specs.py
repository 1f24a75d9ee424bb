"""A parameter is said once: shape, logical axes, initialiser. Everything else derives from that.

>>> import jax
>>> specs = {"w_up": ParamSpec((4, 16), ("embed", "mlp"), normal(0.5)), "b_up": ParamSpec((16,), ("mlp",), zeros)}
>>> jax.tree.map(lambda p: p.shape, init_params(specs, jax.random.key(0)))
{'b_up': (16,), 'w_up': (4, 16)}
>>> count_params(specs)
80
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.types import Array, Params

Initializer = Callable[[Array, tuple[int, ...]], Array]


@dataclass(frozen=True)
class ParamSpec:
    """One parameter.

    Attributes:
      shape: its shape.
      axes: one logical axis name per dimension (`parallel.mesh` maps names to mesh axes); None is "never split".
      init: ``(rng, shape) -> float32 array``.
      decay: whether weight decay applies; None: to matrices (two axes or more, "layers" not counted). Said where
        the shape misleads: a bias of [heads, head_width] is no matrix.

    Raises:
      ValueError: if there is not one axis name per dimension.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Initializer
    decay: bool | None = None

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"ParamSpec: shape {self.shape} and axes {self.axes} differ in length")


def normal(std: float) -> Initializer:
    """Normal initialiser with standard deviation `std`."""
    return lambda rng, shape: std * jax.random.normal(rng, shape, jnp.float32)


def uniform(limit: float) -> Initializer:
    """Uniform initialiser on [-limit, limit]."""
    return lambda rng, shape: jax.random.uniform(rng, shape, jnp.float32, -limit, limit)


def zeros(rng: Array, shape: tuple[int, ...]) -> Array:
    """All zeros."""
    del rng
    return jnp.zeros(shape, jnp.float32)


def ones(rng: Array, shape: tuple[int, ...]) -> Array:
    """All ones."""
    del rng
    return jnp.ones(shape, jnp.float32)


def is_spec(x: Any) -> bool:
    """True for a ParamSpec; the `is_leaf` of every tree operation over specs."""
    return isinstance(x, ParamSpec)


def stack_specs(specs: Any, num_layers: int) -> Any:
    """The specs of `num_layers` equal blocks as one tree with a leading "layers" axis on every leaf."""

    def stacked(spec: ParamSpec) -> ParamSpec:
        def init(rng, shape):
            return jax.vmap(lambda r: spec.init(r, shape[1:]))(jax.random.split(rng, shape[0]))

        return ParamSpec((num_layers, *spec.shape), ("layers", *spec.axes), init, spec.decay)

    return jax.tree.map(stacked, specs, is_leaf=is_spec)


def init_params(specs: Any, rng: Array) -> Params:
    """Initial values, float32. Each parameter's stream depends on its own path only, so adding one parameter
    to a model leaves the others' initial values as they were."""

    def init(path, spec):
        name = jax.tree_util.keystr(path)
        return spec.init(jax.random.fold_in(rng, zlib.crc32(name.encode())), spec.shape)

    return jax.tree_util.tree_map_with_path(init, specs, is_leaf=is_spec)


def abstract_params(specs: Any, dtype=jnp.float32) -> Any:
    """The tree of `jax.ShapeDtypeStruct` of the parameters; allocates nothing."""
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, dtype), specs, is_leaf=is_spec)


def param_axes(specs: Any) -> Any:
    """The tree of logical axis names, one tuple per parameter."""
    return jax.tree.map(lambda s: s.axes, specs, is_leaf=is_spec)


def decay_mask(specs: Any) -> Any:
    """True where weight decay applies: matrices, not biases or norm scales (see `ParamSpec.decay`)."""

    def decays(spec: ParamSpec) -> bool:
        return spec.decay if spec.decay is not None else len([a for a in spec.axes if a != "layers"]) >= 2

    return jax.tree.map(decays, specs, is_leaf=is_spec)


def count_params(specs: Any) -> int:
    """Number of parameters, all groups together."""
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=is_spec))


def count_by_group(specs: dict[str, Any]) -> dict[str, int]:
    """Number of parameters under each top-level name of `specs`."""
    return {name: count_params(group) for name, group in specs.items()}
