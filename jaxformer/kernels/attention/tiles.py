"""Pads attention's arguments to whole blocks, heads first: the input of `online_softmax`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.kernels.attention.nonfinite import marked, usable_key, usable_value
from jaxformer.kernels.attention.xla import Bias
from jaxformer.kernels.attention.xla_vjp import heads_first, rank4
from jaxformer.masks import Mask
from jaxformer.patterns import MaskPattern
from jaxformer.types import Array

# The fastest block sizes on CPU. A block has half as many keys if the float32 scores of a pair of blocks exceed PAIR.
QUERY_BLOCK = 256
KEY_BLOCK = 512
PAIR = 64 * 2**20  # bytes
# Fields of a mask whose last axis is over queries (0) or keys (1).
SIDES = {"keys": 1, "prefix_keys": 1, "query_segments": 0, "key_segments": 1, "query_index": 0, "key_index": 1,
          "global_queries": 0, "global_keys": 1}  # fmt: skip


class TileOptions(NamedTuple):
    """Static settings."""

    soft_cap: float | None
    dropout_rate: float
    query_block: int
    key_block: int
    window: int | None  # `window` and `causal` are set only if indices are 0, 1, 2, ..., to rule out blocks statically
    causal: bool
    mask_is_positional: bool  # True if positions alone determine the mask, which also hides the padding of keys
    hides: bool  # True if the mask hides anything
    bias: Callable[..., Array] | None  # (query index, key index, *constants) -> bias of a pair of blocks
    log_sum: bool = False  # True if the log of the sum of exp(score) is a result too
    patterns: tuple[MaskPattern, ...] = ()  # with lists of visits: what is allowed inside blocks that are not whole
    excluded: tuple[MaskPattern, ...] = ()  # and what other lists have


class TiledInputs(NamedTuple):
    """Array arguments. Lengths are whole numbers of blocks; the mask's key index is -1 in the padding."""

    query: Array  # [B, G, R, T, K], scaled
    key: Array  # [B, G, S, K]
    value: Array  # [B, G, S, K']
    bias: tuple[Array, ...]  # constants of the bias function, or the one bias array [b, h, t, s]
    mask: Mask
    rng: Array | None
    visits: Any = None  # lists of the blocks of keys that each block of queries visits; None: as the mask says


def pad_to_tiles(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    bias: Callable[..., Array] | None,
    constants: tuple[Array, ...],
    *,
    scale: float,
    soft_cap: float | None,
    dropout_rate: float,
    rng: Array | None,
    blocks: tuple[int, int] | None = None,
) -> tuple[TileOptions, TiledInputs]:
    """Attention's arguments, padded to whole blocks.

    Args:
      query, key, value, scale, soft_cap, dropout_rate, rng: as `functional.attention.attention` documents them.
      mask: of the unpadded arrays.
      bias: (query index [t], key index [s], *constants) -> what broadcasts to [B, H, t, s]; None: none, or an array.
      constants: of `bias`, or a bias array [b, h, t, s], or nothing.
      blocks: queries and keys per block; None: `sizes`.
    """
    queries, keys, groups = query.shape[1], key.shape[1], key.shape[2]
    query_block, key_block = blocks or sizes(query, key)
    plain = mask.query_index is None and mask.key_index is None
    to_query, to_key = -queries % query_block, -keys % key_block
    others = mask.prefix, mask.prefix_keys, mask.keys, mask.query_segments, mask.key_segments, mask.dense
    if bias is not None:
        bias = _inside(bias, queries, keys)
    elif constants:
        constants = (_pad(_pad(constants[0], 2, to_query), 3, to_key),)
    options = TileOptions(
        soft_cap=soft_cap,
        dropout_rate=dropout_rate if rng is not None else 0.0,
        query_block=query_block,
        key_block=key_block,
        window=mask.window if plain else None,
        causal=mask.causal and plain,
        mask_is_positional=plain and (mask.causal or to_key == 0) and all(x is None for x in others),
        hides=mask.hides,
        bias=bias,
    )
    inputs = TiledInputs(
        heads_first(_pad(query * jnp.asarray(scale, query.dtype), 1, to_query), groups),
        _pad(key, 1, to_key).swapaxes(1, 2),
        _pad(value, 1, to_key).swapaxes(1, 2),
        constants,
        _padded(mask, queries, keys, to_query, to_key),
        rng,
    )
    return options, inputs


