"""A parameter is said once: shape, logical axes, initialiser, role. Everything else derives from that.

>>> import jax
>>> specs = {
...     "w_up": ParamSpec((4, 16), ("embed", "mlp"), normal(0.5), "hidden"),
...     "b_up": ParamSpec((16,), ("mlp",), zeros, "bias"),
... }
>>> jax.tree.map(lambda p: p.shape, init_params(specs, jax.random.key(0)))
{'b_up': (16,), 'w_up': (4, 16)}
>>> count_params(specs)
80
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jaxformer.types import Array, Params

Initializer = Callable[[Array, tuple[int, ...]], Array]
Role = Literal["input", "hidden", "output", "norm", "bias", "counter_bias", "statistic"]
STACKED = ("layers", "experts")


@dataclass(frozen=True)
class ParamSpec:
    """One parameter.

    Attributes:
      shape: its shape.
      axes: one logical axis name per dimension (`parallel.mesh` maps names to mesh axes); None is "never split".
      init: ``(rng, shape) -> float32 array``.
      role: what it does, by which the optimizer chooses its update. "input": a table that is looked up; "hidden": a
        matrix between activations; "output": makes logits; "norm": a scale; "bias": is added; "counter_bias": is moved
        by `rate` against the sign of its gradient; "statistic": no parameter of the model, but what the loss sums over
        a whole batch by its gradient, before it is computed (`training.gradients.gradients`).
      num_inputs: of a "hidden" matrix, how many leading dimensions are its input, "layers" and "experts" not counted;
        the others are its output: 2 of [heads, head_width, embed].
      rate, decay, epsilon: multiply the optimizer's learning rate, weight decay and epsilon for this parameter; rate
        may be a tuple, one for each stacked layer. The decay is 0 for norms and biases where nothing is said.
      active: the share of it that one token uses.
      trained: False: the optimizer leaves it as it was initialised or loaded, and no gradient is computed for it.

    Raises:
      ValueError: there is not one axis name per dimension, an unknown role, or a hidden matrix without outputs.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Initializer
    role: Role
    num_inputs: int = 1
    rate: float | tuple[float, ...] = 1.0
    decay: float | None = None
    epsilon: float = 1.0
    trained: bool = True
    active: float = 1.0

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"ParamSpec: shape {self.shape} and axes {self.axes} differ in length")
        if self.role not in get_args(Role):
            raise ValueError(f"ParamSpec: role {self.role!r}; accepted: {', '.join(get_args(Role))}")
        if self.role == "hidden" and not 0 < self.num_inputs < len(self.shape) - self.num_stacked:
            raise ValueError(f"ParamSpec: num_inputs {self.num_inputs} of the hidden matrix {self.shape}")
        if self.decay is None:
            object.__setattr__(self, "decay", 0.0 if self.role in ("norm", "bias", "counter_bias") else 1.0)

    @property
    def num_stacked(self) -> int:
        """Leading dimensions that number equal parameters, as layers and experts do, and are no side of a matrix."""
        return next((i for i, axis in enumerate(self.axes) if axis not in STACKED), len(self.axes))


def normal(std: float) -> Initializer:
    """Normal initialiser with standard deviation `std`."""
    return lambda rng, shape: std * jax.random.normal(rng, shape, jnp.float32)


def uniform(limit: float) -> Initializer:
    """Uniform initialiser on [-limit, limit]."""
    return lambda rng, shape: jax.random.uniform(rng, shape, jnp.float32, -limit, limit)


def zeros(rng: Array, shape: tuple[int, ...]) -> Array:
    """All zeros."""
    return jnp.zeros(shape, jnp.float32)


def ones(rng: Array, shape: tuple[int, ...]) -> Array:
    """All ones."""
    return jnp.ones(shape, jnp.float32)


def is_spec(x: Any) -> bool:
    """True for a ParamSpec; the `is_leaf` of every tree operation over specs."""
    return isinstance(x, ParamSpec)


