"""Chunked attention is xla attention: every mask, bias and option, values and gradients, in float64; in O(T) memory."""

import functools

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from jax.extend.core import jaxprs_in_params

from jaxformer import masks
from jaxformer.functional.attention import attention
from jaxformer.kernels.attention import tiles

LENGTH = 22


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks that divide neither each other nor the length."""
    monkeypatch.setattr(tiles, "QUERY_BLOCK", 6)
    monkeypatch.setattr(tiles, "KEY_BLOCK", 4)


def value_and_gradients(q, k, v, bias, mask, soft_cap, implementation):
    """(gradients of an array bias too, value)."""
    array = None if callable(bias) else bias

    def total(q, k, v, array):
        used = bias if array is None else array
        x = attention(q, k, v, mask, bias=used, soft_cap=soft_cap, implementation=implementation)
        return jnp.sum(jnp.sin(x + jnp.arange(x.size).reshape(x.shape))), x

    return jax.grad(total, (0, 1, 2) if array is None else (0, 1, 2, 3), has_aux=True)(q, k, v, array)


@functools.partial(jax.jit, static_argnums=5)
def by_xla(q, k, v, bias, allowed, soft_cap):
    """Of every mask as an array, so that one program is all of them."""
    return value_and_gradients(q, k, v, bias, masks.dense(allowed), soft_cap, "xla")


def both(mask, allowed, bias, groups=2, soft_cap=None, queries=LENGTH, keys=LENGTH):
    """(gradients, value) of xla and of chunked on the same random float64 inputs; `allowed`: the mask by NumPy."""
    rng = np.random.default_rng(0)
    shapes = [(2, queries, 4, 4), (2, keys, groups, 4), (2, keys, groups, 4)]
    x = [jnp.asarray(rng.normal(size=s)) for s in shapes]
    allowed = np.broadcast_to(allowed, (2, 4, queries, keys))
    array = bias(jnp.arange(queries), jnp.arange(keys)) if callable(bias) else bias
    grads, out = by_xla(*x, array, allowed, soft_cap)
    if callable(bias):
        run = jax.jit(lambda *x: value_and_gradients(*x, bias, mask, soft_cap, "chunked"))
        return (grads[:3], out), run(*x)
    return (grads, out), jax.jit(lambda *x: value_and_gradients(*x, mask, soft_cap, "chunked"))(*x, bias)


HARD = ("causal_window_segments_padding", "causal_array")


@pytest.mark.parametrize(
    "mask", [m if m in HARD else pytest.param(m, marks=pytest.mark.slow) for m in cases.mask_cases(LENGTH)]
)
def test_every_mask(mask):
    with jax.enable_x64(True):
        wanted, found = both(*cases.mask_cases(LENGTH)[mask], None, soft_cap=2.0)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), wanted, found)


@pytest.mark.parametrize("bias", ["t5", *(pytest.param(b, marks=pytest.mark.slow) for b in ("array", "row", "alibi"))])
def test_every_bias(bias):
    with jax.enable_x64(True):
        wanted, found = both(masks.causal(), np.tri(LENGTH, dtype=bool), cases.bias_cases(LENGTH)[bias][0], groups=1)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), wanted, found)


@pytest.mark.slow
def test_a_closed_over_table_gets_its_gradient():
    """T5's learned table, captured by the bias function, in float64."""
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(1).normal(size=(1, LENGTH, 2, 4)))
        table = jnp.asarray(np.random.default_rng(2).normal(size=(40, 2)))

        def total(table, name):
            bias = lambda q, k: jnp.moveaxis(table[jnp.clip(q[:, None] - k[None], -10, 10) + 15], -1, 0)  # noqa: E731
            return jnp.sum(jnp.cos(attention(x, x, x, masks.window(9), bias=bias, implementation=name)))

        a, b = (jax.jit(jax.grad(total), static_argnums=1)(table, name) for name in ("xla", "chunked"))
        assert float(jnp.abs(a).max()) > 1e-3
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_cross_attention_of_other_lengths():
    with jax.enable_x64(True):
        for queries, keys in ((1, 17), (5, 3), (13, 17)):
            wanted, found = both(None, True, None, queries=queries, keys=keys)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), wanted, found)


