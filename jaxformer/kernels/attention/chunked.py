"""Attention in O(T) memory, forward and backward: online softmax over blocks of keys, with every option.

Never materialises a [T, S] array, see `online_softmax`. Pairs of blocks outside causality or the window are not
visited; those that the rest of the mask rules out are skipped at run time.
"""

import functools

import jax
import jax.numpy as jnp

from jaxformer.kernels import derivatives
from jaxformer.kernels.attention import online_softmax, tiles
from jaxformer.kernels.attention.tiles import TiledInputs, TileOptions
from jaxformer.kernels.attention.xla import Bias
from jaxformer.kernels.attention.xla_vjp import heads_first
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
) -> Array:
    """Attention as `functional.attention.attention` documents it; arguments are already checked there."""
    function, constants = tiles.constants_of(bias, query, key)
    options, inputs = tiles.pad_to_tiles(
        query, key, value, mask, function, constants,
        scale=scale, soft_cap=soft_cap, dropout_rate=dropout_rate, rng=rng,
    )  # fmt: skip
    return _attend(options, *inputs)[:, : query.shape[1]]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(o: TileOptions, query, key, value, bias, mask, rng) -> Array:
    return _forward(o, query, key, value, bias, mask, rng)[0]


def _forward(o: TileOptions, *arrays):
    x = tiles.for_values(o, TiledInputs(*arrays))
    batch, groups, per_group, length, _ = x.query.shape

    def query_block(_, i):
        return None, online_softmax.finish(
            online_softmax.visit_keys(o, x, i, online_softmax.nothing(x, o.query_block)), x.value.dtype
        )

    _, (out, normalizer) = jax.lax.scan(query_block, None, jnp.arange(length // o.query_block))
    out = jnp.moveaxis(out, 0, 1).reshape(batch, length, groups * per_group, -1)
    normalizer = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2).reshape(batch, groups * per_group, length), normalizer)
    return out, (arrays, out, normalizer)


def _backward(o: TileOptions, saved, g_out):
    arrays, out, normalizer = saved
    wide = jnp.promote_types(out.dtype, jnp.float32)
    passed = jnp.sum(g_out.astype(wide) * out.astype(wide), axis=-1)
    x = tiles.for_gradients(o, TiledInputs(*arrays))
    d = online_softmax.gradients(o, x, passed, normalizer, heads_first(g_out, x.query.shape[1]))
    grads = d.query, online_softmax.turned(d.key), online_softmax.turned(d.value), d.bias
    return *jax.tree.map(lambda grad, a: grad.astype(a.dtype), grads, tuple(arrays[:4])), None, None


def _tangent(o: TileOptions, saved, changes):
    """Forward mode, by differentiating `_forward`."""
    arrays = saved[0]
    return jax.jvp(lambda *floats: _forward(o, *floats, *arrays[4:])[0], arrays[:4], changes[:4])[1]


derivatives.define(_attend, _forward, _tangent, _backward, loops=True)
