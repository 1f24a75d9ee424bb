"""Which tiles the kernels of `flash_gpu` visit: found once outside the kernels, from each block's least and largest.

Of each block of queries and keys only the least and largest position and segment matter. A tile is ruled out if no pair
of such ranges meets; it is open if the mask is sure to allow all of its pairs, and then no mask is applied. A block
visits one run of tiles, [first, end), in which one run [first open, end of open) is open. With documents packed one
after the other nothing else is visited; with segments in another order, tiles inside the run that are ruled out are
visited and give weights of exactly 0.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jaxformer.kernels.constants import constant
from jaxformer.masks import Mask
from jaxformer.types import Array


class _Range(NamedTuple):
    """Least and largest of each block, [B or 1, blocks]."""

    least: Array
    most: Array


def visits(mask: Mask, queries: int, keys: int, query_block: int, key_block: int, *, by_key: bool) -> Array:
    """[B or 1, blocks, 4] int32: for each block of queries (`by_key`: of keys) the first and one past the last block of
    keys (of queries) to visit, and those of the open ones among them.

    >>> from jaxformer.masks import causal
    >>> visits(causal(), 64, 64, 16, 16, by_key=False)[0].tolist()
    [[0, 1, 1, 1], [0, 2, 0, 1], [0, 3, 0, 2], [0, 4, 0, 3]]
    """
    fields = mask.prefix, mask.prefix_keys, mask.keys, mask.query_segments, mask.query_index, mask.key_index
    if any(x is not None for x in fields):
        return _visits(mask, queries, keys, query_block, key_block, by_key)
    return constant(lambda: _visits(mask, queries, keys, query_block, key_block, by_key))


def _visits(mask: Mask, queries: int, keys: int, query_block: int, key_block: int, by_key: bool) -> Array:
    met, open_ = tiles(mask, queries, keys, query_block, key_block)
    if by_key:
        met, open_ = met.swapaxes(1, 2), open_.swapaxes(1, 2)
    count = met.shape[2]
    at = jnp.arange(count, dtype=jnp.int32)[None, None]
    end = jnp.max(jnp.where(met, at + 1, 0), axis=2)
    first = jnp.minimum(jnp.min(jnp.where(met, at, count), axis=2), end)
    first_open = jnp.min(jnp.where(open_, at, end[..., None]), axis=2)
    closed = ~open_ & (at >= first_open[..., None])
    end_open = jnp.minimum(jnp.min(jnp.where(closed, at, count), axis=2), end)
    return jnp.stack([first, end, first_open, end_open], axis=2)


def tiles(mask: Mask, queries: int, keys: int, query_block: int, key_block: int) -> tuple[Array, Array]:
    """[B or 1, blocks of queries, blocks of keys] bool, of a mask without patterns: not ruled out; and open."""
    query_index = jnp.arange(queries, dtype=jnp.int32) if mask.query_index is None else mask.query_index
    key_index = jnp.arange(keys, dtype=jnp.int32) if mask.key_index is None else mask.key_index
    exists = jnp.broadcast_to(_rows(key_index), (*_rows(key_index).shape[:-1], keys)) >= 0
    exists = exists if mask.keys is None else exists & _rows(mask.keys)
    query = _range(_rows(query_index), queries, query_block)
    key = _range(_rows(key_index), keys, key_block, exists)
    whole = _range(exists.astype(jnp.int32), keys, key_block)
    full_block = (jnp.arange(1, whole.least.shape[1] + 1) * key_block <= keys)[None]
    met, open_ = [(whole.most > 0)[:, None]], [((whole.least > 0) & full_block)[:, None]]

    def q(x: Array) -> Array:
        return x[:, :, None]

    def k(x: Array) -> Array:
        return x[:, None]

    if mask.causal:
        met.append(k(key.least) <= q(query.most))
        open_.append(k(key.most) <= q(query.least))
    if mask.window is not None:
        met.append((q(query.least) - k(key.most) < mask.window) & (k(key.least) - q(query.most) < mask.window))
        open_.append((q(query.most) - k(key.least) < mask.window) & (k(key.most) - q(query.least) < mask.window))
    if mask.prefix is not None:
        ends = mask.prefix[:, None, None]
        met.append((k(key.least) <= q(query.most)) | (k(key.least) < ends))
        open_.append((k(key.most) <= q(query.least)) | (k(key.most) < ends))
    if mask.prefix_keys is not None:
        early = _range(_rows(mask.prefix_keys).astype(jnp.int32), keys, key_block, exists)
        met.append((k(key.least) <= q(query.most)) | k(early.most > 0))
        open_.append((k(key.most) <= q(query.least)) | k(early.least > 0))
    if mask.query_segments is not None and mask.key_segments is not None:
        mine = _range(_rows(mask.query_segments), queries, query_block)
        theirs = _range(_rows(mask.key_segments), keys, key_block, exists)
        met.append((k(theirs.least) <= q(mine.most)) & (q(mine.least) <= k(theirs.most)))
        open_.append((k(theirs.least) == q(mine.most)) & (q(mine.least) == k(theirs.most)))
    shape = (max(x.shape[0] for x in met), query.least.shape[1], key.least.shape[1])
    return tuple(_all(conditions, shape) for conditions in (met, open_))  # type: ignore[return-value]


def _all(conditions: list[Array], shape: tuple[int, ...]) -> Array:
    out = jnp.broadcast_to(conditions[0], shape)
    for condition in conditions[1:]:
        out = out & condition
    return out


def _rows(x: Array) -> Array:
    """[length] or [B, length] -> [1 or B, length]."""
    return x if x.ndim == 2 else x[None]


def _range(x: Array, length: int, block: int, counts: Array | None = None) -> _Range:
    """Least and largest of each block of [B or 1, length], of the entries that count."""
    found, x = [], jnp.broadcast_to(x, (x.shape[0], length))
    for empty, reduce in ((jnp.iinfo(x.dtype).max, jnp.min), (jnp.iinfo(x.dtype).min, jnp.max)):
        kept = x if counts is None else jnp.where(counts, x, empty)
        kept = jnp.pad(kept, ((0, 0), (0, -length % block)), constant_values=empty)
        found.append(reduce(kept.reshape(kept.shape[0], -1, block), axis=2))
    return _Range(*found)