def for_values(o: TileOptions, x: TiledInputs) -> TiledInputs:
    """For the forward pass: non-finite keys and values reach only the queries that attend to them, as NaN scores."""
    return x._replace(key=marked(x.key, x.value), value=usable_value(x.value)) if o.hides else x


def for_gradients(o: TileOptions, x: TiledInputs) -> TiledInputs:
    """For the backward pass: keys and values are finite, so that their product with the 0 of a masked pair is 0."""
    return x._replace(key=usable_key(x.key), value=usable_value(x.value)) if o.hides else x


def sizes(query: Array, key: Array) -> tuple[int, int]:
    """Queries and keys per block, for arrays [B, T, H, K] and [B, S, G, K]."""
    fits = 4 * query.shape[0] * query.shape[2] * QUERY_BLOCK * KEY_BLOCK <= PAIR
    key_block = KEY_BLOCK if fits else KEY_BLOCK // 2
    return min(QUERY_BLOCK, query.shape[1]), min(key_block, key.shape[1])


def constants_of(
    bias: Bias | None, query: Array, key: Array, blocks: tuple[int, int] | None = None
) -> tuple[Callable | None, tuple[Array, ...]]:
    """A bias as a function of explicit constants, so that these can receive gradients; or as one array of 4 axes."""
    if callable(bias):
        function, found = jax.closure_convert(bias, *map(jnp.arange, blocks or sizes(query, key)))
        return function, tuple(found)
    return None, () if bias is None else (rank4(bias),)


def _inside(bias: Callable[..., Array], queries: int, keys: int) -> Callable[..., Array]:
    """The bias function with positions clipped to the row: beyond the end it might give NaN, and 0 * NaN would make its
    gradients NaN."""
    return lambda q, k, *constants: bias(jnp.minimum(q, queries - 1), jnp.minimum(k, keys - 1), *constants)


def _pad(x: Array, axis: int, amount: int) -> Array:
    """`x` with `amount` zeros at the end of an axis; an axis of size 1 broadcasts and stays."""
    if amount == 0 or x.shape[axis] == 1:
        return x
    return jnp.pad(x, [(0, amount if i == axis % x.ndim else 0) for i in range(x.ndim)])


def _padded(mask: Mask, queries: int, keys: int, to_query: int, to_key: int) -> Mask:
    """The mask padded to whole blocks, with explicit indices."""
    query_index = jnp.arange(queries) if mask.query_index is None else mask.query_index
    key_index = jnp.arange(keys) if mask.key_index is None else mask.key_index
    if key_index.shape[-1] == 1 and keys > 1:
        key_index = jnp.broadcast_to(key_index, (*key_index.shape[:-1], keys))
    key_index = jnp.pad(key_index, [(0, 0)] * (key_index.ndim - 1) + [(0, to_key)], constant_values=-1)
    dense = None if mask.dense is None else rank4(mask.dense)
    amounts = to_query, to_key
    mask = _along_tokens(
        replace(mask, query_index=query_index, key_index=None, dense=dense),
        lambda x, axis, side: _pad(x, axis, amounts[side]),
    )
    return replace(mask, key_index=key_index)


def _along_tokens(mask: Mask, function: Callable[[Array, int, int], Array]) -> Mask:
    """The mask with function(field, axis, side) for each axis of its fields over queries (side 0) or keys (side 1)."""
    fields = {}
    if mask.dense is not None:
        fields["dense"] = function(function(mask.dense, -2, 0), -1, 1)
    for name, side in SIDES.items():
        if getattr(mask, name) is not None:
            fields[name] = function(getattr(mask, name), -1, side)
    return replace(mask, **fields)


def cut_mask(mask: Mask, starts: tuple[Any, Any], sizes: tuple[int, int]) -> Mask:
    """The mask of some queries and keys: the first of each, which may be traced, and how many."""
    return _along_tokens(mask, lambda x, axis, side: cut(x, axis, starts[side], sizes[side]))


def cut(x: Array, axis: int, start: Array | int, size: int) -> Array:
    """A slice along an axis, which may be traced; an axis of size 1 broadcasts and stays."""
    return x if x.shape[axis] == 1 else jax.lax.dynamic_slice_in_dim(x, start, size, axis % x.ndim)
