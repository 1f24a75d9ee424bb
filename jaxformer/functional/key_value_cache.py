"""The keys and values that decoding keeps of one layer, and attention of one new token to them.

A layer has a ring of S slots: every row writes its i-th new token into slot i mod S. Its prompt, however long, ends in
slot S - 1. So one step writes one slot, prompts of different lengths leave no padding between tokens, and a model with
a window needs a ring of window size only.

Beams of a row share one ring with a place for each of them in every slot. Nothing is copied when a beam goes on from
another one: `DecodeProgress.ancestors` says which of the places are its own. On CPU such a ring is in parts, and those
in which nothing was written yet are not read.
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
from jaxformer.parallel.platforms import this_platform
from jaxformer.patterns import MaskPattern
from jaxformer.types import Array


class LayerCache(NamedTuple):
    """One layer's keys and values, [B * G, S, K], each row's heads one after the other."""

    key: Array
    value: Array


class SharedCache(NamedTuple):
    """One layer's keys and values that W beams of each row share, in parts of L slots each, which follow each other:
    keys [B * G, K, L * W] and values [B * G, L * W, K], those of a slot one after the other."""

    parts: tuple[LayerCache, ...]


PARTS, LEAST_SLOTS = 4, 32  # how many parts at most, and slots of each at least


def init_cache(cfg: ModelConfig, rows: int, length: int, dtype: Any) -> LayerCache:
    """An empty ring for sequences of `length` tokens: that many slots, or the window's size if it is smaller."""
    slots = length if cfg.attention.window is None else min(cfg.attention.window, length)
    empty = jnp.zeros((rows * cfg.attention.kv_heads, slots, cfg.head_size), dtype)
    return LayerCache(empty, empty)


def heads_as_rows(x: Array) -> Array:
    """[B, S, G, K] -> [B * G, S, K], as a cache holds them."""
    return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], x.shape[3])


def for_beams(cache: LayerCache, beams: int) -> SharedCache:
    """A ring that so many beams of each row share, in which they are alike."""
    slots = cache.key.shape[1]
    many = next((n for n in range(PARTS, 1, -1) if slots % n == 0 and slots // n >= LEAST_SLOTS), 1)
    if this_platform() != "cpu" or mesh_axes():
        many = 1
    keys, values = (jnp.split(jnp.repeat(x, beams, axis=1), many, axis=1) for x in cache)
    return SharedCache(tuple(LayerCache(jnp.swapaxes(k, 1, 2), v) for k, v in zip(keys, values, strict=True)))


def keys_of_rows(cache: LayerCache | SharedCache, progress: DecodeProgress, query: Array) -> Array:
    """[B, S, G, K], all keys that the query [B, 1, H, K] may see, in its dtype; of beams each one's own."""
    origins, slots = origins_of(cache, progress), slots_of(cache, progress)
    if isinstance(cache, SharedCache):
        assert origins is not None
        found = jnp.concatenate([part.key for part in cache.parts], axis=2)
        apart = jnp.swapaxes(found, 1, 2).reshape(len(origins), 1, -1, slots, progress.beams, found.shape[1])
        found = jnp.take_along_axis(apart, origins[:, :, None, :, None, None], axis=4)
    else:
        found = cache.key
    return found.reshape(query.shape[0], -1, slots, found.shape[-1]).swapaxes(1, 2).astype(query.dtype)


def slots_of(cache: LayerCache | SharedCache, progress: DecodeProgress) -> int:
    """S."""
    parts = cache.parts if isinstance(cache, SharedCache) else (cache,)
    return sum(part.value.shape[1] for part in parts) // progress.beams


def origins_of(cache: LayerCache | SharedCache, progress: DecodeProgress) -> Array | None:
    """[B, W, S], the beam that wrote what each beam finds in each slot; any for a prompt, of which all have the same.
    None: there are no beams."""
    if progress.ancestors is None:
        return None
    assert progress.steps is not None
    written = slot_positions(jnp.zeros(1, jnp.int32), progress.steps + 1, slots_of(cache, progress))[0]
    return jnp.take(progress.ancestors, jnp.maximum(written, 0), axis=2, mode="clip")


def places_of_slots(cache: LayerCache | SharedCache, progress: DecodeProgress) -> Array:
    """`slot_positions` after the present step."""
    assert progress.steps is not None
    return slot_positions(progress.starts, progress.steps + 1, slots_of(cache, progress))


def slot_positions(starts: Array, steps: Array | int, slots: int) -> Array:
    """Index of the token in each slot once `steps` new tokens are written, [B, S] int32; negative: empty."""
    newest = steps - 1
    return (starts + newest)[:, None] - ((newest - jnp.arange(slots, dtype=jnp.int32)) % slots)[None, :]


def write_cache(
    cache: LayerCache | SharedCache, progress: DecodeProgress, key: Array, value: Array
) -> LayerCache | SharedCache:
    """The cache with new keys and values [B, T, G, K] added: those of a prompt, or of one token."""
    if isinstance(cache, SharedCache):
        return _write_shared(cache, progress, key, value)
    slots, dtype = slots_of(cache, progress), cache.key.dtype
    new = tuple(heads_as_rows(x).astype(dtype) for x in (key, value))
    if progress.steps is not None:
        slot = progress.steps % slots
        return LayerCache(
            *(jax.lax.dynamic_update_slice_in_dim(x, n, slot, 1) for x, n in zip(cache, new, strict=True))
        )
    # Empty slots hold a copy of the first token, which is finite; the mask hides them.
    source = jnp.maximum(slot_positions(progress.starts, jnp.zeros((), jnp.int32), slots), 0)
    source = jnp.repeat(source, key.shape[2], axis=0)[:, :, None]
    return LayerCache(*(jnp.take_along_axis(x, source, axis=1) for x in new))


def _write_shared(cache: SharedCache, progress: DecodeProgress, key: Array, value: Array) -> SharedCache:
    """The cache with one token of each beam added: every part is written to, but to all others what is there."""
    assert progress.steps is not None
    beams, dtype = progress.beams, cache.parts[0].key.dtype
    new_key, new_value = (heads_as_rows(x.reshape(-1, beams, *x.shape[2:])).astype(dtype) for x in (key, value))
    new_key = jnp.swapaxes(new_key, 1, 2)
    slot = progress.steps % slots_of(cache, progress)

    def written(x: Array, new: Array, axis: int, number: int) -> Array:
        slots = x.shape[axis] // beams
        first = jnp.clip(slot - number * slots, 0, slots - 1) * beams
        old = jax.lax.dynamic_slice_in_dim(x, first, beams, axis)
        here = slot // slots == number
        return jax.lax.dynamic_update_slice_in_dim(x, jnp.where(here, new, old), first, axis)

    return SharedCache(
        tuple(
            LayerCache(written(part.key, new_key, 2, number), written(part.value, new_value, 1, number))
            for number, part in enumerate(cache.parts)
        )
    )


def attend_to_cache(
    query: Array,
    cache: LayerCache | SharedCache,
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
    if isinstance(cache, SharedCache):
        origins = origins_of(cache, progress)
        assert origins is not None
        keys, values = (tuple(part[i] for part in cache.parts) for i in range(2))
        return attend_beams(query, keys, values, origins, places >= 0, mask, bias, **options)
    if bias is None and not patterns and not mesh_axes() and flash_gpu.decodes(cache.key):
        from jaxformer.kernels.attention import flash_gpu_decode

        return flash_gpu_decode.attend_one(query, cache.key, cache.value, mask, **options)
    return attend_one(query, cache.key, cache.value, mask, bias, **options)
