"""The terms of distance and segment against NumPy, pair by pair, and the same from every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import masks
from jaxformer.functional.attention import attention
from jaxformer.functional.relative_terms import Places, SegmentTerm, distances, encoded, relative_terms

B, H, K, D = 2, 2, 4, 6
RNG = np.random.default_rng(0)
BIAS, SEGMENT_BIAS, OF_SEGMENTS = (RNG.normal(size=shape) for shape in ((H, K), (H, K), (2, H, K)))
W = RNG.normal(size=(D, H, K))
PLACES = {
    "memory": (5, 9, Places(), Places(first=-4)),
    "pooled queries": (4, 8, Places(-3, 4), Places(-1, 2)),
    "one query": (1, 3, Places(2), Places()),
}


def arrays(queries, keys):
    types = RNG.integers(-1, 2, size=(B, queries)), RNG.integers(-1, 2, size=(B, keys))
    there = RNG.random(queries) < 0.7, RNG.random((B, keys)) < 0.7
    return RNG.normal(size=(B, queries, H, K)), types, there


def by_pairs(query, types, there, of_query, of_key):
    """The bias written out for each pair."""
    out = np.zeros((B, H, query.shape[1], types[1].shape[1]))
    for b, h, i, j in np.ndindex(*out.shape):
        if not (there[0][i] and there[1][b, j]):
            continue
        distance = of_query.first + i * of_query.stride - of_key.first - j * of_key.stride
        other = types[0][b, i] >= 0 and types[1][b, j] >= 0 and types[0][b, i] != types[1][b, j]
        r = encoded(np.array([distance]), D)[0] @ W[:, h]
        score = (query[b, i, h] + BIAS[h]) @ r
        out[b, h, i, j] = 0.5 * (score + (query[b, i, h] + SEGMENT_BIAS[h]) @ OF_SEGMENTS[int(other), h])
    return out


def bias_of(query, types, there, of_query, of_key, w=W):
    keys = types[1].shape[1]
    table = jnp.einsum("RD,DHK->RHK", encoded(distances(query.shape[1], keys, of_query, of_key), D), w)
    segments = SegmentTerm(*map(jnp.asarray, (SEGMENT_BIAS, OF_SEGMENTS, *types)))
    return relative_terms(
        jnp.asarray(query), table, keys, scale=0.5, position_bias=jnp.asarray(BIAS), segments=segments,
        query_places=of_query, key_places=of_key, query_there=jnp.asarray(there[0]), key_there=jnp.asarray(there[1]),
    )  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=pytest.mark.slow if x == "pooled queries" else ()) for x in PLACES]
)
def test_each_pair_as_written_out(case):
    """A block of the whole, one inside, single tokens in any order (as decoding asks), and a padded one."""
    queries, keys, *places = PLACES[case]
    query, types, there = arrays(queries, keys)
    wanted = by_pairs(query, types, there, *places)
    with jax.enable_x64(True):
        places_of = np.array([[queries - 1], [0]]), RNG.permuted(np.tile(np.arange(keys), (B, 1)), axis=1)
        asked = (
            (np.arange(queries), np.arange(keys)),
            (np.arange(queries // 2, queries), np.arange(2, keys)),
            (np.minimum(np.arange(queries - 1, queries + 2), queries - 1), np.arange(keys)),
            places_of,
        )
        whole, part, over, alone = jax.jit(
            lambda query: [bias_of(query, types, there, *places)(*map(jnp.asarray, each)) for each in asked]
        )(jnp.asarray(query))
    np.testing.assert_allclose(whole, wanted, atol=1e-12)
    np.testing.assert_allclose(part, wanted[:, :, queries // 2 :, 2:], atol=1e-12)
    np.testing.assert_allclose(over[:, :, :1], wanted[:, :, -1:], atol=1e-12)
    for b in range(B):
        np.testing.assert_allclose(alone[b, :, 0], wanted[b][:, places_of[0][b, 0]][:, places_of[1][b]], atol=1e-12)


@pytest.mark.slow
def test_every_implementation_has_the_same_values_and_gradients():
    """Longer than one block of chunked attention, so that blocks begin anywhere and the last one is padded."""
    queries = keys = 300
    query, types, there = arrays(queries, keys)
    key, value = RNG.normal(size=(2, B, keys, H, K))

    def total(implementation, query, w, key):
        bias = bias_of(query, types, there, Places(), Places(), w)
        out = attention(query, key, value, masks.causal(), bias=bias, scale=0.5, implementation=implementation)
        return jnp.sum(jnp.sin(out))

    with jax.enable_x64(True):
        given = tuple(map(jnp.asarray, (query, W, key)))
        one, other = (
            jax.jit(jax.value_and_grad(lambda *a, name=name: total(name, *a), argnums=(0, 1, 2)))(*given)
            for name in ("xla", "chunked")
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), one, other)


def test_a_table_of_other_distances_is_refused():
    with pytest.raises(ValueError, match=r"position_keys \(3, 1, 4\); accepted: 5, one for a distance"):
        relative_terms(jnp.ones((1, 3, 1, 4)), jnp.ones((3, 1, 4)), 3, scale=1.0)
    with pytest.raises(ValueError, match="stride 1; accepted: multiples of 2"):
        distances(2, 2, Places(), Places(0, 2))
