"""Linear attention, FAVOR+ and Linformer as functions: the quadratic form, what must not be seen, features, errors."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import attention, masks
from jaxformer.functional.linear_attention import (
    ELU,
    attend,
    elu_plus_one,
    favor_attention,
    favor_features,
    favor_maps,
    linear_attention,
    orthogonal_directions,
)
from jaxformer.functional.linformer import linformer_attention

B, T, H, G, K, V = 2, 13, 4, 2, 4, 3
SEGMENTS = np.array([[1] * 2 + [2] * 8 + [3] * 3, [4] * 7 + [5] * 6])
THERE = np.array([[True] * 12 + [False], [False] + [True] * 12])
EARLY = np.arange(T)[None] % 3 == 1
MASKS = {
    "all": None,
    "padding": masks.padding(THERE),
    "causal": masks.causal(),
    "documents": masks.segments(SEGMENTS),
    "causal documents and padding": masks.causal() & masks.segments(SEGMENTS) & masks.padding(THERE),
    "prefixes": masks.prefix(np.repeat(EARLY, B, 0)) & masks.segments(SEGMENTS),
    "prefix": masks.prefix(jnp.array([3, 9])),
}
# The chunk of 5 ends inside documents, at their ends, and holds a whole one.
CASES = [("causal documents and padding", 5)]
SLOW = [
    ("prefixes", 5), ("all", 64), ("padding", 5), ("causal", 1), ("documents", 5), ("documents", 64),
    ("causal documents and padding", 64), ("prefix", 5),
]  # fmt: skip
EACH = pytest.mark.parametrize("name, chunk", CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW])


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


QUERY, KEY, VALUE, DIRECTIONS = (
    draw(*s, seed=i) for i, s in enumerate([(B, T, H, K), (B, T, G, K), (B, T, G, V), (6, K)])
)
SCALE = K**-0.25


def elu_by_hand(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def favor_by_hand(x, hyperbolic=False):
    along = x * SCALE @ DIRECTIONS.T
    along = np.concatenate([along, -along], -1) if hyperbolic else along
    return np.exp(along - np.square(x * SCALE).sum(-1, keepdims=True) / 2) / math.sqrt(along.shape[-1])


def quadratic(features, query, key, value, mask):
    """By all [T, T] weights, in NumPy."""
    see = masks.expand(mask, T, T)
    see = np.ones((B, H, T, T), bool) if see is None else np.broadcast_to(see, (B, H, T, T))
    key, value = (np.repeat(x, H // G, axis=2) for x in (key, value))
    weights = np.where(see, np.einsum("BTHM,BSHM->BHTS", features(query), features(key)), 0)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("BHTS,BSHK->BTHK", weights / np.where(total == 0, 1, total), value)


# name -> the function of (query, key, value, mask, chunk), and its features by hand
KINDS = {
    "elu": (lambda *a, chunk: linear_attention(*a, chunk=chunk), elu_by_hand),
    "positive": (lambda q, k, v, m, chunk: favor_attention(q, k, v, DIRECTIONS, m, chunk=chunk), favor_by_hand),
    "hyperbolic": (
        lambda q, k, v, m, chunk: favor_attention(q, k, v, DIRECTIONS, m, chunk=chunk, kind="hyperbolic"),
        functools.partial(favor_by_hand, hyperbolic=True),
    ),
}


@EACH
def test_equals_the_quadratic_form(name, chunk):

    @jax.jit
    def all_kinds(*arrays):
        return [function(*arrays, MASKS[name], chunk=chunk) for function, _ in KINDS.values()]

    for found, (_, features) in zip(all_kinds(QUERY, KEY, VALUE), KINDS.values(), strict=True):
        np.testing.assert_allclose(found, quadratic(features, QUERY, KEY, VALUE, MASKS[name]), atol=1e-14)


# FAVOR+ has all that the other has, and scales.
POSITIVE = ["all", "documents", "prefixes", "causal documents and padding"]
KIND_AND_MASK = [("elu", "causal documents and padding"), *(("positive", name) for name in POSITIVE)]


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", KIND_AND_MASK)
def test_gradients_are_central_differences_and_agree_with_forward_mode(kind, name):
    function, _ = KINDS[kind]
    weight, given = draw(B, T, H, V, seed=9), (QUERY, KEY, VALUE)

    def loss(*arrays):
        return jnp.sum(weight * function(*arrays, MASKS[name], chunk=5))

    step = tuple(draw(*x.shape, seed=7) for x in given)
    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    ahead, behind = (float(run(*(x + e * s for x, s in zip(given, step, strict=True)))[0]) for e in (1e-6, -1e-6))
    along = sum(np.vdot(g, s) for g, s in zip(run(*given)[1], step, strict=True))
    assert float(along) == pytest.approx((ahead - behind) / 2e-6, rel=1e-7, abs=1e-8)
    forward = jax.jit(lambda given, step: jax.jvp(loss, given, step)[1])(given, step)
    assert float(forward) == pytest.approx(float(along), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", [case for case in KIND_AND_MASK if case[1] != "all"])
def test_nothing_leaks(kind, name):
    """Gradients are exactly zero for all that is not seen, and not for what is seen."""
    function, _ = KINDS[kind]
    given = QUERY, KEY, VALUE

    @jax.jit
    def jacobian(key, value):  # [B, T of the output, B, T of key or value], the heads of a group together
        out = lambda *kv: jnp.sum(function(given[0], *kv, MASKS[name], chunk=5) ** 2, axis=(2, 3))  # noqa: E731
        return [jnp.abs(x).sum((4, 5)) for x in jax.jacrev(out, (0, 1))(key, value)]

    see = np.broadcast_to(masks.expand(MASKS[name], T, T), (B, 1, T, T))[:, 0]
    alone = see & (see.sum(-1) == 1)[..., None]  # the mean of one value, whatever its key
    for found, moves in zip(jax.device_get(jacobian(*given[1:])), (see & ~alone, see), strict=True):
        for row in range(B):
            assert not found[row, :, row][~see[row]].any() and (found[row, :, row][moves[row]] > 0).all()
            assert not found[row, :, 1 - row].any()


LONGEST = DIRECTIONS[np.argmax(np.linalg.norm(DIRECTIONS, axis=1))]
BAD = {
    "NaN": np.nan, "infinite": np.inf, "huge": 1e4, "beyond all squares": 1e30, "of the largest scale": LONGEST / SCALE,
}  # fmt: skip


@pytest.mark.parametrize(
    "kind, name",
    [
        ("positive", "causal documents and padding"),
        pytest.param("positive", "documents", marks=pytest.mark.slow),
        pytest.param("elu", "causal documents and padding", marks=pytest.mark.slow),
    ],
)
def test_what_is_hidden_changes_no_bit(kind, name):
    """Not even as NaN, infinite or so large that a maximum over all keys would push the others out of range; and every
    query that sees a NaN gets one. In float32, and with the gradients of what is not touched."""
    function, _ = KINDS[kind]
    q, k, v = (x.astype(np.float32) for x in (QUERY, KEY, VALUE))
    see = np.broadcast_to(masks.expand(MASKS[name], T, T), (B, 1, T, T))[:, 0]

    @jax.jit
    def both(key, value, used):
        def loss(key, value):
            out = function(q, key, value, MASKS[name], chunk=5)
            return jnp.sum(jnp.where(used[..., None, None], out, 0) ** 2), out

        grads, out = jax.grad(loss, (0, 1), has_aux=True)(key, value)
        return out, grads

    def with_at(x, place, value):
        x = x.copy()
        x[0, place] = value
        return x

    for place in (6, 9):  # in the second document of row 0, and at its end
        used = ~see[:, :, place] | (np.arange(B) == 1)[:, None]
        clean = jax.device_get(both(k, v, used))
        for what, bad in BAD.items():
            values = np.float32(bad), np.float32(bad if np.isscalar(bad) else 1e6)
            poisoned = (with_at(x, place, value) for x, value in zip((k, v), values, strict=True))
            found = jax.device_get(both(*poisoned, used))
            np.testing.assert_array_equal(found[0][used], clean[0][used])
            others = np.ones((B, T), bool)
            others[0, place] = False
            jax.tree.map(lambda a, b, o=others: np.testing.assert_array_equal(a[o], b[o]), found[1], clean[1])
            if what == "NaN":
                assert np.isnan(found[0][~used]).all() and (~used).any()


@pytest.mark.slow
@pytest.mark.parametrize("size", [-24.0, -45.0, -80.0])
def test_features_that_are_tiny_lose_neither_output_nor_gradient(size):
    """Of a token that sees itself alone: exp(-80) twice is no float32, and the square of exp(-48) is none either."""
    q, k, v = (jax.random.normal(jax.random.key(n), (2, 5, 1, 8), jnp.float32) for n in range(3))
    q, k = (x.at[0, 0].set(size) for x in (q, k))

    def total(q, k, v):
        return jnp.sum(linear_attention(q, k, v, masks.causal()) * v[:, ::-1])

    def quadratic(q, k, v):
        weights = jnp.einsum("bthk,bshk->bhts", elu_plus_one(q), elu_plus_one(k)) * jnp.tril(jnp.ones((1, 1, 5, 5)))
        return jnp.sum(jnp.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdims=True), v) * v[:, ::-1])

    found = jax.jit(jax.value_and_grad(total, (0, 1)))(q, k, v)
    with jax.enable_x64(True):
        exact = (jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v))
        expected = jax.device_get(jax.jit(jax.value_and_grad(quadratic, (0, 1)))(*exact))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_opposite_vectors_give_no_nan():
    """Weights that are small, and that are none in float32: the gradients are finite, the output right or 0."""
    directions = orthogonal_directions(jax.random.key(0), 256, 64)
    along, v = (
        jax.random.normal(jax.random.key(n), shape, jnp.float32) for n, shape in ((3, (64,)), (4, (1, 3, 1, 64)))
    )
    for norm, right in ((30.0, True), (300.0, False)):
        q = jnp.broadcast_to(along * norm / jnp.linalg.norm(along), (1, 3, 1, 64))

        def total(q, k):
            out = favor_attention(q, k, v, directions, masks.causal())
            return jnp.sum(out * v[:, ::-1]), out

        grads, out = jax.jit(jax.grad(total, (0, 1), has_aux=True))(q, -q)
        np.testing.assert_allclose(out[0, 0], v[0, 0] if right else 0, atol=1e-5)
        assert all(bool(jnp.isfinite(grad).all()) for grad in grads)


def test_a_state_goes_on():
    """The second half from the sums over the first is the whole, and one token at a time; FAVOR's scales go along."""
    for maps in (ELU, favor_maps(jnp.asarray(DIRECTIONS), "positive", K)):
        run = jax.jit(lambda *qkv, state, maps=maps: attend(*qkv, maps, masks.causal(), state=state, chunk=4))
        whole, last = run(QUERY, KEY, VALUE, state=None)
        for cuts in ([6], [6, 7, 8]):
            parts, state = [], None
            for q, k, v in zip(*(np.split(x, cuts, 1) for x in (QUERY, KEY, VALUE)), strict=True):
                out, state = run(q, k, v, state=state)
                parts.append(out)
            np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-15)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-13), state, last)


