"""Layers against float64 NumPy; their dtypes; the gradients of the products that carry a rule of their own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from jax.test_util import check_grads

from jaxformer.functional import layers
from jaxformer.kernels.columns import by_columns
from jaxformer.kernels.matmul import add_bias, product, times_transpose, transposed_product

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 12)) * 3 + 1
SCALE, BIAS = RNG.normal(size=12), RNG.normal(size=12)


def float64(function, *arrays, **options):
    """The function under x64, compiled, as NumPy."""
    with jax.enable_x64(True):
        return np.asarray(jax.jit(lambda *a: function(*a, **options))(*map(jnp.array, arrays)))


def test_linear_contracts_the_last_axis():
    w, b = RNG.normal(size=(12, 3, 4)), RNG.normal(size=(3, 4))
    wanted = np.einsum("btd,dhk->bthk", X, w)
    np.testing.assert_allclose(float64(layers.linear, X, w), wanted, rtol=1e-12)
    np.testing.assert_allclose(float64(layers.linear, X, w, b), wanted + b, rtol=1e-12)
    np.testing.assert_allclose(float64(layers.linear, X[0, 0], w[:, :, 0]), wanted[0, 0, :, 0], rtol=1e-12)


@pytest.mark.parametrize("rows", [1, 3, 64, 65])
def test_a_weight_stored_by_columns_is_the_same_weight(rows):
    x, w, b = RNG.normal(size=(rows, 3, 4)), RNG.normal(size=(3, 4, 5)), RNG.normal(size=5)

    def of_two_axes(x, w, b):
        return layers.linear(x, by_columns(w, 2), b, num_inputs=2)

    def of_one_axis(x, w):
        return layers.linear_of(jnp.tanh, (x,), by_columns(w))

    wanted = np.einsum("bhk,hkd->bd", x, w)
    np.testing.assert_allclose(float64(of_two_axes, x, w, b), wanted + b, rtol=1e-12, atol=1e-12)
    flat, matrix = x.reshape(rows, 12), w.reshape(12, 5)
    np.testing.assert_allclose(float64(of_one_axis, flat, matrix), np.tanh(flat) @ matrix, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(12,), (1, 12), (1, 1, 12), (2, 12)], ids=str)
def test_products_of_few_rows_in_bfloat16(shape):
    """One row is multiplied as two, which nobody may see."""
    x, w, table = (jnp.array(RNG.normal(size=size), jnp.bfloat16) for size in (shape, (12, 3, 4), (7, 12)))
    exact_x, exact_w, exact_table = (np.asarray(a, np.float64) for a in (x, w, table))
    found = jax.jit(lambda x, w: layers.linear(x, by_columns(w)))(x, w)
    assert found.shape == (*shape[:-1], 3, 4) and found.dtype == jnp.bfloat16
    wanted = np.einsum("...d,dhk->...hk", exact_x, exact_w)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0.01, atol=0.02)
    logits = jax.jit(layers.unembed)(x, table)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, exact_x @ exact_table.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(12, 5), (12, 30)], ids=["narrow", "wide"])
def test_gradients_of_linear(shape):
    """Both ways of the weight's gradient: the narrower operand is the one that is transposed."""
    w, b = RNG.normal(size=shape), RNG.normal(size=shape[1])
    with jax.enable_x64(True):
        check_grads(
            jax.jit(layers.linear), tuple(map(jnp.array, (X, w, b))), order=1, modes=["rev"], atol=1e-6, rtol=1e-6
        )


def test_gradients_of_product():
    a, b = RNG.normal(size=(2, 3, 4)), RNG.normal(size=(2, 5, 4))
    with jax.enable_x64(True):
        arrays = tuple(map(jnp.array, (a, b)))
        run = jax.jit(lambda a, b: product("btk,bsk->bts", a, b, jnp.float64))
        check_grads(run, arrays, order=2, modes=["rev"])


