"""`chunked` under a mask of patterns: each block of queries visits the blocks of keys of a list, and no others.

The lists are known before the program runs (`block_tables`), except for global tokens that an array marks. Where heads,
or rows because of such tokens, have lists of their own, they are computed one after the other. Cost and memory grow
with the number of blocks that are visited.

Source: Child et al. 2019, section 5.4; Zaheer et al. 2020, appendix D (blocks).
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.kernels.attention import block_tables, tiles
from jaxformer.kernels.attention.block_tables import Group, Visits
from jaxformer.kernels.attention.xla import Bias
from jaxformer.kernels.attention.xla_vjp import log_sum_exp, rank4, softmax
from jaxformer.masks import Mask
from jaxformer.patterns import Marked, RandomBlocks
from jaxformer.types import Array


def attend(
    compute: Callable[..., tuple[Array, Array]],
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    bias: Bias | None,
    *,
    rng: Array | None,
    return_log_sum: bool = False,
    **options: Any,
) -> Any:
    """Attention as `functional.attention.attention` documents it, of a mask with patterns and without indices.

    Args:
      compute: (options, *inputs) -> output and log-sums, of tiled inputs.
      others: as of `chunked.attend`.
    """
    found = block_tables.groups(mask.patterns, query.shape[1], key.shape[1])
    parts = [
        _attend_group(
            compute, group, query, key, value, mask, bias,
            rng=None if rng is None else jax.random.fold_in(rng, number), **options,
        )
        for number, group in enumerate(found)
    ]  # fmt: skip
    out, log_sum = combine(*zip(*parts, strict=True)) if len(parts) > 1 else parts[0]
    return (out, log_sum) if return_log_sum else out


def combine(outs, log_sums) -> tuple[Array, Array]:
    """As `functional.attention.combine`."""
    stacked = jnp.stack(list(log_sums), axis=-1)  # [B, H, T, sets]
    share = jnp.swapaxes(softmax(stacked), 1, 2)[..., None, :]
    out = functools.reduce(jnp.add, (out.astype(share.dtype) * share[..., n] for n, out in enumerate(outs)))
    return out.astype(outs[0].dtype), log_sum_exp(stacked)


def _attend_group(
    compute, group: Group, query: Array, key: Array, value: Array, mask: Mask, bias: Bias | None, *, rng, **options
) -> tuple[Array, Array]:
    """Output and log-sums of the pairs that the group's patterns allow, and those before it do not."""
    of = block_tables.table(group, mask)
    marked = any(isinstance(pattern, Marked) for pattern in group.patterns)
    by_head = any(isinstance(pattern, RandomBlocks) and pattern.by_head for pattern in group.patterns)
    visits = block_tables.listed_with_marks(of, group, mask) if marked else block_tables.listed(of)
    heads = query.shape[2] if by_head else 1
    if mask.heads is not None and by_head:  # these heads of all; a row's are side by side
        visits = jax.tree.map(lambda x: x.reshape(-1, len(of.touched), *x.shape[1:])[:, mask.heads], visits)
        visits = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), visits)
    rows = len(visits.counts) // heads
    query, (key, value) = group.query.regroup(query, 1), (group.key.regroup(x, 1) for x in (key, value))
    mask, bias = _regrouped(group, mask, bias)
    if rows * heads == 1:
        one = functools.partial(_attend_listed, compute, group, **options)
        out, log_sum = one(query, key, value, mask, bias, rng, jax.tree.map(lambda x: x[0], visits))
    else:
        out, log_sum = _one_by_one(
            functools.partial(_attend_listed, compute, group, **options),
            rows, heads, query, key, value, mask, bias, rng, visits,
        )  # fmt: skip
    return group.query.restore(out, 1), group.query.restore(log_sum, 2)


def _regrouped(group: Group, mask: Mask, bias: Bias | None) -> tuple[Mask, Bias | None]:
    """The mask, with the position of each token as its index, and the bias in the group's order of tokens."""
    orders = group.query, group.key

    def both(x: Array) -> Array:
        x = rank4(x)
        return orders[1].regroup(orders[0].regroup(x, 2), 3)

    fields: dict[str, Any] = {}
    for name, side in tiles.SIDES.items():
        if getattr(mask, name) is not None:
            fields[name] = orders[side].regroup(getattr(mask, name), -1)
    places = []
    for name, order in zip(("query_index", "key_index"), orders, strict=True):
        places.append(jnp.asarray(order.positions()) if order.step > 1 else None)
        if order.step > 1:
            fields[name] = places[-1]
    if mask.dense is not None:
        fields["dense"] = both(mask.dense)
    if callable(bias):
        function, lengths = bias, [order.length for order in orders]

        def bias(q: Array, k: Array) -> Array:
            at = (x if of is None else jnp.maximum(of[x], 0) for x, of in zip((q, k), places, strict=True))
            return function(*(jnp.minimum(x, length - 1) for x, length in zip(at, lengths, strict=True)))

    elif bias is not None:
        bias = both(bias)
    return replace(mask, **fields), bias