def kernel_error(features, orthogonal, kind="positive", draws=400):
    """Relative error of phi(x) . phi(y) as exp(x . y), root mean square over draws and unit vectors."""
    x, y = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (draw(16, 16, seed=1), draw(16, 16, seed=2)))
    count, exact = features // (2 if kind == "hyperbolic" else 1), np.exp((x * y).sum(1))

    @jax.vmap
    def error(rng):
        w = orthogonal_directions(rng, count, 16) if orthogonal else jax.random.normal(rng, (count, 16))
        return jnp.sum(favor_features(x, w, kind=kind) * favor_features(y, w, kind=kind), axis=1) / exact - 1

    return jnp.sqrt(jnp.mean(jnp.square(error(jax.random.split(jax.random.key(0), draws)))))


@pytest.mark.slow
def test_the_features_estimate_the_kernel():
    """The error falls as m^-1/2; orthogonal directions and hyperbolic features have less of it."""
    cases = ((16, False), (256, False), (16, True), (32, True), (32, True, "hyperbolic"))
    few, many, orthogonal, more, hyperbolic = map(float, jax.jit(lambda: [kernel_error(*case) for case in cases])())
    assert math.log(few / many) / math.log(256 / 16) == pytest.approx(0.5, abs=0.1)
    assert orthogonal < 0.95 * few
    assert hyperbolic < 0.85 * more


