"""Attention over rows cut into parts is attention over whole rows: every mask, bias and mesh, values and gradients."""

import functools
from dataclasses import replace

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from jax.sharding import PartitionSpec as P

from jaxformer import masks
from jaxformer.config import MeshConfig
from jaxformer.functional.attention import attention
from jaxformer.kernels.attention import tiles
from jaxformer.parallel import context
from jaxformer.parallel.mesh import make_mesh

LENGTH = 32
ALL = list(cases.mask_cases(LENGTH))
TELLING = ("causal_window_segments_padding",)  # every kind of rule but a prefix and an array
SOME = ("none", "causal", "prefix_segments", "causal_window_segments_padding", "prefix_padding", "causal_array")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks that divide neither each other nor a part."""
    monkeypatch.setattr(tiles, "QUERY_BLOCK", 3)
    monkeypatch.setattr(tiles, "KEY_BLOCK", 2)


def total(x):
    """A number that depends on every output, each in another way."""
    return jnp.sum(jnp.sin(x + jnp.arange(x.size).reshape(x.shape)))


@functools.partial(jax.jit, static_argnames="soft_cap")
def whole_rows(q, k, v, bias, allowed, soft_cap):
    """(gradients, value) by all pairs at once: one program for all masks and biases of the same shapes."""

    def attend(q, k, v, bias):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("BTHK,BSHK->BHTS", q, k) * q.shape[3] ** -0.5
        scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
        weights = jnp.where(allowed, jnp.exp(scores + (bias if bias.ndim == 4 else bias[None])), 0)
        sums = weights.sum(-1, keepdims=True)
        x = jnp.einsum("BHTS,BSHK->BTHK", weights / jnp.where(sums == 0, 1, sums), v)
        return total(x), x

    return jax.grad(attend, (0, 1, 2, 3), has_aux=True)(q, k, v, bias)


def both(shape, mask, allowed, bias=(None, 0.0), groups=2, soft_cap=None, rows=2, zigzag=None):
    """(gradients, value) of whole rows, and of parts on a mesh, on the same float64 inputs."""
    mask = mask if mask is None or isinstance(mask, masks.Mask) else masks.dense(mask)
    bias, numbers = bias
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(rows, LENGTH, heads, 4)) for heads in (4, groups, groups))
    array = bias if bias is not None and not callable(bias) else None

    def folded(q, k, v, bias):
        causal = mask is not None and mask.causal and mask.window is None
        cut = context.sequence_sharding(LENGTH, zigzag=causal if zigzag is None else zigzag)
        m = arranged(masks.Mask() if mask is None else mask, cut)
        if cut.order is not None and bias is not None and not callable(bias):
            bias = bias if bias.shape[-2] == 1 else bias[..., cut.order, :]
            bias = bias[..., cut.order]
        elif cut.order is not None and bias is not None:
            natural, order = bias, jnp.asarray(cut.order)
            bias = jax.tree_util.Partial(
                lambda order, q, k: natural(jnp.take(order, q, mode="clip"), jnp.take(order, k, mode="clip")), order
            )
        arrays = [cut.shard(x) for x in (q, k, v)]
        x = cut.unshard(attention(*arrays, m, bias=bias, soft_cap=soft_cap, implementation="chunked"))
        return total(x), x

    arguments = (q, k, v) if array is None else (q, k, v, array)
    given = np.zeros((1, 4, LENGTH, LENGTH)) + numbers if array is None else array
    if mask is None:
        allowed = np.ones((1, 1, LENGTH, LENGTH), bool)
    grads, out = whole_rows(q, k, v, given, np.broadcast_to(allowed, (rows, 4, LENGTH, LENGTH)), soft_cap)
    differentiate = tuple(range(len(arguments)))
    with jax.set_mesh(make_mesh(MeshConfig(*shape), jax.devices()[: int(np.prod(shape))])):
        run = jax.jit(jax.grad(lambda *x: folded(*(x if len(x) == 4 else (*x, bias))), differentiate, has_aux=True))
        return (grads[: len(arguments)], out), run(*arguments)


def arranged(mask, cut):
    """The mask of whole rows, in the order of the parts."""
    if cut.order is None:
        return replace(mask, parts=cut.parts)
    dense = mask.dense
    if dense is not None:
        dense = dense[..., cut.order]
        dense = dense if dense.shape[-2] == 1 else dense[..., cut.order, :]
    fields = ("keys", "prefix_keys", "query_segments", "key_segments")
    return replace(
        mask, parts=cut.parts, dense=dense, query_index=jnp.asarray(cut.order), key_index=jnp.asarray(cut.order),
        **{name: cut.arrange(getattr(mask, name)) for name in fields},
    )  # fmt: skip


def agree(pair):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), *pair)


# data, fsdp, tensor, context
MESHES = [(1, 1, 1, 8), (2, 1, 2, 2)]


# Every mask in eight parts; in two, and on meshes with other axes, those that hold each kind of rule; in four, two.
CASES = [
    *(pytest.param(mask, MESHES[1], marks=() if mask in TELLING else pytest.mark.slow) for mask in SOME),
    *(pytest.param(mask, MESHES[0], marks=pytest.mark.slow) for mask in ALL),
    *(pytest.param(mask, (1, 1, 1, 4), marks=pytest.mark.slow) for mask in (SOME[2], SOME[3])),
]


@pytest.mark.parametrize("mask, shape", CASES)
def test_every_mask(mask, shape):
    with jax.enable_x64(True):
        agree(both(shape, *cases.mask_cases(LENGTH)[mask], soft_cap=2.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "bias, mask, shape",
    [
        (bias, ("causal", "none")[number], MESHES[(n + number) % 2])
        for n, bias in enumerate(("array", "row", "alibi", "t5"))
        for number in (0, 1)
    ],
)
def test_every_bias(bias, mask, shape):
    """With and without causality, on one mesh or the other."""
    with jax.enable_x64(True):
        agree(both(shape, *cases.mask_cases(LENGTH)[mask], cases.bias_cases(LENGTH)[bias], groups=1))


WINDOWS = [
    (4, True),
    (4, False),
    (1, True),
    (6, False),
    (11, True),
    (31, False),
]  # reach no other part, two, three, all


@pytest.mark.slow
@pytest.mark.parametrize("window, causal", WINDOWS)
def test_a_window_ends_the_round_early(window, causal):
    mask = masks.Mask(causal=causal) & masks.window(window)
    allowed = reference.allowed(LENGTH, LENGTH, causal=causal, window=window)
    with jax.enable_x64(True):
        agree(both((1, 1, 1, 8), mask, allowed, groups=1))


def test_how_far_a_window_makes_keys_travel():
    from jaxformer.kernels.attention.ring_local import RingOptions, offsets_to_visit

    o = RingOptions(1.0, None, 0.0, 8, (), (), indexed=False)
    causal = masks.causal()
    assert offsets_to_visit(o, causal & masks.window(1), 4) == range(1)
    assert offsets_to_visit(o, causal & masks.window(5), 4) == range(2)
    assert offsets_to_visit(o, causal & masks.window(6), 4) == range(3)
    assert offsets_to_visit(o, masks.window(5), 4) == range(-1, 2)
    assert offsets_to_visit(o, causal, 4) == offsets_to_visit(o, masks.window(99), 4) == range(8)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_key_heads_that_tensor_does_not_divide(groups):
    with jax.enable_x64(True):
        agree(both((1, 1, 4, 2), *cases.mask_cases(LENGTH)["causal"], groups=groups))


@pytest.mark.slow
def test_rows_that_data_does_not_divide_and_no_context_axis():
    with jax.enable_x64(True):
        agree(both((4, 1, 2, 1), *cases.mask_cases(LENGTH)["causal_window_segments_padding"]))
        agree(both((2, 2, 2, 1), *cases.mask_cases(LENGTH)["causal_array"]))


@pytest.mark.slow
def test_dropped_weights_keep_their_mean():
    q = jnp.zeros((2, LENGTH, 4, 4))
    v = jnp.ones((2, LENGTH, 4, 4))

    def attend(q, v, rng):
        cut = context.sequence_sharding(LENGTH, zigzag=False)
        m = masks.Mask(parts=cut.parts)
        out = attention(cut.shard(q), cut.shard(q), cut.shard(v), m, dropout_rate=0.25, rng=rng)
        return cut.unshard(out)

    with jax.set_mesh(make_mesh(MeshConfig(1, 1, 1, 8))):
        out = jax.jit(attend)(q, v, jax.random.key(0))
        assert abs(float(out.mean()) - 1) < 0.02 and float(out.std()) > 0.05
        np.testing.assert_allclose(jax.jit(attend)(q, v, None), 1.0, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.optimized
def test_memory_falls_with_the_axis(monkeypatch):
    """Bytes of a device, forward and backward, at 32k tokens, fall as the axis grows; the scores alone would be 4 GiB
    a head. Blocks are short because a pair's scores are the same for every axis."""
    for name in ("QUERY_BLOCK", "KEY_BLOCK"):
        monkeypatch.setattr(tiles, name, 256)

    def peak(number):
        mesh = make_mesh(MeshConfig(1, 1, 1, number), jax.devices()[:number])

        def loss(q, k, v):
            cut = context.sequence_sharding(2**15, zigzag=True)
            m = masks.Mask(causal=True, parts=cut.parts, query_index=cut.order, key_index=cut.order)
            return jnp.sum(attention(q, k, v, m, implementation="chunked"))

        with jax.set_mesh(mesh):
            rows = jax.ShapeDtypeStruct(
                (number, 2**15 // number, 4, 64), jnp.float32, sharding=jax.NamedSharding(mesh, P("context"))
            )
            found = jax.jit(jax.grad(loss, (0, 1, 2))).lower(rows, rows, rows).compile().memory_analysis()
        return found.temp_size_in_bytes + found.argument_size_in_bytes + found.output_size_in_bytes

    one = peak(1)
    for number in (2, 8):
        assert number * peak(number) < 1.1 * one, (number, peak(number), one)


@pytest.mark.slow
def test_a_large_number_on_all_scores_of_a_query_changes_no_gradient():
    """As additive padding does to a query that sees nothing else; float32 loses the log of the sum beside it."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(2, LENGTH, 2, 4)), jnp.float32) for _ in range(3))
    bias = jnp.where(jnp.arange(LENGTH) < 9, -1e9, 0.0)[None, None, None]

    def total(q, k, v, cut, name):
        arrays = q, k, v
        mask = masks.causal() if cut is None else arranged(masks.causal(), cut)
        if cut is not None:
            arrays = [cut.shard(x) for x in arrays]
        return jnp.sum(jnp.sin(attention(*arrays, mask, bias=bias, implementation=name)))

    wanted = jax.jit(jax.grad(lambda *a: total(*a, None, "xla"), (0, 1, 2)))(q, k, v)
    with jax.set_mesh(make_mesh(MeshConfig(1, 1, 1, 8), jax.devices())):
        cut = context.sequence_sharding(LENGTH, zigzag=False)
        found = jax.device_get(jax.jit(jax.grad(lambda *a: total(*a, cut, "chunked"), (0, 1, 2)))(q, k, v))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), wanted, found)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 2, 2), (1, 1, 1, 8)])
def test_sources_of_another_length_go_around_the_ring(shape):
    """Cross attention with context parallelism: queries in zigzag order, keys of rows of another length."""
    rng = np.random.default_rng(3)
    arrays = [
        rng.normal(size=(2, n, heads, 4)) for n, heads in ((LENGTH, 4), (3 * LENGTH // 2, 2), (3 * LENGTH // 2, 2))
    ]
    targets, sources = np.sort(rng.integers(0, 4, (2, LENGTH))), np.sort(rng.integers(0, 3, (2, 3 * LENGTH // 2)))

    def loss(arrays, sharded):
        cuts = [context.sequence_sharding(arrays[i].shape[1], zigzag=i == 0) for i in (0, 1, 1)]
        mask = masks.segments(*(jnp.asarray(cut.arrange(s)) for cut, s in zip(cuts, (targets, sources), strict=False)))
        folded = [cut.shard(x) for cut, x in zip(cuts, arrays, strict=True)]
        options = {"implementation": "chunked" if sharded else "xla"}
        x = cuts[0].unshard(attention(*folded, replace(mask, parts=cuts[0].parts), **options))
        return total(x), x

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    with jax.enable_x64(True):
        whole = run(arrays, False)
        with jax.set_mesh(make_mesh(MeshConfig(*shape), jax.devices()[: int(np.prod(shape))])):
            agree((whole, run(arrays, True)))
    assert not np.any(np.asarray(whole[1])[targets == 3])  # no source of that number: zeros
