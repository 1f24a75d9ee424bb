"""How activations lie on the devices of a mesh: the rule table, and rows cut into parts over the `context` axis.

Functions say where an activation may be split by the names of its axes (`constrain`); without a mesh that does nothing.

A `context` axis splits the tokens of a row. Rows are then *folded*: [B, T, ...] becomes [parts * B, T / parts, ...],
part by part, and the parts lie on the devices of the axis. So everything that works token by token (projections, norms,
the loss) sees rows as ever, and attention alone knows that a row has other parts (`Mask.parts`, `kernels.ring`).
Causal rows are put in zigzag order first: of 2 * parts pieces, part i holds the pieces i and 2 * parts - 1 - i, so that
every device has the same number of (query, key) pairs to visit.

Source: Liu et al. 2023 (ring attention); Brandon et al. 2023, section 3 (why contiguous causal parts are unequal work).
"""

from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxformer.types import Array

# THE rule table of activations: axis -> the mesh axes it is split over.
RULES: dict[str, tuple[str, ...]] = {
    "rows": ("data", "fsdp"),  # of a batch
    "parts": ("context", "data", "fsdp"),  # of a batch whose rows are folded
    "tokens": (),  # of a part, between the layers; see `shard_norms`
    "heads": ("tensor",),
    "mlp": ("tensor",),
}
_shard_norms: ContextVar[bool] = ContextVar("shard_norms", default=False)


@contextmanager
def shard_norms(on: bool):
    """While entered (as a program is traced), what lies between the layers is split over the tensor axis by tokens.

    Norms, residual sums and dropout are then done once and not by every device of the axis, and each all-reduce becomes
    a reduce-scatter and an all-gather. Source: Korthikanti et al. 2022, section 4.2.2 (sequence parallelism).
    """
    token = _shard_norms.set(on)
    try:
        yield
    finally:
        _shard_norms.reset(token)


def mesh_axes() -> dict[str, int]:
    """The axes of the mesh in use that are split automatically and have more than one device, and their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in kinds if kind == AxisType.Auto and size > 1}


def constrain(x: Array, *axes: str | None) -> Array:
    """Pins the layout of an activation inside jit, by names of `RULES`; does nothing where no mesh is set.

    A dimension that does not divide over its mesh axes, or whose mesh axes there are not, is left alone.

    >>> constrain(jnp.ones((4, 8)), "rows", None).shape
    (4, 8)
    """
    sizes = mesh_axes()
    if not sizes:
        return x
    entries: list[Any] = []
    for size, axis in zip(x.shape, axes, strict=True):
        wanted = ("tensor",) if axis == "tokens" and _shard_norms.get() else RULES[axis] if axis else ()
        entries.append(splits(size, wanted, sizes) or None)
    return jax.lax.with_sharding_constraint(x, P(*entries))


def splits(size: int, axes: tuple[str, ...], sizes: dict[str, int]) -> tuple[str, ...]:
    """Those of `axes` that a dimension is split over: the ones there are, if it divides over all of them, else none."""
    there = tuple(axis for axis in axes if axis in sizes)
    return there if size % int(np.prod([sizes[axis] for axis in there])) == 0 else ()


class Cut(NamedTuple):
    """How rows of T tokens are cut into parts.

    Attributes:
      parts: how many; 1: not at all, and every method returns what it is given.
      order: [T] int, the place in the row of each token in the order of the parts; None: as it is.
    """

    parts: int = 1
    order: np.ndarray | None = None

    def arrange(self, x: Any) -> Any:
        """[B, T, ...] in the order of the parts. None stays None."""
        return x if x is None or self.order is None else jnp.take(x, self.order, axis=1)

    def fold(self, x: Any) -> Any:
        """[B, T, ...] -> [parts * B, T / parts, ...], in order, one part of all rows after the other."""
        if x is None or self.parts == 1:
            return x
        x = self.arrange(x)
        x = jnp.swapaxes(x.reshape(x.shape[0], self.parts, -1, *x.shape[2:]), 0, 1)
        return constrain(x.reshape(-1, *x.shape[2:]), "parts", *[None] * (x.ndim - 2))

    def unfold(self, x: Array) -> Array:
        """[parts * B, T / parts, ...] -> [B, T, ...], as the row was."""
        if self.parts == 1:
            return x
        x = jnp.swapaxes(x.reshape(self.parts, -1, *x.shape[1:]), 0, 1)
        x = x.reshape(x.shape[0], -1, *x.shape[3:])
        return x if self.order is None else jnp.take(x, np.argsort(self.order), axis=1)

    def add_rows(self, x: Array) -> Array:
        """Sums over parts of rows [parts * B] -> sums over rows [B]."""
        return x if self.parts == 1 else jnp.sum(x.reshape(self.parts, -1), axis=0)


def cut(length: int, *, zigzag: bool) -> Cut:
    """How the mesh in use cuts rows of `length` tokens; not at all where its `context` axis does not divide them.

    >>> cut(16, zigzag=True)
    Cut(parts=1, order=None)
    """
    parts = mesh_axes().get("context", 1)
    if parts == 1 or length % (2 * parts if zigzag else parts):
        return Cut()
    return Cut(parts, zigzag_order(length, parts) if zigzag else None)


def zigzag_order(length: int, parts: int) -> np.ndarray:
    """The tokens of a row, part by part: part i holds the pieces i and 2 * parts - 1 - i of 2 * parts.

    >>> zigzag_order(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    pieces = np.arange(length).reshape(2 * parts, -1)
    return np.concatenate([np.concatenate([pieces[i], pieces[2 * parts - 1 - i]]) for i in range(parts)])
