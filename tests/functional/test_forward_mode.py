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
    "attention_with_soft_cap_and_dropout": attends("xla", mask=SEGMENTS, soft_cap=1.5, dropout_rate=0.4),
    "attention_t5": t5("xla"),
    "chunked": attends("chunked", mask=SEGMENTS),
    "chunked_of_all": attends("chunked", 8),
    "chunked_with_soft_cap_and_dropout": attends("chunked", mask=SEGMENTS, soft_cap=1.5, dropout_rate=0.4),
    "chunked_t5": t5("chunked"),
    "token_loss": losses(token_loss, z_loss=0.1, label_smoothing=0.1),
    "token_loss_in_blocks": losses(token_loss, chunk_tokens=4),
    "masked_token_loss": losses(masked_token_loss, z_loss=0.1),
}


def draw(shapes, seed):
    rng = np.random.default_rng(seed)
    return tuple(jnp.array(rng.normal(size=shape)) for shape in shapes)


def inner(one, other):
    return sum(np.vdot(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


SLOW = (
    "chunked", "chunked_t5", "chunked_of_all", "chunked_with_soft_cap_and_dropout", "attention_in_blocks",
    "attention_with_soft_cap_and_dropout",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_a_tangent_is_the_product_with_the_gradient(name):
    """<g, jvp(v)> = <vjp(g), v>, and the value is the one without derivatives; tangents of each argument alone too."""
    function, shapes = CASES[name]
    x, v = draw(shapes, 0), draw(shapes, 1)

    @jax.jit
    def run(x, v):
        out, tangent = jax.jvp(function, x, v)
        g = draw([out.shape], 2)[0]
        return out, tangent, function(*x), g, jax.vjp(function, *x)[1](g)

    out, tangent, plain, g, grads = run(x, v)
    np.testing.assert_allclose(out, plain, rtol=1e-12)
    np.testing.assert_allclose(inner(g, tangent), inner(grads, v), rtol=1e-9, atol=1e-11)
    for i, (d, grad) in enumerate(zip(v, grads, strict=True)):
        alone = run(x, tuple(each if n == i else jnp.zeros_like(each) for n, each in enumerate(v)))[1]
        np.testing.assert_allclose(inner(g, alone), inner(grad, d), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("layer_norm", "token_loss") else slow)
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
    loops = "loss" in name or "chunked" in name

    @jax.jit
    def run(x, v):
        reverse = () if loops else (jax.grad(slope, every), jax.grad(lambda *x: along(*x, v=v), every))
        twice = jax.jvp(slope, x, v)[1]
        return jax.jvp(jax.grad(total, every), x, v)[1], twice, [products(*x) for products in reverse]

    def along(*x, v):
        return sum(jnp.vdot(a, b) for a, b in zip(jax.grad(total, every)(*x), v, strict=True))

    forward_over_reverse, twice, in_reverse = run(x, v)
    for found, right in zip(forward_over_reverse, wanted, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-7 * np.abs(right).max() + 1e-8)
    np.testing.assert_allclose(twice, inner(forward_over_reverse, v), rtol=1e-9, atol=1e-11)
    for products in in_reverse:
        for found, right in zip(products, forward_over_reverse, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_hessians_and_jacobians():
    """`jacfwd`, `jacrev` and `hessian`, which map over tangents and cotangents; `linearize`, and its transpose."""
    for name in ("linear", "layer_norm", "attention", "chunked"):
        function, shapes = CASES[name]
        x, v = draw(shapes, 0), draw(shapes, 1)

        @jax.jit
        def run(x, v, function=function):
            out, pushed = jax.linearize(function, *x)
            g = draw([out.shape], 2)[0]
            back = jax.linear_transpose(pushed, *x)(g), jax.vjp(function, *x)[1](g)
            jacobians = tuple(jac(function, 1)(*x) for jac in (jax.jacfwd, jax.jacrev))
            return [jacobians, (pushed(*v), jax.jvp(function, x, v)[1]), *zip(*back, strict=True)]

        for found, right in run(x, v):
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
        """The tangents, and the sum of the gradient's product with the direction."""
        both = jax.jit(lambda *x: (jax.jvp(function, x, (v_x, v_w))[1], grads_of(function, *x)))(x, w)
        return both[0], inner(both[1], (v_x, v_w))

    def grads_of(function, *x):
        return jax.grad(lambda *x: jnp.sum(function(*x)), (0, 1))(*x)

    examples = jax.vmap(run, (0, None))
    plain, by_gradient = slopes(examples)
    np.testing.assert_allclose(np.sum(plain), by_gradient, rtol=1e-9)
    for wrapped in (
        jax.vmap(functools.partial(run, wrap=jax.checkpoint), (0, None)),
        lambda x, w: jax.lax.map(lambda one: run(one, w), x),
    ):
        tangent, grads = slopes(wrapped)
        np.testing.assert_allclose(tangent, plain, rtol=1e-9)
        np.testing.assert_allclose(grads, by_gradient, rtol=1e-9)

    @jax.jit
    def of_one_argument(x, w):
        """Of the examples: the derivative mapped, and that of what is mapped; of the parameters: mapped."""
        tangents = jax.vmap(lambda x, v: jax.jvp(lambda x: run(x, w), (x,), (v,))[1])(x, v_x)
        whole = jax.jvp(lambda x: examples(x, w), (x,), (v_x,))[1]
        return tangents, whole, jax.vmap(lambda x: jax.grad(run, 1)(x, w))(x)

    apart, whole, of_each = of_one_argument(x, w)
    np.testing.assert_allclose(apart, whole, rtol=1e-9)
    np.testing.assert_allclose(np.sum(apart) + inner(np.sum(of_each, axis=0), v_w), by_gradient, rtol=1e-9)


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

    def derivatives(x, table):
        one = jax.jvp(run, (x, table), (v, change))
        return one, *jax.jvp(jax.grad(run, (0, 1)), (x, table), (v, change))

    one, grads, twice = jax.jit(derivatives)(x, table)
    with jax.set_mesh(make_mesh(MeshConfig(**{"data": 1, axis: 2}), jax.devices()[:2])):
        found, their_grads, their_twice = jax.jit(lambda *a: derivatives(*a))(x, table)
    np.testing.assert_allclose(found, one, rtol=1e-10)
    np.testing.assert_allclose(inner(their_grads, (v, change)), one[1], rtol=1e-10)
    pairs = (their_grads, their_twice), (grads, twice)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10), *pairs)


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
        out, tangent = jax.jit(functools.partial(jax.jvp, function))(arguments, arguments)
        assert tangent.dtype == out.dtype and np.isfinite(tangent.astype(jnp.float32)).all()
