"""The state of a run between two steps: one tuple of arrays, created with the shardings that it keeps."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from jaxformer.parallel.mesh import param_shardings, replicated
from jaxformer.specs import init_params, is_spec, only_trained
from jaxformer.types import Model, Params

Leaf = Any  # an array; in a tree that describes the state, its shape or its sharding


class TrainState(NamedTuple):
    """Everything the next step depends on, besides the batch.

    Attributes:
      step: int32, batches seen; also the index of the next one.
      params: the parameters.
      opt_state: the optimizer's.
      ema: moving average of `params`, or None if there is none.
      rng: uint32 key data that every step's randomness is folded from; it never changes.
      bad_steps: int32, consecutive steps up to now that were not finite.
      skipped: int32, all such steps since step 0.
      frozen: a tree that the loss sees and nobody updates (`Model.frozen`), or None.
    """

    step: Leaf
    params: Any
    opt_state: Any
    ema: Any
    rng: Leaf
    bad_steps: Leaf
    skipped: Leaf
    frozen: Any = None


def init_state(
    model: Model, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh, *, ema: bool = False
) -> TrainState:
    """The state of step 0. Made inside jit with `state_shardings`, so no device ever holds more than its part."""
    return jax.jit(
        functools.partial(fresh_state, model, optimizer, seed, ema=ema),
        out_shardings=state_shardings(model, optimizer, mesh, ema=ema),
        compiler_options=init_options(mesh.devices.flat[0]),
    )()


def fresh_state(model: Model, optimizer: optax.GradientTransformation, seed: Leaf, *, ema: bool = False) -> TrainState:
    """The state of step 0 as a pure function of the seed, an int or a traced int32."""
    init_rng, run_rng = jax.random.split(jax.random.key(seed))
    params = model.init(init_rng)
    frozen = None if model.frozen is None else init_params(model.frozen, jax.random.fold_in(init_rng, 1))
    opt_state = optimizer.init(only_trained(params, model.specs))
    zero = jnp.zeros((), jnp.int32)
    # A copy, because donation needs the average in buffers of its own.
    average = jax.tree.map(jnp.copy, params) if ema else None
    return TrainState(zero, params, opt_state, average, jax.random.key_data(run_rng), zero, zero, frozen)


def init_options(device: jax.Device) -> dict[str, int] | None:
    """Compiler options for `fresh_state`: on CPU, optimizing the random numbers takes most of a small model's compile
    time; at this level they are the same bits."""
    return {"xla_backend_optimization_level": 1} if device.platform == "cpu" else None


def state_shapes(model: Model, optimizer: optax.GradientTransformation, *, ema: bool = False) -> TrainState:
    """The state as a tree of ShapeDtypeStruct; runs and allocates nothing."""
    return jax.eval_shape(functools.partial(fresh_state, model, optimizer, 0, ema=ema))


def state_shardings(
    model: Model, optimizer: optax.GradientTransformation, mesh: Mesh, *, ema: bool = False
) -> TrainState:
    """The state as a tree of NamedSharding.

    A leaf of the optimizer's state that mirrors a parameter (the end of its path is the parameter's path, and the
    shapes agree) is sharded as that parameter; every other leaf is replicated.
    """
    params, whole = param_shardings(model.specs, mesh), replicated(mesh)
    leaves = zip(tree_leaves_with_path(params), jax.tree.leaves(model.specs, is_leaf=is_spec), strict=True)
    mirrors = {(path, spec.shape): sharding for (path, sharding), spec in leaves}

    def sharding(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        ends = ((path[start:], leaf.shape) for start in range(len(path)))
        return next((mirrors[end] for end in ends if end in mirrors), whole)

    opt_state = tree_map_with_path(sharding, state_shapes(model, optimizer, ema=ema).opt_state)
    frozen = param_shardings(model.frozen, mesh)
    return TrainState(whole, params, opt_state, params if ema else None, whole, whole, whole, frozen)


def abstract_state(
    model: Model, optimizer: optax.GradientTransformation, mesh: Mesh, *, ema: bool = False
) -> TrainState:
    """Shapes and shardings together: what a checkpoint is restored into."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        state_shapes(model, optimizer, ema=ema),
        state_shardings(model, optimizer, mesh, ema=ema),
    )


def averaged(state: TrainState) -> Params:
    """The weights to evaluate and sample with: the moving average where there is one."""
    return state.params if state.ema is None else state.ema


def state_bytes(state: Any) -> int:
    """Bytes of one whole copy of a state, or of any tree of arrays or their shapes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
