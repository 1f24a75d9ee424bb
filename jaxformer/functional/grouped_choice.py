"""THE table of implementations of grouped products, and which one "auto" stands for."""

from collections.abc import Callable
from typing import NamedTuple

from jaxformer.kernels.grouped import blocks_gpu, expert_blocks, megablox, ragged_products
from jaxformer.kernels.grouped.in_two import in_two
from jaxformer.parallel.platforms import GPU, this_platform
from jaxformer.types import Array


def anything(width: int, out: int, dtype: str) -> None:
    """Of implementations that can do all products."""


class Grouped(NamedTuple):
    """One implementation of the products of rows with the weight of their group.

    Attributes:
      mlp_of: ``(function, x, first, last, sizes, align) -> [M, F2]``: function(*(x @ w for w in first)) @ last of each
        row, with the weights of its group. function: elementwise; x: [M, D]; first: [E, D, F] each; last: [E, F, F2];
        sizes: [E] int32, rows of each group, one group after the other, multiples of `align`. Kept for the backward
        pass are x and the products with `first`, under the name `rematerialize.PRODUCT`. What stands in the rows after
        the last group, and in their gradient, is not defined.
      alignment: ``(rows, groups) -> align``.
      platform: the one that has it; None: all.
      what: that platform in words.
      unsupported: ``(D, F, dtype) -> why it cannot do this``, or None.
    """

    mlp_of: Callable[..., Array]
    alignment: Callable[[int, int], int]
    platform: str | None = None
    what: str = ""
    unsupported: Callable[[int, int, str], str | None] = anything


GROUPED = {
    "blocks": Grouped(expert_blocks.mlp_of, expert_blocks.alignment),
    "ragged": Grouped(in_two(ragged_products.products_of), ragged_products.alignment),
    "blocks_gpu": Grouped(in_two(blocks_gpu.products_of), blocks_gpu.alignment, "cuda", GPU, blocks_gpu.unsupported),
    "megablox": Grouped(in_two(megablox.products_of), megablox.alignment, "tpu", "a TPU", megablox.unsupported),
}
ANY = ", ".join(("auto", *(name for name, one in GROUPED.items() if one.platform is None)))


def choose(width: int, out: int, dtype: str, platform: str | None = None) -> str:
    """The implementation that "auto" stands for, for weights [E, width, out].

    >>> choose(64, 256, "float32", "cpu"), choose(1024, 4096, "bfloat16", "tpu"), choose(64, 100, "float32", "tpu")
    ('blocks', 'megablox', 'ragged')
    >>> choose(1024, 4096, "bfloat16", "cuda")
    'blocks_gpu'
    """
    platform = this_platform() if platform is None else platform
    for name, one in GROUPED.items():
        if one.platform == platform and one.unsupported(width, out, dtype) is None:
            return name
    return "blocks" if platform == "cpu" else "ragged"


def part_of(hidden: int, devices: int) -> int:
    """Width of what each of the devices of a tensor axis has of an expert's hidden layer.

    >>> part_of(1408, 4), part_of(6, 4)
    (352, 6)
    """
    return hidden // devices if hidden % devices == 0 else hidden


def unavailable(name: str, platform: str | None = None) -> str | None:
    """The platform that an implementation needs, if `platform`, None: that of this process, is another; otherwise None.

    >>> unavailable("blocks") is None, unavailable("megablox")
    (True, 'a TPU')
    """
    one = GROUPED.get(name)
    return None if one is None or one.platform in (None, platform or this_platform()) else one.what