def of_parts(name, length):
    """With blocks of 4 queries and 8 keys, whole, half and unmasked ones occur; and the mask by NumPy."""
    mask, rules = masks.Mask(causal="causal" in name), {"causal": "causal" in name}
    if "window" in name:
        mask, rules["window"] = mask & masks.window(15), 15
    if "segments" in name:
        rules["segments"] = np.arange(length)[None] // 10
        mask = mask & masks.segments(jnp.asarray(rules["segments"]))
    return mask, reference.allowed(length, length, **rules)


def halved(monkeypatch):
    monkeypatch.setattr(tiles, "QUERY_BLOCK", 4)
    monkeypatch.setattr(tiles, "KEY_BLOCK", 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask, bias, length",  # 7: one block of keys, 21: a last one that is filled up, 24: whole ones
    [
        ("causal_segments", "t5", 21),
        ("causal", None, 21), ("causal_window", None, 21), ("none", None, 24), ("window", None, 21),
        ("causal", None, 7), ("causal_segments", None, 7),
        ("causal_window", None, 24), ("causal_segments", "array", 24), ("causal_segments", "t5", 24),
    ],
)  # fmt: skip
def test_parts_of_blocks(mask, bias, length, monkeypatch):
    halved(monkeypatch)
    with jax.enable_x64(True):
        array = None if bias is None else cases.bias_cases(length)[bias][0]
        wanted, found = both(*of_parts(mask, length), array, queries=length, keys=length, soft_cap=2.0)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), wanted, found)


@pytest.mark.parametrize("queries, keys", [(21, 8), pytest.param(8, 21, marks=pytest.mark.slow)])
def test_causal_blocks_of_other_lengths(queries, keys, monkeypatch):
    """More queries than keys: some have no block of keys of their own places."""
    halved(monkeypatch)
    with jax.enable_x64(True):
        wanted, found = both(masks.causal(), np.tri(queries, keys, dtype=bool), None, queries=queries, keys=keys)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), wanted, found)


@pytest.mark.parametrize(
    "mask", [*(pytest.param(m, marks=pytest.mark.slow) for m in ("causal", "causal_window")), "causal_segments"]
)
def test_the_half_of_a_block_behind_causality_is_not_read(mask, monkeypatch):
    """Not even with weight 0: NaN in the second half of the last block of keys does not reach the queries before it."""
    halved(monkeypatch)
    x = jax.random.normal(jax.random.key(0), (1, 24, 2, 4))
    unseen = jnp.where(jnp.arange(24)[:, None, None] >= 20, jnp.nan, x)

    @jax.jit
    def result(q, k):
        out, pull = jax.vjp(lambda q: attention(q, k, k, of_parts(mask, 24)[0], implementation="chunked"), q)
        return out[:, :20], pull(jnp.ones_like(out))[0][:, :20]

    for found, wanted in zip(result(x, unseen), result(x, x), strict=True):
        np.testing.assert_array_equal(found, wanted)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def choices(mask, **more):
    """In a vmapped forward and backward pass, the numbers of branches of every choice between ways to weigh keys."""
    x = jnp.zeros((3, 1, 24, 2, 4))

    def grads(x, more):
        used = mask if not more else mask & masks.segments(**more)
        return jax.grad(lambda x: attention(x, x, x, used, implementation="chunked").sum())(x)

    return [
        len(e.params["branches"])
        for e in equations(jax.make_jaxpr(jax.vmap(grads))(x, more).jaxpr)
        if e.primitive.name == "cond"
        and "exp" in {i.primitive.name for b in e.params["branches"] for i in equations(b)}
    ]


@pytest.mark.slow
def test_what_places_tell_stays_a_choice_under_vmap(monkeypatch):
    """Half or whole of the last block, once in each direction; whether any pair meets is data, all of that is done."""
    halved(monkeypatch)
    assert choices(masks.causal()) == [2, 2]
    assert choices(masks.causal(), query_segments=jnp.zeros((3, 1, 24), int)) == [2, 2]
    assert choices(None) == choices(masks.window(15)) == []