@pytest.mark.parametrize("compute", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_weights_stay_float32_and_so_do_their_gradients(compute):
    x, w, b = jnp.array(X, compute), jnp.array(RNG.normal(size=(12, 7)), jnp.float32), jnp.zeros(7)

    def total(x, w, b):
        out = layers.linear(x, w, b)
        return jnp.sum(out.astype(jnp.float32)), out

    grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(x, w, b)
    assert out.dtype == compute and [g.dtype for g in grads] == [compute, jnp.float32, jnp.float32]
    exact = np.asarray(x, np.float64)
    # The sum over tokens is accumulated and kept in float32: far closer than bfloat16's 2^-9.
    np.testing.assert_allclose(grads[1], np.repeat(exact.sum(axis=(0, 1))[:, None], 7, axis=1), rtol=1e-5)
    np.testing.assert_allclose(
        np.asarray(out, np.float64), exact @ np.asarray(w, np.float64), atol=0.2 if compute == jnp.bfloat16 else 1e-5
    )


@pytest.mark.parametrize("width", [128, 127])  # in halves, and not
@pytest.mark.parametrize("shape", [(512, 256), (512, 64), (8, 256)])
def test_products_with_a_transpose(shape, width):
    """Equal to float64 products of the same bfloat16 numbers."""
    rows, other = shape
    x, g, w = (
        jnp.asarray(np.random.default_rng(i).normal(size=size), jnp.bfloat16)
        for i, size in enumerate([(rows, width), (rows, other), (other, width)])
    )
    wide = [np.asarray(a, np.float64) for a in (x, g, w)]
    both = jax.jit(lambda x, g, w: (transposed_product(x, g, jnp.float32), times_transpose(x, w, jnp.float32)))(x, g, w)
    np.testing.assert_allclose(both[0], wide[0].T @ wide[1], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(both[1], wide[0] @ wide[2].T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gradient_of_a_bias_is_summed_in_its_own_dtype(dtype):
    """4096 times 1/256 is 16; a sum in bfloat16 stays at 1."""
    x, b = jnp.zeros((4096, 8), dtype), jnp.zeros((8,), jnp.float32)
    _, back = jax.vjp(add_bias, x, b)
    d_x, d_b = back(jnp.full((4096, 8), 1 / 256, dtype))
    assert d_b.dtype == jnp.float32 and (d_b == 16).all() and d_x.dtype == x.dtype


@pytest.mark.optimized
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's CPU backend")
def test_bfloat16_products_have_no_float32_operands():
    """XLA's CPU backend makes float32 products of those whose operand it takes for a transpose."""
    x, g, w = (jnp.ones(size, jnp.bfloat16) for size in [(512, 128), (512, 256), (256, 128)])
    for function, one, two, out in (
        (transposed_product, x, g, (128, 256)),
        (transposed_product, g, x, (256, 128)),
        (times_transpose, x, w, (512, 256)),
    ):
        program = jax.jit(lambda a, b, f=function: f(a, b, jnp.float32))
        text = program.lower(one, two).compile().as_text()
        sizes = {tuple(map(int, found.split(","))) for found in re.findall(r"f32\[(\d+,\d+)\]", text)}
        assert sizes <= {out, out[::-1]}, sizes


def test_gradients_of_linear_for_each_example():
    x, w = jnp.array(X, jnp.float32), jnp.array(RNG.normal(size=(12, 7)), jnp.float32)

    def each(x):
        return jax.grad(lambda w: jnp.sum(jnp.sin(layers.linear(x, w))))(w)

    together = jax.jit(jax.vmap(each))(x)
    alone = jax.jit(each)
    for row, grad in zip(np.asarray(x), together, strict=True):
        np.testing.assert_allclose(grad, alone(row), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_layer_norm(epsilon):
    wanted = reference.layer_norm(X, SCALE, BIAS, epsilon)
    np.testing.assert_allclose(float64(layers.layer_norm, X, SCALE, BIAS, epsilon=epsilon), wanted, rtol=1e-10)
    wanted = reference.layer_norm(X, SCALE, 0.0, epsilon)
    np.testing.assert_allclose(float64(layers.layer_norm, X, SCALE, epsilon=epsilon), wanted, rtol=1e-10)


@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_rms_norm(epsilon):
    wanted = reference.rms_norm(X, SCALE, epsilon)
    np.testing.assert_allclose(float64(layers.rms_norm, X, SCALE, epsilon=epsilon), wanted, rtol=1e-10)


@pytest.mark.parametrize(
    ("norm", "arrays"),
    [
        (layers.layer_norm, (X, SCALE, BIAS)),
        pytest.param(layers.layer_norm, (X, SCALE), marks=pytest.mark.slow),
        (layers.rms_norm, (X, SCALE)),
    ],
    ids=["layer_norm", "layer_norm without bias", "rms_norm"],
)
def test_gradients_of_norms(norm, arrays):
    with jax.enable_x64(True):
        check_grads(jax.jit(norm), tuple(map(jnp.array, arrays)), order=2, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("norm", [layers.layer_norm, layers.rms_norm])
def test_norms_reduce_no_axis_of_one(norm):
    """XLA shares a reduction out by its first axis; one row is normed as its tokens are, bit for bit."""
    x, g = (jnp.array(RNG.normal(size=(1, 6, 12)), jnp.float32) for _ in range(2))

    @jax.jit
    def gradients(x, scale, g):
        return jax.vjp(norm, x, scale)[1](g)

    program = str(jax.make_jaxpr(gradients)(x, jnp.ones(12), g))
    shapes = re.findall(r"f32\[([\d,]*)\] = reduce_sum", program)
    assert shapes and not [shape for shape in shapes if shape.startswith("1,")]
    one, scale = jax.device_get(gradients(x, np.ones(12, np.float32), g))
    tokens, same = gradients(np.asarray(x)[0], np.ones(12, np.float32), np.asarray(g)[0])
    np.testing.assert_array_equal(one[0], tokens)
    np.testing.assert_array_equal(scale, same)


def test_norms_forget_scale_and_layer_norm_forgets_the_mean():
    x = jnp.array(X, jnp.float32)
    ones = jnp.ones(12)
    for norm in (layers.layer_norm, layers.rms_norm):
        np.testing.assert_allclose(norm(x * 50, ones), norm(x, ones), atol=1e-4)
    np.testing.assert_allclose(layers.layer_norm(x + 50, ones), layers.layer_norm(x, ones), atol=1e-4)
    assert np.abs(layers.rms_norm(x + 50, ones) - layers.rms_norm(x, ones)).max() > 0.1


@pytest.mark.parametrize("norm", [layers.layer_norm, layers.rms_norm])
def test_norms_of_bfloat16_have_wide_statistics(norm):
    """Entries near 100 differ by 0.5 in bfloat16: a mean or square rounded to bfloat16 would be off by that much."""
    x = jnp.array(100 + RNG.normal(size=(3, 256)), jnp.bfloat16)
    out = norm(x, jnp.ones(256))
    assert out.dtype == jnp.bfloat16
    wanted = getattr(reference, norm.__name__)(np.asarray(x, np.float64), 1.0)
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, rtol=2**-8, atol=1e-3)


def test_gelu_by_the_gpu_s_own_exponential():
    """In float32 as exact as by tanh, with a slope everywhere; what no 16-bit number can hold is 0."""
    x = jnp.concatenate([jnp.linspace(-12, 12, 4801), jnp.array([-1e4, -300.0, 300.0, 1e4, -0.0])])
    functions = (layers._gelu_tanh_on_gpu, layers._gelu_tanh)
    (value, slope), (expected, slope_expected) = (jax.vmap(jax.value_and_grad(f))(x) for f in functions)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(slope, slope_expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations(name):
    x = np.concatenate([np.linspace(-12, 12, 101), [-1e4, 1e4]])
    np.testing.assert_allclose(
        float64(getattr(layers, name), x),
        getattr(reference, name)(np.maximum(x, -700)) * (x > -700),
        rtol=1e-9,
        atol=1e-12,
    )
    function = getattr(layers, name)
    assert jax.eval_shape(function, jnp.array(x, jnp.bfloat16)).dtype == jnp.bfloat16
    grads = jax.jit(jax.vmap(jax.grad(lambda v: function(v))))(jnp.array(x, jnp.float32))
    assert np.isfinite(grads).all()


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (layers.gelu, lambda x: jax.nn.gelu(x, approximate=False)),
        (layers.gelu_tanh, lambda x: jax.nn.gelu(x, approximate=True)),
        (layers.silu, jax.nn.silu),
    ],
)
def test_activations_and_their_gradients_are_those_of_jax_nn(ours, theirs):
    run = jax.jit(lambda x: [jax.vmap(jax.value_and_grad(f))(x) for f in (ours, theirs)])
    for one, other in zip(*run(np.linspace(-6, 6, 61, dtype=np.float32)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", layers.ACTIVATIONS)
def test_mlp(activation, bias):
    shapes = {"w_up": (12, 20), "w_down": (20, 12)} | ({"b_up": (20,), "b_down": (12,)} if bias else {})
    if activation in ("swiglu", "geglu", "geglu_tanh"):
        shapes["w_gate"] = (12, 20)
    params = {name: RNG.normal(size=shape) for name, shape in shapes.items()}
    got = float64(lambda x, *leaves: layers.mlp(x, **dict(zip(params, leaves, strict=True)), activation=activation),
                  X, *params.values())  # fmt: skip
    np.testing.assert_allclose(got, reference.mlp(X, params, activation), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "activation",
    [pytest.param(x, marks=() if x in ("gelu_tanh", "swiglu") else pytest.mark.slow) for x in layers.ACTIVATIONS],
)
def test_gradients_of_mlp(activation):
    names = ["w_up", "b_up", "b_down", *(["w_gate", "b_gate"] if layers.ACTIVATIONS[activation][1] else [])]
    shapes = {"w_up": (12, 7), "w_gate": (12, 7), "b_up": (7,), "b_gate": (7,), "b_down": (12,)}
    params = {name: RNG.normal(size=shapes[name]) for name in names} | {"w_down": RNG.normal(size=(7, 12))}
    with jax.enable_x64(True):
        mlp = jax.jit(lambda x, params: layers.mlp(x, **params, activation=activation))
        check_grads(mlp, jax.tree.map(jnp.array, (X, params)), order=1, modes=["rev"], atol=1e-5, rtol=1e-5)


def test_the_gate_has_a_bias_of_its_own():
    x, w, b = jnp.zeros((1, 2)), jnp.zeros((2, 3)), jnp.array([1.0, 2.0, 3.0])
    mlp = jax.jit(layers.mlp, static_argnames="activation")
    out = mlp(
        x, w, jnp.asarray(np.eye(3, 2, dtype=np.float32)), b_up=jnp.ones(3), w_gate=w, b_gate=b, activation="swiglu"
    )
    np.testing.assert_allclose(out, [reference.silu(np.array([1.0, 2.0]))], rtol=1e-6)


@pytest.mark.parametrize(
    "activation, gate, message",
    [
        ("tanh", False, "activation 'tanh'; accepted: relu, gelu, gelu_tanh, swiglu, geglu, geglu_tanh"),
        ("swiglu", False, "activation 'swiglu' needs w_gate"),
        ("gelu", True, "activation 'gelu' has no use for w_gate"),
    ],
)
def test_wrong_mlps_are_named(activation, gate, message):
    w = jnp.ones((2, 2))
    with pytest.raises(ValueError, match=message):
        layers.mlp(jnp.ones((1, 2)), w, w, w_gate=w if gate else None, activation=activation)


def test_dropout_keeps_the_stated_share_and_the_mean():
    x, rate = jnp.full((200, 200), 2.0), 0.25
    out = np.asarray(layers.dropout(x, rate, jax.random.key(0)))
    kept = out != 0
    np.testing.assert_allclose(out[kept], 2 / (1 - rate), rtol=1e-6)
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / x.size)
    grad = jax.grad(lambda x: jnp.sum(layers.dropout(x, rate, jax.random.key(0))))(x)
    np.testing.assert_allclose(grad, kept / (1 - rate), rtol=1e-6)


def test_dropout_without_rng_or_rate_is_nothing():
    x = jnp.ones((3, 3), jnp.bfloat16)
    assert layers.dropout(x, 0.5, None) is x and layers.dropout(x, 0.0, jax.random.key(0)) is x
    assert layers.dropout(x, 0.5, jax.random.key(0)).dtype == jnp.bfloat16


@pytest.mark.parametrize("rate", [1.0, -0.1, float("nan")])
def test_dropout_of_everything_is_refused(rate):
    with pytest.raises(ValueError, match=f"dropout: rate {rate}; accepted: 0 <= rate < 1"):
        layers.dropout(jnp.ones(3), rate, jax.random.key(0))


def test_embed_and_unembed():
    table, bias = RNG.normal(size=(9, 12)), RNG.normal(size=9)
    tokens = np.array([[3, 0], [8, 3]])
    np.testing.assert_array_equal(float64(layers.embed, tokens, table), table[tokens])
    np.testing.assert_allclose(float64(layers.unembed, X, table), X @ table.T, rtol=1e-12)
    np.testing.assert_allclose(float64(layers.unembed, X, table, bias), X @ table.T + bias, rtol=1e-12)


def test_logits_of_bfloat16_are_float32():
    """1 + 2^-10 is lost in bfloat16, which keeps 8 bits; the sum of the products must not be rounded to it."""
    x, table = jnp.array([[1.0, 2**-10]], jnp.bfloat16), jnp.ones((1, 2))
    logits = layers.unembed(x, table)
    assert logits.dtype == jnp.float32 and logits.item() == 1 + 2**-10


@pytest.mark.parametrize(
    "spec", ["BTS,BSK->BTK", "BTK,BSK->BTS", "BHNTS,BHNSK->BHNTK", "BHTS,BSHK->BTHK", "BTHK,RHK->BHTR"]
)
def test_products_of_batches_in_bfloat16(spec):
    """Compiled on CPU, gradients too, whichever operand is the larger; equal to float64 products of them."""
    left, right, out = spec.replace("->", ",").split(",")
    for t, s in ((8, 32), (32, 8)):
        sizes = {"B": 2, "H": 3, "N": 2, "T": t, "S": s, "K": 16, "R": s}
        rng = np.random.default_rng(0)
        a, b, g = (jnp.asarray(rng.normal(size=[sizes[x] for x in each]), jnp.bfloat16) for each in (left, right, out))

        def back(a, b, g):
            found, gradients = jax.vjp(lambda a, b: product(spec, a, b, jnp.float32), a, b)
            return found, *gradients(g.astype(jnp.float32))

        x, y, z = (np.asarray(each, np.float64) for each in (a, b, g))
        wanted = (
            np.einsum(spec, x, y),
            np.einsum(f"{out},{right}->{left}", z, y),
            np.einsum(f"{left},{out}->{right}", x, z),
        )
        for got, exact in zip(jax.jit(back)(a, b, g), wanted, strict=True):
            np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2e-2, atol=2e-2 * np.abs(exact).max())
