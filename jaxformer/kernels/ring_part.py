"""What one device of a ring does: its queries visit the keys of every part in turn; see `ring`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.kernels import block_problem, blocks
from jaxformer.masks import Mask
from jaxformer.types import Array

AXIS = "context"


class Options(NamedTuple):
    """What is known when the program is traced."""

    scale: float
    soft_cap: float | None
    dropout_rate: float
    parts: int
    rows: tuple[str, ...]  # mesh axes that split the rows
    heads: tuple[str, ...]  # and the heads
    indexed: bool  # whether the tokens stand in another order than in the row


class Operands(NamedTuple):
    """What is an array; [parts * B, T / parts, heads, width] and, of whole rows, the mask."""

    query: Array
    key: Array
    value: Array
    bias: tuple[Array, ...]  # the arrays of the bias function that may have gradients
    fixed: tuple[Array, ...]  # and the others
    mask: Mask
    rng: Array | None


def used_axes(o: Options) -> tuple[str, ...]:
    """Mesh axes whose devices do different work."""
    return ((AXIS,) if o.parts > 1 else ()) + o.rows + o.heads


def offsets_to_visit(o: Options, mask: Mask, length: int) -> range:
    """How many parts before (positive) or after its own a device has to visit; without an order of its own it knows."""
    if o.parts == 1 or o.indexed or mask.window is None:
        return range(o.parts)
    reach = min(o.parts - 1, -(-(mask.window - 1) // length))
    after = 0 if mask.causal else reach
    return range(-after, reach + 1) if reach + after + 1 < o.parts else range(o.parts)


def _shifted(tree: Any, by: int, parts: int) -> Any:
    """Every part goes `by` devices on along the ring."""
    if by % parts == 0:
        return tree
    return jax.lax.ppermute(tree, AXIS, [(i, (i + by) % parts) for i in range(parts)])


def _around(o: Options, offsets: range, moving: Any, carry: Any, visit: Callable) -> tuple[Any, Any]:
    """carry, moving = visit(carry, moving, the part they come from), for each offset; then everything goes home.

    `moving` is (what is only read, what is added to); the first is not sent after the last visit.
    """
    own = jax.lax.axis_index(AXIS) if o.parts > 1 else jnp.zeros((), jnp.int32)
    read, added = _shifted(moving, offsets[0], o.parts)

    def one(state, offset):
        carry, read, added = state
        after = _shifted(read, 1, o.parts)  # on its way while this part is visited
        carry, added = visit(carry, read, added, (own - offset) % o.parts)
        return (carry, after, _shifted(added, 1, o.parts)), None

    if len(offsets) > 1:
        (carry, read, added), _ = jax.lax.scan(one, (carry, read, added), jnp.asarray(offsets[:-1]))
    carry, added = visit(carry, read, added, (own - offsets[-1]) % o.parts)
    return carry, _shifted(added, -offsets[-1], o.parts)


def _problem(o: Options, bias, x: Operands, key: Array, value: Array, source: Array) -> tuple[Any, Any]:
    """The queries of this device and the keys of part `source`, in blocks."""
    length, mask = x.query.shape[1], x.mask
    own = jax.lax.axis_index(AXIS) if o.parts > 1 else jnp.zeros((), jnp.int32)
    if mask.dense is not None:
        dense = mask.dense.reshape((1,) * (4 - mask.dense.ndim) + mask.dense.shape)
        mask = replace(mask, dense=_own_rows_and_heads(o, dense, x))
    if o.parts > 1:

        def cut(field: Array | None, part: Array, axis: int = -1) -> Array | None:
            if field is None or field.shape[axis] == 1:
                return field
            return jax.lax.dynamic_slice_in_dim(field, part * length, length, axis % field.ndim)

        def index(field: Array | None, part: Array) -> Array | None:
            return part * length + jnp.arange(length) if field is None else cut(field, part)

        mask = replace(
            mask,
            keys=cut(mask.keys, source),
            query_segments=cut(mask.query_segments, own),
            key_segments=cut(mask.key_segments, source),
            query_index=index(mask.query_index, own),
            key_index=index(mask.key_index, source),
            dense=cut(cut(mask.dense, own, -2), source),
            parts=1,
        )
    rng = None if x.rng is None else jax.random.fold_in(x.rng, source)
    return block_problem.prepare(
        x.query, key, value, mask, _bias_of_parts(o, bias, x, own * length, source * length), x.bias,
        scale=o.scale, soft_cap=o.soft_cap, dropout_rate=o.dropout_rate, rng=rng,
    )  # fmt: skip


def _bias_of_parts(o: Options, function: Callable | None, x: Operands, first_query: Array, first_key: Array):
    """The bias function of places within the two parts, for the rows and heads of this device."""
    if function is None:
        return None

    def bias(query_place: Array, key_place: Array, *constants: Array) -> Array:
        found = function(x.fixed, first_query + query_place, first_key + key_place, *constants)
        return _own_rows_and_heads(o, found.reshape((1,) * (4 - found.ndim) + found.shape), x)

    return bias


def _own_rows_and_heads(o: Options, found: Array, x: Operands) -> Array:
    """[B or 1, H or 1, ...] of all rows and heads -> those of this device."""
    for axis, size, names in ((0, x.query.shape[0], o.rows), (1, x.query.shape[2], o.heads)):
        if found.shape[axis] > 1 and names:
            found = jax.lax.dynamic_slice_in_dim(found, jax.lax.axis_index(names) * size, size, axis)
    return found


def visit_all(o: Options, bias, x: Operands) -> tuple[Array, Array]:
    """Output and the log of the sum [blocks, B, H, t] of this device's queries."""
    length = x.query.shape[1]
    options, inputs = _problem(o, bias, x, x.key, x.value, jnp.zeros((), jnp.int32))
    count = inputs.query.shape[3] // options.query_block
    start = jax.tree.map(lambda c: jnp.broadcast_to(c, (count, *c.shape)), blocks.nothing(options, inputs))

    def visit(carry, read, added, source):
        options, inputs = _problem(o, bias, x, read[0], read[1], source)

        def query_block(_, part):
            return None, blocks.visit_keys(options, inputs, *part)

        return jax.lax.scan(query_block, None, (jnp.arange(count), carry))[1], added

    carry, _ = _around(o, offsets_to_visit(o, x.mask, length), ((x.key, x.value), ()), start, visit)
    out, log_sum = jax.vmap(lambda carry: blocks.finish(carry, x.value.dtype))(carry)
    out = jnp.moveaxis(out, 0, 1)  # [B, blocks, t, H, K']
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :length], log_sum


