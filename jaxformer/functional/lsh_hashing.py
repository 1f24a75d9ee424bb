"""Hashes of vectors by random rotations: near vectors fall into the same bucket more often than far ones.

Source: Andoni et al. 2015, section 3; Kitaev et al. 2020 (Reformer), section 2.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.kernels.matmul import product
from jaxformer.types import Array

Rotations: TypeAlias = Array | tuple[Array, ...]


def random_rotations(rng: Array, heads: int, width: int, rounds: int, buckets: int | Sequence[int]) -> Rotations:
    """[H, K, R, buckets / 2] float32 normal numbers: the rotations of each head and round.

    `buckets` may be a sequence of factors: then each has an array, and the number of buckets is their product.

    Raises:
      ValueError: an odd number of buckets.

    >>> [each.shape for each in random_rotations(jax.random.key(0), heads=4, width=8, rounds=2, buckets=(32, 64))]
    [(4, 8, 2, 16), (4, 8, 2, 32)]
    """
    factors = (buckets,) if isinstance(buckets, int) else tuple(buckets)
    if not factors or any(each < 2 or each % 2 for each in factors):
        raise ValueError(f"random_rotations: buckets {buckets}; accepted: even, at least 2")
    drawn = jax.random.normal(rng, (heads, width, rounds, sum(factors) // 2), jnp.float32)
    parts = tuple(jnp.split(drawn, np.cumsum(factors)[:-1] // 2, axis=-1))
    return parts[0] if isinstance(buckets, int) else parts


def hash_buckets(query_key: Array, rotations: Rotations) -> Array:
    """The bucket of every token in every round, [B, H, R, T] int32: which of the rotated axes it is nearest to.

    Many buckets are told apart by several hashes of few values each, because the work and the memory of one grow with
    its values.

    Args:
      query_key: [B, T, H, K].
      rotations: [H, K, R, buckets / 2], or one such for each factor of the number of buckets, the fastest first.

    Source: Andoni et al. 2015, section 3; Kitaev et al. 2020, section 2; factors as in its released implementation.

    >>> x = jnp.array([[1.0, 0.0], [-1.0, 0.1], [0.9, 0.1]])
    >>> hash_buckets(x[None, :, None], jnp.eye(2)[None, :, None])[0, 0, 0].tolist()
    [0, 2, 0]
    >>> hash_buckets(x[None, :, None], 2 * (jnp.eye(2)[None, :, None],))[0, 0, 0].tolist()
    [0, 10, 0]
    """
    wide = jnp.promote_types(query_key.dtype, jnp.float32)
    buckets, below = jnp.zeros((), jnp.int32), 1
    for each in factors_of(rotations):
        rotated = product("BTHK,HKRN->BHRTN", query_key, each.astype(query_key.dtype), wide)
        nearest = jnp.argmax(jnp.concatenate([rotated, -rotated], axis=-1), axis=-1)
        buckets, below = buckets + below * nearest.astype(jnp.int32), below * 2 * each.shape[3]
    return buckets


def factors_of(rotations: Rotations) -> tuple[Array, ...]:
    """The rotations of each factor of the number of buckets."""
    return rotations if isinstance(rotations, tuple) else (rotations,)


def num_buckets(rotations: Rotations) -> int:
    """Buckets of a round.

    >>> num_buckets(random_rotations(jax.random.key(0), heads=4, width=8, rounds=2, buckets=(32, 64)))
    2048
    """
    return math.prod(2 * each.shape[3] for each in factors_of(rotations))
