"""Ring attention on GPUs: `ring_local`'s round of keys and values, with `flash_gpu`'s kernels on each device.

Each shard of keys gives an output and a normalizer of its own; they are put together as online softmax puts blocks
together. The backward pass makes a round with the normalizer of all keys, in which the gradients of keys and values
travel along. Everything that is added up is float32.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxformer.kernels.attention import flash_gpu_vjp, ring_local, shard_specs, tiles
from jaxformer.kernels.attention.flash_gpu_backward import key_gradients, query_gradients
from jaxformer.kernels.attention.flash_gpu_forward import forward
from jaxformer.kernels.attention.flash_gpu_launch import FlashInputs, FlashNormalizer
from jaxformer.kernels.attention.flash_gpu_scores import FlashOptions
from jaxformer.kernels.attention.flash_gpu_vjp import Blocks
from jaxformer.kernels.attention.ring_local import AXIS, RingOptions
from jaxformer.kernels.rematerialize import named_attention
from jaxformer.masks import Mask
from jaxformer.parallel import constraints
from jaxformer.types import Array


def attend(options: FlashOptions, blocks: Blocks, query: Array, key: Array, value: Array, mask: Mask) -> Array:
    """Attention of arrays [parts * B, T / parts, heads, K] on the current mesh, whose context axis has `mask.parts`
    devices. `options`, `blocks`: as for `flash_gpu_vjp.flash`; `mask`: of whole rows, without `keys`."""
    rows = constraints.splits(
        query.shape[0] // mask.parts, constraints.ACTIVATION_RULES["batch_rows"], constraints.mesh_axes()
    )
    key, value, heads = shard_specs.head_axes(query, key, value, constraints.mesh_axes())
    indexed = mask.query_index is not None or mask.key_index is not None
    ring = RingOptions(options.scale, options.soft_cap, 0.0, mask.parts, rows, heads, indexed)

    def local(query: Array, key: Array, value: Array, mask: Mask) -> Array:
        here = options._replace(heads=query.shape[2], groups=key.shape[2], hides=True)
        return _attend(ring, here, blocks, query, key, value, mask)

    run = shard_specs.on_devices(local, (AXIS, *rows), heads, shard_specs.mask_specs(mask, rows))
    return run(query, key, value, mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(ring: RingOptions, o: FlashOptions, blocks: Blocks, query, key, value, mask) -> Array:
    return _forward(ring, o, blocks, query, key, value, mask)[0]


def _forward(ring: RingOptions, o: FlashOptions, blocks: Blocks, query, key, value, mask):
    def visit(carry, read, added, source):
        shard, others = _shard(o, mask, source)
        visited = flash_gpu_vjp.visits_of(shard, o.queries, o.keys, blocks)[0]
        one = forward(o, FlashInputs(query, read[0], read[1], others), visited, blocks[0], jnp.float32)
        return _joined(carry, *one), added

    numbers = (query.shape[0], query.shape[2], query.shape[1])
    start = jnp.zeros(query.shape, jnp.float32), jnp.full(numbers, -jnp.inf), jnp.zeros(numbers)
    offsets = ring_local.offsets_to_visit(ring, mask, query.shape[1])
    (out, top, total), _ = ring_local.around(ring, offsets, ((key, value), ()), start, visit)
    empty = total == 0.0
    out = (out / _of_rows(jnp.where(empty, 1.0, total))).astype(value.dtype)
    known = FlashNormalizer(jnp.where(empty, 0.0, top), jnp.where(empty, jnp.inf, jnp.log2(total)))
    out, known = named_attention((out, known))
    return out, (query, key, value, mask, out, known)


def _backward(ring: RingOptions, o: FlashOptions, blocks: Blocks, saved, g_out):
    query, key, value, mask, out, known = saved
    passed = jnp.sum(g_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1).swapaxes(1, 2)

    def visit(d_query, read, added, source):
        shard, others = _shard(o, mask, source)
        _, by_key, by_query = flash_gpu_vjp.visits_of(shard, o.queries, o.keys, blocks)
        x = FlashInputs(query, read[0], read[1], others)
        found = key_gradients(o, x, by_key, blocks[1], known, passed, g_out, jnp.float32)
        mine, _ = query_gradients(o, x, by_query, blocks[2], known, passed, g_out, jnp.float32)
        return d_query + mine, jax.tree.map(jnp.add, added, found)

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (key, value))
    offsets = ring_local.offsets_to_visit(ring, mask, query.shape[1])
    d_query, grads = ring_local.around(ring, offsets, ((key, value), start), jnp.zeros(query.shape, jnp.float32), visit)
    return *(d.astype(x.dtype) for d, x in zip((d_query, *grads), (query, key, value), strict=True)), None


_attend.defvjp(_forward, _backward)


def _joined(carry: tuple[Array, Array, Array], out: Array, one: FlashNormalizer) -> tuple[Array, Array, Array]:
    """Weighted values, largest scores and sums of weights over the keys so far, with those of one more shard."""
    values, top, total = carry
    empty = one.log_total == jnp.inf
    new_top = jnp.maximum(top, jnp.where(empty, -jnp.inf, one.top))
    safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    before = jnp.exp2(top - safe)
    weight = jnp.where(empty, 0.0, jnp.exp2((one.top - safe) + one.log_total))
    return values * _of_rows(before) + out * _of_rows(weight), new_top, total * before + weight


def _of_rows(x: Array) -> Array:
    """[B, H, T] -> [B, T, H, 1]."""
    return x.swapaxes(1, 2)[..., None]


def _shard(o: FlashOptions, mask: Mask, source: Array) -> tuple[Mask, dict[str, Array]]:
    """The mask of this device's queries and of one shard's keys, and its arrays for the kernels."""
    starts = jax.lax.axis_index(AXIS) * o.queries, source * o.keys
    part = replace(tiles.cut_mask(mask, starts, (o.queries, o.keys)), parts=1)
    for name, start, size in zip(("query_index", "key_index"), starts, (o.queries, o.keys), strict=True):
        if getattr(mask, name) is None:
            part = replace(part, **{name: start + jnp.arange(size)})
    return part, flash_gpu_vjp.others_of(part, o, None, None)
