"""One device's work in ring attention: its queries attend to the keys of one shard after another; see `ring`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.kernels.attention import online_softmax, tiles
from jaxformer.kernels.attention.xla_vjp import heads_first, rank4
from jaxformer.kernels.rematerialize import rematerialize
from jaxformer.masks import Mask
from jaxformer.parallel.constraints import ACTIVATION_RULES
from jaxformer.types import Array

(AXIS,) = ACTIVATION_RULES["parts"]
# A shard's keys are sent in at most this many pieces, each of whole blocks, so that the buffers in flight (two each for
# keys, values and their gradients) are the size of a piece.
PIECES = 8


class RingOptions(NamedTuple):
    """Static settings."""

    scale: float
    soft_cap: float | None
    dropout_rate: float
    parts: int  # shards of a row
    rows: tuple[str, ...]  # mesh axes that shard the rows
    heads: tuple[str, ...]  # and the heads
    indexed: bool  # True if the mask has its own indices, so that tokens need not be in the order of the row
    own_bias: bool = False  # True if the bias's arrays are those of this device's rows and heads, not of all


class RingOperands(NamedTuple):
    """Array arguments: [parts * B, T / parts, heads, width], and the mask of whole rows."""

    query: Array
    key: Array
    value: Array
    bias: tuple[Array, ...]  # arrays of the bias function that may have gradients
    fixed: tuple[Array, ...]  # and its other arrays
    mask: Mask
    rng: Array | None


def offsets_to_visit(o: RingOptions, mask: Mask, length: int) -> range:
    """The shards that a device has to visit, as distances before (positive) or after its own; all if `indexed`. With a
    window, shards of queries and of keys have the same `length`."""
    if o.parts == 1 or o.indexed or mask.window is None:
        return range(o.parts)
    reach = min(o.parts - 1, -(-(mask.window - 1) // length))
    after = 0 if mask.causal else reach
    return range(-after, reach + 1) if reach + after + 1 < o.parts else range(o.parts)


def _shifted(tree: Any, by: int, parts: int) -> Any:
    """Sends every device's arrays `by` devices further along the ring."""
    if by % parts == 0:
        return tree
    return jax.lax.ppermute(tree, AXIS, [(i, (i + by) % parts) for i in range(parts)])


def around(o: RingOptions, offsets: range, moving: Any, carry: Any, visit: Callable) -> tuple[Any, Any]:
    """Calls carry, added = visit(carry, read, added, source shard) for each offset, then returns `added` to its owner.

    `moving` is (read, added): arrays that are only read, and accumulators; `read` is not sent after the last visit.
    """
    own = jax.lax.axis_index(AXIS) if o.parts > 1 else jnp.zeros((), jnp.int32)
    read, added = _shifted(moving, offsets[0], o.parts)

    def one(state, offset):
        carry, read, added = state
        after = _shifted(read, 1, o.parts)  # sent while this shard is visited
        carry, added = visit(carry, read, added, (own - offset) % o.parts)
        return (carry, after, _shifted(added, 1, o.parts)), None

    if len(offsets) > 1:
        (carry, read, added), _ = jax.lax.scan(one, (carry, read, added), jnp.asarray(offsets[:-1]))
    carry, added = visit(carry, read, added, (own - offsets[-1]) % o.parts)
    return carry, _shifted(added, -offsets[-1], o.parts)


def piece_length(o: RingOptions, length: int) -> int:
    """Number of a shard's keys that are sent at a time.

    >>> piece_length(RingOptions(1.0, None, 0.0, 8, (), (), indexed=True), 4096)
    512
    """
    if o.parts == 1:
        return length
    return next(length // n for n in range(PIECES, 0, -1) if n == 1 or length % (n * tiles.KEY_BLOCK) == 0)


def _piece(o: RingOptions, x: RingOperands, first: Array | int) -> tuple[Array, Array]:
    """This device's piece of keys and values that starts at `first`."""
    size = piece_length(o, x.key.shape[1])
    return _cut(x.key, first, size, 1), _cut(x.value, first, size, 1)


def _cut(x: Array, first: Array | int, size: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, first, size, axis)


def _put(x: Array, part: Array, first: Array, axis: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), first, axis)


def _problem(
    o: RingOptions, bias, x: RingOperands, key: Array, value: Array, first_key: Array | int
) -> tuple[Any, Any]:
    """This device's queries and the given keys, padded to tiles; `first_key` is the keys' position in the whole row."""
    length, mask = x.query.shape[1], x.mask
    own = jax.lax.axis_index(AXIS) if o.parts > 1 else jnp.zeros((), jnp.int32)
    if mask.dense is not None:
        mask = replace(mask, dense=_own_rows_and_heads(o, rank4(mask.dense), x))
    if o.parts > 1:
        starts, sizes = (own * length, first_key), (length, key.shape[1])
        mask = replace(tiles.cut_mask(mask, starts, sizes), parts=1)
        for name, start, size in zip(("query_index", "key_index"), starts, sizes, strict=True):
            if getattr(mask, name) is None:
                mask = replace(mask, **{name: start + jnp.arange(size)})
    rng = None if x.rng is None else jax.random.fold_in(x.rng, first_key)
    return tiles.pad_to_tiles(
        x.query, key, value, mask, _bias_of_parts(o, bias, x, own * length, first_key), x.bias,
        scale=o.scale, soft_cap=o.soft_cap, dropout_rate=o.dropout_rate, rng=rng,
    )  # fmt: skip


