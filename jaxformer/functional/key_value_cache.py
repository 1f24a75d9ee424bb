"""The keys and values that decoding keeps of one layer, and attention of one new token to them.

A layer has a ring of S slots: every row writes its i-th new token into slot i mod S. Its prompt, however long, ends in
slot S - 1. So one step writes one slot, prompts of different lengths leave no padding between tokens, and a model with
a window needs a ring of window size only.

Beams of a row share one ring with a place for each of them in every slot. Nothing is copied when a beam goes on from
another one: `DecodeProgress.ancestors` says which of the places are its own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer import masks
from jaxformer.config import ModelConfig
from jaxformer.functional.layer import DecodeProgress
from jaxformer.functional.position_encodings import self_scale
from jaxformer.kernels.attention import flash_gpu
from jaxformer.kernels.attention.decode import attend_beams, attend_one
from jaxformer.parallel.constraints import mesh_axes
from jaxformer.patterns import MaskPattern
from jaxformer.types import Array


class LayerCache(NamedTuple):
    """One layer's keys and values, [B * G, S, K], each row's heads one after the other.

    If W beams of each row share them, keys [B * G, K, S * W] and values [B * G, S * W, K], those of a slot one after
    the other.
    """

    key: Array
    value: Array


def init_cache(cfg: ModelConfig, rows: int, length: int, dtype: Any) -> LayerCache:
    """An empty ring for sequences of `length` tokens: that many slots, or the window's size if it is smaller."""
    slots = length if cfg.attention.window is None else min(cfg.attention.window, length)
    empty = jnp.zeros((rows * cfg.attention.kv_heads, slots, cfg.head_size), dtype)
    return LayerCache(empty, empty)


def heads_as_rows(x: Array) -> Array:
    """[B, S, G, K] -> [B * G, S, K], as a cache holds them."""
    return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], x.shape[3])


def for_beams(cache: LayerCache, beams: int) -> LayerCache:
    """A ring that so many beams of each row share, in which they are alike."""
    key, value = (jnp.repeat(x, beams, axis=1) for x in cache)
    return LayerCache(jnp.swapaxes(key, 1, 2), value)


def keys_of_rows(cache: LayerCache, progress: DecodeProgress, query: Array) -> Array:
    """[B, S, G, K], all keys that the query [B, 1, H, K] may see, in its dtype; of beams each one's own."""
    found, origins, slots = cache.key, origins_of(cache, progress), slots_of(cache, progress)
    if origins is not None:
        apart = jnp.swapaxes(found, 1, 2).reshape(len(origins), 1, -1, slots, progress.beams, found.shape[1])
        found = jnp.take_along_axis(apart, origins[:, :, None, :, None, None], axis=4)
    return found.reshape(query.shape[0], -1, slots, found.shape[-1]).swapaxes(1, 2).astype(query.dtype)


def slots_of(cache: LayerCache, progress: DecodeProgress) -> int:
    """S."""
    return cache.value.shape[1] // progress.beams


def origins_of(cache: LayerCache, progress: DecodeProgress) -> Array | None:
    """[B, W, S], the beam that wrote what each beam finds in each slot; any for a prompt, of which all have the same.
    None: there are no beams."""
    if progress.ancestors is None:
        return None
    assert progress.steps is not None
    written = slot_positions(jnp.zeros(1, jnp.int32), progress.steps + 1, slots_of(cache, progress))[0]
    return jnp.take(progress.ancestors, jnp.maximum(written, 0), axis=2, mode="clip")


def places_of_slots(cache: LayerCache, progress: DecodeProgress) -> Array:
    """`slot_positions` after the present step."""
    assert progress.steps is not None
    return slot_positions(progress.starts, progress.steps + 1, slots_of(cache, progress))


def slot_positions(starts: Array, steps: Array | int, slots: int) -> Array:
    """Index of the token in each slot once `steps` new tokens are written, [B, S] int32; negative: empty."""
    newest = steps - 1
    return (starts + newest)[:, None] - ((newest - jnp.arange(slots, dtype=jnp.int32)) % slots)[None, :]


def write_cache(cache: LayerCache, progress: DecodeProgress, key: Array, value: Array) -> LayerCache:
    """The cache with new keys and values [B, T, G, K] added: those of a prompt, or of one token."""
    slots, dtype = slots_of(cache, progress), cache.key.dtype
    if progress.steps is not None:
        first, beams = progress.steps % slots * progress.beams, progress.beams
        key, value = (heads_as_rows(x.reshape(-1, beams, *x.shape[2:])).astype(dtype) for x in (key, value))
        key, axis = (key, 1) if progress.ancestors is None else (jnp.swapaxes(key, 1, 2), 2)
        put = jax.lax.dynamic_update_slice_in_dim
        return LayerCache(put(cache.key, key, first, axis), put(cache.value, value, first, 1))
    new = map(heads_as_rows, (key, value))
    # Empty slots hold a copy of the first token, which is finite; the mask hides them.
    source = jnp.maximum(slot_positions(progress.starts, jnp.zeros((), jnp.int32), slots), 0)
    source = jnp.repeat(source, key.shape[2], axis=0)[:, :, None]
    return LayerCache(*(jnp.take_along_axis(x, source, axis=1).astype(dtype) for x in new))


def attend_to_cache(
    query: Array,
    cache: LayerCache,
    progress: DecodeProgress,
    cfg: ModelConfig,
    bias: Any,
    patterns: tuple[MaskPattern, ...] = (),
) -> Array:
    """Attention of one new token per row, [B, 1, H, K], to all slots including its own, or to those that one of the
    patterns names."""
    assert progress.steps is not None
    index = (progress.starts + progress.steps)[:, None]
    # All that the ring holds may be seen, so the mask only has to hide empty slots.
    places = places_of_slots(cache, progress)
    mask = masks.Mask(query_index=index, key_index=places, patterns=patterns)
    bias = bias(index, places) if callable(bias) else bias
    options = {"scale": self_scale(cfg), "soft_cap": cfg.attention.soft_cap}
    origins = origins_of(cache, progress)
    if origins is not None:
        return attend_beams(query, cache.key, cache.value, origins, mask, bias, **options)
    if bias is None and not patterns and not mesh_axes() and flash_gpu.decodes(cache.key):
        from jaxformer.kernels.attention import flash_gpu_decode

        return flash_gpu_decode.attend_one(query, cache.key, cache.value, mask, **options)
    return attend_one(query, cache.key, cache.value, mask, bias, **options)
