"""Sizes of the blocks of `flash_gpu`'s kernels, by chip, kernel and shape.

`flash_gpu_blocks.json` beside this file holds what `benchmarks.autotune` measured; what is not there gets the sizes of
`RESIDENT`: for 16-bit heads up to 128 wide the fastest on an H200, else the largest whose numbers fit in registers and
shared memory, as ptxas counts them for compute capability 9.0. All of them compile for 8.0 and 10.0 too.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

TABLE = Path(__file__).with_suffix(".json")
KERNELS = ("forward", "keys", "queries")


class FlashBlock(NamedTuple):
    """A kernel's tile, how many warps of 32 threads compute it, and how many loads are under way."""

    queries: int
    keys: int
    warps: int
    stages: int


# kernel -> ((greatest padded width, bytes of a number), block), the first that fits.
RESIDENT: dict[str, tuple[tuple[tuple[int, int], FlashBlock], ...]] = {
    "forward": (
        ((128, 2), FlashBlock(64, 64, 4, 3)),
        ((256, 2), FlashBlock(128, 32, 8, 2)),
        ((64, 4), FlashBlock(64, 32, 4, 2)),
        ((128, 4), FlashBlock(32, 32, 4, 2)),
        ((256, 4), FlashBlock(16, 32, 8, 1)),
    ),
    "keys": (
        ((64, 2), FlashBlock(64, 64, 4, 3)),
        ((128, 2), FlashBlock(64, 64, 4, 2)),
        ((256, 2), FlashBlock(32, 32, 8, 2)),
        ((64, 4), FlashBlock(32, 32, 4, 2)),
        ((128, 4), FlashBlock(16, 32, 4, 1)),
        ((256, 4), FlashBlock(16, 32, 8, 1)),
    ),
    "queries": (
        ((128, 2), FlashBlock(64, 32, 4, 3)),
        ((256, 2), FlashBlock(32, 64, 8, 2)),
        ((64, 4), FlashBlock(64, 32, 4, 2)),
        ((128, 4), FlashBlock(32, 32, 4, 2)),
        ((256, 4), FlashBlock(16, 32, 8, 1)),
    ),
}


def padded_width(width: int) -> int:
    """A tile's width: a power of two, as Triton needs it, and at least 16, as its products do."""
    return max(16, 1 << (width - 1).bit_length())


def block_of(kernel: str, chip: str, width: int, dtype: Any, length: int) -> FlashBlock:
    """The tile of a kernel.

    Args:
      kernel: one of `KERNELS`.
      chip: what JAX calls the device, "NVIDIA H100 80GB HBM3".
      width: of a head, padded to a power of two.
      dtype: of queries, keys and values.
      length: of the rows, in tokens; of measured ones the nearest counts.
    """
    size = jnp.dtype(dtype).itemsize
    rows = [
        row for row in measured()
        if chip.lower().startswith(row["chip"].lower())
        and (row["kernel"], row["width"], row["bytes"]) == (kernel, width, size)
    ]  # fmt: skip
    if rows:
        return FlashBlock(*min(rows, key=lambda row: abs(row["length"] - length))["block"])
    return next(block for (widest, most), block in RESIDENT[kernel] if width <= widest and size <= most)


def decodes(chip: str, width: int, dtype: Any, slots: int) -> bool:
    """True if on this chip `flash_gpu_decode` was measured to be faster than XLA's products, for heads so wide and for
    a cache of at most so many slots; `autotune` writes a row for it only then."""
    return any(
        row["kernel"] == "decode" and chip.lower().startswith(row["chip"].lower()) and row["length"] <= slots
        and (row["width"], row["bytes"]) == (width, jnp.dtype(dtype).itemsize)
        for row in measured()
    )  # fmt: skip


@functools.cache
def measured() -> tuple[dict[str, Any], ...]:
    """The rows of the table: chip (how the device's name begins), kernel, width, bytes, length, block."""
    return tuple(json.loads(TABLE.read_text(encoding="utf-8"))) if TABLE.exists() else ()
