"""Shuffles and random bits as pure functions of integers: any row of any epoch, on any number of hosts, with no state
to save. Only integer arithmetic and a raw Philox stream, so that results do not depend on library versions.

>>> sorted(permuted(np.arange(10), 10, keys(3, 0, np.arange(10) * 0)).tolist())
[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
"""

import math

import numpy as np

_ROUNDS = 6  # pairs of half rounds; with 4, neighbours in a short shuffle are measurably dependent
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: its multiples are far apart


def mix(values: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers that spreads every input bit over all output bits (splitmix64's finaliser).

    Source: Steele, Lea and Flood 2014; constants by Stafford (variant 13).
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def keys(seed: int, stream: int, numbers: np.ndarray) -> np.ndarray:
    """One 64-bit key for each number; different seeds or streams give unrelated keys.

    Args:
      seed: at least 0.
      stream: what the keys are for; at least 0.
      numbers: [R] integers, at least 0.

    Returns:
      [R] uint64.
    """
    out = np.zeros(1, np.uint64)  # an array, because scalars warn when they overflow
    for each in (np.array([seed]), np.array([stream]), numbers):
        out = mix(out + (each.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return out


def permuted(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """The position of each index after a shuffle: for each key a permutation of 0 .. size-1, computed per index.

    Args:
      index: [R] integers from 0 to size - 1.
      size: of the permutation.
      key: [R] uint64, which shuffle to use for each index.

    Returns:
      [R] int64.

    A Feistel network on a rectangle of at least `size` cells, applied again to results outside of it. Source: Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains".
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
    """Random bits of consecutive global rows; a row's bits do not depend on which other rows are requested with it.

    Args:
      seed: at least 0.
      first_row: global row number of the first.
      rows, words: how many.

    Returns:
      [rows, words] uint64.
    """
    blocks = -(-words // 4)  # Philox makes four words per counter value
    generator = np.random.Philox(key=np.array([seed, 0], np.uint64), counter=first_row * blocks)
    return generator.random_raw(rows * blocks * 4).reshape(rows, blocks * 4)[:, :words]


def bits_of(seed: int, stream: int, number: int, words: int) -> np.ndarray:
    """[words] random uint64; different seeds, streams or numbers give unrelated ones, more words only add to the end.

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