def gradients(o: Options, bias, x: Operands, passed: Array, log_sum: Array, g_out: Array) -> tuple[Any, ...]:
    """Gradients of this device's query, key and value (the latter two from all devices), and of all the constants."""
    length = x.query.shape[1]
    _, inputs = _problem(o, bias, x, x.key, x.value, jnp.zeros((), jnp.int32))
    wide = log_sum.dtype
    more = ((0, 0), (0, inputs.query.shape[3] - length), (0, 0))
    passed, g_out = jnp.pad(passed, more), jnp.pad(g_out, (*more, (0, 0)))

    def visit(carry, read, added, source):
        options, inputs = _problem(o, bias, x, read[0], read[1], source)
        d_query, d_bias = carry
        more, (*added, d_bias) = blocks.gradients(options, inputs, passed, log_sum, g_out, (*added, d_bias))
        return (d_query + more, d_bias), tuple(added)

    *zeros, no_bias = blocks.zeros(inputs)
    start = jnp.zeros(inputs.query.shape, wide), no_bias
    moving = (x.key, x.value), tuple(zeros)
    (d_query, d_bias), (d_key, d_value) = _around(o, offsets_to_visit(o, x.mask, length), moving, start, visit)
    d_query = o.scale * d_query.transpose(0, 3, 1, 2, 4)[:, :length].reshape(x.query.shape)
    keys = x.key.shape[1]
    d_key, d_value = (blocks.turned(d).swapaxes(1, 2)[:, :keys] for d in (d_key, d_value))
    return d_query, d_key, d_value, d_bias
