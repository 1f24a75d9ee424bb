"""Laws of one update: parts add up, what is not finite changes nothing, many steps are one after another."""

import functools

import compilations
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import T, ToyBatches, V, logits, make_batch, make_config, make_model, numpy_params

from jaxformer.parallel.mesh import make_mesh
from jaxformer.training import microbatch
from jaxformer.training import step as steps
from jaxformer.training.eval_step import eval_step
from jaxformer.training.optim import make_optimizer, make_schedule
from jaxformer.training.state import TrainState


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def setup(config=None, dropout=0.0):
    """State 0 and the keyword arguments of train_step."""
    config = config or make_config()
    model = make_model(dropout)
    optimizer = make_optimizer(config.optimizer, config.train.steps, model.specs)
    options = {
        "model": model,
        "optimizer": optimizer,
        "schedule": make_schedule(config.optimizer, config.train.steps),
        "clip_norm": config.optimizer.clip_norm,
        "ema_decay": config.optimizer.ema_decay,
    }
    params, zero = jax.tree.map(jnp.asarray, numpy_params()), jnp.int32(0)
    ema = None if config.optimizer.ema_decay is None else params
    return TrainState(zero, params, jax.jit(optimizer.init)(params), ema, np.zeros(2, np.uint32), zero, zero), options


def compiled(options):
    return jax.jit(functools.partial(steps.train_step, **options))


def test_loss_and_gradient_against_numpy():
    params = numpy_params(dtype=np.float64)
    batch = make_batch(3, 5, dtype=np.float64)

    def reference(params):
        scores = logits(params, batch.tokens, np)
        scores = scores - scores.max(-1, keepdims=True)
        nll = np.log(np.exp(scores).sum(-1)) - np.take_along_axis(scores, batch.targets[..., None], -1)[..., 0]
        return (nll * batch.weights).sum() / batch.weights.sum()

    with jax.enable_x64(True):
        rng = jax.random.key(0)
        loss, grads, sums, weights = jax.jit(functools.partial(steps.gradients, model=make_model()))(params, batch, rng)
        np.testing.assert_allclose(loss, reference(params), rtol=1e-12)
        np.testing.assert_allclose(sums["loss"][0] / sums["loss"][1], loss, rtol=1e-12)
        assert weights["loss"] == batch.weights.sum()
        for name, index in (("w_up", (1, 2, 3)), ("b_up", (0, 5)), ("w_down", (0, 7, 1))):
            shifted = [{k: dict(v) for k, v in params.items()} for _ in range(2)]
            for tree, sign in zip(shifted, (1, -1), strict=True):
                tree["blocks"][name] = tree["blocks"][name].copy()
                tree["blocks"][name][index] += sign * 1e-5
            slope = (reference(shifted[0]) - reference(shifted[1])) / 2e-5
            np.testing.assert_allclose(grads["blocks"][name][index], slope, rtol=1e-5)


@pytest.mark.parametrize("pairs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_micro_batches_add_up_exactly_for_unequal_weights(pairs):
    with jax.enable_x64(True):
        batch = make_batch(2, 8, pairs, np.float64)

        def run(micro_batches):
            some = jax.jit(functools.partial(steps.gradients, model=make_model(), micro_batches=micro_batches))
            return some(numpy_params(dtype=np.float64), batch, jax.random.key(0))

        whole, accumulated = run(1), run(4)
        shares = [float(w) for w in batch.weights.reshape(2, 4, -1).sum((0, 2))]
        assert len(set(shares)) > 1  # the law would be empty for equal parts
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), whole, accumulated)


def test_parts_are_accumulated_in_float32():
    some = functools.partial(steps.gradients, model=make_model(), micro_batches=4)
    _, grads, _, _ = jax.eval_shape(some, numpy_params(dtype=jnp.bfloat16), make_batch(1, 8), jax.random.key(0))
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@pytest.mark.optimized
def test_what_reads_a_batch_of_several_reads_an_array():
    """Else XLA's CPU backend cuts it out of the stack once more in every loop that reads it, which is then slow."""

    def masked(index, scores, batch):
        seen = batch[:, :, None] == batch[:, None, :]
        return jnp.exp(jnp.where(seen, scores, -jnp.inf) + index)

    program = jax.jit(functools.partial(microbatch.fori_over_batches, masked))
    compiled = program.lower(jnp.ones((4, 16, 16)), jnp.ones((3, 4, 16), jnp.int32), 3).compile().as_text()
    (loop,) = [text for text in compiled.split("\n\n") if " exponential(" in text]
    assert "dynamic-slice" not in loop
    assert "dynamic-slice" in compiled


