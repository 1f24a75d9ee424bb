"""One sum over the data axis for a whole loop over micro-batches, where XLA would have one in every pass.

XLA sums a micro-batch's gradients over `data` as soon as they are there, and adds the sums up: M micro-batches send M
times the bytes. Here the devices along the axis run the loop apart, each over its own rows, and only what they have
added up is summed. The other axes of the mesh stay XLA's.

The numbers are the same only if rows share nothing. Dropout does share: one key draws for all rows of a micro-batch,
and devices apart would draw the same for each of theirs. So a loss that draws random numbers, whatever for, stays with
XLA.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxformer.parallel.constraints import mesh_axes

DATA = "data"  # the mesh axis
# Primitives that make random numbers, or show the bits of a key to something that will.
_DRAWING = frozenset({"random_bits", "random_gamma", "random_unwrap", "rng_bit_generator", "rng_uniform"})


def data_shards() -> int:
    """The number of groups of devices along the data axis of the mesh in use; 1: there is nothing to sum."""
    return mesh_axes().get(DATA, 1)


def draws(function: Callable[..., Any], *args: Any) -> bool:
    """Whether `function(*args)` draws random numbers; it is traced and not run.

    >>> draws(lambda rng, x: x * jax.random.uniform(rng), jax.random.key(0), 1.0)
    True
    >>> draws(lambda rng, x: x, jax.random.fold_in(jax.random.key(0), 1), 1.0)
    False
    """
    return _draws(jax.make_jaxpr(function)(*args).jaxpr)


def _draws(jaxpr: Any) -> bool:
    return any(eqn.primitive.name in _DRAWING or any(map(_draws, _inside(eqn))) for eqn in jaxpr.eqns)


def _inside(eqn: Any) -> list[Any]:
    """The programs inside an operation: bodies of loops, branches, functions that are called."""
    values = [each for value in eqn.params.values() for each in (value if isinstance(value, tuple | list) else [value])]
    found = [getattr(each, "jaxpr", each) for each in values]
    return [each for each in found if hasattr(each, "eqns")]


def sum_over_data(tree: Any) -> Any:
    """Inside `apart`: the sum over the devices of the axis."""
    return jax.lax.psum(tree, DATA)


def axes_alone(*axes: str) -> set[str]:
    """These mesh axes and those of one device, for `shard_map`'s `axis_names`: where no axis is XLA's to shard, a
    kernel for TPUs may stand by itself, but not beside an axis of one device that is."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {*axes, *(name for name, size, kind in kinds if size == 1 and kind == AxisType.Auto)}


def apart(function: Callable[..., Any], rows: Any, *args: Any) -> Any:
    """function(its rows, *args) on every device of the data axis; every output has to be the same on all of them.

    Args:
      function: sees a mesh without the axis.
      rows: a tree of arrays [B, ...], which the devices share out.
      *args: trees of arrays that are the same on all devices.
    """
    into = (P(DATA), *[P()] * len(args))
    run = jax.shard_map(function, in_specs=into, out_specs=P(), axis_names=axes_alone(DATA), check_vma=False)
    return run(rows, *args)
