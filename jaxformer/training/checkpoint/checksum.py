"""Checksums of arrays that do not depend on their sharding.

The checksum of an array is the sum, modulo 2**32, over its 32-bit words, of mix(word ^ mix(index)), where mix is a
bijection. The order of a sum does not matter, so each device adds up its shard and the result is the same on any mesh
and any number of hosts. One changed word always changes it; several go unnoticed once in 2**32 times.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.types import Array

SMALL_STATE_BYTES = 2**26


def checksums(tree: Any) -> dict[str, str]:
    """path -> 8 hex digits, for every array of a tree.

    >>> a, b = checksums({"w": jnp.zeros(3)}), checksums({"w": jnp.zeros(3).at[1].set(-0.0)})
    >>> a == b, a == checksums({"w": np.zeros(3, np.float32)})
    (False, True)
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    # Small states are summed on the host, which is faster than compiling a program per shape.
    small = sum(x.nbytes for _, x in leaves) <= SMALL_STATE_BYTES and jax.process_count() == 1
    sums = {leaf_name(path): _host_checksum(np.asarray(x)) if small else _device_checksum(x) for path, x in leaves}
    return {name: f"{int(value):08x}" for name, value in jax.device_get(sums).items()}


@jax.jit
def _device_checksum(x: Array) -> Array:
    bits = jax.lax.bitcast_convert_type(_bytes_if_bool(x), _word(x.dtype)).astype(jnp.uint32)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for dimension, size in enumerate(bits.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dimension)
    return jnp.sum(_mix(bits ^ _mix(index)), dtype=jnp.uint32)


def _host_checksum(x: np.ndarray) -> int:
    """The same number as `_device_checksum`, by NumPy, in blocks that fit in the CPU's cache."""
    words = np.ascontiguousarray(_bytes_if_bool(x)).reshape(-1).view(_word(x.dtype))
    total, block = 0, 2**15
    for start in range(0, len(words), block):
        bits = words[start : start + block].astype(np.uint32)
        index = np.arange(start, start + len(bits)).astype(np.uint32)
        total += int(_mix(bits ^ _mix(index)).sum(dtype=np.uint64))
    return total % 2**32


def _bytes_if_bool(x: Any) -> Any:
    return x.astype(np.uint8) if x.dtype == np.bool_ else x


def _word(dtype: Any) -> Any:
    """The unsigned integer as wide as `dtype`, at most 32 bits: a 64-bit number is two words."""
    return {1: np.uint8, 2: np.uint16}.get(np.dtype(dtype).itemsize, np.uint32)


def _mix(x: Any) -> Any:
    """The finaliser of MurmurHash3, a bijection of uint32; for NumPy and JAX arrays."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def leaf_name(path: tuple) -> str:
    """A leaf's path in a tree, joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
