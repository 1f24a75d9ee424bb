"""The filters keep exactly what they say, and tokens come as often as they should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decoding import Sampling, keep_min_p, keep_top_k, keep_top_p, penalize_repetition
from jaxformer.decoding.sampling import choose, filtered
from jaxformer.errors import ConfigError

RNG = np.random.default_rng(0)
LOGITS = np.float32(RNG.normal(0, 2, (50, 40)))
LOGITS[0] = 1.5  # all tied
LOGITS[1, ::2] = LOGITS[1, 0]  # many tied
LOGITS[2, 5:] = -np.inf  # most suppressed
LOGITS[3, :2] = [0.0, -0.0]


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kept(filtered):
    return np.isfinite(np.asarray(filtered))


@pytest.mark.parametrize("k", [1, 2, 7, 40, 1000])
def test_top_k_keeps_the_k_largest_and_ties_with_the_last(k):
    threshold = np.sort(LOGITS, axis=-1)[:, -min(k, 40)][:, None]
    out = keep_top_k(LOGITS, k)
    np.testing.assert_array_equal(kept(out), (threshold <= LOGITS) & np.isfinite(LOGITS))
    np.testing.assert_array_equal(np.where(kept(out), out, 0), np.where(kept(out), LOGITS, 0))


@pytest.mark.parametrize("p", [1e-30, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_top_p_keeps_the_fewest_that_reach_p_and_ties_with_the_last(p):
    probabilities, keep = softmax(LOGITS), kept(keep_top_p(LOGITS, p))
    for row, (mass, kept_here) in enumerate(zip(probabilities, keep, strict=True)):
        assert kept_here[LOGITS[row].argmax()]
        smallest = mass[kept_here].min()
        assert not (~kept_here & (mass > smallest)).any()  # a cut through the order, ties together
        assert mass[kept_here].sum() >= p - 1e-6  # enough
        assert mass[mass > smallest].sum() < p + 1e-6  # and without the last ones not enough
    if p == 1.0:
        np.testing.assert_array_equal(keep, np.isfinite(LOGITS))


@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 1.0])
def test_min_p_keeps_what_is_at_least_p_times_as_probable_as_the_best(p):
    probabilities, keep = softmax(LOGITS), kept(keep_min_p(LOGITS, p))
    bar = p * probabilities.max(-1, keepdims=True)
    np.testing.assert_array_equal(keep, (probabilities >= bar * (1 - 1e-6)) & np.isfinite(LOGITS))


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens():
    logits = np.array([[3.0, -1.5, 0.5, 2.0]], np.float32)
    seen = np.array([[True, True, False, True]])
    np.testing.assert_allclose(penalize_repetition(logits, seen, 1.5), [[2.0, -2.25, 0.5, 4 / 3]], rtol=1e-6)
    # Keskar et al.: p_i ~ exp(x_i / (T I(i in g))), for positive logits.
    mixed = filtered(
        jnp.asarray(logits[:, [0, 2, 3]]), seen[:, [0, 2, 3]], Sampling(0.7, repetition_penalty=1.5).traced()
    )
    expected = softmax(np.array([[3.0 / (0.7 * 1.5), 0.5 / 0.7, 2.0 / (0.7 * 1.5)]]))
    np.testing.assert_allclose(jax.nn.softmax(mixed), expected, rtol=1e-5)


def test_filters_apply_in_order_penalty_temperature_top_k_top_p_min_p():
    seen = RNG.random(LOGITS.shape) < 0.3
    sampling = Sampling(temperature=1.7, top_k=12, top_p=0.8, min_p=0.2, repetition_penalty=1.3)
    x = np.asarray(penalize_repetition(LOGITS, seen, 1.3)) / np.float32(1.7)
    expected = kept(keep_min_p(keep_top_p(keep_top_k(x, 12), 0.8), 0.2))
    got = np.asarray(filtered(jnp.asarray(LOGITS), seen, sampling.traced()))
    np.testing.assert_array_equal(np.isfinite(got), expected)
    rows = np.arange(4, 50)  # without ties and rounding at their edges
    np.testing.assert_allclose(softmax(got[rows]), softmax(np.where(expected, x, -np.inf)[rows]), atol=1e-6)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(),
     *(pytest.param(each, marks=pytest.mark.slow) for each in (
         Sampling(1.3, top_k=6, top_p=0.9, min_p=0.05),
         Sampling(0.5), Sampling(2.0), Sampling(top_k=3), Sampling(top_p=0.7), Sampling(min_p=0.3)))],
    ids=str,
)  # fmt: skip
def test_frequencies_are_the_filtered_probabilities_within_binomial_bounds(sampling):
    draws = 40_000
    logits = np.float32([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -4.0])
    rngs = jax.random.split(jax.random.key(7), draws)
    tokens = choose(jnp.broadcast_to(logits, (draws, 8)), None, sampling.traced(), rngs)
    expected = softmax(np.asarray(filtered(jnp.asarray(logits)[None], None, sampling.traced())))[0]
    frequency = np.bincount(np.asarray(tokens), minlength=8) / draws
    assert (frequency[expected == 0] == 0).all()
    deviation = np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(frequency - expected) <= 4.5 * deviation).all(), (frequency, expected)


def test_temperature_zero_is_the_most_probable_token_and_what_small_temperatures_tend_to():
    greedy = choose(jnp.asarray(LOGITS), None, Sampling(temperature=0, top_k=3, top_p=0.5).traced(), None)
    np.testing.assert_array_equal(greedy, LOGITS.argmax(-1))
    rngs = jax.random.split(jax.random.key(0), len(LOGITS))
    cold = np.asarray(choose(jnp.asarray(LOGITS), None, Sampling(temperature=1e-6).traced(), rngs))
    np.testing.assert_array_equal(LOGITS[np.arange(50), cold], LOGITS.max(-1))


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("temperature", 1e-9), ("temperature", float("inf")),
     ("top_k", 0), ("top_k", 2.5), ("top_k", True), ("top_p", 0.0), ("top_p", 1.5), ("top_p", "0.9"), ("min_p", -0.1),
     ("min_p", 2.0), ("repetition_penalty", 0.0), ("repetition_penalty", float("inf"))],
)  # fmt: skip
def test_a_value_out_of_range_is_one_line_that_names_the_field(field, value):
    with pytest.raises(ConfigError, match=rf"^sampling\.{field}: .*; accepted: ") as error:
        Sampling(**{field: value})
    assert "\n" not in str(error.value)
