"""Attention: peers, the blocked path, returned weights, dropout, dtypes, and what is refused."""

import functools
import re
import types

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from attention_cases import BATCH, HEADS, LONG, SHORT, WIDTH, bias_cases, mask_cases

from jaxformer import masks
from jaxformer.functional.attention import attention
from jaxformer.kernels.attention import xla

JAX_NN = {
    "plain": ({}, lambda m: {}),
    "causal": ({"mask": masks.causal()}, lambda m: {"is_causal": True}),
    "window": ({"mask": masks.causal() & masks.window(4)}, lambda m: {"is_causal": True, "local_window_size": (3, 0)}),
    "two_sided_window": ({"mask": masks.window(4)}, lambda m: {"local_window_size": (3, 3)}),
    "array": ("array", lambda m: {"mask": m}),
}


@pytest.mark.parametrize("name, groups", [
    *(pytest.param(name, 2, marks=() if name in ("window", "array") else pytest.mark.slow) for name in JAX_NN),
    pytest.param("causal", HEADS, marks=pytest.mark.slow), ("causal", 1),
])  # fmt: skip
def test_jax_nn_agrees(name, groups):
    """Values, and gradients by query, key, value and bias (in float32: jax.nn has no wider softmax)."""
    ours, theirs = JAX_NN[name]
    array = np.array(mask_cases(SHORT)["array"][1])
    array[..., 0] = True  # jax.nn gives a query without keys the mean of all values
    ours = {"mask": jnp.array(array)} if ours == "array" else ours

    arrays = [*cases.inputs(SHORT, groups, jnp.float32), jnp.array(bias_cases(SHORT)["array"][1], jnp.float32)[None]]
    weight = jnp.array(np.random.default_rng(1).normal(size=(BATCH, SHORT, HEADS, WIDTH)), jnp.float32)

    def loss(function, query, key, value, bias, **options):
        return jnp.sum(function(query, key, value, bias=bias, **options) * weight)

    values_and_grads = [
        jax.jit(jax.value_and_grad(functools.partial(loss, function, **options), argnums=(0, 1, 2, 3)))(*arrays)
        for function, options in ((attention, ours), (jax.nn.dot_product_attention, theirs(jnp.array(array))))
    ]
    for got, wanted in zip(*map(jax.tree.leaves, values_and_grads), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "mask, bias",
    [
        pytest.param("causal", "alibi", marks=pytest.mark.slow),
        pytest.param("causal_window_segments_padding", "none", marks=pytest.mark.slow),
        ("causal_array", "array"),
    ],
)
def test_blocks_of_queries_equal_the_whole(mask, bias, monkeypatch):
    arrays, described, added = cases.inputs(LONG, 2, jnp.float32), mask_cases(LONG)[mask][0], bias_cases(LONG)[bias][0]

    def run():
        def out_and_grads(*arrays):
            out, backward = jax.vjp(lambda *a: attention(*a, described, bias=added), *arrays)
            return out, *backward(jnp.cos(out))

        return jax.jit(out_and_grads)(*arrays)

    blocked = run()
    monkeypatch.setattr(xla, "QUERY_BLOCK", LONG)
    for got, wanted in zip(blocked, run(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "shape, window",
    [
        ((2, 4, LONG, LONG), 30),
        *(pytest.param((*shape, LONG), 30, marks=pytest.mark.slow) for shape in ((4,), (1, LONG), (2, 1, 1))),
        *(pytest.param((*shape, LONG), None, marks=pytest.mark.slow) for shape in ((1, LONG), (4,))),
    ],
    ids=str,
)
def test_a_bias_over_blocks_of_queries_has_the_gradient_of_the_whole(shape, window, monkeypatch):
    """An array; or, with two axes, a function that looks a table of distances up, as T5's does."""
    described = masks.causal() if window is None else masks.causal() & masks.window(window)
    with jax.enable_x64(True):
        arrays = cases.inputs(LONG, 2, jnp.float64)
        learned = jnp.array(np.random.default_rng(5).normal(size=shape))

        def loss(x):
            bias = x if x.ndim > 2 else lambda q, k: x[:, q[:, None] - k[None, :]]
            return jnp.sum(jnp.sin(attention(*arrays, described, bias=bias)))

        blocked = jax.jit(jax.grad(loss))(learned)
        monkeypatch.setattr(xla, "QUERY_BLOCK", LONG)
        np.testing.assert_allclose(blocked, jax.jit(jax.grad(loss))(learned), rtol=1e-9, atol=1e-12)
        assert np.abs(blocked).max() > 1e-3


def score_shapes(function, *arrays):
    """The last two axes of every array of rank 4 or more in the jaxpr, inner calls included."""
    shapes, todo = set(), [jax.make_jaxpr(function)(*arrays).jaxpr]
    while todo:
        jaxpr = todo.pop()
        for equation in jaxpr.eqns:
            shapes |= {v.aval.shape[-2:] for v in equation.outvars if len(getattr(v.aval, "shape", ())) >= 4}
            todo += [getattr(p, "jaxpr", p) for p in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr)
                     if is_jaxpr(p)]  # fmt: skip
    return shapes


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def test_long_causal_attention_never_holds_a_square_of_scores():
    length, block = 4 * xla.QUERY_BLOCK, xla.QUERY_BLOCK
    query, key, value = (jax.ShapeDtypeStruct((1, length, 2, 4), jnp.float32),) * 3
    segments = jnp.zeros((1, length), int)

    def widest(mask):
        shapes = score_shapes(lambda *a: attention(*a, mask), query, key, value)
        return {t: max(s for t2, s in shapes if t2 == t) for t, _ in shapes if t in (block, length)}

    assert widest(masks.causal() & masks.segments(segments))[block] == length
    assert (length, length) not in score_shapes(lambda *a: attention(*a, masks.causal()), query, key, value)
    assert widest(masks.causal() & masks.window(17))[block] == block + 16


