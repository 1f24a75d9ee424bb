"""Disentangled attention: written out in NumPy, on every implementation that can do it and on a mesh; masked keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import MeshConfig
from jaxformer.functional.attention import attention
from jaxformer.functional.disentangled import buckets, disentangled_bias
from jaxformer.kernels.attention import tiles
from jaxformer.masks import segments
from jaxformer.parallel.mesh import make_mesh

B, T, H, G, K, SPAN = 2, 11, 4, 2, 3, 3
SCALE = (3 * K) ** -0.5
SEGMENTS = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 3, (B, T)), axis=1))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(tiles, "QUERY_BLOCK", 4)
    monkeypatch.setattr(tiles, "KEY_BLOCK", 3)


def arrays(dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = [(B, T, H, K), (B, T, G, K), (B, T, G, K), (2 * SPAN, G, K), (2 * SPAN, H, K)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@functools.partial(jax.jit, static_argnames=("implementation", "farthest"))
def attended(q, k, v, position_key, position_query, *, implementation, farthest=None, mask=None):
    bias = disentangled_bias(q, k, position_key, position_query, SCALE, farthest)
    mask = segments(SEGMENTS) if mask is None else mask
    return attention(q, k, v, mask, bias=bias, scale=SCALE, implementation=implementation)


def written_out(q, k, v, position_key, position_query, bucket):
    """One pair of tokens after another."""
    q, k, v, position_key, position_query = map(np.asarray, (q, k, v, position_key, position_query))
    out, documents = np.zeros((B, T, H, K)), np.asarray(SEGMENTS)
    for b, t, h in np.ndindex(B, T, H):
        g, scores = h // (H // G), np.full(T, -np.inf)
        for s in range(T):
            if documents[b, t] == documents[b, s]:
                row = bucket(t - s)
                c2p, p2c = q[b, t, h] @ position_key[row, g], k[b, s, g] @ position_query[row, h]
                scores[s] = (q[b, t, h] @ k[b, s, g] + c2p + p2c) * SCALE
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ v[b, :, g]
    return out


def logarithmic(distance):
    """The rule of the released code with span 3 and a farthest distance of 8, by hand."""
    exact = 1
    far = exact + int(np.ceil(np.log(max(abs(distance), exact) / exact) / np.log(7 / exact) * (exact - 1)))
    return int(np.clip((distance if abs(distance) <= exact else far * np.sign(distance)) + SPAN, 0, 2 * SPAN - 1))


@pytest.mark.parametrize("farthest, bucket", [
    (None, lambda distance: int(np.clip(distance + SPAN, 0, 2 * SPAN - 1))), (8, logarithmic),
], ids=["clipped", "log"])  # fmt: skip
def test_written_out_in_numpy(farthest, bucket):
    with jax.enable_x64(True):
        given = arrays()
        wanted = written_out(*given, bucket)
        for implementation in ("xla", "chunked"):
            found = attended(*given, implementation=implementation, farthest=farthest)
            np.testing.assert_allclose(found, wanted, atol=1e-13)


@functools.cache
def gradients(implementation, shape=None):
    def total(*given):
        return jnp.sum(jnp.sin(3 * attended(*given, implementation=implementation, farthest=8)))

    with jax.enable_x64(True):
        run = jax.jit(jax.grad(total, (0, 1, 2, 3, 4)))
        if shape is None:
            return run(*arrays())
        with jax.set_mesh(make_mesh(MeshConfig(*shape), jax.devices()[:4])):
            return jax.device_get(run(*arrays()))


@pytest.mark.slow
@pytest.mark.parametrize("implementation, shape", [
    ("chunked", (2, 1, 2, 1)), ("chunked", None), ("xla", (2, 1, 2, 1)),
])  # fmt: skip
def test_every_implementation_and_a_mesh_of_rows_and_heads_have_the_same_gradients(implementation, shape):
    for found, wanted in zip(gradients(implementation, shape), gradients("xla"), strict=True):
        assert np.abs(np.asarray(wanted)).max() > 0.1
        np.testing.assert_allclose(found, wanted, atol=1e-12)


@pytest.mark.parametrize("implementation", [pytest.param("xla", marks=pytest.mark.slow), "chunked"])
def test_keys_that_nobody_sees_change_nothing(implementation):
    """NaN in padding reaches no output and no gradient, those of the tables included."""
    padding = np.arange(T)[None, :] >= np.array([[T], [T - 4]])
    mask = segments(SEGMENTS, jnp.asarray(np.where(padding, -1, SEGMENTS)))

    @jax.jit
    def run(fill):
        q, k, v, *tables = arrays(np.float32)
        k, v = (jnp.where(padding[:, :, None, None], fill, x) for x in (k, v))
        total = lambda *given: jnp.sum(jnp.sin(attended(*given, implementation=implementation, mask=mask)))  # noqa: E731
        return jax.value_and_grad(total, (0, 1, 2, 3, 4))(q, k, v, *tables)

    for found, wanted in zip(*map(jax.tree.leaves, (run(np.nan), run(0.0))), strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found, wanted)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"^disentangled_bias: neither position_key nor position_query; accepted: "):
        disentangled_bias(*arrays(np.float32)[:2], None, None, 1.0)
    assert buckets(jnp.asarray([-9, 9]), 4, 8).tolist() == [0, 7]


@pytest.mark.parametrize(("span", "most"), [(128, 512), (64, 1024), (256, 512)])
def test_compiled_distances_are_those_of_the_formula(span, most):
    """In float64: the last one before `most` is a whole number, which a compiled float32 may round up."""
    distance = np.arange(-most - 1, most + 2)
    exact = span // 2
    far = np.maximum(np.abs(distance), exact) / exact
    steps = np.ceil(np.log(far) / np.log((most - 1) / exact) * (exact - 1))
    wanted = np.where(np.abs(distance) <= exact, distance, np.sign(distance) * (steps + exact))
    found = jax.jit(lambda x: buckets(x, span, most))(jnp.asarray(distance))
    assert found.tolist() == np.clip(wanted + span, 0, 2 * span - 1).astype(int).tolist()
