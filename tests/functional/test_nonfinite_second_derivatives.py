"""What a mask hides has no influence on second derivatives either; and a bias is asked for places of the row only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from jaxformer import masks
from jaxformer.functional.attention import attention
from jaxformer.kernels.attention import tiles

LENGTH = 7
EVERY = (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def in_blocks_that_are_filled_up(monkeypatch):
    monkeypatch.setattr(tiles, "QUERY_BLOCK", 4)
    monkeypatch.setattr(tiles, "KEY_BLOCK", 6)


def draw(seed):
    rng = np.random.default_rng(seed)
    shapes = [(1, LENGTH, 2, 3), (1, LENGTH, 1, 3), (1, LENGTH, 1, 3), (2, LENGTH, LENGTH)]
    return [jnp.array(rng.normal(size=shape), jnp.float32) for shape in shapes]


def inner(one, other):
    return sum(jnp.vdot(a, b) for a, b in zip(one, other, strict=True))


def second_derivatives(implementation, options):
    """Of query, key, value and bias, products of the Hessian with a direction: in every order of modes with "xla"."""
    v = draw(1)

    def total(*x):
        seen = jnp.arange(LENGTH)[None] < LENGTH - 2
        out = attention(*x[:3], masks.padding(seen), bias=x[3], implementation=implementation, **options)
        return jnp.sum(jnp.sin(out))

    def run(*x):
        gradient = jax.grad(total, EVERY)
        out = [jax.jvp(gradient, x, tuple(v))[1]]
        if implementation == "xla":
            out.append(jax.grad(lambda *x: jax.jvp(total, x, tuple(v))[1], EVERY)(*x))
            out.append(jax.grad(lambda *x: inner(gradient(*x), v), EVERY)(*x))
        return out

    return jax.jit(run)


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"soft_cap": 2.0}], ids=["plain", "soft_cap"]
)
@pytest.mark.parametrize("implementation", [pytest.param("xla", marks=pytest.mark.slow), "chunked"])
def test_hidden_keys_change_no_second_derivative(implementation, options):
    run, (query, key, value, bias) = second_derivatives(implementation, options), draw(0)
    wanted = run(query, key, value, bias)
    hidden = np.arange(LENGTH) >= LENGTH - 2
    for garbage in np.float32([np.nan, np.inf, -np.inf, 3e38]):
        signs = np.float32([1, -1, 1]) if np.isfinite(garbage) else np.ones(3, np.float32)
        key_, value_ = (np.where(hidden[:, None, None], garbage * signs, x) for x in (key, value))
        found = run(query, key_, value_, np.where(hidden, garbage, bias))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize(
    "mask",
    [pytest.param(None, marks=pytest.mark.slow), masks.causal(), pytest.param(masks.window(3), marks=pytest.mark.slow)],
    ids=["all", "causal", "window"],
)
def test_a_bias_is_no_number_beyond_the_row(mask):
    """Blocks are filled up, and log(T - place) is none there: the gradient of its slope is what "xla" gives."""
    query, key, value, _ = draw(0)

    def total(slope, implementation):
        bias = Partial(lambda slope, q, k: slope * jnp.log(LENGTH - q)[:, None] * jnp.log(LENGTH - k)[None], slope)
        return jnp.sum(jnp.sin(attention(query, key, value, mask, bias=bias, implementation=implementation)))

    run = jax.jit(lambda slope: [jax.grad(total)(slope, name) for name in ("xla", "chunked")])
    wanted, found = run(np.float32(0.3))
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    tangent = jax.jvp(jax.jit(lambda slope: total(slope, "chunked")), (0.3,), (1.0,))[1]  # numbers of Python's
    np.testing.assert_allclose(tangent, wanted, rtol=1e-4)
