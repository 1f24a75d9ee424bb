"""Mixture of experts: laws of the router, of the layer and of its losses, in float64 where it matters."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import Experts, ModelConfig, OptimizerConfig, Softmax
from jaxformer.functional import experts_layer, router
from jaxformer.functional.experts import capacity_mlp, expert_choice_mlp, expert_mlp
from jaxformer.functional.grouped_choice import GROUPED
from jaxformer.functional.layer import Context
from jaxformer.functional.layers import mlp
from jaxformer.kernels.grouped import megablox
from jaxformer.masks import causal, segments
from jaxformer.specs import init_params, param_axes, stack_specs
from jaxformer.training.gradients import gradients
from jaxformer.training.optim import make_optimizer, muon_dimensions
from jaxformer.types import Batch, Model

B, T, D, F, E, K = 2, 24, 6, 8, 4, 2
SIZES = np.array([24, 0, 40, 8])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def drawn(*shapes, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def weights(seed=1):
    return dict(zip(("w_up", "w_gate", "w_down"), drawn((E, D, F), (E, D, F), (E, F, D), seed=seed), strict=True))


def each_expert(x, w):
    """[E, N, D], every token through every expert."""
    return np.stack([mlp(x, **{name: one[e] for name, one in w.items()}, activation="swiglu") for e in range(E)])


def close(got, wanted, tolerance=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, wanted)


@pytest.mark.parametrize("name", GROUPED)
def test_products_of_groups_are_those_of_a_loop(name, monkeypatch):
    monkeypatch.setattr(megablox, "INTERPRET", True)
    single = name == "megablox"
    width, out, dtype, tolerance = (128, 128, np.float32, 2e-4) if single else (5, 6, np.float64, 1e-12)
    a, b, w, g = drawn((96, width), (96, width), (4, width, out), (96, out), dtype=dtype)
    live = SIZES.sum()
    g[live:] = 0  # what stands behind the last group is not defined

    def function(a, b):
        return jnp.sin(a) * b

    def loop(a, b, w):
        parts = np.split(np.arange(live), np.cumsum(SIZES)[:-1])
        return jnp.concatenate([function(a, b)[part] @ w[e] for e, part in enumerate(parts)])

    def grouped(a, b, w):
        return GROUPED[name].product_of(function, (a, b), w, jnp.asarray(SIZES, jnp.int32), 8)

    with jax.enable_x64(not single):
        got, pull = jax.vjp(jax.jit(grouped), a, b, w)
        wanted, pull_wanted = jax.vjp(loop, a, b, w)
        close(got[:live], wanted, tolerance)
        of_a, of_b, of_w = pull(g)
        wanted_a, wanted_b, wanted_w = pull_wanted(g[:live])
        close((of_a[:live], of_b[:live], of_w), (wanted_a[:live], wanted_b[:live], wanted_w), 10 * tolerance)
    if not single:
        close(jax.jvp(grouped, (a, b, w), (b, a, w))[1][:live], jax.jvp(loop, (a, b, w), (b, a, w))[1])


@pytest.mark.parametrize("name", ["blocks", "ragged", "capacity"])
def test_the_layer_is_a_weighted_sum_of_all_experts(name):
    x, w_router, g = drawn((B * T, D), (D, E), (B * T, D))
    w = weights()

    def layer(x, w_router, w):
        gates, chosen = router.route(x @ w_router, K)
        if name == "capacity":  # so large that nothing is dropped
            rows = (a.reshape(B, T, -1) for a in (x, gates, chosen))
            return capacity_mlp(*rows, T, **w, activation="swiglu").reshape(x.shape)
        return expert_mlp(x, gates, chosen, **w, activation="swiglu", implementation=name)

    def plain(x, w_router, w):
        gates, chosen = router.route(x @ w_router, K)
        of_each = jnp.sum(jax.nn.one_hot(chosen, E) * gates[..., None], axis=1)
        hidden = jax.nn.silu(jnp.einsum("ND,EDF->ENF", x, w["w_gate"])) * jnp.einsum("ND,EDF->ENF", x, w["w_up"])
        return jnp.einsum("NE,ENF,EFD->ND", of_each, hidden, w["w_down"])

    got, pull = jax.vjp(jax.jit(layer), x, w_router, w)
    wanted, pull_wanted = jax.vjp(plain, x, w_router, w)
    close(got, wanted)
    close(pull(g), pull_wanted(g), 1e-11)


def test_equal_experts_are_a_dense_layer_and_their_order_is_theirs_alone():
    x, w_router = drawn((T, D), (D, E))
    w = weights()
    alike = {name: np.broadcast_to(one[:1], one.shape) for name, one in w.items()}
    gates, chosen = router.route(x @ w_router, K)
    run = functools.partial(jax.jit(functools.partial(expert_mlp, activation="swiglu")), x)
    close(run(gates, chosen, **alike), mlp(x, **{name: one[0] for name, one in w.items()}, activation="swiglu"))
    order = np.array([2, 0, 3, 1])
    moved_gates, moved = router.route(x @ w_router[:, order], K)
    np.testing.assert_array_equal(order[moved], chosen)
    moved_weights = {name: one[order] for name, one in w.items()}
    close(run(moved_gates, moved, **moved_weights), run(gates, chosen, **w))


def test_gates():
    logits = drawn((50, E))[0] * 2
    probabilities = np.asarray(jax.nn.softmax(logits))
    gates, chosen = router.route(logits, 1)
    close(gates[:, 0], probabilities.max(1))
    np.testing.assert_array_equal(chosen[:, 0], probabilities.argmax(1))
    two, which = router.route(logits, 2)
    close(two.sum(1), np.ones(50))
    close(router.route(logits, 2, renormalize=False)[0], np.take_along_axis(probabilities, np.asarray(which), 1))
    bias = np.array([0.0, 0.0, 2.0, 0.0])  # chooses, but does not weigh
    gates, chosen = router.route(logits, 1, bias)
    assert (np.asarray(chosen) == 2).all()
    close(gates[:, 0], probabilities[:, 2])
    # A gate of a single expert has to tell the router something; one that is divided by itself would not.
    assert np.abs(jax.grad(lambda x: router.route(x, 1)[0].sum())(logits)).max() > 0.1
    for wrong in ({"per_token": E + 1}, {"per_token": 1, "renormalize": True}):
        with pytest.raises(ValueError, match="accepted"):
            router.route(logits, **wrong)


def test_capacity_takes_the_earliest_tokens_of_a_row():
    chosen = jnp.array([[[0, 1], [0, 2], [1, 0], [0, 1]]] * 2, jnp.int32).at[1, 0].set(3)  # padding in the second row
    kept, _ = router.within_capacity(chosen, 3, 2)
    assert kept[0].tolist() == [[0, 1], [0, 2], [1, 3], [3, 3]]
    assert kept[1].tolist() == [[3, 3], [0, 2], [1, 0], [3, 1]]
    of_experts, which = drawn((300,))[0], np.random.default_rng(1).integers(0, E + 1, 300)
    rank, counts = router.ranks(jnp.asarray(which, jnp.int32), E)
    assert rank.tolist() == [(which[:i] == which[i]).sum() for i in range(len(of_experts))]
    assert counts.tolist() == np.bincount(which, minlength=E)[:E].tolist()


def test_a_later_token_changes_nothing_of_what_is_kept():
    chosen = jnp.asarray(np.random.default_rng(0).integers(0, E, (1, T, K)), jnp.int32)
    kept, _ = router.within_capacity(chosen, E, 5)
    for t in range(1, T, 5):
        other, _ = router.within_capacity(chosen.at[:, t:].set(0), E, 5)
        np.testing.assert_array_equal(other[:, :t], kept[:, :t])


def test_experts_that_choose_take_the_same_number_of_tokens():
    x, w_router = drawn((B, T, D), (D, E))
    w, capacity = weights(), 5
    there = np.ones((B, T), bool)
    there[1, 15:] = False
    logits = x @ w_router
    got = expert_choice_mlp(x, logits, capacity, **w, there=there, activation="swiglu")
    outs = each_expert(x.reshape(-1, D), w).reshape(E, B, T, D)
    wanted = np.zeros_like(x)
    probabilities = np.where(there[..., None], jax.nn.softmax(logits), 0)
    for b in range(B):
        for e in range(E):
            for t in np.argsort(-probabilities[b, :, e])[:capacity]:
                wanted[b, t] += probabilities[b, t, e] * outs[e, b, t]
    close(got, wanted)
    assert not np.asarray(got)[1, 15:].any()


# One layer between a table and a square, for what only a gradient of a whole batch shows.
LAYER = ModelConfig(
    num_layers=1, width=D, context_length=T, vocab_size=32, attention=Softmax(1), feed_forward=Experts(
        count=E, per_token=K, shared=1, width=F, activation="swiglu", balance=0.5, z_loss=0.1, bias_rate=0.01),
)  # fmt: skip


def one_layer(params, batch, rng=None, frozen=None, cfg=LAYER):
    """(objective, metrics), as of `types.Model.loss`."""
    x = jnp.asarray(drawn((32, cfg.width), seed=5)[0])[batch.tokens]
    out, _, terms = experts_layer.apply(params["mlp"], x, cfg, Context(segments(batch.segments)))
    total = jnp.sum(jnp.square(out) * batch.weights[..., None])
    weights = one_layer_weights(batch)
    metrics = {"loss": (total, weights["loss"])}
    return {name: (value, weights[name]) for name, value in {"loss": total, **terms}.items()}, metrics


def one_layer_weights(batch):
    return dict.fromkeys(("loss", *experts_layer.TERMS), jnp.sum(batch.weights))


def drawn_layer(cfg=LAYER):
    """Parameters of a layer, whose router is so sure that rounding changes no choice."""
    specs = {"mlp": experts_layer.specs(cfg)}
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), init_params(specs, jax.random.key(0)))
    params["mlp"]["w_router"] = 30 * params["mlp"]["w_router"]
    return specs, params


def batch_of(rows=8, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 32, (rows, T)).astype(np.int32)
    documents = np.where(np.arange(T) < T // 2, 1, 2).astype(np.int32) * np.ones((rows, 1), np.int32)
    documents[1, T // 3 :] = 0
    documents[-1] = 0
    positions = np.broadcast_to(np.arange(T, dtype=np.int32) % (T // 2), tokens.shape)
    return Batch(tokens, np.roll(tokens, -1, 1), (documents > 0).astype(np.float32), positions, documents)


@functools.cache
def program(micro_batches):
    model = Model(drawn_layer()[0], None, one_layer, one_layer_weights)
    return jax.jit(functools.partial(gradients, model=model, micro_batches=micro_batches))


def test_losses_are_exact_over_micro_batches():
    params, batch = drawn_layer()[1], batch_of()
    whole, parts = (program(number)(params, batch, jax.random.key(1)) for number in (1, 4))
    close(parts[:2], whole[:2], 1e-6)
    bias = np.asarray(whole[1]["mlp"]["bias"])
    assert np.abs(bias).max() > 0 and abs(bias.sum()) < 1e-6 and whole[1]["mlp"]["load"] is None


def test_the_balance_of_parts_would_be_another_loss():
    logits = drawn((8, E))[0] * 3
    counts = [router.count_choices(router.route(part, K)[1], E) for part in (logits, logits[:4], logits[4:])]
    whole, *parts = map(router.balance_loss, (logits, logits[:4], logits[4:]), counts)
    close(sum(router.balance_loss(part, counts[0]) for part in (logits[:4], logits[4:])), whole, 1e-6)
    assert abs(sum(parts) / whole - 1) > 0.01


def test_padding_changes_nothing():
    params, batch = drawn_layer()[1], batch_of()
    other = batch._replace(tokens=np.where(batch.segments == 0, (batch.tokens + 5) % 32, batch.tokens))
    assert (other.tokens != batch.tokens).any()
    close(*(program(1)(params, each, jax.random.key(1))[:2] for each in (batch, other)))


def test_balance_is_what_the_paper_says():
    x, w_router = drawn((B, T, D), (D, E))
    logits = x @ w_router
    _, chosen = router.route(logits, K)
    shares = np.bincount(np.asarray(chosen).ravel(), minlength=E) / (B * T * K)
    wanted = E * np.sum(shares * np.asarray(jax.nn.softmax(logits)).reshape(-1, E).mean(0))
    close(router.balance_loss(logits, router.count_choices(chosen, E)) / (B * T), wanted, 1e-6)


def test_no_token_sees_another_document():
    _, params = drawn_layer()
    documents = batch_of().segments
    there = documents == 1
    x, other = drawn((8, T, D), (8, T, D))
    other = np.where(there[..., None], x, other)

    def of_document(x):
        out = experts_layer.apply(params["mlp"], x, LAYER, Context(causal() & segments(documents)))[0]
        return jnp.sum(jnp.square(out) * there[..., None]), out

    run = jax.jit(jax.value_and_grad(of_document, has_aux=True))
    (_, out), grad = run(x)
    (_, out_of_other), _ = run(other)
    np.testing.assert_array_equal(np.asarray(out)[there], np.asarray(out_of_other)[there])
    assert not np.asarray(grad)[~there].any() and np.asarray(grad)[there].any()
    assert not np.asarray(out - mlp(x, **shared(params), activation="swiglu"))[documents == 0].any()  # padding


def shared(params):
    return {name.removeprefix("shared_"): w for name, w in params["mlp"].items() if name.startswith("shared_")}


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_optimizers_know_experts_from_layers(name):
    specs = stack_specs(experts_layer.specs(LAYER), 2)
    spec = specs["w_up"]
    assert spec.axes == ("layers", "experts", "embed", "mlp") and muon_dimensions(spec) == ((2,), (3,))
    assert param_axes(specs)["w_router"] == ("layers", "embed", None)
    cfg = OptimizerConfig(name=name, learning_rate=0.1, schedule="constant", warmup_steps=0, weight_decay=0.5)
    one = {"w": spec, "b": specs["bias"]}
    params = dict(zip(one, drawn(one["w"].shape, one["b"].shape, dtype=np.float32), strict=True))
    grads = dict(zip(one, drawn(one["w"].shape, one["b"].shape, seed=3, dtype=np.float32), strict=True))
    optimizer = make_optimizer(cfg, 10, one)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    close(updates["b"], -0.01 * np.sign(grads["b"]), 1e-6)
    # An expert by itself is updated as one of many.
    alone, alone_grads = ({"w": x["w"][1:2, 2:3]} for x in (params, grads))
    single = make_optimizer(cfg, 10, {"w": replace(spec, shape=alone["w"].shape)})
    wanted, _ = jax.jit(single.update)(alone_grads, single.init(alone), alone)
    close(updates["w"][1:2, 2:3], wanted["w"], 1e-4)
