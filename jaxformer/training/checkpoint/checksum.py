"""Checksums of arrays that do not depend on where their parts live.

The checksum of an array is the sum, modulo 2**32, over its 32-bit words, of mix(word ^ mix(place)), where mix is a
bijection. A sum needs no order, so devices and hosts add up their parts, and the number is the same on any mesh and any
number of hosts. One changed word always changes it; more go unseen once in 2**32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.types import Array

SMALL_STATE_BYTES = 2**26


def checksums(tree: Any) -> dict[str, str]:
    """path -> 8 hex digits, for every array of a tree, whatever its sharding.

    >>> a, b = checksums({"w": jnp.zeros(3)}), checksums({"w": jnp.zeros(3).at[1].set(-0.0)})
    >>> a == b, a == checksums({"w": np.zeros(3, np.float32)})
    (False, True)
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    # A small state is summed on the host: compiling a program per shape would take longer than that.
    small = sum(x.nbytes for _, x in leaves) <= SMALL_STATE_BYTES and jax.process_count() == 1
    sums = {leaf_name(path): _host_checksum(np.asarray(x)) if small else _device_checksum(x) for path, x in leaves}
    return {name: f"{int(value):08x}" for name, value in jax.device_get(sums).items()}


@jax.jit
def _device_checksum(x: Array) -> Array:
    bits = jax.lax.bitcast_convert_type(_bytes_if_bool(x), _word(x.dtype)).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for dimension, size in enumerate(bits.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dimension)
    return jnp.sum(_mix(bits ^ _mix(place)), dtype=jnp.uint32)


def _host_checksum(x: np.ndarray) -> int:
    """The same number as `_device_checksum`, by numpy, in blocks that stay in the cache."""
    words = np.ascontiguousarray(_bytes_if_bool(x)).reshape(-1).view(_word(x.dtype))
    total, block = 0, 2**15
    for start in range(0, len(words), block):
        part = words[start : start + block].astype(np.uint32)
        place = np.arange(start, start + len(part)).astype(np.uint32)
        total += int(_mix(part ^ _mix(place)).sum(dtype=np.uint64))
    return total % 2**32


def _bytes_if_bool(x: Any) -> Any:
    return x.astype(np.uint8) if x.dtype == np.bool_ else x


def _word(dtype: Any) -> Any:
    """Unsigned integers as wide as `dtype`, or 32 bits wide where that is wider (and every number is two words)."""
    return {1: np.uint8, 2: np.uint16}.get(np.dtype(dtype).itemsize, np.uint32)


def _mix(x: Any) -> Any:
    """The finaliser of MurmurHash3, a bijection of uint32; for numpy and jax arrays."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def leaf_name(path: tuple) -> str:
    """A leaf's path in a tree, in dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