def test_split_rows_takes_rows_from_all_over():
    np.testing.assert_array_equal(microbatch.split_microbatches(jnp.arange(6), 2), [[0, 2, 4], [1, 3, 5]])


def test_micro_batches_have_randomness_of_their_own():
    batch = jax.tree.map(lambda x: jnp.asarray(np.repeat(x[1:2], 4, 0)), make_batch(1, 2))  # four equal rows
    model, seen = make_model(0.5), []

    def loss(params, part, rng, frozen):
        out = model.loss(params, part, rng, frozen)
        jax.debug.callback(lambda x: seen.append(float(x)), out[0]["loss"][0])
        return out

    spied = model._replace(loss=loss)
    run = jax.jit(functools.partial(steps.gradients, model=spied, micro_batches=4))

    def part_losses(rng):
        seen.clear()
        jax.block_until_ready(run(numpy_params(), batch, rng))
        jax.effects_barrier()
        return list(seen)

    first, second = part_losses(jax.random.key(0)), part_losses(jax.random.key(1))
    assert len(set(first)) == 4 and not set(first) & set(second)


def test_every_step_has_randomness_of_its_own_and_no_other():
    state, options = setup(dropout=0.5)
    step, batch = compiled(options), make_batch(0, 8)
    losses = [float(step(state._replace(step=jnp.int32(n)), batch)[1].loss) for n in (0, 1, 2, 0)]
    assert len(set(losses)) == 3 and losses[3] == losses[0]
    other = float(step(state._replace(rng=np.ones(2, np.uint32)), batch)[1].loss)
    assert other not in losses


def test_a_batch_without_weight_gives_zero_not_nan():
    state, options = setup()
    batch = make_batch(0, 8)
    after, out = compiled(options)(state, batch._replace(weights=0 * batch.weights))
    assert out.loss == 0 and out.grad_norm == 0 and after.skipped == 0


@pytest.mark.slow
def test_terms_that_disagree_are_named():
    state, options = setup()
    options["model"] = options["model"]._replace(weights=lambda batch: {"other": jnp.ones(())})
    with pytest.raises(ValueError, match=r"Model.weights names \['other'\], Model.loss \['loss'\]"):
        steps.train_step(state, make_batch(0, 8), **options)


@pytest.mark.parametrize(
    "name", ["adamw", *(pytest.param(x, marks=pytest.mark.slow) for x in ("lion", "adafactor", "muon"))]
)
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(name):
    state, options = setup(make_config(optimizer={"name": name, "ema_decay": 0.9}))
    step = compiled(options)
    good, bad = make_batch(0, 8), make_batch(1, 8)
    bad = bad._replace(weights=np.full_like(bad.weights, np.inf))
    once, first = step(state, good)
    twice, second = step(once, bad)
    assert equal((once.params, once.opt_state, once.ema), (twice.params, twice.opt_state, twice.ema))
    assert not equal(state.params, once.params)
    assert [int(x) for x in (twice.step, twice.bad_steps, twice.skipped)] == [2, 1, 1]
    assert np.isnan(second.loss) and int(second.bad_steps) == 1
    thrice, _ = step(twice, bad)
    assert [int(x) for x in (thrice.step, thrice.bad_steps, thrice.skipped)] == [3, 2, 2]
    # then it goes on as if the bad steps had not been: same update, same learning rate
    after, third = step(thrice, good)
    unharmed, same = step(once, good)
    assert equal((after.params, after.opt_state, after.ema), (unharmed.params, unharmed.opt_state, unharmed.ema))
    assert float(third.learning_rate) == float(same.learning_rate)
    assert [int(x) for x in (after.step, after.bad_steps, after.skipped)] == [4, 0, 2]
    assert np.isfinite(first.loss)


