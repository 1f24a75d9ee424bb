"""Attention to parts of the keys, combined by their log-sums, is attention to all of them; gradients too."""

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks
from jaxformer.functional.attention import attention, combine
from jaxformer.kernels.attention import tiles


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(tiles, "QUERY_BLOCK", 6)
    monkeypatch.setattr(tiles, "KEY_BLOCK", 4)


def total(out, log_sum):
    """A number that depends on both."""
    found = jnp.where(jnp.isfinite(log_sum), log_sum, 0.0)
    return jnp.sum(jnp.sin(out + jnp.arange(out.size).reshape(out.shape))) + jnp.sum(jnp.cos(found))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xla", "chunked"])
def test_two_sets_of_keys_are_the_whole(name):
    """Some queries see nothing of one set, one of either."""
    with jax.enable_x64(True):
        q, k, v = cases.inputs(13, 2, jnp.float64)
        dense = np.random.default_rng(3).random((1, 1, 13, 13)) < 0.7
        dense[..., 2, 5:], dense[..., 4, :5], dense[..., 7, :] = False, False, False
        mask = masks.causal() & masks.dense(dense)

        def whole(q, k, v):
            out, log_sum = attention(q, k, v, mask, soft_cap=3.0, implementation="xla", return_log_sum=True)
            plain = attention(q, k, v, mask, soft_cap=3.0, implementation="xla")
            return total(out, log_sum), (out, log_sum, plain)

        def parts(q, k, v):
            places = jnp.arange(13)
            found = [
                attention(
                    q, k[:, part], v[:, part], masks.dense(dense[..., part]) & masks.Mask(True, key_index=places[part]),
                    soft_cap=3.0, implementation=name, return_log_sum=True,
                )
                for part in (slice(0, 5), slice(5, 13))
            ]  # fmt: skip
            out, log_sum = combine(*zip(*found, strict=True))
            return total(out, log_sum), (out, log_sum)

        both = jax.jit(lambda *x: [jax.value_and_grad(f, (0, 1, 2), has_aux=True)(*x) for f in (whole, parts)])
        ((a, (*found, plain)), of_whole), ((b, in_parts), of_parts) = jax.device_get(both(q, k, v))
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13),
            (a, tuple(found), of_whole), (b, in_parts, of_parts),
        )  # fmt: skip
        out, log_sum = found
        assert np.all(out[:, 7] == 0) and np.all(log_sum[..., 7] == -np.inf)
        np.testing.assert_allclose(out, plain, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("options, line", [
    ({"implementation": "splash"}, "implementation 'splash' returns no log-sums; accepted there: auto, xla, chunked, "),
    ({"return_weights": True}, "return_weights and return_log_sum; accepted: one of them"),
    ({"mask": masks.Mask(parts=2)}, "return_log_sum of rows in 2 parts; accepted: whole rows"),
])  # fmt: skip
def test_refusals(options, line):
    x = jnp.ones((2, 4, 2, 4))
    with pytest.raises(ValueError, match=f"attention: {line}"):
        attention(x, x, x, return_log_sum=True, **options)


@pytest.mark.slow
def test_on_eight_devices():
    """Rows and heads on their own devices, a bias of each head, padding of each row."""
    q, k, v = cases.inputs(13, 4, jnp.float32)
    bias = jnp.asarray(np.random.default_rng(0).normal(size=(4, 13, 13)), jnp.float32)
    mask = masks.causal() & masks.padding(np.arange(13)[None] < np.array([[13], [9]]))

    def f(q, k, v, bias):
        return total(*attention(q, k, v, mask, bias=bias, implementation="chunked", return_log_sum=True))

    grad = jax.jit(jax.grad(f, (0, 1, 2, 3)))
    alone = grad(q, k, v, bias)
    mesh = jax.make_mesh((2, 1, 1, 4), ("data", "fsdp", "context", "tensor"), (jax.sharding.AxisType.Auto,) * 4)
    with jax.set_mesh(mesh):
        spread = grad(q, k, v, bias)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), alone, spread)


def test_without_any_key():
    x = jnp.ones((1, 3, 2, 4))
    out, log_sum = attention(x, x[:, :0], x[:, :0], return_log_sum=True)
    assert out.shape == x.shape and np.all(log_sum == -jnp.inf) and log_sum.shape == (1, 2, 3)
