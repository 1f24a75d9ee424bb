"""Order and noise as pure functions of numbers: any row of any epoch in any order, on any number of hosts, with no
state to save. Integer arithmetic and a raw Philox stream only, so nothing depends on the versions of libraries.

>>> sorted(permuted(np.arange(10), 10, keys(3, 0, np.arange(10) * 0)).tolist())
[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
"""

import math

import numpy as np

_ROUNDS = 6  # pairs of half rounds: with 4 the neighbours of 12 rows are seen to depend on each other, with 6 not
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: its multiples are far apart


def mix(values: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers that spreads every input bit over all output bits (splitmix64's last step).

    Source: Steele, Lea and Flood 2014; constants by Stafford (variant 13).
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def keys(seed: int, stream: int, numbers: np.ndarray) -> np.ndarray:
    """One 64-bit key for each number; another seed or stream gives unrelated keys.

    Args:
      seed: at least 0.
      stream: what the keys are for; at least 0.
      numbers: [R] integers, at least 0.

    Returns:
      [R] uint64.
    """
    out = np.zeros(1, np.uint64)  # arrays, for scalars would warn where they wrap
    for part in (np.array([seed]), np.array([stream]), numbers):
        out = mix(out + (part.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return out


def permuted(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Where a shuffle puts each index: a permutation of 0 .. size-1 for each key, computed index by index.

    Args:
      index: [R] integers from 0 to size - 1.
      size: how many there are.
      key: [R] uint64, the shuffle each index is in.

    Returns:
      [R] int64.

    A Feistel network on a rectangle of at least `size` cells; what falls outside is sent through again. Source: Black
    and Rogaway 2002, "Ciphers with arbitrary finite domains".
    """
    width = np.uint64(math.isqrt(size - 1) + 1)
    height = np.uint64(-(-size // int(width)))

    def encrypt(cell: np.ndarray, key: np.ndarray) -> np.ndarray:
        row, column = np.divmod(cell, width)
        for _ in range(_ROUNDS):
            row = (row + mix(key + column) % height) % height
            key = key + _GOLDEN
            column = (column + mix(key + row) % width) % width
            key = key + _GOLDEN
        return row * width + column

    cell = encrypt(np.asarray(index).astype(np.uint64), key)
    while (outside := cell >= size).any():
        cell[outside] = encrypt(cell[outside], key[outside])
    return cell.astype(np.int64)


def noise(seed: int, first_row: int, rows: int, words: int) -> np.ndarray:
    """Random bits of consecutive global rows; the bits of a row do not depend on which rows are asked for with it.

    Args:
      seed: at least 0.
      first_row: global row number of the first.
      rows, words: how many.

    Returns:
      [rows, words] uint64.
    """
    blocks = -(-words // 4)  # Philox makes four words from each value of its counter
    generator = np.random.Philox(key=np.array([seed, 0], np.uint64), counter=first_row * blocks)
    return generator.random_raw(rows * blocks * 4).reshape(rows, blocks * 4)[:, :words]


def bits_of(seed: int, stream: int, number: int, words: int) -> np.ndarray:
    """[words] random uint64; another seed, stream or number gives unrelated ones, more words begin with the same.

    Args:
      seed, stream, number: at least 0.
      words: how many.
    """
    return noise(int(keys(seed, stream, np.array([number]))[0]), 0, 1, words)[0]


def fractions(bits: np.ndarray) -> np.ndarray:
    """Uniform float64 in [0, 1) from random uint64."""
    return (bits >> np.uint64(11)) * 2.0**-53


def below(limits: np.ndarray | int, bits: np.ndarray) -> np.ndarray:
    """Uniform int64 from 0 to limit - 1 from the low 32 of random uint64 bits; limits are under 2**31."""
    low = bits & np.uint64(0xFFFFFFFF)
    return ((low * np.asarray(limits).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