@pytest.mark.parametrize(
    ("length", "window", "number"), [(100, None, 1), (1024, None, 8), (4096, None, 8), (4100, None, 8), (4096, 64, 32)]
)
def test_blocks_of_queries_cover_the_row_and_are_few(length, window, number):
    """Each adds to the gradients of all the keys it reads; with a window those are few, so blocks stay small."""
    spans = xla.causal_spans(length, window)
    assert len(spans) == number
    assert [q for (start, end), _ in spans for q in range(start, end)] == list(range(length))
    for (start, end), keys in spans:
        assert keys == (0 if window is None else max(0, start - window + 1), end)


@pytest.mark.parametrize(
    "queries, keys", [(3, 7), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((1, 6), (5, 3)))]
)
def test_cross_attention(queries, keys):
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.normal(size=s) for s in [(BATCH, queries, 4, 3), (BATCH, keys, 2, 3), (BATCH, keys, 2, 5)]
    )  # values wider than keys
    sides = np.array([[0] * queries, [1] * queries]), np.array([[0] * (keys - 1) + [1], [1] * keys])
    allowed = (sides[0][:, :, None] == sides[1][:, None, :])[:, None]
    with jax.enable_x64(True):
        run = jax.jit(functools.partial(attention, scale=0.3))
        out = run(query, key, value, masks.segments(*map(jnp.array, sides)))
    assert out.shape == (BATCH, queries, 4, 5)
    np.testing.assert_allclose(
        out, reference.attention(query, key, value, allowed=allowed, scale=0.3), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("length", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
def test_returned_weights(length):
    mask, allowed = mask_cases(length)["causal_padding"]
    with jax.enable_x64(True):
        query, key, value = cases.inputs(length, 2, jnp.float64)
        run = jax.jit(functools.partial(attention, soft_cap=3.0), static_argnames="return_weights")
        out, weights = run(query, key, value, mask, return_weights=True)
        alone = run(query, key, value, mask)
    query, key, value, weights = (np.asarray(x) for x in (query, key, value, weights))
    sees = np.broadcast_to(allowed.any(axis=-1), (BATCH, HEADS, length))
    np.testing.assert_allclose(weights.sum(axis=-1), sees.astype(float), rtol=1e-12)
    np.testing.assert_allclose(
        weights, reference.attention_weights(query, key, allowed=allowed, soft_cap=3.0), atol=1e-12
    )
    np.testing.assert_allclose(out, np.einsum("bhts,bshk->bthk", weights, np.repeat(value, 2, axis=2)), atol=1e-12)
    np.testing.assert_allclose(out, alone, atol=1e-12)


def test_returned_weights_are_float32_whatever_the_values_are():
    run = jax.jit(functools.partial(attention, return_weights=True))
    out, weights = run(*cases.inputs(SHORT, 2, jnp.bfloat16), masks.causal())
    assert (out.dtype, weights.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(np.sum(weights, axis=-1), 1, rtol=1e-6)


def test_dropout_keeps_the_stated_share_and_scales_the_rest():
    query, key, value = cases.inputs(64, HEADS, jnp.float32)
    rate = 0.3
    run = jax.jit(functools.partial(attention, dropout_rate=rate), static_argnames="return_weights")
    plain = run(query, key, value, return_weights=True)[1]
    out, weights = run(query, key, value, rng=jax.random.key(3), return_weights=True)
    kept = np.asarray(weights) != 0
    n = kept.size
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / n)
    np.testing.assert_allclose(np.asarray(weights)[kept], np.asarray(plain)[kept] / (1 - rate), rtol=1e-5)
    np.testing.assert_allclose(out, np.einsum("bhts,bshk->bthk", weights, value), atol=1e-5)
    np.testing.assert_allclose(out, run(query, key, value, rng=jax.random.key(3)), rtol=1e-6)
    assert not np.allclose(out, run(query, key, value, rng=jax.random.key(4)))


def test_dropout_without_rng_or_rate_is_none():
    arrays = cases.inputs(SHORT, 2, jnp.float32)
    run = jax.jit(attention, static_argnames="dropout_rate")
    plain = run(*arrays)
    np.testing.assert_array_equal(plain, run(*arrays, dropout_rate=0.5))
    np.testing.assert_array_equal(plain, run(*arrays, rng=jax.random.key(0)))


def test_every_block_and_head_drops_differently():
    length, block = 2 * xla.QUERY_BLOCK, xla.QUERY_BLOCK
    query = np.zeros((1, length, 2, 2), np.float32)
    value = np.eye(length, dtype=np.float32)[None, :, None].repeat(2, axis=2)
    attend = jax.jit(lambda *arrays, rng: attention(*arrays, masks.causal(), dropout_rate=0.5, rng=rng))
    out = np.asarray(attend(query, query, value, rng=jax.random.key(0)))
    kept = out[0, :, :, :] != 0  # values are one-hot: the output is the weights, [T, H, S]
    first, second = kept[block - 1, :, :block], kept[length - 1, :, :block]
    assert 0.3 < (first == second).mean() < 0.7 and 0.3 < (first[0] == first[1]).mean() < 0.7


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_bfloat16_is_close_to_float64(length):
    """Scores and softmax are wide: what is lost is the rounding of inputs, weights and outputs (2^-9 each)."""
    arrays = cases.inputs(length, 2, jnp.bfloat16)
    mask, allowed = mask_cases(length)["causal_segments"]
    out = jax.jit(lambda *a: attention(*a, mask))(*arrays)
    assert out.dtype == jnp.bfloat16
    wanted = reference.attention(*(np.asarray(a, np.float64) for a in arrays), allowed=allowed)
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=4 * 2**-9 * np.abs(arrays[2]).max().item())


def test_huge_scores_do_not_overflow():
    query, key, value = cases.inputs(SHORT, HEADS, jnp.float32)

    @jax.jit
    def run(query):
        out, backward = jax.vjp(lambda q: attention(q, key, value), query)
        return out, backward(out)[0]

    out, grad = run(np.asarray(query) * 1e30)
    best = np.argmax(np.einsum("bthk,bshk->bhts", query, key), axis=-1)
    wanted = np.take_along_axis(np.moveaxis(np.asarray(value), 2, 1), best[..., None], axis=2)
    np.testing.assert_allclose(np.moveaxis(np.asarray(out), 2, 1), wanted, rtol=1e-6)
    assert np.isfinite(grad).all()


def test_under_vmap():
    query, key, value = cases.inputs(SHORT, 2, jnp.float32)
    mapped = jax.vmap(lambda *a: attention(*(x[None] for x in a), masks.causal())[0])
    both = jax.jit(lambda *a: (mapped(*a), attention(*a, masks.causal())))(query, key, value)
    np.testing.assert_allclose(*both, rtol=1e-6)


X = jnp.zeros((2, 3, 4, 6))
WRONG = [
    (dict(query=X[0]), r"query has shape \(3, 4, 6\); accepted: 4 axes"),
    (dict(value=X[:, :2]), r"key \(2, 3, 4, 6\) and value \(2, 2, 4, 6\) differ in batch, length or heads"),
    (dict(query=X[:1]), r"query \(1, 3, 4, 6\) and key \(2, 3, 4, 6\) differ in batch or head width"),
    (dict(query=X[..., :5]), "differ in batch or head width"),
    (dict(key=X[:, :, :3], value=X[:, :, :3]), "4 query heads are not a multiple of 3 key heads"),
    (dict(implementation="flash"), "implementation 'flash'; accepted: auto, .*xla"),
    (dict(dropout_rate=1.0), "dropout_rate 1.0; accepted: 0 <= rate < 1"),
    (dict(soft_cap=0.0), "soft_cap 0.0; accepted: None, or a number above 0"),
    (dict(bias=jnp.zeros((3, 3, 3))), r"bias has shape \(3, 3, 3\); accepted: what broadcasts to \(2, 4, 3, 3\)"),
    (dict(mask=jnp.ones((2, 3, 3), bool)), r"dense has shape \(2, 3, 3\); accepted: what broadcasts to \(2, 4, 3, 3\)"),
    (dict(mask=masks.padding(X[:, 0, :, 0] > 0)), r"keys has shape \(2, 4\); accepted: what broadcasts to \(2, 3\)"),
    (dict(mask=masks.Mask(keys=jnp.ones(3, bool))), r"keys has shape \(3,\)"),
    (dict(mask=masks.segments(jnp.ones((3, 3)))), r"query_segments has shape \(3, 3\)"),
    (
        dict(mask=masks.Mask(prefix=jnp.ones((2, 3), int))),
        r"prefix has shape \(2, 3\); accepted: what broadcasts to \(2,\)",
    ),
    (dict(mask=masks.Mask(query_segments=jnp.ones((2, 3)))), "query_segments and key_segments come together"),
    (dict(mask=masks.Mask(key_index=jnp.arange(4))), r"key_index has shape \(4,\)"),
    (dict(key=X[:, :, :0], value=X[:, :, :0]), "4 query heads are not a multiple of 0 key heads"),
    (dict(query=X[..., :0], key=X[..., :0]), "have heads of width 0; accepted: 1 up"),
    (dict(implementation="bogus", return_weights=True), "implementation 'bogus'; accepted: auto, .*xla"),
    *[
        (
            dict(implementation=name, return_weights=True),
            f"implementation '{name}' returns no weights; accepted there: auto, xla",
        )
        for name in ("chunked", "splash", "cudnn")
    ],
    *[
        (
            dict(implementation=name, bias=lambda q, k: jnp.zeros((3, q.size, k.size))),
            r"bias, a function, returns shape \(3, 3, 3\); accepted: what broadcasts to \(2, 4, 3, 3\)",
        )
        for name in ("auto", "xla", "chunked")
    ],
]


@pytest.mark.parametrize("change, message", WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        attention(**{"query": X, "key": X, "value": X, **change})


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", [jnp.int32, bool, jnp.complex64])
def test_what_is_no_float_is_refused(name, dtype):
    """Integers gave zeros."""
    with pytest.raises(TypeError, match=rf"{name} has dtype {jnp.dtype(dtype)}; accepted: floats \(float32, bfloat16"):
        attention(**{"query": X, "key": X, "value": X, name: X.astype(dtype)})


@pytest.mark.parametrize("implementation", ["auto", pytest.param("xla", marks=pytest.mark.slow), "chunked"])
@pytest.mark.parametrize("axis", [*(pytest.param(x, marks=pytest.mark.slow) for x in "BH"), "T", "S"])
def test_nothing_to_attend_to_gives_zeros(axis, implementation):
    """chunked divided by zero."""
    size = {"B": 2, "T": 3, "S": 5, "H": 4} | {axis: 0}
    query = jnp.ones((size["B"], size["T"], size["H"], 6))
    key, value = (jnp.ones((size["B"], size["S"], size["H"] // 2, n), jnp.bfloat16) for n in (6, 7))
    for options in {}, {"soft_cap": 2.0}, {"bias": lambda q, k: q[:, None] - k[None, :]}, {"mask": masks.window(2)}:

        def total(*arrays, options=options):
            out = attention(*arrays, implementation=implementation, **options)
            return jnp.sum(out.astype(jnp.float32)), out

        grads, out = jax.grad(total, (0, 1, 2), has_aux=True)(query, key, value)
        assert out.shape == (*query.shape[:3], 7) and out.dtype == jnp.bfloat16 and not out.any()
        for grad, array in zip(grads, (query, key, value), strict=True):
            assert grad.shape == array.shape and grad.dtype == array.dtype and not grad.any()
    if implementation != "chunked":
        _, weights = attention(query, key, value, implementation=implementation, return_weights=True)
        assert weights.shape == (size["B"], size["H"], size["T"], size["S"]) and weights.dtype == jnp.float32


@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_one_number_is_a_bias(implementation):
    arrays = cases.inputs(LONG, 2, jnp.float32)
    biases = None, jnp.float32(3), lambda q, k: jnp.float32(3)
    run = lambda *x: [attention(*x, masks.causal(), bias=bias, implementation=implementation) for bias in biases]  # noqa: E731
    plain, *found = jax.jit(run)(*arrays)
    for got in found:
        np.testing.assert_allclose(got, plain, rtol=1e-5, atol=1e-6)


def test_auto_says_what_returns_the_weights(caplog):
    with caplog.at_level("INFO", "jaxformer"):
        jax.eval_shape(functools.partial(attention, return_weights=True), X, X, X)
    assert "attention: auto is xla for 3 queries" in caplog.text


def test_a_mask_that_is_not_bool_is_refused():
    with pytest.raises(TypeError, match="mask has dtype float32; accepted: an array of bool, or a Mask"):
        attention(X, X, X, jnp.ones((3, 3)))
    with pytest.raises(TypeError, match=r"mask is a function; accepted: .* a Mask such as causal\(\)"):
        attention(X, X, X, masks.causal)


@pytest.mark.parametrize(
    ("platform", "length", "added", "said"),
    [
        ("cpu", 8, None, "auto is xla for 8 queries x 8 keys, 2 heads of 64, float32, on cpu$"),
        ("tpu", 256, None, "auto is xla for .*, on tpu; splash is taken from 1024 queries on$"),
        ("tpu", 1024, np.zeros(1024), "auto is xla for .*, on tpu; splash cannot do a bias$"),
        (
            "cuda", 512, np.zeros(512),
            r"xla for .*, on cuda; cudnn cannot do float32 \(float16 and bfloat16\); flash_gpu cannot do a bias that",
        ),
    ],
)  # fmt: skip
def test_auto_says_what_it_is_and_why_not_the_platforms_own(platform, length, added, said, monkeypatch, caplog):
    x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)
    attend = lambda **options: jax.eval_shape(lambda x: attention(x, x, x, masks.causal(), bias=added, **options), x)  # noqa: E731
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if platform == "cuda" else platform)
    monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(compute_capability="9.0")])
    with caplog.at_level("INFO", "jaxformer"):
        attend(implementation="xla")
        assert not caplog.messages
        attend()
    (line,) = caplog.messages
    assert re.search(said, line), line
