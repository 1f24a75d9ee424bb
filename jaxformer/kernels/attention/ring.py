"""Ring attention: context parallelism in which queries stay and keys and values are passed around a ring of devices.

Every device holds one shard of its rows (`parallel.context.SequenceSharding.shard`). Its queries attend to the keys of
their own shard, then to those from its neighbour, and so on, with one online softmax over all of them; the next keys
are sent while the present ones are used. The backward pass makes another round, in which the gradients of keys and
values travel with them. Long shards are sent in several pieces (`ring_local.PIECES`), so that a device holds little
more than its own shard, and the [T, S] scores never exist. A window ends the round early.

Without context parallelism (`parts` 1) each device computes its own rows and heads without communication, and decides
by itself which pairs of blocks to skip.

Source: Liu et al. 2023, "Ring attention with blockwise Transformers", section 3.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from jaxformer.kernels import derivatives
from jaxformer.kernels.attention import content_bias, shard_specs
from jaxformer.kernels.attention import ring_local as part
from jaxformer.kernels.attention.xla import Bias
from jaxformer.kernels.attention.xla_vjp import rank4
from jaxformer.kernels.rematerialize import named_attention
from jaxformer.masks import Mask
from jaxformer.parallel import constraints
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
    """Attention as `functional.attention.attention` documents it, on the current mesh; arguments are checked there.

    Each device draws its own dropout, so the result depends on the mesh.
    """
    sizes, parts = constraints.mesh_axes(), mask.parts
    key, value, heads = shard_specs.head_axes(query, key, value, sizes)
    rows = constraints.splits(query.shape[0] // parts, constraints.ACTIVATION_RULES["batch_rows"], sizes)
    shards = ((part.AXIS,) if parts > 1 else ()) + rows
    options = part.RingOptions(
        scale=scale,
        soft_cap=soft_cap,
        dropout_rate=0.0 if rng is None else dropout_rate,
        parts=parts,
        rows=rows,
        heads=heads,
        indexed=mask.query_index is not None or mask.key_index is not None,
        own_bias=isinstance(bias, content_bias.ContentBias),
    )
    # A Partial passes a function's arrays as arguments: shard_map cannot close over arrays of another mesh.
    bias = Partial(bias) if callable(bias) and not isinstance(bias, Partial) else bias

    def local(query, key, value, mask, bias, rng):
        if rng is not None:
            for axis in shards + heads:
                rng = jax.random.fold_in(rng, jax.lax.axis_index(axis))
        return _attend_here(options, query, key, value, mask, bias, rng)

    of_bias = content_bias.specs(bias, rows, heads) if options.own_bias else None if bias is None else P()
    rest = of_bias, None if rng is None else P()
    run = shard_specs.on_devices(local, shards, heads, shard_specs.mask_specs(mask, rows), *rest)
    return run(query, key, value, mask, bias, rng)


def _attend_here(o: part.RingOptions, query, key, value, mask: Mask, bias: Bias | None, rng: Array | None) -> Array:
    """One device's attention, with the bias's arrays as explicit arguments so that they can have gradients."""
    if bias is not None and not callable(bias):
        bias = Partial(_taken, rank4(bias))
    leaves, structure = jax.tree.flatten(bias)
    floats = tuple(bool(jnp.issubdtype(leaf.dtype, jnp.floating)) for leaf in leaves)
    function = None if bias is None else functools.partial(_call, structure, floats)
    learned, fixed = (tuple(x for x, is_float in zip(leaves, floats, strict=True) if is_float == of) for of in (1, 0))
    return _attend(o, function, query, key, value, learned, fixed, mask, rng)


def _taken(array: Array, query_place: Array, key_place: Array) -> Array:
    """A bias array [b, h, t, s] as a function of the positions in the row."""
    x = array if array.shape[2] == 1 else jnp.take(array, query_place, axis=2, mode="clip")
    return x if x.shape[3] == 1 else jnp.take(x, key_place, axis=3, mode="clip")


def _call(structure, floats: tuple[bool, ...], fixed: tuple, query_place: Array, key_place: Array, *learned: Array):
    """Calls the bias function, rebuilt from its arrays: those that may have gradients, and the others."""
    those, others = iter(learned), iter(fixed)
    bias = jax.tree.unflatten(structure, [next(those if is_float else others) for is_float in floats])
    return bias(query_place, key_place)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attend(o: part.RingOptions, bias_function, query, key, value, bias, fixed, mask, rng) -> Array:
    return _forward(o, bias_function, query, key, value, bias, fixed, mask, rng)[0]


def _forward(o: part.RingOptions, bias_function, *arrays):
    visit = derivatives.apart(lambda *arrays: part.visit_all(o, bias_function, part.RingOperands(*arrays)))
    out, normalizer = named_attention(visit(*arrays))
    return out, (arrays, out, normalizer)


def _backward(o: part.RingOptions, bias_function, saved, g_out):
    arrays, out, normalizer = saved
    wide = jnp.promote_types(out.dtype, jnp.float32)
    passed = jnp.sum(g_out.astype(wide) * out.astype(wide), axis=-1)
    grads = part.gradients(o, bias_function, part.RingOperands(*arrays), passed, normalizer, g_out)
    return *jax.tree.map(lambda grad, a: grad.astype(a.dtype), grads, tuple(arrays[:4])), None, None, None


def _tangent(o: part.RingOptions, bias_function, saved, changes):
    """Forward mode, by differentiating `_forward`."""
    arrays = saved[0]
    return jax.jvp(lambda *floats: _forward(o, bias_function, *floats, *arrays[4:])[0], arrays[:4], changes[:4])[1]


derivatives.define(_attend, _forward, _tangent, _backward)
