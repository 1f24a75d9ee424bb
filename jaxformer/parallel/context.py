"""Context parallelism: rows sharded over the devices of the `context` axis.

[B, T, ...] becomes [parts * B, T / parts, ...], one shard of all rows after the other. So everything that works token
by token (projections, norms, the loss) sees ordinary rows; only attention knows that a row has other shards
(`Mask.parts`, `kernels.attention.ring`). Causal rows are first put in zigzag order: of 2 * parts pieces, shard i holds
the pieces i and 2 * parts - 1 - i, so that every device has the same number of (query, key) pairs to visit.

Source: Liu et al. 2023 (ring attention); Brandon et al. 2023, section 3 (contiguous causal shards are unequal work).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxformer.parallel.constraints import constrain, context_parts
from jaxformer.types import Array


class SequenceSharding(NamedTuple):
    """How rows of T tokens are sharded.

    Attributes:
      parts: number of shards; with 1, every method returns its argument.
      order: [T] int, the index in the row of each token in the order of the shards; None: 0, 1, 2, ...
    """

    parts: int = 1
    order: np.ndarray | None = None

    def arrange(self, x: Any) -> Any:
        """[B, T, ...] in the order of the shards. None stays None."""
        return x if x is None or self.order is None else jnp.take(x, self.order, axis=1)

    def shard(self, x: Any) -> Any:
        """[B, T, ...] -> [parts * B, T / parts, ...], in order, one shard of all rows after the other."""
        if x is None or self.parts == 1:
            return x
        x = self.arrange(x)
        x = jnp.swapaxes(x.reshape(x.shape[0], self.parts, -1, *x.shape[2:]), 0, 1)
        return constrain(x.reshape(-1, *x.shape[2:]), "rows", *[None] * (x.ndim - 2))

    def unshard(self, x: Array) -> Array:
        """[parts * B, T / parts, ...] -> [B, T, ...], in the order of the row."""
        if self.parts == 1:
            return x
        x = jnp.swapaxes(x.reshape(self.parts, -1, *x.shape[1:]), 0, 1)
        x = x.reshape(x.shape[0], -1, *x.shape[3:])
        return x if self.order is None else jnp.take(x, np.argsort(self.order), axis=1)

    def sum_shards(self, x: Array) -> Array:
        """Sums over shards of rows [parts * B] -> sums over rows [B]."""
        return x if self.parts == 1 else jnp.sum(x.reshape(self.parts, -1), axis=0)

    def first_tokens(self, x: Array) -> Array:
        """[B, 1 or more, D], the first token of each row first, of [parts * B, T / parts, D]: the first shards of all
        rows come first."""
        return x[: x.shape[0] // self.parts]


def sequence_sharding(length: int, *, zigzag: bool) -> SequenceSharding:
    """How the mesh in use shards rows of `length` tokens; not at all if its `context` axis does not divide them.

    >>> sequence_sharding(16, zigzag=True)
    SequenceSharding(parts=1, order=None)
    """
    parts = context_parts()
    if parts == 1 or length % (2 * parts if zigzag else parts):
        return SequenceSharding()
    return SequenceSharding(parts, zigzag_order(length, parts) if zigzag else None)


def zigzag_order(length: int, parts: int) -> np.ndarray:
    """The tokens of a row, shard by shard: shard i holds the pieces i and 2 * parts - 1 - i of 2 * parts.

    >>> zigzag_order(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    pieces = np.arange(length).reshape(2 * parts, -1)
    return np.concatenate([np.concatenate([pieces[i], pieces[2 * parts - 1 - i]]) for i in range(parts)])
