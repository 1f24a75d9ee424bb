"""Attention of one new token per row to a long cache, by the forward kernel of `flash_gpu`.

One token gives a kernel that walks over all keys far too few programs to fill a GPU. So the cache is cut into equal
pieces, which are attended to side by side and joined by their log-sums. The query heads that share keys stand where the
kernel has its queries, so that keys are read once. Tiles whose slots are all empty are not visited.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

from typing import Any

import jax.numpy as jnp

from jaxformer.kernels.attention import flash_gpu, flash_gpu_vjp
from jaxformer.kernels.attention.flash_gpu_forward import forward
from jaxformer.kernels.attention.flash_gpu_launch import FlashInputs
from jaxformer.masks import Mask
from jaxformer.types import Array

PROGRAMS = 264  # two for each multiprocessor of an H100
LEAST = 256  # slots of a piece


def pieces(slots: int, keys: int) -> int:
    """Into how many pieces a cache of `slots` is cut, where `keys` rows and heads have one of their own.

    >>> pieces(32768, 8), pieces(32768, 512), pieces(1000, 8), pieces(200, 8)
    (32, 1, 2, 1)
    """
    most = max(1, min(-(-PROGRAMS // keys), slots // LEAST))
    return next(count for count in range(most, 0, -1) if slots % count == 0)


def attend_one(query: Array, key: Array, value: Array, mask: Mask, *, scale: float, soft_cap: float | None) -> Array:
    """Scaled dot-product attention with T = 1, on one device.

    Args:
      query: [B, 1, H, K], K at most 256.
      key, value: [B * G, S, K], float32, bfloat16 or float16; products are computed in their dtype.
      mask: of which slots are filled, by `key_index` [B, S]; each row has at least one.
      scale, soft_cap: as in `functional.attention.attention`.

    Returns:
      [B, 1, H, K] in the dtype of `query`.
    """
    (rows, _, heads, width), (both, slots, _) = query.shape, key.shape
    groups, count = both // rows, pieces(slots, both)
    size, per_group = slots // count, heads // groups
    assert mask.key_index is not None
    filled = jnp.broadcast_to(
        jnp.repeat(mask.key_index, groups, axis=0).reshape(both * count, size), (both * count, size)
    )
    part = Mask(key_index=filled)
    queries = jnp.repeat(query.reshape(both, per_group, 1, width).astype(key.dtype), count, axis=0)
    keys, values = (x.reshape(both * count, size, 1, width) for x in (key, value))

    blocks = flash_gpu_vjp.blocks_of(queries, keys, flash_gpu.chip())
    settings: Any = {"scale": scale, "soft_cap": soft_cap, "dropout_rate": 0.0}
    options = flash_gpu.settings(queries, keys, part, None, settings)
    visited = flash_gpu_vjp.visits_of(part, per_group, size, blocks)[0]
    others = flash_gpu_vjp.others_of(part, options, None, None)
    out, normalizer = forward(options, FlashInputs(queries, keys, values, others), visited, blocks[0], jnp.float32)

    log_sum = normalizer.log_sum().reshape(both, count, per_group)
    weights = jnp.exp(log_sum - jnp.max(log_sum, axis=1, keepdims=True))
    whole = jnp.einsum(
        "ncr,ncrk->nrk",
        weights / weights.sum(axis=1, keepdims=True),
        out[:, :, 0].reshape(both, count, per_group, width),
    )
    return whole.reshape(query.shape).astype(query.dtype)
