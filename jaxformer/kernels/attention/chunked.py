"""Attention in O(T) memory, forward and backward: online softmax over blocks of keys, with every option.

Never materialises a [T, S] array, see `online_softmax`. Pairs of blocks outside causality or the window are not
visited; those that the rest of the mask rules out are skipped at run time. A mask of patterns is `block_sparse`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.kernels import derivatives
from jaxformer.kernels.attention import block_sparse, online_softmax, tiles
from jaxformer.kernels.attention.tiles import TiledInputs, TileOptions
from jaxformer.kernels.attention.xla import Bias
from jaxformer.kernels.attention.xla_vjp import heads_first
from jaxformer.kernels.rematerialize import named_attention
from jaxformer.masks import Mask
from jaxformer.types import Array


def attend(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    bias: Bias | None,
    *,
    scale: float,
    soft_cap: float | None,
    dropout_rate: float,
    rng: Array | None,
    return_log_sum: bool = False,
) -> Any:
    """Attention as `functional.attention.attention` documents it; arguments are already checked there."""
    if mask.patterns and mask.query_index is None and mask.key_index is None:
        return block_sparse.attend(
            _attend, query, key, value, mask, bias, scale=scale, soft_cap=soft_cap, dropout_rate=dropout_rate, rng=rng,
            return_log_sum=return_log_sum,
        )  # fmt: skip
    function, constants = tiles.constants_of(bias, query, key)
    options, inputs = tiles.pad_to_tiles(
        query, key, value, mask, function, constants,
        scale=scale, soft_cap=soft_cap, dropout_rate=dropout_rate, rng=rng,
    )  # fmt: skip
    out = _attend(options._replace(log_sum=return_log_sum), *inputs)
    length = query.shape[1]
    return (out[0][:, :length], out[1][:, :, :length]) if return_log_sum else out[:, :length]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(o: TileOptions, query, key, value, bias, mask, rng, visits) -> Any:
    return _forward(o, query, key, value, bias, mask, rng, visits)[0]


def _forward(o: TileOptions, *arrays):
    out, normalizer, log_sum = named_attention(derivatives.apart(functools.partial(_visit, o))(*arrays))
    return (out, log_sum) if o.log_sum else out, (arrays, out, normalizer)


def _visit(o: TileOptions, *arrays):
    """Output, normalizer and log-sum."""
    x = tiles.for_values(o, TiledInputs(*arrays))
    batch, groups, per_group, length, _ = x.query.shape

    def query_block(_, i):
        carry = online_softmax.visit_keys(o, x, i, online_softmax.nothing(x, o.query_block))
        out, normalizer = online_softmax.finish(carry, x.value.dtype)
        return None, (out, normalizer, online_softmax.log_sum(carry) if o.log_sum else None)

    _, (out, *numbers) = jax.lax.scan(query_block, None, jnp.arange(length // o.query_block))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, length, groups * per_group, -1)
    normalizer, log_sum = jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 2).reshape(batch, groups * per_group, length), tuple(numbers)
    )
    return out, normalizer, log_sum


def _backward(o: TileOptions, saved, g_out):
    arrays, out, normalizer = saved
    g_out, g_log_sum = g_out if o.log_sum else (g_out, None)
    wide = jnp.promote_types(out.dtype, jnp.float32)
    passed = jnp.sum(g_out.astype(wide) * out.astype(wide), axis=-1)
    if g_log_sum is not None:  # its derivative by a score is the weight, which the gradients multiply this with
        passed = passed - g_log_sum.swapaxes(1, 2)
    x = tiles.for_gradients(o, TiledInputs(*arrays))
    d = online_softmax.gradients(o, x, passed, normalizer, heads_first(g_out, x.query.shape[1]))
    grads = d.query, online_softmax.turned(d.key), online_softmax.turned(d.value), d.bias
    return *jax.tree.map(lambda grad, a: grad.astype(a.dtype), grads, tuple(arrays[:4])), None, None, None


def _tangent(o: TileOptions, saved, changes):
    """Forward mode, by differentiating `_forward`."""
    arrays = saved[0]
    return jax.jvp(lambda *floats: _forward(o, *floats, *arrays[4:])[0], arrays[:4], changes[:4])[1]


derivatives.define(_attend, _forward, _tangent, _backward)
