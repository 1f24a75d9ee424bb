"""Dropout by counter: whether a weight is kept is a hash of its place, not the next number of a generator.

So the backward pass finds the same weights without having stored any, and the result depends neither on the size of
blocks nor on how rows and heads lie on devices.

Source: the hash is "lowbias32" of Wellons 2018, "Prospecting for Hash Functions"; the idea, Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3".
"""

import jax
import jax.numpy as jnp

from jaxformer.types import Array


def mix(x: Array) -> Array:
    """A bijection of 32-bit numbers in which each bit of the result depends on all bits of `x`. uint32 -> uint32.

    >>> [hex(mix(jnp.uint32(i))) for i in (0, 1, 2)]
    ['0x0', '0x688990c0', '0xd1132181']
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ jax.lax.shift_right_logical(x, jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ jax.lax.shift_right_logical(x, jnp.uint32(16))


def kept(seed: tuple[Array, Array], number: Array, query: Array, key: Array, rate: float) -> Array:
    """Which weights are kept, [t, s] bool.

    Args:
      seed: two uint32 scalars.
      number: uint32 scalar, a different one for each row and head.
      query, key: [t], [s] uint32, places in the row.
      rate: share that is dropped, 0 <= rate < 1.
    """
    start = mix(number * jnp.uint32(0x9E3779B9) ^ seed[0])
    rows = mix(mix(query ^ start) + seed[1])
    bits = mix(rows[:, None] ^ (key * jnp.uint32(0x85EBCA6B))[None, :])
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
