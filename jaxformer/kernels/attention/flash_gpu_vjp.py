"""The kernels of `flash_gpu` as one function with a derivative, on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.kernels.attention.block_tables import Group
from jaxformer.kernels.attention.flash_gpu_backward import key_gradients, query_gradients
from jaxformer.kernels.attention.flash_gpu_blocks import KERNELS, FlashBlock, block_of, padded_width
from jaxformer.kernels.attention.flash_gpu_forward import forward
from jaxformer.kernels.attention.flash_gpu_launch import FlashInputs
from jaxformer.kernels.attention.flash_gpu_lists import lists
from jaxformer.kernels.attention.flash_gpu_scores import FlashOptions
from jaxformer.kernels.attention.flash_gpu_visits import visits
from jaxformer.kernels.rematerialize import named_attention
from jaxformer.masks import Mask
from jaxformer.types import Array

FILLING = jnp.iinfo(jnp.int32).max  # an edge beyond every distance


Blocks = tuple[FlashBlock, FlashBlock, FlashBlock]  # of the three kernels


def blocks_of(query: Array, key: Array, chip: str) -> Blocks:
    """The tiles of the three kernels for queries [.., T, H, K] and keys [.., S, G, K]: no longer than short rows are,
    but at least 16 tokens."""
    most = [max(16, 1 << (x.shape[1] - 1).bit_length()) for x in (query, key)]
    found = (block_of(name, chip, padded_width(key.shape[3]), key.dtype, key.shape[1]) for name in KERNELS)
    return tuple(  # type: ignore[return-value]
        block._replace(queries=min(block.queries, most[0]), keys=min(block.keys, most[1])) for block in found
    )


def visits_of(
    mask: Mask, queries: int, keys: int, blocks: Blocks, group: Group | None = None
) -> tuple[Array, Array, Array]:
    """What each kernel visits, see `flash_gpu_visits`; under the patterns of a group, see `flash_gpu_lists`. The same
    for all layers."""
    by_key = (name == "keys" for name in KERNELS)
    return tuple(  # type: ignore[return-value]
        visits(mask, queries, keys, block.queries, block.keys, by_key=of)
        if group is None else lists(group, mask, block, by_key=of)
        for block, of in zip(blocks, by_key, strict=True)
    )  # fmt: skip


def flash(
    o: FlashOptions, blocks: Blocks, query: Array, key: Array, value: Array, mask: Mask,
    visited: tuple[Array, Array, Array], slopes: Array | None, steps: Array | None, seed: Array | None,
) -> tuple[Array, Array]:  # fmt: skip
    """Output [B, T, H, K] and log-sum [B, H, T] float32.

    Args:
      o: static settings.
      blocks: from `blocks_of`.
      query: [B, T, H, K].
      key, value: [B, S, G, K].
      mask: without `keys` and `dense`; of these rows.
      visited: from `visits_of`.
      slopes, steps: [H, 1] and [H, N] float32, of a `DistanceBias`.
      seed: [4] uint32, see `FlashInputs`; None: no dropout.
    """
    return _flash(o, blocks, query, key, value, steps, others_of(mask, o, slopes, seed), visited)


def others_of(mask: Mask, o: FlashOptions, slopes: Array | None, seed: Array | None) -> dict[str, Array]:
    """`FlashInputs.others`, without the steps."""
    fields = {
        "query_index": (mask.query_index, o.queries), "key_index": (mask.key_index, o.keys),
        "query_segments": (mask.query_segments, o.queries), "key_segments": (mask.key_segments, o.keys),
        "prefix_keys": (mask.prefix_keys, o.keys),
        "global_queries": (mask.global_queries, o.queries), "global_keys": (mask.global_keys, o.keys),
    }  # fmt: skip
    found: dict[str, Any] = {
        name: jnp.broadcast_to(x if x.ndim == 2 else x[None], (x.shape[0] if x.ndim == 2 else 1, size))
        .astype(jnp.int32)[:, None]
        for name, (x, size) in fields.items() if x is not None
    }  # fmt: skip
    if mask.prefix is not None:
        found["prefix"] = mask.prefix.astype(jnp.int32)
    if slopes is not None:
        found["slopes"] = slopes
    if o.edges is not None:
        size = 1 << (max(len(o.edges), 1) - 1).bit_length()
        found["edges"] = jnp.asarray([*o.edges, *[FILLING] * (size - len(o.edges))], jnp.int32)
    if seed is not None:
        found["seed"] = seed
    return found


def _inputs(query, key, value, steps, others) -> FlashInputs:
    return FlashInputs(query, key, value, others if steps is None else others | {"steps": steps})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(o: FlashOptions, blocks: Blocks, query, key, value, steps, others, visited) -> tuple[Array, Array]:
    return _forward(o, blocks, query, key, value, steps, others, visited)[0]


def _forward(o: FlashOptions, blocks: Blocks, *arrays):
    *inputs, visited = arrays
    out, normalizer = named_attention(forward(o, _inputs(*inputs), visited[0], blocks[0]))
    return (out, normalizer.log_sum()), (arrays, out, normalizer)


def _backward(o: FlashOptions, blocks: Blocks, saved, cotangents):
    (*inputs, visited), out, normalizer = saved
    g_out, g_log_sum = cotangents
    x = _inputs(*inputs)
    passed = jnp.sum(g_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1).swapaxes(1, 2) - g_log_sum
    known = normalizer, passed, g_out
    d_key, d_value = key_gradients(o, x, visited[1], blocks[1], *known)
    d_query, d_steps = query_gradients(o, x, visited[2], blocks[2], *known)
    return d_query, d_key, d_value, d_steps, None, None


_flash.defvjp(_forward, _backward)
