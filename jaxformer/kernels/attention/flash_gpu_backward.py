"""The backward kernels of `flash_gpu`: gradients of keys and values, and gradients of queries.

A program of the first has a block of keys and walks over the queries of all heads that share it; one of the second has
a block of queries of one head and walks over keys. So nothing is added up by two programs, and results are the same
every time. Both compute the weights again, from the normalizer.
"""

import functools
from collections.abc import Callable
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
from jaxformer.kernels.attention.flash_gpu_scores import ALONE, FlashOptions, Refs, load_numbers, load_rows
from jaxformer.types import Array


def key_gradients(
    o: FlashOptions,
    x: FlashInputs,
    visits: Array,
    block: FlashBlock,
    known: FlashNormalizer,
    passed: Array,
    g_out: Array,
    dtype: Any = None,
) -> tuple[Array, Array]:
    """Gradients of keys and values, [B, S, G, K]. `visits`: by key; the rest: as in `query_gradients`."""
    rows, keys, groups, _ = x.key.shape
    shared = o.heads // groups
    specs = FlashSpecs(o, groups, shared)
    return pl.pallas_call(
        functools.partial(_key_kernel, o, block),
        grid=(-(-keys // block.keys), rows * groups),
        in_specs=[
            specs.visits(visits), specs.queries(), *[specs.keys()] * 2, specs.others(x.others),
            *[specs.numbers()] * 3, specs.queries(),
        ],
        out_specs=[specs.keys()] * 2,
        out_shape=[jax.ShapeDtypeStruct(a.shape, dtype or a.dtype) for a in (x.key, x.value)],
        **launch(o, block, "flash_gpu_keys"),
    )(visits, x.query, x.key, x.value, x.others, *known, passed, g_out)  # fmt: skip


def _key_kernel(
    o,
    block,
    visits,
    query_ref,
    key_ref,
    value_ref,
    refs,
    top_ref,
    log_total_ref,
    passed_ref,
    g_ref,
    d_key_ref,
    d_value_ref,
):
    j, row, group = place(o, o.groups, reverse=False)
    first_key, shared = j * block.keys, o.heads // o.groups
    key, value = (load_rows(ref, ALONE, first_key, block.keys, o.keys, o.width) for ref in (key_ref, value_ref))

    def of_head(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def visit(masked: int, i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            d_key, d_value = carry
            first = i * block.queries
            query, g = (load_rows(ref, number, first, block.queries, o.queries, o.width) for ref in (query_ref, g_ref))
            weights, d_scores = _gradient_tile(
                o, refs, number, row, group * shared + number, masked, query, key, value, g,
                (top_ref, log_total_ref, passed_ref), first, first_key, turned=True,
            )  # fmt: skip
            d_value = d_value + triton.dot(weights.astype(g.dtype), g)
            d_key = d_key + triton.dot(d_scores.astype(query.dtype), query)
            return d_key, d_value

        return walk(o, block, visits, j, visit, carry, number)

    zeros = jnp.zeros((block.keys, padded_width(o.width)), jnp.float32)
    d_key, d_value = jax.lax.fori_loop(0, shared, of_head, (zeros, zeros))
    tile.store_rows(d_key_ref, first_key, o.keys, o.width, d_key * o.scale)
    tile.store_rows(d_value_ref, first_key, o.keys, o.width, d_value)


def query_gradients(
    o: FlashOptions,
    x: FlashInputs,
    visits: Array,
    block: FlashBlock,
    known: FlashNormalizer,
    passed: Array,
    g_out: Array,
    dtype: Any = None,
) -> tuple[Array, Array | None]:
    """Gradients of queries [B, T, H, K], and of the steps of a bias [H, N] (None: there are none).

    Args:
      o, x, block: as in `forward`.
      visits: by query.
      known: from `forward`, over all keys of the query (also those of other calls).
      passed: [B, H, T] float32, the sum over K of output times its gradient, less the gradient of the log-sum.
      g_out: [B, T, H, K], the gradient of the output.
      dtype: of the result; None: that of the queries.
    """
    rows, queries, heads, _ = x.query.shape
    blocks = -(-queries // block.queries)
    specs = FlashSpecs(o, heads)
    out_specs, out_shape = [specs.queries()], [jax.ShapeDtypeStruct(x.query.shape, dtype or x.query.dtype)]
    steps = None if o.edges is None else 1 << len(o.edges).bit_length()
    if steps is not None:
        out_specs.append(pl.BlockSpec((None, None, steps), lambda i, n: (n, i, 0)))
        out_shape.append(jax.ShapeDtypeStruct((rows * heads, blocks, steps), jnp.float32))
    d_query, *d_steps = pl.pallas_call(
        functools.partial(_query_kernel, o, block),
        grid=(blocks, rows * heads),
        in_specs=[
            specs.visits(visits), specs.queries(), *[specs.keys()] * 2, specs.others(x.others),
            *[specs.numbers()] * 3, specs.queries(),
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        **launch(o, block, "flash_gpu_queries"),
    )(visits, x.query, x.key, x.value, x.others, *known, passed, g_out)  # fmt: skip
    if o.edges is None:
        return d_query, None
    return d_query, d_steps[0].reshape(rows, heads, blocks, -1).sum((0, 2))[:, : len(o.edges) + 1]


def _query_kernel(
    o,
    block,
    visits,
    query_ref,
    key_ref,
    value_ref,
    refs,
    top_ref,
    log_total_ref,
    passed_ref,
    g_ref,
    d_query_ref,
    *d_steps_ref,
):
    i, row, head = place(o, o.heads)
    first = i * block.queries
    query, g = (load_rows(ref, ALONE, first, block.queries, o.queries, o.width) for ref in (query_ref, g_ref))

    def visit(masked: int, j: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        d_query, *d_steps = carry
        first_key = j * block.keys
        key, value = (load_rows(ref, ALONE, first_key, block.keys, o.keys, o.width) for ref in (key_ref, value_ref))
        through = [functools.partial(_add_steps, refs, first, first_key, d_steps)] if d_steps else []
        _, d_scores, *d_steps = _gradient_tile(
            o,
            refs,
            ALONE,
            row,
            head,
            masked,
            query,
            key,
            value,
            g,
            (top_ref, log_total_ref, passed_ref),
            first,
            first_key,
            *through,
        )
        key = tile.finite(key) if masked else key
        return d_query + triton.dot(d_scores.astype(key.dtype), key), *d_steps

    start: Any = (jnp.zeros((block.queries, padded_width(o.width)), jnp.float32),)
    start += tuple(jnp.zeros(ref.shape, jnp.float32) for ref in d_steps_ref)
    d_query, *d_steps = walk(o, block, visits, i, visit, start)
    tile.store_rows(d_query_ref, first, o.queries, o.width, d_query * o.scale)
    for ref, total in zip(d_steps_ref, d_steps, strict=True):
        triton.store(ref.at[:], total)


def _gradient_tile(
    o: FlashOptions, refs: Refs, member, row, head, masked, query, key, value, g, of_queries, first, first_key,
    through: Callable[[Array], Array] | None = None, turned: bool = False,
) -> tuple[Array, ...]:  # fmt: skip
    """Weights of a tile after dropout, and gradients of its scores before the scale (which is applied at the end).

    `through`: also called with the gradient of the scores after the soft cap; its result is the third one. `turned`:
    both are [s, t], see `tile.scores`.
    """
    size = query.shape[0]
    found, squashed, allowed = tile.scores(o, refs, member, query, key, first, first_key, masked, turned)
    fillings = (0.0, jnp.inf, 0.0)  # beyond the row's end weights are 0
    top, log_total, passed = (
        load_numbers(ref, member, first, size, o.queries, filling)
        for ref, filling in zip(of_queries, fillings, strict=True)
    )
    top, log_total, passed = (x[None, :] if turned else x[:, None] for x in (top, log_total, passed))
    weights = jnp.exp2((found - top) - log_total)
    d_weights = triton.dot(value, g, trans_b=True) if turned else triton.dot(g, value, trans_b=True)
    used = weights
    if o.dropout_rate:
        kept = tile.dropout_mask(o, refs, row, head, first, first_key, (size, key.shape[0]))
        kept = kept.T if turned else kept
        used, d_weights = (jnp.where(kept, a / (1.0 - o.dropout_rate), 0.0) for a in (weights, d_weights))
    d_scores = weights * (d_weights - passed)
    if allowed is not None:  # 0 times the NaN of a hidden value
        d_scores = jnp.where(allowed, d_scores, 0.0)
    more = () if through is None else (through(d_scores),)
    if squashed is not None:
        d_scores = d_scores * (1.0 - squashed * squashed)
        d_scores = d_scores if allowed is None else jnp.where(allowed, d_scores, 0.0)
    return used, d_scores, *more


def _add_steps(refs: Refs, first: Array, first_key: Array, d_steps: list[Array], d_scores: Array) -> Array:
    """The gradient of a bias's steps [N, filled up], with a tile's added: for each step that it meets, one sum."""
    low, high = tile.steps_of(refs, first, first_key, d_scores.shape)
    far = tile.distances(first, first_key, d_scores.shape)
    numbers = jax.lax.iota(jnp.int32, d_steps[0].shape[0])

    def step(n: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total, rest = carry
        from_here = jnp.where(far >= refs["edges"][n - 1], d_scores, 0.0)
        beyond = jnp.sum(from_here)
        return jnp.where(numbers == n - 1, total + (rest - beyond), total), beyond

    total, rest = jax.lax.fori_loop(low + 1, high + 1, step, (d_steps[0], jnp.sum(d_scores)))
    return jnp.where(numbers == high, total + rest, total)