def _bias_of_parts(o: RingOptions, function: Callable | None, x: RingOperands, first_query: Array, first_key: Array):
    """The bias as a function of positions within the two shards, for this device's rows and heads."""
    if function is None:
        return None

    def bias(query_place: Array, key_place: Array, *constants: Array) -> Array:
        found = function(x.fixed, first_query + query_place, first_key + key_place, *constants)
        return rank4(found) if o.own_bias else _own_rows_and_heads(o, rank4(found), x)

    return bias


def _own_rows_and_heads(o: RingOptions, found: Array, x: RingOperands) -> Array:
    """[B or 1, H or 1, ...] of all rows and heads -> this device's."""
    for axis, size, names in ((0, x.query.shape[0], o.rows), (1, x.query.shape[2], o.heads)):
        if found.shape[axis] > 1 and names:
            found = jax.lax.dynamic_slice_in_dim(found, jax.lax.axis_index(names) * size, size, axis)
    return found


def visit_all(o: RingOptions, bias, x: RingOperands) -> tuple[Array, online_softmax.Normalizer]:
    """Output [B, T, H, K'] and normalizer [B, H, T] of this device's queries, the latter padded to whole blocks."""
    length, keys = x.query.shape[1], x.key.shape[1]
    offsets = offsets_to_visit(o, x.mask, keys)
    _, at_first = _problem(o, bias, x, *_piece(o, x, 0), 0)
    query = at_first.query

    def piece(carry, first):
        def visit(carry, read, added, source):
            options, inputs = _problem(o, bias, x, read[0], read[1], source * keys + first)
            inputs = tiles.for_values(options, inputs._replace(query=query))
            size = options.query_block

            def query_block(i, carry):
                one = tuple(_cut(c, i * size, size, 2) for c in carry)
                one = online_softmax.visit_keys(options, inputs, i, one)
                return tuple(_put(c, new, i * size, 2) for c, new in zip(carry, one, strict=True))

            return jax.lax.fori_loop(0, query.shape[3] // size, query_block, carry), added

        return around(o, offsets, (_piece(o, x, first), ()), carry, visit)[0], None

    carry, _ = jax.lax.scan(
        piece, online_softmax.nothing(at_first, query.shape[3]), jnp.arange(0, keys, piece_length(o, keys))
    )
    out, normalizer = online_softmax.finish(carry, x.value.dtype)
    return out[:, :length], normalizer


def gradients(
    o: RingOptions, bias, x: RingOperands, passed: Array, normalizer: online_softmax.Normalizer, g_out: Array
) -> tuple[Any, ...]:
    """Gradients of this device's query, key and value (the latter two from all devices), and of the bias's arrays."""
    length, keys = x.query.shape[1], x.key.shape[1]
    offsets = offsets_to_visit(o, x.mask, keys)
    _, at_first = _problem(o, bias, x, *_piece(o, x, 0), 0)
    query = at_first.query
    more = ((0, 0), (0, query.shape[3] - length), (0, 0))
    passed = jnp.pad(passed, more)
    g_out = heads_first(jnp.pad(g_out, (*more, (0, 0))), query.shape[1])

    def piece(carry, first):
        def visit(staying, read, added, source):
            options, inputs = _problem(o, bias, x, read[0], read[1], source * keys + first)
            start = online_softmax.Gradients(staying[0], added[0], added[1], staying[1])
            inputs = tiles.for_gradients(options, inputs._replace(query=query))
            d = online_softmax.gradients(options, inputs, passed, normalizer, g_out, start)
            return (d.query, d.bias), (d.key, d.value)

        staying, *whole = carry
        moving = _piece(o, x, first), (zeros.key, zeros.value)
        staying, added = around(o, offsets, moving, staying, visit)
        return (staying, *(put(d, part, first) for d, part in zip(whole, added, strict=True))), None

    def put(whole: Array, part: Array, first: Array) -> Array:
        return _put(whole, online_softmax.turned(part).swapaxes(1, 2)[:, : piece_length(o, keys)], first, 1)

    # Otherwise XLA's CPU backend allocates the zeros before the forward pass and keeps them through it.
    zeros, d_key, d_value = jax.tree.map(
        lambda a: rematerialize(a, passed.ravel()[0]),
        (online_softmax.zeros(at_first), jnp.zeros_like(x.key), jnp.zeros_like(x.value)),
    )
    ((d_query, d_bias), d_key, d_value), _ = jax.lax.scan(
        piece, ((zeros.query, zeros.bias), d_key, d_value), jnp.arange(0, keys, piece_length(o, keys))
    )
    d_query = o.scale * d_query.transpose(0, 3, 1, 2, 4)[:, :length].reshape(x.query.shape)
    return d_query, d_key, d_value, d_bias
