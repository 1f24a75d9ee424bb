"""`flash_gpu` under a mask of patterns: for each group of patterns that share an order of tokens one call of the
kernels, which visit the tiles of a list; the groups are put together by their log-sums.

Source: Child et al. 2019, section 5.4; Zaheer et al. 2020, appendix D (blocks); Dao 2023, section 3.1.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np

from jaxformer.kernels.attention import block_tables, tiles
from jaxformer.kernels.attention.block_sparse import combine
from jaxformer.kernels.attention.block_tables import Group, Order
from jaxformer.kernels.attention.flash_gpu_blocks import FlashBlock
from jaxformer.kernels.attention.flash_gpu_lists import lists
from jaxformer.masks import Mask
from jaxformer.patterns import RandomBlocks
from jaxformer.types import Array

SMALLEST = 16  # tokens of a tile's side


def unsupported(mask: Mask, bias: bool) -> str | None:
    """Why the kernels cannot apply the patterns of a mask; None: they can, or there are none. `bias`: there is one."""
    if not mask.patterns:
        return None
    if mask.query_index is not None or mask.key_index is not None:
        return "a mask of patterns and indices"
    if mask.dense is not None:
        return "a mask of patterns and an array"
    apart = any(pattern.steps != (1, 1) for pattern in mask.patterns)
    if apart and any(isinstance(pattern, RandomBlocks) for pattern in mask.patterns):
        return "random blocks and patterns of tokens far apart"
    if apart and bias:
        return "a bias and patterns of tokens far apart"
    for pattern in mask.patterns:
        if isinstance(pattern, RandomBlocks) and pattern.block % SMALLEST:
            return f"random blocks of {pattern.block} tokens (multiples of {SMALLEST})"
    return None


def attend_with_log_sum(
    attend: Callable[..., tuple[Array, Array]],
    blocks: tuple[FlashBlock, ...],
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    rng: Array | None,
) -> tuple[Array, Array]:
    """Output [B, T, H, K] and log-sum [B, H, T].

    Args:
      attend: (query, key, value, mask, rng, blocks, group) -> both of one group, arrays in its order.
      blocks: the tiles of the kernels.
      others: as of `flash_gpu.attend_with_log_sum`; the mask without `keys`.
    """
    parts = []
    for number, found in enumerate(block_tables.groups(mask.patterns, query.shape[1], key.shape[1])):
        group, fitted = _in_tiles(found, blocks, query.shape[1], key.shape[1])
        rows = group.query.regroup(query, 1), *(group.key.regroup(x, 1) for x in (key, value))
        of_group = None if rng is None else jax.random.fold_in(rng, number)
        out, log_sum = attend(*rows, _regrouped(mask, group), of_group, fitted, group)
        parts.append((group.query.restore(out, 1), group.query.restore(log_sum, 2)))
    return combine(*zip(*parts, strict=True)) if len(parts) > 1 else parts[0]


def visited_share(mask: Mask, length: int, block: FlashBlock) -> float:
    """Share of the pairs that lie in tiles of the lists, of all pairs of rows in the order of their tokens; the mean of
    the groups. `mask`: without arrays."""
    shares = []
    for found in block_tables.groups(mask.patterns, length, length):
        group, (fitted,) = _in_tiles(found, (block,), length, length)
        visited = lists(group, _regrouped(mask, group), fitted, by_key=False)[0, :, :, 2].sum(1).mean()
        shares.append(visited * fitted.queries * fitted.keys / (group.query.tokens * group.key.tokens))
    return float(np.mean(shares))


def _in_tiles(
    group: Group, blocks: tuple[FlashBlock, ...], queries: int, keys: int
) -> tuple[Group, tuple[FlashBlock, ...]]:
    """The group with runs that tiles divide, and tiles no larger than its runs and its random blocks."""
    random = [pattern.block & -pattern.block for pattern in group.patterns if isinstance(pattern, RandomBlocks)]

    def fitted(length: int, step: int, sizes: list[int]) -> list[int]:
        run = max(SMALLEST, 1 << (math.ceil(length / step) - 1).bit_length())
        return [min(size, run, *random) for size in sizes]

    of_queries = fitted(queries, group.query.step, [block.queries for block in blocks])
    of_keys = fitted(keys, group.key.step, [block.keys for block in blocks])
    orders = Order(queries, group.query.step, max(of_queries)), Order(keys, group.key.step, max(of_keys))
    found = tuple(block._replace(queries=q, keys=k) for block, q, k in zip(blocks, of_queries, of_keys, strict=True))
    return Group(group.patterns, group.excluded, *orders), found


def _regrouped(mask: Mask, group: Group) -> Mask:
    """The mask without its patterns, in the group's order of tokens, with their positions as indices."""
    orders = group.query, group.key
    fields = {
        name: orders[side].regroup(getattr(mask, name), -1)
        for name, side in tiles.SIDES.items() if getattr(mask, name) is not None
    }  # fmt: skip
    for name, order in zip(("query_index", "key_index"), orders, strict=True):
        if order.step > 1:
            fields[name] = order.positions()
    return replace(mask, patterns=(), **fields)
