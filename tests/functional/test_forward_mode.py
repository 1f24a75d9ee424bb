"""Forward mode: a tangent is the gradient's product with it, in float64; under vmap, jit, scan, remat and on a mesh.

And second derivatives in every order of modes, against central differences of the gradient.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks
from jaxformer.config import MeshConfig
from jaxformer.functional import layers
from jaxformer.functional.attention import attention
from jaxformer.functional.embedding_lookup import look_up
from jaxformer.functional.losses import token_loss
from jaxformer.functional.masked_loss import masked_token_loss
from jaxformer.kernels.attention import tiles, xla
from jaxformer.kernels.matmul import product
from jaxformer.kernels.rematerialize import rematerialize
from jaxformer.parallel import context
from jaxformer.parallel.mesh import make_mesh

T, LONG = 9, xla.QUERY_BLOCK + 5
TARGETS, WEIGHTS = np.arange(2 * 5).reshape(2, 5) % 7, np.array([[1, 0, 2, 1, 1], [0, 1, 0, 0, 3]])


@pytest.fixture(autouse=True)
def in_small_blocks_and_float64(monkeypatch):
    monkeypatch.setattr(tiles, "QUERY_BLOCK", 4)
    monkeypatch.setattr(tiles, "KEY_BLOCK", 4)
    with jax.enable_x64(True):
        yield


def attends(implementation, length=T, mask=None, **options):
    """(function of query, key, value and bias, shapes); a dropout's key is made inside."""

    def function(query, key, value, bias):
        rng = jax.random.key(3) if options.get("dropout_rate") else None
        return attention(query, key, value, mask, bias=bias, rng=rng, implementation=implementation, **options)

    return function, [(2, length, 4, 3), (2, length, 2, 3), (2, length, 2, 3), (1, 4, length, length)]


def t5(implementation):
    """A bias that is a function of positions, of a learned table."""

    def function(query, table):
        bias = jax.tree_util.Partial(lambda table, q, k: table[:, jnp.abs(q[:, None] - k[None])], table)
        return attention(query, query, query, masks.causal(), bias=bias, implementation=implementation)

    return function, [(1, T, 2, 3), (2, T)]


def losses(function, **options):
    def loss(hidden, table, bias):
        return function(hidden, table, jnp.array(TARGETS), jnp.array(WEIGHTS, hidden.dtype), bias, **options).total

    return loss, [(2, 5, 4), (7, 4), (7,)]


