"""Positions: rotary sees distances only; every scheme against its paper, written out."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest

from jaxformer.functional import positions as pos

SCALINGS = [
    ("none", 1.0, 2048),
    ("linear", 4.0, 2048),
    ("ntk", 4.0, 2048),
    ("yarn", 4.0, 256),
    ("yarn", 16.0, 4096),
]


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def rotate(x, positions, scaling="none", factor=1.0, original=2048, width=16):
    frequencies, scale = pos.rotary_frequencies(width, 10_000.0, scaling, factor, original)
    return pos.rotary(x, *pos.rotary_angles(positions, frequencies), scale)


@pytest.mark.parametrize("scaling, factor, original", SCALINGS)
def test_rotary_scores_depend_on_the_distance_only(scaling, factor, original):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        query, key = (jnp.array(rng.normal(size=(1, 1, 2, 16))) for _ in range(2))

        def score(i, j):
            q = rotate(query, np.array([i]), scaling, factor, original)
            k = rotate(key, np.array([j]), scaling, factor, original)
            return np.einsum("bthk,bthk->h", np.asarray(q), np.asarray(k))

        for distance in (0, 1, 7, 300):
            base = score(distance, 0)
            for j in (1, 19, 4000):
                np.testing.assert_allclose(score(distance + j, j), base, rtol=1e-9)
            assert distance == 0 or not np.allclose(base, score(0, 0))
            assert distance == 0 or not np.allclose(base, score(0, distance)), "the order counts"


@pytest.mark.parametrize("scaling, factor, original", SCALINGS)
def test_rotary_equals_multiplication_by_complex_numbers(scaling, factor, original):
    rng = np.random.default_rng(1)
    x, positions = rng.normal(size=(2, 5, 3, 16)), np.array([[0, 1, 2, 3, 4], [7, 0, 900, 2, 1]])
    frequencies, scale = pos.rotary_frequencies(16, 10_000.0, scaling, factor, original)
    wanted = reference.rotary(x, positions, frequencies, scale)
    with jax.enable_x64(True):
        np.testing.assert_allclose(
            rotate(jnp.array(x), jnp.array(positions), scaling, factor, original), wanted, rtol=1e-12, atol=1e-14
        )
    got = rotate(jnp.array(x, jnp.float32), jnp.array(positions), scaling, factor, original)
    np.testing.assert_allclose(got, wanted, atol=3e-4)  # 900 radians in float32 are known to 3e-5
    one_row = rotate(jnp.array(x, jnp.float32), jnp.arange(5), scaling, factor, original)
    np.testing.assert_allclose(one_row[0], got[0], rtol=1e-6)


def test_rotary_keeps_dtype_and_length():
    x = jnp.array(np.random.default_rng(0).normal(size=(1, 6, 2, 16)), jnp.bfloat16)
    turned = rotate(x, jnp.arange(6) * 100)
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_allclose(*(np.linalg.norm(np.asarray(y, np.float32), axis=-1) for y in (turned, x)), rtol=2**-7)


def test_rotary_frequencies_of_the_paper():
    wanted = [10_000 ** (-2 * i / 8) for i in range(4)]
    np.testing.assert_allclose(pos.rotary_frequencies(8)[0], wanted, rtol=1e-14)
    np.testing.assert_allclose(pos.rotary_frequencies(8, base=500.0)[0], [500 ** (-2 * i / 8) for i in range(4)])


def test_linear_scaling_divides_positions():
    np.testing.assert_allclose(
        pos.rotary_frequencies(8, scaling="linear", factor=4)[0], pos.rotary_frequencies(8)[0] / 4, rtol=1e-14
    )


def test_ntk_scaling_stretches_the_longest_wave_and_keeps_the_shortest():
    plain, scaled = pos.rotary_frequencies(64)[0], pos.rotary_frequencies(64, scaling="ntk", factor=4)[0]
    assert scaled[0] == plain[0] == 1
    np.testing.assert_allclose(scaled[-1], plain[-1] / 4, rtol=1e-12)
    np.testing.assert_allclose(np.diff(np.log(scaled)), np.diff(np.log(scaled))[0], rtol=1e-9)  # still geometric


def test_yarn_leaves_fast_pairs_stretches_slow_ones_and_ramps_between():
    """Peng et al. 2023, section 3.2: by the number of turns r over the original length; alpha = 1, beta = 32."""
    width, length, factor = 64, 2048, 8.0
    plain, (scaled, scale) = (
        pos.rotary_frequencies(width)[0],
        pos.rotary_frequencies(width, 1e4, "yarn", factor, length),
    )
    turns = length * plain / (2 * math.pi)
    ratio = scaled / plain
    # The released code rounds the ends of the ramp to whole pairs, outwards.
    step = plain[0] / plain[1]
    np.testing.assert_allclose(ratio[turns > 32 * step], 1, rtol=1e-12)
    np.testing.assert_allclose(ratio[turns < 1 / step], 1 / factor, rtol=1e-12)
    between = ratio[(turns < 32) & (turns > 1)]
    assert len(between) > 5 and (np.diff(between) < 0).all() and (between < 1).all() and (between > 1 / factor).all()
    assert scale == pytest.approx(0.1 * math.log(8) + 1)
    assert pos.rotary_frequencies(width, 1e4, "yarn", 1.0, length)[1] == 1.0
    np.testing.assert_allclose(pos.rotary_frequencies(width, 1e4, "yarn", 1.0, length)[0], plain, rtol=1e-12)


def test_yarn_scales_queries_and_keys():
    x = jnp.ones((1, 1, 1, 16))
    scale = pos.rotary_frequencies(16, 1e4, "yarn", 4.0, 256)[1]
    np.testing.assert_allclose(rotate(x, jnp.array([0]), "yarn", 4.0, 256), scale, rtol=1e-6)


@pytest.mark.parametrize("call", [lambda: pos.rotary_frequencies(7), lambda: pos.sinusoidal(jnp.arange(3), 7)])
def test_odd_widths_are_refused(call):
    with pytest.raises(ValueError, match="width 7 is odd"):
        call()


def test_an_unknown_scaling_names_the_known():
    with pytest.raises(ValueError, match="scaling 'dynamic'; accepted: none, linear, ntk, yarn"):
        pos.rotary_frequencies(8, scaling="dynamic")


@pytest.mark.parametrize("width", [2, 10])
def test_sinusoidal(width):
    positions = [0, 1, 5, 100]
    wanted = reference.sinusoidal(positions, width)
    one, two = jax.jit(lambda p: (pos.sinusoidal(p, width), pos.sinusoidal(p[None], width, base=50.0)[0]))(
        jnp.array(positions)
    )
    np.testing.assert_allclose(one, wanted, atol=1e-5)
    np.testing.assert_allclose(two, reference.sinusoidal(positions, width, 50.0), atol=1e-5)


def test_a_shift_turns_sinusoids_by_a_fixed_angle():
    """Vaswani et al. 2017: PE(pos + k) is a linear function of PE(pos); here their products depend on k only."""
    x = np.asarray(pos.sinusoidal(jnp.arange(40), 16), np.float64)
    products = x @ x.T
    for k in (0, 3, 11):
        np.testing.assert_allclose(np.diagonal(products, k), products[0, k], atol=1e-4)


def test_learned_positions_are_rows():
    table = jnp.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(pos.learned(table, jnp.array([[2, 0]])), [[[6, 7, 8], [0, 1, 2]]])


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20])
def test_alibi_slopes(heads):
    np.testing.assert_allclose(pos.alibi_slopes(heads), reference.alibi_slopes(heads), rtol=1e-14)


def test_alibi_slopes_as_published():
    """Section 3: for 8 heads 1/2, 1/4, ..., 1/256; for 16 heads they start at 2^-0.5."""
    np.testing.assert_allclose(pos.alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(pos.alibi_slopes(16)[:2], [2**-0.5, 2**-1])
    np.testing.assert_allclose(pos.alibi_slopes(12)[8:], [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


def test_alibi():
    alibi = jax.jit(pos.alibi, static_argnums=2)
    np.testing.assert_allclose(alibi(np.arange(5), np.arange(7), 6), reference.alibi(5, 7, 6), rtol=1e-6)
    rows = alibi(np.array([[3], [0]]), np.arange(2)[None], 2)  # indices of a decoder's cache, by row
    np.testing.assert_allclose(
        np.asarray(rows)[:, :, 0], [[[-3 / 16, -2 / 16], [-3 / 256, -2 / 256]], [[0, -1 / 16], [0, -1 / 256]]]
    )


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (8, 20), (6, 50)])
def test_t5_buckets(bidirectional, buckets, max_distance):
    relative = np.arange(-300, 300)
    run = jax.jit(pos.t5_buckets, static_argnums=(1, 2, 3))
    got = np.asarray(run(relative, bidirectional, buckets, max_distance))
    wanted = [reference.t5_bucket(int(r), bidirectional, buckets, max_distance) for r in relative]
    # At exact powers the logarithm may round either way: at most a handful of distances, by one bucket.
    assert np.abs(got - wanted).max() <= 1 and (got != wanted).sum() <= 4
    assert got.min() == 0 and got.max() == buckets - 1
    past = got[relative <= 0][::-1]
    assert (np.diff(past) >= 0).all(), "farther is never a nearer bucket"
    assert bidirectional or not got[relative > 0].any()


def test_t5_bias_looks_up_its_table():
    table = np.random.default_rng(0).normal(size=(8, 3))
    run = jax.jit(lambda table: pos.t5_bias(table, jnp.arange(4), jnp.arange(6), True, 20))
    got = np.asarray(run(table.astype(np.float32)))
    assert got.shape == (3, 4, 6)
    for t in range(4):
        for s in range(6):
            np.testing.assert_allclose(got[:, t, s], table[reference.t5_bucket(s - t, True, 8, 20)], rtol=1e-6)
