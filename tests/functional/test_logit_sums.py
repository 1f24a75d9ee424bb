"""What cross-entropy needs of a row, read once: equal to what reads it three times, in value and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.kernels.logit_sums import logit_sums

RNG = np.random.default_rng(0)
TARGETS = RNG.integers(0, 33, (5, 7)).astype(np.int32)


def logits(spread: float) -> np.ndarray:
    found = RNG.normal(size=(5, 7, 33)) * spread
    found[0, 0, :5] = -np.inf
    return found


def thrice(x):
    at_target = jnp.take_along_axis(x, TARGETS[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(x, axis=-1), at_target, jnp.max(x, axis=-1)


@pytest.mark.parametrize("spread", [0.0, 1.0, 300.0])
def test_the_three_sums(spread):
    with jax.enable_x64(True):
        x = logits(spread)
        for found, expected in zip(logit_sums(jnp.asarray(x), TARGETS), thrice(x), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)


def test_a_row_without_any_possible_entry():
    """Its log of the sum is -inf, as of `logsumexp`."""
    sums = logit_sums(jnp.full((1, 4), -jnp.inf), jnp.array([2]))
    assert sums.log_sum[0] == -jnp.inf and sums.top[0] == -jnp.inf


def test_derivatives():
    """Of any function of the first two; the gradient's own derivative too."""

    def of(sums):
        return jnp.sum(jnp.sin(sums[0]) * 2.0 + jnp.cos(sums[1]) * jnp.arange(7.0)[None])

    with jax.enable_x64(True):
        x, direction = jnp.asarray(logits(3.0)), jnp.asarray(RNG.normal(size=(5, 7, 33)))
        once, three = (jax.grad(lambda x, f=f: of(f(x))) for f in (lambda x: logit_sums(x, TARGETS), thrice))
        np.testing.assert_allclose(once(x), three(x), rtol=1e-12, atol=1e-13)
        x = jnp.where(jnp.isfinite(x), x, 0.0)
        found, expected = (jax.jvp(f, (x,), (direction,))[1] for f in (once, three))
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def test_one_reduction_reads_the_logits():
    jaxpr = jax.make_jaxpr(lambda x: logit_sums(x, TARGETS))(np.zeros((5, 7, 33), np.float32))
    inner = str(jaxpr)
    assert inner.count("reduce[") == 1 and "reduce_sum" not in inner and "reduce_max" not in inner


def test_the_reducer_calls_no_function():
    """XLA's compiler for GPUs crashes on a reduction without users whose reducer does."""
    text = jax.jit(lambda x: logit_sums(x, TARGETS)).lower(np.zeros((5, 7, 33), np.float32)).as_text()
    reducer = text[text.index("reducer(") :]
    assert "stablehlo.select" in reducer and "call" not in reducer[: reducer.index("stablehlo.return")]