SEGMENTS = masks.causal() & masks.segments(jnp.arange(T)[None] // 4)
CASES = {
    "linear": (layers.linear, [(2, 3, 4), (4, 5), (5,)]),
    "mlp": (functools.partial(layers.mlp, activation="gelu_tanh"), [(2, 3, 4), (4, 6), (6, 4), (6,), (4,)]),
    "gated_mlp": (
        lambda x, up, down, gate: layers.mlp(x, up, down, w_gate=gate, activation="swiglu"),
        [(2, 3, 4), (4, 6), (6, 4), (4, 6)],
    ),
    "layer_norm": (layers.layer_norm, [(2, 3, 4), (4,), (4,)]),
    "rms_norm": (layers.rms_norm, [(1, 3, 4), (4,)]),
    "product": (lambda a, b: product("btk,bsk->bts", a, b, jnp.float64), [(2, 3, 4), (2, 5, 4)]),
    "unembed": (layers.unembed, [(2, 3, 4), (7, 4), (7,)]),
    "look_up": (lambda table: look_up(jnp.array([[1, 0, 1]]), table, "vocab"), [(3, 4)]),
    "rematerialize": (lambda x: rematerialize(x, jnp.cos(x)), [(512, 512)]),
    "attention": attends("xla", mask=SEGMENTS),
    "attention_of_all": attends("xla"),
    "attention_in_blocks": attends("xla", LONG, masks.causal()),
    "attention_with_soft_cap": attends("xla", mask=SEGMENTS, soft_cap=1.5),
    "attention_with_dropout": attends("xla", mask=SEGMENTS, dropout_rate=0.4),
    "attention_t5": t5("xla"),
    "chunked": attends("chunked", mask=SEGMENTS),
    "chunked_of_all": attends("chunked", 8),
    "chunked_with_soft_cap": attends("chunked", mask=SEGMENTS, soft_cap=1.5),
    "chunked_with_dropout": attends("chunked", mask=SEGMENTS, dropout_rate=0.4),
    "chunked_t5": t5("chunked"),
    "token_loss": losses(token_loss, z_loss=0.1, label_smoothing=0.1),
    "token_loss_in_blocks": losses(token_loss, chunk_tokens=4),
    "masked_token_loss": losses(masked_token_loss, z_loss=0.1),
}
FLAT = ("product", "look_up", "rematerialize", "unembed", "token_loss", "token_loss_in_blocks", "masked_token_loss")


def draw(shapes, seed):
    rng = np.random.default_rng(seed)
    return tuple(jnp.array(rng.normal(size=shape)) for shape in shapes)


def inner(one, other):
    return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


SLOW = ("chunked_with_soft_cap", "chunked_with_dropout")  # their loops are those of "chunked"


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_a_tangent_is_the_product_with_the_gradient(name):
    """<g, jvp(v)> = <vjp(g), v>, and the value is the one without derivatives; tangents of each argument alone too."""
    function, shapes = CASES[name]
    x, v = draw(shapes, 0), draw(shapes, 1)
    out, tangent = jax.jit(lambda x, v: jax.jvp(function, x, v))(x, v)
    np.testing.assert_allclose(out, jax.jit(function)(*x), rtol=1e-12)
    g = draw([out.shape], 2)[0]
    grads = jax.jit(lambda x: jax.vjp(function, *x)[1](g))(x)
    np.testing.assert_allclose(inner(g, tangent), inner(grads, v), rtol=1e-9, atol=1e-11)
    for i in range(len(x)):
        alone = jax.jit(lambda x, t, i=i: jax.jvp(lambda y: function(*x[:i], y, *x[i + 1 :]), (x[i],), (t,))[1])(
            x, v[i]
        )
        np.testing.assert_allclose(inner(g, alone), inner(grads[i], v[i]), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("mlp", "layer_norm", "attention", "token_loss") else slow)
        for slow in [pytest.mark.slow]
        for name in CASES
        if name != "rematerialize" and CASES[name][1][0][1:2] != (LONG,)
    ],
)
def test_second_derivatives_in_every_order(name):
    """Products of the Hessian with a direction: forward over reverse, twice forward, reverse over forward, twice
    reverse (but through the loops of the losses and of chunked attention, which end where data says); all that a
    central difference says."""
    function, shapes = CASES[name]
    x, v = draw(shapes, 0), draw(shapes, 1)

    def total(*x):
        return jnp.sum(jnp.sin(function(*x)))

    def slope(*x):
        return jax.jvp(total, x, v)[1]

    every = tuple(range(len(x)))
    gradient = jax.jit(jax.grad(total, every))
    step = 1e-6
    ahead, behind = (gradient(*(a + sign * step * b for a, b in zip(x, v, strict=True))) for sign in (1, -1))
    wanted = [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]
    forward_over_reverse = jax.jit(lambda x: jax.jvp(jax.grad(total, every), x, v)[1])(x)
    for found, right in zip(forward_over_reverse, wanted, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-7 * np.abs(right).max() + 1e-8)
    twice = jax.jit(lambda x: jax.jvp(slope, x, v)[1])(x)
    np.testing.assert_allclose(twice, inner(forward_over_reverse, v), rtol=1e-9, atol=1e-11)
    if "loss" in name or "chunked" in name:
        return
    for reverse in (
        jax.grad(slope, every),
        jax.grad(lambda *x: inner(jax.grad(total, every)(*x), v), every),
    ):
        for found, right in zip(jax.jit(reverse)(*x), forward_over_reverse, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_hessians_and_jacobians():
    """`jacfwd`, `jacrev` and `hessian`, which map over tangents and cotangents; `linearize`, and its transpose."""
    for name in ("linear", "layer_norm", "attention", "chunked"):
        function, shapes = CASES[name]
        x = draw(shapes, 0)
        forward, reverse = (jax.jit(jac(function, 1))(*x) for jac in (jax.jacfwd, jax.jacrev))
        np.testing.assert_allclose(forward, reverse, rtol=1e-9, atol=1e-11)
        out, pushed = jax.linearize(function, *x)
        v = draw(shapes, 1)
        np.testing.assert_allclose(pushed(*v), jax.jvp(function, x, v)[1], rtol=1e-9, atol=1e-11)
        g = draw([out.shape], 2)[0]
        for found, right in zip(jax.linear_transpose(pushed, *x)(g), jax.vjp(function, *x)[1](g), strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_under_transformations():
    """Examples apart (vmap inside and outside of the derivative), a scan of layers, rematerialisation."""
    x, w, v_x, v_w = draw([(3, 2, T, 4), (5, 4, 4), (3, 2, T, 4), (5, 4, 4)], 0)

    def layer(x, w):
        heads = layers.linear(layers.rms_norm(x, jnp.ones(4)), w).reshape(*x.shape[:2], 2, 2)
        new = attention(heads, heads, heads, masks.causal(), implementation="chunked").reshape(x.shape)
        return x + layers.mlp(new, w, w.T), None

    def run(x, w, wrap=lambda f: f):
        return jnp.sum(jnp.sin(jax.lax.scan(wrap(layer), x, w)[0]))

    def slopes(function):
        both = jax.jit(lambda *x: jax.jvp(function, x, (v_x, v_w))[1])(x, w)
        return both, inner(jax.jit(jax.grad(lambda *x: jnp.sum(function(*x)), (0, 1)))(x, w), (v_x, v_w))

    examples = jax.vmap(run, (0, None))
    plain, by_gradient = slopes(examples)
    np.testing.assert_allclose(jnp.sum(plain), by_gradient, rtol=1e-9)
    for wrapped in (
        jax.vmap(functools.partial(run, wrap=jax.checkpoint), (0, None)),
        lambda x, w: jnp.stack([run(one, w) for one in x]),
        lambda x, w: jax.lax.map(lambda one: run(one, w), x),
    ):
        tangent, grads = slopes(wrapped)
        np.testing.assert_allclose(tangent, plain, rtol=1e-9)
        np.testing.assert_allclose(grads, by_gradient, rtol=1e-9)
    apart = jax.jit(jax.vmap(lambda x, v: jax.jvp(lambda x: run(x, w), (x,), (v,))[1]))(x, v_x)
    np.testing.assert_allclose(apart, slopes(lambda x, _: examples(x, w))[0], rtol=1e-9)
    again_ = jax.jit(jax.vmap(lambda x: jax.grad(run, 1)(x, w)))(x)
    np.testing.assert_allclose(inner(jnp.sum(again_, axis=0), v_w), slopes(lambda _, w: examples(x, w))[1], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "context", "fsdp"])
def test_on_a_mesh(axis):
    """A ring's keys and their tangents go round; a table's rows are looked up where they lie."""
    x, v = (jnp.array(a) for a in draw([(2, 8, 4, 4)] * 2, 0))
    table, change = draw([(8, 4)] * 2, 1)

    def run(x, table):
        cut = context.sequence_sharding(8, zigzag=False)
        mask = masks.Mask(window=5, parts=cut.parts)
        out = cut.unshard(attention(*[cut.shard(x)] * 3, mask, implementation="chunked"))
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(look_up(jnp.array([[1, 7], [3, 1]]), table, "vocab")))

    wanted = jax.jvp(run, (x, table), (v, change))
    with jax.set_mesh(make_mesh(MeshConfig(**{"data": 1, axis: 2}), jax.devices()[:2])):
        found = jax.jit(lambda *a: jax.jvp(run, a, (v, change)))(x, table)
        grads = jax.jit(jax.grad(run, (0, 1)))(x, table)
        twice = jax.jit(lambda *a: jax.jvp(jax.grad(run, (0, 1)), a, (v, change))[1])(x, table)
    np.testing.assert_allclose(found, wanted, rtol=1e-10)
    np.testing.assert_allclose(inner(grads, (v, change)), wanted[1], rtol=1e-10)
    alone = jax.jvp(jax.grad(run, (0, 1)), (x, table), (v, change))[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10), twice, alone)


@pytest.mark.slow
def test_dtypes_of_tangents():
    """Those of the results, in the dtypes that train: bfloat16 activations and float32 parameters."""
    x, w = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.ones((4, 4), jnp.float32)
    for function, arguments in (
        (layers.linear, (x, w, w[0])),
        (layers.layer_norm, (x, w[0], w[0])),
        (layers.mlp, (x, w, w)),
        (lambda x: attention(x[:, :, None], x[:, :, None], x[:, :, None], masks.causal()), (x,)),
        (lambda x, w: token_loss(x, w, jnp.zeros((2, 3), int), jnp.ones((2, 3))).total, (x, w)),
    ):
        out, tangent = jax.jvp(function, arguments, arguments)
        assert tangent.dtype == out.dtype and np.isfinite(tangent.astype(jnp.float32)).all()