@pytest.mark.slow
def test_favor_is_softmax_attention_in_the_mean():
    small = 0.5 * QUERY, 0.5 * KEY, VALUE
    mask = masks.causal() & masks.segments(SEGMENTS)

    @jax.jit
    def both(*x):
        directions = orthogonal_directions(jax.random.key(0), 20000, K)
        return favor_attention(*x, directions, mask), attention(*x, mask)

    np.testing.assert_allclose(*both(*small), atol=0.03)


@pytest.mark.slow
def test_orthogonal_directions():
    """Orthogonal in blocks; lengths of normal vectors; a pure function of the key; uniform, signs included."""
    draw_some = jax.jit(orthogonal_directions, static_argnums=(1, 2))
    w, again, other = (np.asarray(draw_some(jax.random.key(seed), 11, 4)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(w, again)
    assert w.shape == (11, 4) and not np.allclose(w, other)
    products = w @ w.T
    for block in (slice(0, 4), slice(4, 8), slice(8, 11)):
        own = products[block, block]
        np.testing.assert_allclose(own, np.diag(np.diag(own)), atol=1e-5)
    many = np.asarray(draw_some(jax.random.key(0), 4000, 4))
    np.testing.assert_allclose(many.T @ many / 4000, np.eye(4), atol=0.06)
    np.testing.assert_allclose(many.mean(0), 0, atol=0.06)


def test_directions_are_those_of_a_qr_decomposition_without_lapack():
    """LAPACK's batched calls wait inside XLA's pool for a thread of the same pool: several at once, and all wait."""
    draw_some = jax.jit(orthogonal_directions, static_argnums=(1, 2))
    assert "lapack" not in draw_some.lower(jax.random.key(5), 48, 24).as_text()
    w = np.asarray(draw_some(jax.random.key(5), 48, 24)).reshape(2, 24, 24)
    q, r = np.linalg.qr(np.asarray(jax.random.normal(jax.random.split(jax.random.key(5))[0], (2, 24, 24)), np.float64))
    q *= np.sign(np.diagonal(r, axis1=-2, axis2=-1))[:, None]
    np.testing.assert_allclose(w / np.linalg.norm(w, axis=-1, keepdims=True), q, atol=3e-6)


def linformer_by_hand(query, key, value, w_key, w_value, there):
    per_head = lambda w: np.broadcast_to(w[:, None], (T, G, w.shape[-1])) if w.ndim == 2 else w  # noqa: E731
    key, value = (
        np.repeat(np.einsum("BSGK,SGk->BkGK", np.where(there[..., None, None], x, 0), per_head(w)), H // G, 2)
        for x, w in ((key, w_key), (value, w_value))
    )
    scores = np.exp(np.einsum("BTHK,BkHK->BHTk", query, key) / math.sqrt(K))
    return np.einsum("BHTk,BkHK->BTHK", scores / scores.sum(-1, keepdims=True), value)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(), (G,)])
def test_linformer(heads):
    """By hand, with padding, which changes nothing, not even as NaN; longer projections than the row."""
    w_key, w_value = draw(T + 2, *heads, 5, seed=5), draw(T + 2, *heads, 5, seed=6)
    wanted = linformer_by_hand(QUERY, KEY, VALUE, w_key[:T], w_value[:T], THERE)
    run = jax.jit(lambda *a: linformer_attention(QUERY, *a, w_key, w_value, masks.padding(THERE)))
    found = run(KEY, VALUE)
    np.testing.assert_allclose(found, wanted, atol=1e-14)
    poisoned = (np.where(THERE[..., None, None], x, np.nan) for x in (KEY, VALUE))
    np.testing.assert_array_equal(run(*poisoned), found)


@pytest.mark.slow
def test_dtypes():
    """bfloat16 in and out, features and sums in float32; close to float64."""
    given = [jnp.asarray(x, jnp.bfloat16) for x in (QUERY, KEY, VALUE)]
    wide = [np.asarray(x, np.float64) for x in given]
    out, sums = jax.jit(lambda *a: attend(*a, ELU, masks.causal(), chunk=4))(*given)
    assert (out.dtype, sums.sums.dtype, sums.shift.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    np.testing.assert_allclose(out.astype(np.float64), jax.jit(linear_attention)(*wide, masks.causal()), atol=0.01)
    assert jax.eval_shape(favor_features, given[0], DIRECTIONS).dtype == jnp.float32
    np.testing.assert_allclose(elu_plus_one(jnp.array([-200.0, 0.0, 2.0])), [np.exp(-200.0), 1.0, 3.0], rtol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, name", [("positive", "causal documents"), ("elu", "causal documents"), ("positive", "documents")]
)
def test_memory_and_work_are_linear(kind, name):
    """Temporaries of forward and backward grow no faster than the row, and hold no state for each token."""
    with jax.enable_x64(False):
        found = {}
        for length in (2048, 8192):
            segments = jnp.arange(length)[None] // 1000
            mask = masks.segments(segments) & masks.Mask(causal=name != "documents")
            arrays = [jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)] * 3
            directions = jnp.ones((128, 32))
            run = favor_attention if kind == "positive" else lambda q, k, v, w, mask: linear_attention(q, k, v, mask)
            loss = lambda *qkv: jnp.sum(run(*qkv, directions, mask))  # noqa: B023, E731
            compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile()
            found[length] = compiled.memory_analysis().temp_size_in_bytes
    features = 128 if kind == "positive" else 32
    assert found[8192] < 4.4 * found[2048]
    assert found[8192] < 0.25 * 4 * 8192 * 2 * features * 33  # a state for each token


REFUSED = {
    "window": (
        masks.causal() & masks.window(3),
        r"a mask with window; accepted: causality, a prefix, segments and pad",
    ),
    "dense": (masks.dense(np.ones((T, T), bool)), "a mask with dense; accepted"),
    "an array": (np.ones((T, T), bool), r"mask is a ndarray; accepted: a Mask"),
    "shape": (masks.padding(np.ones((B, 3), bool)), r"Mask: keys has shape \(2, 3\)"),
}


def test_refusals():
    for mask, line in REFUSED.values():
        with pytest.raises(ValueError, match=line):
            linear_attention(QUERY, KEY, VALUE, mask)
    with pytest.raises(
        ValueError, match=r"^linear_attention: 13 queries and 5 keys with a mask of places or segments; "
    ):
        linear_attention(QUERY, KEY[:, :5], VALUE[:, :5], masks.causal())
    with pytest.raises(ValueError, match=r"^linear_attention: 4 query heads are not a multiple of 3 key heads$"):
        linear_attention(QUERY, draw(B, T, 3, K), draw(B, T, 3, K))
    with pytest.raises(ValueError, match="the same batch, length, heads and head width"):
        linear_attention(QUERY, KEY, VALUE[:, :5])
    with pytest.raises(
        ValueError, match=r"^favor_features: directions \(6, 5\); accepted: \(M, 4\), the width of heads$"
    ):
        favor_attention(QUERY, KEY, VALUE, draw(6, 5))
    with pytest.raises(ValueError, match=r"^favor_features: kind 'trig'; accepted: positive, hyperbolic$"):
        favor_features(QUERY, DIRECTIONS, kind="trig")
    with pytest.raises(ValueError, match=r"^linformer_attention: a mask of places or segments; it mixes a whole row; "):
        linformer_attention(QUERY, KEY, VALUE, draw(T, 5), draw(T, 5), masks.causal())
    with pytest.raises(
        ValueError, match=r"a projection \(3, 5\) of 13 tokens and 2 heads; accepted: \(S, k\) or \(S, 2, k\)"
    ):
        linformer_attention(QUERY, KEY, VALUE, draw(3, 5), draw(T, 5))
