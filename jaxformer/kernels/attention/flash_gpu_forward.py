"""The forward kernel of `flash_gpu`: output and normalizer.

A program has a block of queries of one head and walks over the keys that `visits` names; the heads of a group read its
keys where they lie. Where a tile is open (`flash_gpu_visits`) no mask is applied. Elsewhere keys and values that are
not finite become 0 and reach only the queries that see them, as NaN scores.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxformer.kernels.attention import flash_gpu_scores as tile
from jaxformer.kernels.attention.flash_gpu_blocks import FlashBlock, padded_width
from jaxformer.kernels.attention.flash_gpu_launch import (
    FlashInputs,
    FlashNormalizer,
    FlashSpecs,
    launch,
    place,
    walk,
)
from jaxformer.kernels.attention.flash_gpu_scores import ALONE, FlashOptions, load_rows
from jaxformer.types import Array


def forward(
    o: FlashOptions, x: FlashInputs, visits: Array, block: FlashBlock, dtype: Any = None
) -> tuple[Array, FlashNormalizer]:
    """Output [B, T, H, K], zeros for a query without keys, and the normalizer. `visits`: by query;
    `dtype`: of the output, that of the values by default."""
    rows, queries, heads, _ = x.query.shape
    out = jax.ShapeDtypeStruct(x.query.shape, dtype or x.value.dtype)
    number = jax.ShapeDtypeStruct((rows, heads, queries), jnp.float32)
    specs = FlashSpecs(o, heads)
    out, top, log_total = pl.pallas_call(
        functools.partial(_forward_kernel, o, block),
        grid=(-(-queries // block.queries), rows * heads),
        in_specs=[specs.visits(visits), specs.queries(), *[specs.keys()] * 2, specs.others(x.others)],
        out_specs=[specs.queries(), *[specs.numbers()] * 2],
        out_shape=[out, number, number],
        **launch(o, block, "flash_gpu_forward"),
    )(visits, x.query, x.key, x.value, x.others)
    return out, FlashNormalizer(top, log_total)


def _forward_kernel(o, block, visits, query_ref, key_ref, value_ref, refs, out_ref, top_ref, log_total_ref):
    i, row, head = place(o, o.heads)
    first = i * block.queries
    query = load_rows(query_ref, ALONE, first, block.queries, o.queries, o.width)

    def visit(masked: int, j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, top, total = carry
        first_key = j * block.keys
        key, value = (load_rows(ref, ALONE, first_key, block.keys, o.keys, o.width) for ref in (key_ref, value_ref))
        found, _, allowed = tile.scores(o, refs, ALONE, query, key, first, first_key, masked)
        if allowed is not None:
            found = jnp.where(allowed, found + tile.spoiled(value)[None, :], -jnp.inf)
            value = tile.finite(value)
        new_top = jnp.maximum(top, jnp.max(found, axis=1))
        safe = jnp.where(new_top == -jnp.inf, 0.0, new_top) if masked else new_top
        shrink = jnp.exp2(top - safe)
        weights = jnp.exp2(found - safe[:, None])
        total = total * shrink + jnp.sum(weights, axis=1)
        if o.dropout_rate:
            kept = tile.dropout_mask(o, refs, row, head, first, first_key, weights.shape)
            weights = jnp.where(kept, weights, 0.0)
        out = out * shrink[:, None] + triton.dot(weights.astype(value.dtype), value)
        return out, new_top, total

    padded = padded_width(o.width)
    start = (
        jnp.zeros((block.queries, padded), jnp.float32),
        jnp.full((block.queries,), -jnp.inf, jnp.float32),
        jnp.zeros((block.queries,), jnp.float32),
    )
    out, top, total = walk(o, block, visits, i, visit, start)
    empty = total == 0.0
    out = out / (jnp.where(empty, 1.0, total) * (1.0 - o.dropout_rate))[:, None]
    tile.store_rows(out_ref, first, o.queries, o.width, out)
    tile.store_numbers(top_ref, first, o.queries, jnp.where(empty, 0.0, top))
    tile.store_numbers(log_total_ref, first, o.queries, jnp.where(empty, jnp.inf, jnp.log2(total)))
