"""Which tiles the kernels of `flash_gpu` visit under a mask of patterns: a list for each block.

What the patterns say of a tile is known before the program runs; what causality, documents and padding say, from each
block's least and largest (`flash_gpu_visits`). A list has the tiles first that need no mask, then those that need the
rest of the mask but no pattern, then the others.
"""

import jax.numpy as jnp

from jaxformer.kernels.attention import flash_gpu_visits
from jaxformer.kernels.attention.block_tables import Group, crossed, possible, tables_of
from jaxformer.kernels.attention.flash_gpu_blocks import FlashBlock
from jaxformer.kernels.constants import constant
from jaxformer.masks import Mask
from jaxformer.patterns import Marked
from jaxformer.types import Array


def lists(group: Group, mask: Mask, block: FlashBlock, *, by_key: bool) -> Array:
    """[B or 1, H or 1, blocks, 3 + tiles] int32: for each block of queries (`by_key`: of keys) how many of its tiles
    are open, how many need no pattern, how many there are; and then their numbers.

    Args:
      group: whose orders the arrays of the mask are in.
      mask: with the positions of the tokens as indices, where the order is not the row's.
      block: the tile.

    >>> from jaxformer import patterns
    >>> from jaxformer.kernels.attention.block_tables import Order
    >>> from jaxformer.masks import causal
    >>> row = Order(64, 1, 16)
    >>> group = Group((patterns.local(16),), (), row, row)
    >>> lists(group, causal(), FlashBlock(16, 16, 4, 1), by_key=False)[0, 0].tolist()
    [[0, 1, 1, 0, 1], [0, 1, 2, 1, 0], [0, 1, 2, 2, 1], [0, 1, 2, 3, 2]]
    """
    rows = (mask.prefix, mask.prefix_keys, mask.keys, mask.query_segments, mask.global_queries, mask.global_keys)
    if any(x is not None for x in (*rows, mask.heads)):
        return _lists(group, mask, block, by_key)
    return constant(lambda: _lists(group, mask, block, by_key))


def _lists(group: Group, mask: Mask, block: FlashBlock, by_key: bool) -> Array:
    query, key = crossed(group.query.blocks(block.queries), group.key.blocks(block.keys))
    inside, before = tables_of(group.patterns, query, key), tables_of(group.excluded, query, key)
    inner = possible(query, key, mask)
    static = inside.touched & inner & ~before.whole
    touched, whole = jnp.asarray(static), jnp.asarray(inside.whole & ~before.touched)
    if mask.heads is not None and len(static) > 1:
        touched, whole = touched[mask.heads], jnp.broadcast_to(whole, static.shape)[mask.heads]
    touched, whole = touched[None], whole[None]  # [B or 1, H or 1, blocks of queries, blocks of keys]
    marked, before_marked = (
        any(isinstance(pattern, Marked) for pattern in some) for some in (group.patterns, group.excluded)
    )
    sides = (mask.global_queries, block.queries, -1), (mask.global_keys, block.keys, -2)
    for marks, size, axis in sides:
        if marks is not None:
            found = jnp.pad(marks, ((0, 0), (0, -marks.shape[1] % size))).reshape(len(marks), -1, size).any(2)
            found = jnp.expand_dims(found, (1, axis)) & inner[None]
            touched, whole = touched | found if marked else touched, whole & ~found if before_marked else whole
    met, open_ = flash_gpu_visits.tiles(mask, group.query.tokens, group.key.tokens, block.queries, block.keys)
    touched, whole, open_ = touched & met[:, None], whole & touched, open_[:, None]
    rank = jnp.where(touched, jnp.where(whole, jnp.where(open_, 0, 1), 2), 3).astype(jnp.int32)
    rank, static = (rank.swapaxes(2, 3), static.swapaxes(1, 2)) if by_key else (rank, static)
    most = rank.shape[3] if marked else max(1, int(static.sum(2).max(initial=0)))
    counts = [jnp.sum(rank <= n, axis=3, keepdims=True, dtype=jnp.int32) for n in range(3)]
    order = jnp.argsort(rank, axis=3, stable=True).astype(jnp.int32)[..., :most]
    return jnp.concatenate([*counts, order], axis=3)