def stack_specs(specs: Any, num_layers: int) -> Any:
    """The specs of `num_layers` equal blocks as one tree with a leading "layers" axis on every leaf."""

    def stacked(spec: ParamSpec) -> ParamSpec:
        def init(rng, shape):
            return jax.vmap(lambda r: spec.init(r, shape[1:]))(jax.random.split(rng, shape[0]))

        return replace(spec, shape=(num_layers, *spec.shape), axes=("layers", *spec.axes), init=init)

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


def multiply_rate(spec: ParamSpec, by: float | tuple[float, ...]) -> ParamSpec:
    """`spec` with its learning rate multiplied by a number, or by one for each stacked layer.

    >>> multiply_rate(ParamSpec((2, 4), ("layers", "norm"), ones, "norm", rate=0.5), (1.0, 0.1)).rate
    (0.5, 0.05)
    """
    if isinstance(spec.rate, tuple):
        more = by if isinstance(by, tuple) else (by,) * len(spec.rate)
        return replace(spec, rate=tuple(a * b for a, b in zip(spec.rate, more, strict=True)))
    return replace(spec, rate=tuple(spec.rate * b for b in by) if isinstance(by, tuple) else spec.rate * by)


def freeze(specs: Any, names: Sequence[str]) -> Any:
    """`specs` with the parameters whose dotted path is one of `names`, or begins with one, not trained.

    Raises:
      KeyError: no parameter has such a name.

    >>> tree = {"embedding": {"tokens": ParamSpec((4, 2), ("vocab", "embed"), zeros, "input")}}
    >>> freeze(tree, ["embedding"])["embedding"]["tokens"].trained
    False
    """
    unknown = set(names)

    def frozen(path: Any, spec: ParamSpec) -> ParamSpec:
        dotted = jax.tree_util.keystr(path, simple=True, separator=".")
        found = [name for name in names if f"{dotted}.".startswith(f"{name}.")]
        unknown.difference_update(found)
        return replace(spec, trained=False) if found else spec

    tree = jax.tree_util.tree_map_with_path(frozen, specs, is_leaf=is_spec)
    if unknown:
        raise KeyError(*sorted(unknown))
    return tree


def only(tree: Any, specs: Any, wanted: Callable[[ParamSpec], bool]) -> Any:
    """`tree`, which has a leaf for each of `specs`, with None in place of those that are not wanted."""
    return jax.tree.map(lambda spec, leaf: leaf if wanted(spec) else None, specs, tree, is_leaf=is_spec)


def merge(tree: Any, some: Any, specs: Any, wanted: Callable[[ParamSpec], bool]) -> Any:
    """`tree` with the wanted leaves from another: the inverse of `only`."""
    return jax.tree.map(lambda spec, old, new: new if wanted(spec) else old, specs, tree, some, is_leaf=is_spec)


def is_trained(spec: ParamSpec) -> bool:
    """Whether the optimizer updates a parameter."""
    return spec.trained


def is_statistic(spec: ParamSpec) -> bool:
    """Whether a leaf is counted over a whole batch, and no parameter of the model."""
    return spec.role == "statistic"


def only_trained(tree: Any, specs: Any) -> Any:
    """`tree`, which has a leaf for each of `specs`, with None in place of the parameters that are not trained."""
    return only(tree, specs, is_trained)


def with_trained(tree: Any, trained: Any, specs: Any) -> Any:
    """`tree` with its trained leaves from another: the inverse of `only_trained`."""
    return merge(tree, trained, specs, is_trained)


def count_params(specs: Any) -> int:
    """Number of parameters, all groups together."""
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=is_spec) if not is_statistic(s))


def count_active(specs: Any) -> int:
    """Number of parameters that one token uses: of experts, those that it goes through."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return round(sum(s.active * count_params(s) for s in leaves))


def count_non_embedding(specs: Any) -> int:
    """Number of parameters without the tables that tokens, positions and types are looked up in, and without an output
    table of its own: N of Kaplan et al. 2020, section 1.3."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    tables = [s for s in leaves if s.role == "input" or (s.role == "output" and "vocab" in s.axes)]
    return count_params(leaves) - count_params(tables)


def count_by_group(specs: dict[str, Any]) -> dict[str, int]:
    """Number of parameters under each top-level name of `specs`."""
    return {name: count_params(group) for name, group in specs.items()}