def _attend_listed(
    compute, group: Group, query, key, value, mask: Mask, bias, rng, visits: Visits, **options
) -> tuple[Array, Array]:
    """Arrays in the group's order, and the lists that hold for all of their rows and heads."""
    blocks = group.query.block, group.key.block
    function, constants = tiles.constants_of(bias, query, key, blocks)
    settings, inputs = tiles.pad_to_tiles(
        query, key, value, replace(mask, patterns=()), function, constants, rng=rng, blocks=blocks, **options
    )
    data = mask.prefix, mask.prefix_keys, mask.keys, mask.query_segments, mask.dense, mask.global_queries
    settings = settings._replace(
        log_sum=True,
        hides=True,
        mask_is_positional=all(x is None for x in (*data, mask.global_keys)),
        patterns=() if visits.whole is None else _between_whole(group),
        excluded=group.excluded,
    )
    out, log_sum = compute(settings, *inputs._replace(visits=visits))
    return out[:, : query.shape[1]], log_sum[:, :, : query.shape[1]]


def _between_whole(group: Group) -> tuple:
    """The patterns that have to be looked at inside a block; of those whose blocks are whole ones, the lists tell."""
    size = group.query.block
    aligned = all(order.step == 1 and order.block == size for order in (group.query, group.key))

    def is_told(pattern) -> bool:
        return isinstance(pattern, RandomBlocks) and aligned and pattern.block % size == 0

    return tuple(pattern for pattern in group.patterns if not is_told(pattern))


def _one_by_one(one, rows: int, heads: int, query, key, value, mask: Mask, bias, rng, visits) -> tuple[Array, Array]:
    """`one` for each row and head that has lists of its own, in turn."""
    per_head = query.shape[2] // key.shape[2]
    if heads > 1 and per_head > 1:
        key, value = (jnp.repeat(x, per_head, axis=2) for x in (key, value))
    batch, width = query.shape[0] // rows, heads
    numbers = jnp.arange(query.shape[2]) if mask.heads is None else mask.heads

    def split(x: Array) -> Array:  # [B, T, H, K] -> [rows * heads, B / rows, T, H / heads, K]
        x = (
            x.reshape(rows, batch, x.shape[1], width, -1, x.shape[3])
            if heads > 1
            else x[None].reshape(rows, batch, x.shape[1], 1, x.shape[2], x.shape[3])
        )
        return jnp.moveaxis(x, 3, 1).reshape(rows * heads, batch, x.shape[2], x.shape[4], x.shape[5])

    def part(args):
        number, query, key, value, visits = args
        row, head = number // heads, number % heads

        def own(x: Array, axes: tuple[tuple[int, int, Array], ...]) -> Array:
            for axis, count, at in axes:
                if count > 1 and x.shape[axis] > 1:
                    x = jax.lax.dynamic_slice_in_dim(x, at, 1, axis)
            return x

        here, whole = ((0, rows, row),), ((0, rows, row), (1, heads, head))
        fields = {
            name: own(getattr(mask, name), here)
            for name, least in {**dict.fromkeys(tiles.SIDES, 1), "prefix": 0}.items()
            if getattr(mask, name) is not None and getattr(mask, name).ndim > least
        }
        fields |= {"dense": own(rank4(mask.dense), whole)} if mask.dense is not None else {}
        fields |= {"heads": jax.lax.dynamic_slice_in_dim(numbers, head, 1)} if heads > 1 else {}
        mine = bias
        if callable(bias):
            mine = lambda q, k: own(rank4(bias(q, k)), whole)  # noqa: E731
        elif bias is not None:
            mine = own(bias, whole)
        of_part = None if rng is None else jax.random.fold_in(rng, number)
        return one(query, key, value, replace(mask, **fields), mine, of_part, visits)

    out, log_sum = jax.lax.map(part, (jnp.arange(rows * heads), split(query), split(key), split(value), visits))
    out = out.reshape(rows, heads, batch, out.shape[2], -1, out.shape[4])
    out = jnp.moveaxis(out, 1, 3).reshape(rows * batch, out.shape[3], query.shape[2], out.shape[5])
    log_sum = log_sum.reshape(rows, heads, batch, -1, log_sum.shape[3])
    return out, jnp.moveaxis(log_sum, 1, 2).reshape(rows * batch, query.shape[2], log_sum.shape[4])
