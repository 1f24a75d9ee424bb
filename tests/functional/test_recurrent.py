"""LSTM and GRU: against plain loops in float64, no document sees another, states go on, both modes of derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import recurrent
from jaxformer.functional.recurrent import LstmState, gru, lstm
from jaxformer.kernels import recurrence

B, T, D, H = 2, 11, 3, 4
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3], [1] * 5 + [2] * 6])


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def parameters(gates):
    return draw(D, gates * H, seed=1), draw(H, gates * H, seed=2), draw(gates * H, seed=3), draw(gates * H, seed=4)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm_by_hand(x, w, u, b, bias_hidden):
    h, c, out = np.zeros((len(x), H)), np.zeros((len(x), H)), []
    for t in range(x.shape[1]):
        i, f, g, o = np.split(x[:, t] @ w + b + h @ u + bias_hidden, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        out.append(h)
    return np.stack(out, 1)


def gru_by_hand(x, w, u, b, bias_hidden, *, after):
    h, out = np.zeros((len(x), H)), []
    for t in range(x.shape[1]):
        of_x, of_h = x[:, t] @ w + b, h @ u + bias_hidden
        r, z = (sigmoid(of_x[:, i * H : i * H + H] + of_h[:, i * H : i * H + H]) for i in (0, 1))
        inner = r * of_h[:, 2 * H :] if after else (r * h) @ u[:, 2 * H :] + bias_hidden[2 * H :]
        h = (1 - z) * np.tanh(of_x[:, 2 * H :] + inner) + z * h
        out.append(h)
    return np.stack(out, 1)


# name -> (the layer as a function of x, parameters and options; the same by hand)
LAYERS = {
    "lstm": (lambda x, p, **k: lstm(x, p[0], p[1], p[2] + p[3], **k), lstm_by_hand, parameters(4)),
    "gru": (lambda x, p, **k: gru(x, *p, **k), lambda *a: gru_by_hand(*a, after=True), parameters(3)),
    "gru as published": (
        lambda x, p, **k: gru(x, *p, reset_after=False, **k),
        lambda *a: gru_by_hand(*a, after=False),
        parameters(3),
    ),
}
RUN = {name: jax.jit(layer, static_argnames="reverse") for name, (layer, *_) in LAYERS.items()}
EACH = pytest.mark.parametrize("name", LAYERS)
MOST = pytest.mark.parametrize(
    "name, reverse",
    [
        (n, r) if n == "lstm" and not r else pytest.param(n, r, marks=pytest.mark.slow)
        for n in LAYERS
        for r in (False, True)
    ],
)


@EACH
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_equals_a_plain_loop(name, reverse, length):
    _, by_hand, p = LAYERS[name]
    x = draw(B, length, D)
    out, state = jax.device_get(RUN[name](x, p, reverse=reverse))
    turn = slice(None, None, -1 if reverse else 1)
    np.testing.assert_allclose(out, by_hand(x[:, turn], *p)[:, turn], atol=1e-14)
    last = state.hidden if name == "lstm" else state
    np.testing.assert_array_equal(last, out[:, 0 if reverse else -1])


@pytest.mark.slow
@EACH
def test_packed_documents_are_those_alone(name):
    layer, _, p = LAYERS[name]
    places = [(row, SEGMENTS[row] == segment) for row in range(B) for segment in np.unique(SEGMENTS[row])]

    @jax.jit
    def both_ways(x):
        return [
            (
                layer(x, p, segments=SEGMENTS, reverse=reverse)[0],
                [layer(x[row : row + 1, own], p, reverse=reverse)[0][0] for row, own in places],
            )
            for reverse in (False, True)
        ]

    for packed, alone in jax.device_get(both_ways(draw(B, T, D))):
        for (row, own), found in zip(places, alone, strict=True):
            np.testing.assert_allclose(packed[row, own], found, atol=1e-15)


@MOST
def test_nothing_leaks(name, reverse):
    """Gradients to other documents and to tokens not yet read are exactly zero; NaN in another document changes
    nothing."""
    layer, _, p = LAYERS[name]
    x = draw(B, T, D)
    dirty = x.copy()
    dirty[0, 4:7] = np.nan  # document 2 of row 0
    other = SEGMENTS != 2
    other[1] = True

    @jax.jit
    def run(x):  # the output, and the gradient by x of its sum over what is not poisoned
        def loss(x):
            out = layer(x, p, segments=SEGMENTS, reverse=reverse)[0]
            return jnp.sum(jnp.where(other[..., None], out, 0)), out

        gradient, out = jax.grad(loss, has_aux=True)(x)
        return out, gradient

    sums = jax.jit(jax.jacrev(lambda x: jnp.sum(layer(x, p, segments=SEGMENTS, reverse=reverse)[0], axis=-1)))
    jacobian = np.abs(sums(x)).sum(-1)  # [B, T, B, T]
    order = np.arange(T)[:, None] <= np.arange(T) if reverse else np.arange(T)[:, None] >= np.arange(T)
    seen = order & (SEGMENTS[:, :, None] == SEGMENTS[:, None])
    for row in range(B):
        np.testing.assert_array_equal(jacobian[row, :, row] > 0, seen[row])
        assert not jacobian[row, :, 1 - row].any()
    clean, poisoned = jax.device_get((run(x), run(dirty)))
    for one, two in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(one[other], two[other])
    assert np.isnan(poisoned[0][0, 4:7]).all()


@pytest.mark.slow
@EACH
def test_a_state_goes_on(name):
    """Two halves, the second from the first one's state, are the whole; so is one token at a time."""
    (*_, p), layer, x, segments = LAYERS[name], RUN[name], draw(B, T, D), SEGMENTS
    whole, last = layer(x, p, segments=segments)
    for cuts in ([6], list(range(1, T))):
        parts, state = [], None
        for part, of_part in zip(np.split(x, cuts, 1), np.split(segments, cuts, 1), strict=True):
            before = segments[:, sum(map(lambda each: each.shape[1], parts)) - 1] if parts else None
            if before is not None:  # a document that begins where the part does begins with no state
                same = (before == of_part[:, 0])[:, None]
                state = jax.tree.map(lambda s, same=same: np.where(same, s, 0), state)
            out, state = layer(part, p, segments=of_part, state=state)
            parts.append(out)
        np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-15)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-15), state, last)


