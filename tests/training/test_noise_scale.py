"""The noise scale: against its definition in float64, where the truth is known, and nothing changes without it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import from_mapping
from jaxformer.errors import ConfigError
from jaxformer.specs import ParamSpec, zeros
from jaxformer.training import noise_scale
from jaxformer.training import step as steps
from jaxformer.training.reporter import train_fields
from jaxformer.training.step import StepMetrics
from jaxformer.types import Batch, Model

COUNT, SIZE, TRUTH = 4, 16, 200.0


def linear_model():
    """A loss whose gradient at a token is a vector that the batch brings; and a counter bias, which has none to
    measure, with much of it."""

    def loss(params, batch, rng, frozen=None):
        total = jnp.sum(params["w"] @ (batch.inputs["gradients"] * batch.weights[..., None]).sum((0, 1)))
        weight = jnp.sum(batch.weights)
        total += 100 * weight * jnp.sum(params["bias"])
        return {"loss": (total, weight)}, {"loss": (total, weight)}

    specs = {
        "w": ParamSpec((SIZE,), ("norm",), zeros, "norm"),
        "bias": ParamSpec((1,), (None,), zeros, "counter_bias"),
    }
    return Model(specs, lambda rng: None, loss, lambda batch: {"loss": jnp.sum(batch.weights)})


@pytest.mark.slow
def test_the_simulated_truth_is_found_with_unequal_weights():
    """Gradients of tokens with mean G and tr S = 200 |G|**2, in micro-batches of 1 to 4 of 8 tokens that count."""
    updates, rows, length = 4000, 8, 4
    mean = np.ones(SIZE) / SIZE**0.5
    counted = (np.arange(rows) % COUNT)[:, None] + 1 > np.arange(length)  # rows i, i + 4 are micro-batch i

    def batch(rng):
        noise = jax.random.normal(rng, (rows, length, SIZE)) * (TRUTH / SIZE) ** 0.5
        nothing = jnp.zeros((rows, length), jnp.int32)
        return Batch(
            nothing,
            nothing,
            jnp.asarray(counted, jnp.float32),
            nothing,
            nothing,
            {"gradients": mean[None, None] + noise},
        )

    def measured(rng):
        params = {"w": jnp.zeros(SIZE), "bias": jnp.zeros(1)}
        found = steps.gradients(params, batch(rng), rng, model=linear_model(), micro_batches=COUNT, noise_scale=True)
        return found[2]

    found = jax.jit(jax.vmap(measured))(jax.random.split(jax.random.key(0), updates))
    (variance, square), weight = found["noise_scale"], counted.sum()
    assert variance.mean() == pytest.approx(TRUTH, rel=0.01)
    # |G|**2 = 1 has a standard error of about tr S / W sqrt(2 / (16 updates)) = 0.05.
    assert square.mean() == pytest.approx(1.0, abs=4 * TRUTH / weight * (2 / SIZE / updates) ** 0.5)
    assert (square < 0).any()  # so ratios of single updates mean nothing


def test_the_definition_in_float64():
    rng = np.random.default_rng(1)
    vectors, weights = rng.normal(size=(8, 4, SIZE)), rng.integers(0, 3, (8, 4)).astype(np.float64)
    nothing = np.zeros((8, 4), np.int32)
    batch = Batch(nothing, nothing, weights, nothing, nothing, {"gradients": vectors})
    with jax.enable_x64(True):
        run = functools.partial(steps.gradients, model=linear_model(), micro_batches=COUNT)
        params = {"w": np.zeros(SIZE), "bias": np.zeros(1)}
        loss, grads, sums, _ = jax.jit(functools.partial(run, noise_scale=True))(params, batch, jax.random.key(0))
        plain = jax.jit(run)(params, batch, jax.random.key(0))
    shares = [np.einsum("BT,BTD->D", weights[i::COUNT], vectors[i::COUNT]) / weights.sum() for i in range(COUNT)]
    whole, parts = weights.sum(), np.array([weights[i::COUNT].sum() for i in range(COUNT)]) / weights.sum()
    q, r, a = sum(np.square(shares)).sum(), np.square(sum(shares)).sum(), np.square(parts).sum()
    wanted = whole * (q - a * r) / (1 - a), (r - q) / (1 - a)
    np.testing.assert_allclose(sums["noise_scale"], wanted, rtol=1e-12)
    np.testing.assert_allclose((sums["gradient_variance"][0], sums["gradient_square"][0]), wanted, rtol=1e-12)
    np.testing.assert_allclose(grads["w"], sum(shares), rtol=1e-12)
    np.testing.assert_allclose((plain[0], *plain[1]["w"]), (loss, *grads["w"]), rtol=1e-12)
    assert plain[2].keys() == sums.keys() - {"noise_scale", "gradient_variance", "gradient_square"}


def test_a_batch_with_all_its_weight_in_one_micro_batch_says_nothing():
    squares = noise_scale.Squares(jnp.float32(4.0), jnp.float32(9.0))
    found = noise_scale.noise_sums(squares, {"w": jnp.array([2.0])}, jnp.float32(3.0))
    assert {float(x) for pair in found.values() for x in pair} == {0.0}
    none = noise_scale.noise_sums(jax.tree.map(jnp.zeros_like, squares), {"w": jnp.zeros(1)}, jnp.float32(0.0))
    assert {float(x) for pair in none.values() for x in pair} == {0.0}


def test_records_divide_what_was_averaged():
    two = np.ones(2, np.float32)
    sums = {
        "noise_scale": (np.array([30.0, 10.0]), np.array([3.0, -1.0])),
        "gradient_square": (np.array([3.0, -1.0]), two),
    }
    found = train_fields(StepMetrics(two, two, two, 0 * two, 0 * two, sums, {}))
    assert (found["noise_scale"], found["gradient_square"]) == (20.0, 1.0)


def test_it_needs_two_micro_batches():
    line = (
        "config.train.noise_scale: True; it is measured between micro-batches; accepted with "
        "execution.gradient_accumulation_steps of at least 2"
    )
    with pytest.raises(ConfigError) as error:
        from_mapping({"train": {"noise_scale": True}})
    assert str(error.value) == line
    assert from_mapping({"train": {"noise_scale": True, "micro_batches": 2}}).train.noise_scale