def test_a_gradient_that_is_not_finite_under_a_finite_loss_is_skipped():
    state, options = setup()
    model = options["model"]

    def loss(params, batch, rng, frozen):
        objective, metrics = model.loss(params, batch, rng)
        total, weight = objective["loss"]
        w = params["blocks"]["b_up"][0, 0]
        w = w - jax.lax.stop_gradient(w)
        return {"loss": (total + jnp.sqrt(w * w), weight)}, metrics  # value 0, slope 0 / 0 at w = 0

    after, out = compiled({**options, "model": model._replace(loss=loss)})(state, make_batch(0, 8))
    assert np.isfinite(out.loss) and not np.isfinite(out.grad_norm)
    assert int(after.skipped) == 1 and equal(after.params, state.params)


def test_moving_average_by_hand():
    state, options = setup(make_config(optimizer={"ema_decay": 0.25}))
    params, average = [state.params["blocks"]["w_up"]], state.ema["blocks"]["w_up"]
    assert equal(params[0], average)
    step = compiled(options)
    for n in range(4):
        state, _ = step(state, make_batch(n, 8))
        decay = min(0.25, (1 + n) / (10 + n))
        average = decay * average + (1 - decay) * state.params["blocks"]["w_up"]
    np.testing.assert_allclose(state.ema["blocks"]["w_up"], average, rtol=1e-5)


def test_metrics_say_what_happened():
    state, options = setup(make_config(optimizer={"clip_norm": 0.01}))
    batch = make_batch(0, 8)
    some = jax.jit(functools.partial(steps.gradients, model=options["model"]))
    loss, grads, _, _ = some(state.params, batch, jax.random.key(0))
    _, out = compiled(options)(state, batch)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(out.grad_norm, optax.tree.norm(grads), rtol=1e-6)  # before clipping
    assert float(out.grad_norm) > 1
    np.testing.assert_allclose(out.learning_rate, 1e-2 / 3, rtol=1e-6)  # the first of two warm-up steps
    assert float(out.weights["loss"]) == batch.weights.sum() == float(out.sums["accuracy"][1])


@pytest.mark.slow
def test_many_steps_are_one_after_another():
    state, options = setup(dropout=0.3)
    batches = [make_batch(n, 8) for n in range(4)]
    one = compiled(options)
    by_hand, losses = state, []
    for batch in batches[:3]:
        by_hand, out = one(by_hand, batch)
        losses.append(float(out.loss))
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches)
    together, metrics = jax.jit(functools.partial(steps.train_steps, **options))(state, stacked, 3)
    np.testing.assert_allclose(metrics.loss, [*losses, 0.0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), together.params, by_hand.params)
    assert int(together.step) == 3
    np.testing.assert_array_equal(together.rng, state.rng)
    assert len(set(losses)) == 3


def test_short_chunks_are_filled_up_and_share_one_program():
    config = make_config()
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    model = make_model()
    optimizer = make_optimizer(config.optimizer, 12, model.specs)
    run = steps.compile_steps(model, optimizer, mesh, config)
    batches = ToyBatches(8)
    state = run.init()
    for start, end in ((0, 3), (3, 5), (5, 6)):
        chunk, count = run.place_chunk([batches[i] for i in range(start, end)])
        assert chunk.tokens.shape == (3, 8, T) and count == end - start
        with compilations.counted() as programs:
            state, metrics = run.train(state, chunk, count)
        assert bool(programs) == (start == 0), programs
        assert (np.asarray(metrics.loss) > 0).tolist() == [i < count for i in range(3)]
    assert int(state.step) == 6


def test_evaluation_reports_rows():
    params = numpy_params()
    batch = make_batch(5, 6)
    sums = jax.jit(functools.partial(eval_step, model=make_model(dropout=0.5)))(params, batch)
    assert sums["loss"][0].shape == sums["loss"][1].shape == (6,)
    np.testing.assert_array_equal(sums["loss"][1], batch.weights.sum(1))
    scores = logits(params, batch.tokens, np).astype(np.float64)
    nll = np.log(np.exp(scores).sum(-1)) - np.take_along_axis(scores, batch.targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(sums["loss"][0], (nll * batch.weights).sum(1), rtol=1e-5)
    assert scores.shape[-1] == V