def test_what_is_not_seen_has_exactly_zero_gradient():
    """Causality, window and segments, in float32: not small, zero."""
    segments = jnp.repeat(jnp.arange(2), LENGTH // 2)[None]
    for mask, seen in [
        (masks.causal() & masks.window(3), lambda t, s: t - 3 < s <= t),
        (masks.segments(segments), lambda t, s: (t < LENGTH // 2) == (s < LENGTH // 2)),
    ]:
        x = jax.random.normal(jax.random.key(0), (1, LENGTH, 2, 4))

        def rows(k, mask=mask, x=x):
            return jnp.sum(attention(x, k, k, mask, implementation="chunked")[0], axis=(1, 2))

        leak = np.abs(np.asarray(jax.jit(jax.jacrev(rows))(x))[:, 0]).sum((2, 3))  # [T, S]
        allowed = np.array([[seen(t, s) for s in range(LENGTH)] for t in range(LENGTH)])
        assert (leak[~allowed] == 0).all() and (leak[allowed] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [lambda monkeypatch: None, halved], ids=["odd", "halved"])
def test_dropout_keeps_the_mean_and_its_gradient_is_that_of_the_same_draw(blocks, monkeypatch):
    blocks(monkeypatch)
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 12, 1, 4)))
        v = jnp.ones((1, 12, 1, 1))

        def out(x, rng):
            return attention(x, x, v, masks.causal(), dropout_rate=0.3, rng=rng, implementation="chunked")

        draws = jax.jit(jax.vmap(lambda r: out(x, r)))(jax.random.split(jax.random.key(3), 3000))
        np.testing.assert_allclose(np.mean(draws, 0), 1.0, atol=0.06)
        assert np.std(draws) > 0.1
        step = 1e-6 * jnp.asarray(np.random.default_rng(3).normal(size=x.shape))
        total = jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(out(x, jax.random.key(5))))))
        slope = (total(x + step)[0] - total(x - step)[0]) / 2
        np.testing.assert_allclose(np.vdot(total(x)[1], step), slope, rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((1, 100, 12, 64), (100, 100)), ((1, 4096, 12, 64), (256, 512)), ((32, 4096, 12, 64), (256, 256))],
    ids=["short", "long", "many"],
)
def test_sizes_of_blocks(shape, wanted, monkeypatch):
    monkeypatch.undo()
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert tiles.sizes(x, x) == wanted


@pytest.mark.slow
@pytest.mark.optimized
def test_memory_is_linear(monkeypatch):
    """Bytes of temporaries of forward and backward grow as T, where the reference's grow as T squared."""
    for name in ("QUERY_BLOCK", "KEY_BLOCK"):
        monkeypatch.setattr(tiles, name, 128)

    def temporaries(name, length):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        grad = jax.jit(
            jax.grad(lambda q, k, v: attention(q, k, v, masks.causal(), implementation=name).sum(), (0, 1, 2))
        )
        return grad.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries("chunked", 4096) < 2.6 * temporaries("chunked", 2048)
    assert temporaries("chunked", 2048) < temporaries("xla", 2048) / 4


@jax.jit
def gradients_with_bias(q, k, v, bias):
    def total(q, k, v, name):
        return jnp.sum(jnp.sin(attention(q, k, v, masks.causal(), bias=bias, implementation=name)))

    return [jax.grad(total, (0, 1, 2))(q, k, v, name) for name in ("xla", "chunked")]


@pytest.mark.parametrize("of", [1e9, 1e30, -1e6])
def test_a_large_number_on_all_scores_of_a_query_changes_no_gradient(of):
    """As additive padding does to a query that sees nothing else; float32 loses the log of the sum beside it."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 16, 2, 8)), jnp.float32) for _ in range(3))
    wanted, found = gradients_with_bias(q, k, v, np.where(np.arange(16) < 5, -of, 0.0).astype(np.float32))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), wanted, found)