@pytest.mark.slow
@MOST
def test_gradients_are_central_differences_and_agree_with_forward_mode(name, reverse):
    layer, _, p = LAYERS[name]
    x, weight, first = draw(B, T, D), draw(B, T, H, seed=7), draw(B, H, seed=8)
    state = LstmState(first, 2 * first) if name == "lstm" else first

    def loss(x, p, state):
        out, last = layer(x, p, segments=SEGMENTS, state=state, reverse=reverse)
        return jnp.sum(weight * out) + sum(jnp.sum(3 * s) for s in jax.tree.leaves(last))

    given = (x, p, state)
    run, forward = jax.jit(jax.value_and_grad(loss, (0, 1, 2))), jax.jit(lambda a, s: jax.jvp(loss, a, s)[1])
    _, grads = run(*given)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        step = jax.tree.map(lambda a, rng=rng: rng.normal(size=a.shape), given)
        ahead, behind = (run(*jax.tree.map(lambda a, s, e=e: a + e * s, given, step))[0] for e in (1e-6, -1e-6))
        along = sum(np.vdot(g, s) for g, s in zip(jax.tree.leaves(grads), jax.tree.leaves(step), strict=True))
        assert float(along) == pytest.approx((float(ahead) - float(behind)) / 2e-6, rel=1e-7, abs=1e-7)
        assert float(forward(given, step)) == pytest.approx(float(along), rel=1e-12, abs=1e-12)


@pytest.mark.slow
def test_the_dtypes():
    """bfloat16 in and out, with a cell state in float32; close to float32."""
    p = [jnp.asarray(each / 2, jnp.float32) for each in parameters(4)]
    x, run = jnp.asarray(draw(B, T, D), jnp.float32), jax.jit(lstm)
    exact, _ = run(x, *p[:3])
    out, state = run(x.astype(jnp.bfloat16), *p[:3])
    assert (out.dtype, state.hidden.dtype, state.cell.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.02)
    grads = jax.eval_shape(jax.grad(lambda p: jnp.sum(lstm(x.astype(jnp.bfloat16), *p)[0].astype(jnp.float32))), p[:3])
    assert {g.dtype for g in grads} == {jnp.dtype("float32")}


def test_the_backward_pass_has_one_product_for_the_weights():
    """Not one for each step: the loop of the backward pass holds only the products with the transposed weights."""
    p = [jnp.asarray(each) for each in parameters(4)]
    text = jax.jit(jax.grad(lambda u, x: jnp.sum(lstm(x, p[0], u, p[2])[0]))).lower(p[1], jnp.ones((B, T, D))).as_text()
    loops = text.count("stablehlo.while")
    assert loops == 2  # forward, backward
    products = [
        line for line in text.splitlines() if "dot_general" in line and f"{H}x{4 * H}xf64>" in line.split("->")[1]
    ]
    assert products and all(f"{B * T}x" in line for line in products)


def test_shapes_that_do_not_fit():
    w, u, b, _ = map(jnp.asarray, parameters(4))
    with pytest.raises(
        ValueError, match=r"^w_input: shape \(3, 16\); accepted for x \(2, 11, 5\), 4 gates: \(5, 16\)$"
    ):
        lstm(jnp.ones((B, T, 5)), w, u, b)
    with pytest.raises(ValueError, match=r"^w_hidden: shape \(4, 16\); .* 3 gates: \(4, 12\)$"):
        gru(jnp.ones((B, T, D)), w[:, :12], u, b[:12])


def test_document_starts():
    got = recurrent.document_starts(jnp.array([[1, 1, 2, 2]]), (1, 4))
    assert got.tolist() == [[True, False, True, False]]
    assert recurrent.document_starts(None, (1, 3), go_on=True).tolist() == [[False, False, False]]
    assert recurrence.reset((jnp.array([[jnp.nan], [1.0]]),), jnp.array([True, False]))[0].tolist() == [[0.0], [1.0]]
