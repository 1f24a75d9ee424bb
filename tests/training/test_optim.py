"""Schedules by hand; update rules that agree on what a learning rate, a decay and a layer are."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toy import numpy_params, specs

from jaxformer.config import OptimizerConfig
from jaxformer.errors import ConfigError
from jaxformer.specs import ParamSpec, is_spec, stack_specs, zeros
from jaxformer.training.counter_biases import with_counter_biases
from jaxformer.training.optim import clip, make_optimizer, make_schedule, muon_dimensions, scale_by_adam

RULES = ["adamw", "lion", "adafactor", "muon"]
SLOW_RULES = [pytest.param(name, marks=pytest.mark.slow) for name in RULES[:2]]  # where the simple ones obey anyway


def rates(steps, at, **fields):
    schedule = jax.jit(make_schedule(OptimizerConfig(learning_rate=2.0, **fields), steps))
    return [float(schedule(jnp.int32(step))) for step in at]


def test_warm_up_is_linear_and_wastes_no_step():
    for kind in ("cosine", "linear", "inverse_sqrt", "constant", "wsd"):
        got = rates(100, range(5), schedule=kind, warmup_steps=4)
        np.testing.assert_allclose(got, [0.4, 0.8, 1.2, 1.6, 2.0], rtol=1e-6)
        assert rates(100, [0], schedule=kind, warmup_steps=0) == [2.0]


def test_cosine():
    got = rates(110, [10, 35, 60, 85, 110, 200], schedule="cosine", warmup_steps=10, final_fraction=0.1)
    half = [0.5 * (1 + math.cos(math.pi * p)) for p in (0, 0.25, 0.5, 0.75, 1, 1)]
    np.testing.assert_allclose(got, [0.2 + 1.8 * h for h in half], rtol=1e-6)


def test_linear():
    got = rates(110, [10, 35, 60, 110, 200], schedule="linear", warmup_steps=10, final_fraction=0.5)
    np.testing.assert_allclose(got, [2.0, 1.75, 1.5, 1.0, 1.0], rtol=1e-6)


def test_inverse_sqrt():
    got = rates(10_000, [100, 400, 1600, 9999], schedule="inverse_sqrt", warmup_steps=100, final_fraction=0.2)
    np.testing.assert_allclose(got, [2.0, 1.0, 0.5, 0.4], rtol=1e-6)  # the floor is 0.4


def test_constant():
    assert rates(100, [50, 100], schedule="constant", warmup_steps=10) == [2.0, 2.0]


def test_wsd():
    got = rates(100, [10, 50, 80, 90, 100], schedule="wsd", warmup_steps=10, decay_steps=20, final_fraction=0.1)
    np.testing.assert_allclose(got, [2.0, 2.0, 2.0, 1.1, 0.2], rtol=1e-6)
    by_default = rates(100, [80, 90, 100], schedule="wsd", warmup_steps=10, final_fraction=0.0)
    np.testing.assert_allclose(by_default, [2.0, 1.0, 0.0], atol=1e-6)
    with pytest.raises(ConfigError, match=r"config\.optimizer\.decay_steps: 95 .*accepted: at most 90"):
        rates(100, [0], schedule="wsd", warmup_steps=10, decay_steps=95)


def run(name, tree, grads, **more):
    """Parameters after some steps from fixed gradients that change by the step."""
    return runner(name, tree, **more)(grads)


def runner(name, tree, steps=3, **fields):
    """`run` for any gradients, compiled once."""
    cfg = OptimizerConfig(
        **{"name": name, "learning_rate": 0.1, "warmup_steps": 0, "schedule": "constant", "weight_decay": 0.0, **fields}
    )
    optimizer = make_optimizer(cfg, 100, tree)

    @jax.jit
    def go(params, grads):  # as an argument: XLA would fold a constant for minutes
        state = optimizer.init(params)
        for step in range(steps):
            scaled = jax.tree.map(lambda g, s=step: g * jnp.cos(s * (1 + jnp.abs(g))), grads)
            updates, state = optimizer.update(scaled, state, params)
            params = optax.apply_updates(params, updates)
        return params

    return functools.partial(go, jax.tree.map(lambda s: np.ones(s.shape, np.float32), tree, is_leaf=is_spec))


@pytest.mark.parametrize("name", RULES)
def test_every_rule_descends(name):
    tree = specs()
    goal = numpy_params(tree, seed=2)
    optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.0), 200, tree)

    def distance(params):
        return sum(jnp.sum(jnp.square(p - g)) for p, g in zip(*map(jax.tree.leaves, (params, goal)), strict=True))

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(distance)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def descend(start):
        (end, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), length=200)
        return distance(start), distance(end)

    before, after = descend(numpy_params(tree, seed=1))
    assert after < 0.1 * before


@pytest.mark.parametrize("name", RULES)
def test_decay_is_decoupled_and_spares_biases(name):
    tree = {
        "w": ParamSpec((3, 4), ("embed", "mlp"), zeros, "hidden"),
        "table": ParamSpec((5, 3), ("vocab", "embed"), zeros, "input"),
        "b": ParamSpec((4,), ("mlp",), zeros, "bias"),
    }
    nothing = jax.tree.map(np.zeros_like, numpy_params(tree))
    after = run(name, tree, nothing, steps=2, weight_decay=0.5)
    expected = {"w": (1 - 0.1 * 0.5) ** 2, "table": (1 - 0.1 * 0.5) ** 2, "b": 1.0}
    for key, value in expected.items():
        np.testing.assert_allclose(after[key], value, rtol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", [*SLOW_RULES, "adafactor", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_stack_of_layers_is_its_layers(name):
    # Large enough that Adafactor factors, so many layers that it would factor over them.
    one = {
        "w": ParamSpec((128, 130), ("embed", "mlp"), zeros, "hidden"),
        "b": ParamSpec((130,), ("mlp",), zeros, "bias"),
    }
    stacked, num_layers = stack_specs(one, 140), 140
    grads = numpy_params(stacked)
    # layers of very different size: anything shared between them shows
    scale = np.logspace(-2, 2, num_layers, dtype=np.float32)
    grads = jax.tree.map(lambda g: g * scale.reshape(-1, *[1] * (g.ndim - 1)), grads)
    together = run(name, stacked, grads, steps=2)
    of_one = runner(name, one, steps=2)
    for layer in (0, 77, 139):
        alone = of_one(jax.tree.map(lambda g, i=layer: g[i], grads))
        for key in one:
            np.testing.assert_allclose(together[key][layer], alone[key], rtol=2e-3, atol=2e-5, err_msg=key)


def test_muon_sees_heads_as_one_side_of_a_matrix():
    d, h, k = 12, 4, 3
    heads = {"q": ParamSpec((d, h, k), ("embed", "heads", "head_width"), zeros, "hidden")}
    flat = {"q": ParamSpec((d, h * k), ("embed", "mlp"), zeros, "hidden")}
    g = numpy_params(flat)["q"]
    got = run("muon", heads, {"q": g.reshape(d, h, k)})["q"].reshape(d, h * k)
    np.testing.assert_allclose(got, run("muon", flat, {"q": g})["q"], rtol=1e-5, atol=1e-6)
    assert muon_dimensions(ParamSpec((h, k, d), ("heads", "head_width", "embed"), zeros, "hidden", 2)) == ((0, 1), (2,))


def test_muon_updates_are_orthogonal_and_of_adamw_size():
    tree = {"w": ParamSpec((16, 64), ("embed", "mlp"), zeros, "hidden")}
    moved = run("muon", tree, numpy_params(tree), steps=1)["w"] - 1
    moved = moved / 0.1  # the learning rate
    assert 0.1 < float(jnp.sqrt(jnp.mean(jnp.square(moved)))) < 0.3
    singular = np.linalg.svd(np.asarray(moved), compute_uv=False)
    assert singular.max() / singular.min() < 3  # the gradient's own: 5 or more


def test_muon_leaves_tables_biases_and_scales_to_adamw():
    tree = {
        "table": ParamSpec((8, 4), ("vocab", "embed"), zeros, "input"),
        "positions": ParamSpec((8, 4), ("positions", "embed"), zeros, "input"),
        "b_query": ParamSpec((2, 4), ("heads", "head_width"), zeros, "bias"),
        "scale": ParamSpec((4,), ("norm",), zeros, "norm"),
    }
    grads = numpy_params(tree)
    got, adamw = run("muon", tree, grads), run("adamw", tree, grads)
    for key in tree:
        np.testing.assert_allclose(got[key], adamw[key], rtol=1e-6, err_msg=key)


def test_adamw_by_hand():
    tree = {"w": ParamSpec((2,), ("norm",), zeros, "norm")}
    g = np.array([3.0, -0.5])
    m, v, w = np.zeros(2), np.zeros(2), np.ones(2)
    for t in (1, 2, 3):
        gt = g * np.cos((t - 1) * (1 + np.abs(g)))
        m, v = 0.9 * m + 0.1 * gt, 0.95 * v + 0.05 * gt**2
        w -= 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    np.testing.assert_allclose(run("adamw", tree, {"w": jnp.asarray(g, jnp.float32)})["w"], w, rtol=1e-4)


def test_clip():
    grads = {"a": jnp.array([3.0]), "b": jnp.array([[4.0]])}
    for limit, scale in ((None, 1.0), (10.0, 1.0), (1.0, 0.2), (5.0, 1.0)):
        found, norm = clip(grads, limit)
        assert float(norm) == 5.0
        np.testing.assert_allclose(found, scale, rtol=1e-6)
    assert np.isnan(clip({"a": jnp.array([jnp.nan])}, 1.0)[1])


@pytest.mark.parametrize("name", [*SLOW_RULES, pytest.param("adafactor", marks=pytest.mark.slow), "muon"])
def test_scale_multiplies_the_gradients_and_what_is_not_finite_changes_no_state(name):
    tree = specs()
    params, grads = numpy_params(tree, seed=1), numpy_params(tree, seed=2)
    optimizer = make_optimizer(OptimizerConfig(name=name, weight_decay=0.1), 100, tree)
    update = jax.jit(optimizer.update)
    state = update(grads, jax.jit(optimizer.init)(params), params)[1]
    doubled = update(jax.tree.map(lambda g: 2 * g, grads), state, params)
    for got, wanted in zip(*map(jax.tree.leaves, (update(grads, state, params, scale=2.0), doubled)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    broken = jax.tree.map(lambda g: g * np.nan, grads)
    for got, wanted in zip(*map(jax.tree.leaves, (update(broken, state, params, finite=False)[1], state)), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_adam_is_optax_adam():
    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(3, 4)).astype(np.float32)}
    ours, theirs = scale_by_adam(0.8, 0.99, {"a": 1e-6}), optax.scale_by_adam(0.8, 0.99, 1e-6)
    states = ours.init(params), theirs.init(params)
    our_update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    for step in range(5):
        grads = {"a": rng.normal(size=(3, 4)).astype(np.float32)}
        if step == 2:  # which the other one never sees
            states = our_update({"a": grads["a"] * np.nan}, states[0], finite=False)[1], states[1]
        (got, first), (wanted, second) = our_update(grads, states[0]), their_update(grads, states[1])
        states = first, second
        np.testing.assert_allclose(got["a"], wanted["a"], rtol=2e-6)
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])


@pytest.mark.optimized
def test_the_moments_are_updated_in_place():
    """A loop of updates holds one array more than its state, the gradient; a copy of a moment would be another."""
    adam = scale_by_adam(0.9, 0.99, 1e-8)
    size = 1024

    def run(state, params, steps):
        def step(_, carry):
            state, params = carry
            updates, state = adam.update(params @ params, state, scale=0.5, finite=jnp.isfinite(params[0, 0]))
            return state, params - updates

        return jax.lax.fori_loop(0, steps, step, (state, params))

    params = jax.ShapeDtypeStruct((size, size), jnp.float32)
    compiled = jax.jit(run, donate_argnums=(0, 1)).lower(jax.eval_shape(adam.init, params), params, 3).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * 4 * size**2


def test_a_counter_bias_stays_where_only_rounding_is_left_of_its_gradient():
    specs = {"b": ParamSpec((4,), (None,), zeros, "counter_bias", rate=0.5)}
    both = with_counter_biases(optax.with_extra_args_support(optax.sgd(1.0)), specs)
    left = np.float32(0.3) + np.float32(-0.1) + np.float32(-0.2)  # of an expert's excess in three micro-batches
    assert 0 < left < 1e-7
    gradient = {"b": jnp.array([0.25, -0.25, left, 1e-4])}
    assert both.update(gradient, both.init(gradient))[0]["b"].tolist() == [-0.5, 0.5, 0.0, -0.5]
