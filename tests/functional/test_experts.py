"""Mixture of experts: laws of the router, of the layer and of its losses, in float64 where it matters."""

import functools
from dataclasses import replace

import expert_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import close, drawn, quickly, with_gradients

from jaxformer.config import Experts, OptimizerConfig
from jaxformer.functional import experts_layer, router
from jaxformer.functional.experts import capacity_mlp, expert_choice_mlp, expert_mlp
from jaxformer.functional.grouped_choice import GROUPED
from jaxformer.functional.layer import Context
from jaxformer.functional.layers import mlp
from jaxformer.kernels.grouped import blocks_gpu, megablox
from jaxformer.masks import causal, segments
from jaxformer.specs import param_axes, stack_specs
from jaxformer.training.optim import make_optimizer, muon_dimensions

B, T, D, F, E, K = 2, 24, 6, 8, 4, 2
SIZES = np.array([24, 0, 88, 8])  # parts of every number of blocks


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def weights(seed=1):
    return dict(zip(("w_up", "w_gate", "w_down"), drawn((E, D, F), (E, D, F), (E, F, D), seed=seed), strict=True))


def each_expert(x, w):
    """[E, N, D], every token through every expert."""
    dense = quickly(functools.partial(mlp, activation="swiglu"))
    return np.stack([dense(x, **{name: one[e] for name, one in w.items()}) for e in range(E)])


SLOW = {"megablox": pytest.mark.slow, "blocks_gpu": pytest.mark.slow}


def gated(a, b):
    return jnp.sin(a) * b


def of_groups(name):
    """The layer of an implementation, and its loop, as functions of (x, first, last)."""

    def grouped(x, first, last):
        return GROUPED[name].mlp_of(gated, x, tuple(first), last, jnp.asarray(SIZES, jnp.int32), 8)

    def loop(x, first, last):
        parts = np.split(np.arange(SIZES.sum()), np.cumsum(SIZES)[:-1])
        each = (gated(*(x[part] @ w[e] for w in first)) @ last[e] for e, part in enumerate(parts))
        return jnp.concatenate(list(each))

    return grouped, loop


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in GROUPED])
def test_layers_of_groups_are_those_of_a_loop(name, monkeypatch):
    monkeypatch.setattr(megablox, "INTERPRET", True)
    monkeypatch.setattr(blocks_gpu, "INTERPRET", True)
    single = name in SLOW
    width, hidden, out, dtype = (128, 128, 256, np.float32) if single else (5, 6, 7, np.float64)
    tolerance = 5e-4 if single else 1e-12
    x, *w, last, g = drawn((136, width), *[(4, width, hidden)] * 2, (4, hidden, out), (136, out), dtype=dtype)
    w, last = [one / width**0.5 for one in w], last / hidden**0.5
    live = SIZES.sum()
    g[live:] = 0  # what stands behind the last group is not defined
    grouped, loop = of_groups(name)
    with jax.enable_x64(not single):
        got, (of_x, *of_weights) = with_gradients(grouped, g, x, w, last)
        wanted, (wanted_x, *wanted_weights) = with_gradients(loop, g[:live], x, w, last)
        close(got[:live], wanted, tolerance)
        close((of_x[:live], of_weights), (wanted_x[:live], wanted_weights), 10 * tolerance)
    if not single:
        changes = drawn(x.shape, *(one.shape for one in w), last.shape, seed=3)
        changes = changes[0], changes[1:-1], changes[-1]
        tangents = [quickly(lambda *of, run=run: jax.jvp(run, of, changes)[1])(x, w, last) for run in (grouped, loop)]
        close(tangents[0][:live], tangents[1])


def test_blocks_in_bfloat16_and_what_follows_from_their_gradient():
    """There they hold bits, of which JAX knows no derivative."""
    x, *w, last, g = drawn((136, 5), (4, 5, 6), (4, 5, 6), (4, 6, 7), (136, 7), dtype=np.float32)
    g[SIZES.sum() :] = 0
    grouped, loop = of_groups("blocks")

    def change_of_gradient(run, g, dtype):
        def gradient(x):
            return jax.vjp(functools.partial(run, first=w, last=last), x)[1](g)[0][: SIZES.sum()]

        return quickly(lambda x: jax.jvp(gradient, (x,), (x,)))(jnp.asarray(x, dtype))

    wanted = change_of_gradient(loop, g[: SIZES.sum()], jnp.float32)
    found = change_of_gradient(grouped, jnp.asarray(g, jnp.bfloat16), jnp.bfloat16)
    for got, right in zip(found, wanted, strict=True):
        assert got.dtype == jnp.bfloat16
        assert np.abs(np.asarray(got, np.float32) - right).max() < 0.02 * np.abs(right).max()


@pytest.mark.parametrize("name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("blocks", "ragged")), "capacity"])
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

    close(with_gradients(layer, g, x, w_router, w), with_gradients(plain, g, x, w_router, w), 1e-11)


def test_equal_experts_are_a_dense_layer_and_their_order_is_theirs_alone():
    x, w_router = drawn((T, D), (D, E))
    w = weights()
    alike = {name: np.broadcast_to(one[:1], one.shape) for name, one in w.items()}
    gates, chosen = router.route(x @ w_router, K)
    run = functools.partial(quickly(functools.partial(expert_mlp, activation="swiglu")), x)
    close(run(gates, chosen, **alike), mlp(x, **{name: one[0] for name, one in w.items()}, activation="swiglu"))
    order = np.array([2, 0, 3, 1])
    moved_gates, moved = router.route(x @ w_router[:, order], K)
    np.testing.assert_array_equal(order[moved], chosen)
    moved_weights = {name: one[order] for name, one in w.items()}
    close(run(moved_gates, moved, **moved_weights), run(gates, chosen, **w))


def test_no_tokens():
    nothing, w = np.zeros((0, K)), weights()
    out = expert_mlp(jnp.zeros((0, D)), nothing, nothing.astype(np.int32), **w, activation="swiglu")
    assert out.shape == (0, D)


def test_no_tokens_in_rows_and_tokens_in_rows():
    w = weights()
    nothing = np.zeros((2, 0, K))
    assert capacity_mlp(jnp.zeros((2, 0, D)), nothing, nothing.astype(np.int32), 1, **w, activation="swiglu").shape == (
        2,
        0,
        D,
    )
    gates = np.zeros((2, 3, K), np.float32)
    with pytest.raises(ValueError, match=rf"^expert_mlp: x \(2, 3, {D}\), .* accepted for w_up .*: \[N, {D}\], and"):
        expert_mlp(jnp.zeros((2, 3, D)), gates, gates.astype(np.int32), **w, activation="swiglu")


@pytest.mark.parametrize("name", ["blocks", "capacity"])
def test_gates_of_zero_have_second_derivatives(name):
    x, gates = drawn((T, D), (T, K))
    gates[::3], gates[1, 1] = 0, 0
    chosen, w = np.argsort(np.random.default_rng(4).normal(size=(T, E)), axis=1)[:, :K].astype(np.int32), weights()

    def layer(x, gates):
        if name == "capacity":
            return capacity_mlp(x[None], gates[None], chosen[None], T, **w, activation="swiglu")[0]
        return expert_mlp(x, gates, chosen, **w, activation="swiglu", implementation=name)

    def plain(x, gates):
        of_each = jnp.sum(jax.nn.one_hot(chosen, E) * gates[..., None], axis=1)
        hidden = jax.nn.silu(jnp.einsum("ND,EDF->ENF", x, w["w_gate"])) * jnp.einsum("ND,EDF->ENF", x, w["w_up"])
        return jnp.einsum("NE,ENF,EFD->ND", of_each, hidden, w["w_down"])

    def second(run):
        first = jax.grad(lambda x, gates: jnp.sum(jnp.sin(run(x, gates))), (0, 1))
        return quickly(lambda *of: jax.jvp(first, of, (x[::-1], np.ones_like(gates)))[1])(x, gates)

    close(second(layer), second(plain), 1e-11)


def test_padding_that_is_taken_is_no_number_of_any_gradient():
    x, logits, w = *drawn((1, 6, D), (1, 6, E)), weights()
    x[:, 2:] = np.nan
    valid = np.arange(6)[None] < 2

    def loss(x, logits, w):
        return jnp.sum(expert_choice_mlp(x, logits, 4, **w, valid=valid, activation="swiglu")[:, :2])

    for found in jax.tree.leaves(quickly(jax.grad(loss, (0, 1, 2)))(x, logits, w)):
        assert np.isfinite(found).all()


WRONG = {
    "w_down of other experts": (
        lambda x, g, c, w: expert_mlp(x, g, c, w["w_up"], w["w_down"][1:]),
        "w_down (3, 8, 6), w_gate None;",
    ),
    "w_down of another width": (
        lambda x, g, c, w: expert_mlp(x, g, c, w["w_up"], w["w_down"][:, 1:]),
        "w_down (4, 7, 6), ",
    ),
    "w_gate of another width": (
        lambda x, g, c, w: expert_mlp(x, g, c, w["w_up"], w["w_down"], w["w_up"][:, 1:]),
        "w_gate (4, 5, 8);",
    ),
    "tokens for rows": (
        lambda x, g, c, w: capacity_mlp(x[None], g, c, 2, w["w_up"], w["w_down"]),
        "chosen (3, 2), capacity 2;",
    ),
    "no place": (lambda x, g, c, w: capacity_mlp(x[None], g[None], c[None], 0, w["w_up"], w["w_down"]), "capacity 0;"),
    "more places than tokens": (
        lambda x, g, c, w: expert_choice_mlp(x[None], g[None], 4, w["w_up"], w["w_down"]),
        "capacity 4;",
    ),
    "fewer logits than experts": (
        lambda x, g, c, w: expert_choice_mlp(x[None], g[None], 2, w["w_up"], w["w_down"]),
        f"logits (1, 3, {K}), {E} experts,",
    ),
    "a bias of other experts": (lambda x, g, c, w: router.route(g, 1, bias=x[0]), f"bias ({D},); accepted: ({K},)"),
    "choices for counts": (lambda x, g, c, w: router.balance_loss(g, c), "counts (3, 2); accepted: (2,)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_shapes_that_do_not_fit_are_refused(case):
    call, said = WRONG[case]
    x, gates = drawn((3, D), (3, K))
    with pytest.raises(ValueError) as error:
        call(x, gates, np.zeros((3, K), np.int32), weights())
    assert said in str(error.value) and "accepted: " in str(error.value)


def test_experts_that_choose_take_the_same_number_of_tokens():
    x, w_router = drawn((B, T, D), (D, E))
    w, capacity = weights(), 5
    there = np.ones((B, T), bool)
    there[1, 15:] = False
    logits = x @ w_router
    choose = quickly(functools.partial(expert_choice_mlp, activation="swiglu"), static_argnums=2)
    got = choose(x, logits, capacity, **w, valid=there)
    outs = each_expert(x.reshape(-1, D), w).reshape(E, B, T, D)
    wanted = np.zeros_like(x)
    probabilities = np.where(there[..., None], jax.nn.softmax(logits), 0)
    for b in range(B):
        for e in range(E):
            for t in np.argsort(-probabilities[b, :, e])[:capacity]:
                wanted[b, t] += probabilities[b, t, e] * outs[e, b, t]
    close(got, wanted)
    assert not np.asarray(got)[1, 15:].any()


@functools.cache
def program(micro_batches):
    return cases.step_of(cases.config_of(), micro_batches)


@pytest.mark.slow
def test_losses_are_exact_over_micro_batches():
    params, batch = cases.params_of(cases.config_of()), cases.batch_of()
    whole, parts = (program(number)(params, batch, jax.random.key(1)) for number in (1, 4))
    close(parts[:3], whole[:3], 1e-6)
    assert whole[2].keys() == {"loss", *experts_layer.MEASURED}
    bias = np.asarray(whole[1]["mlp"]["bias"])
    assert np.abs(bias).max() > 0 and abs(bias.sum()) < 1e-6 and whole[1]["mlp"]["load"] is None
    measured = cases.step_of(cases.config_of(), 4, noise_scale=True)(params, batch, jax.random.key(1))
    close(measured[:2], parts[:2], 1e-12)


@pytest.mark.slow  # for the program that both share
def test_padding_changes_nothing():
    params, batch = cases.params_of(cases.config_of()), cases.batch_of()
    other = batch._replace(tokens=np.where(batch.segments == 0, (batch.tokens + 5) % cases.V, batch.tokens))
    assert (other.tokens != batch.tokens).any()
    close(*(program(1)(params, each, jax.random.key(1))[:2] for each in (batch, other)))


@pytest.mark.parametrize("dispatch", ["dropless", "capacity"])
def test_how_busy_experts_are_and_what_finds_no_place(dispatch):
    cfg, documents = cases.config_of(dispatch=dispatch), cases.batch_of().segments
    params, x = cases.params_of(cfg)["mlp"], drawn((*documents.shape, cases.D))[0] + 1
    terms = quickly(lambda x: experts_layer.apply(params, x, cfg, Context(segments(documents)))[2])(x)
    best = np.argsort(-(x @ params["w_router"]), axis=-1)[..., : cfg.feed_forward.top_k]
    count, tokens, lost = cfg.feed_forward.count, (documents != 0).sum(), 0
    found = np.bincount(best[documents != 0].ravel(), minlength=count)
    for row, there in zip(best, documents != 0, strict=True):
        free = np.full(count, cfg.feed_forward.capacity(cases.T))
        for expert in row[there].ravel():
            lost, free[expert] = lost + (free[expert] == 0), max(free[expert] - 1, 0)
    close(terms["expert_load"] / tokens, found.max() / found.mean(), 1e-6)
    assert found.max() / found.mean() > 1.1 and lost > 5
    close(terms["expert_dropped"], lost / cfg.feed_forward.top_k if dispatch == "capacity" else 0, 1e-6)


@pytest.mark.parametrize("unit", [1.0, 100.0])
def test_how_busy_experts_are_whatever_their_load_is_counted_in(unit):
    """Of several layers and micro-batches it is a share of the tokens of all layers, which sums to less than 1."""
    cfg, documents = cases.config_of(), cases.batch_of().segments
    params, x = cases.params_of(cfg)["mlp"], drawn((*documents.shape, cases.D))[0]
    load = unit * np.array([0.2] + (cfg.feed_forward.count - 1) * [0.1]) / cfg.feed_forward.count
    terms = experts_layer.apply(params | {"load": load}, x, cfg, Context(segments(documents)))[2]
    close(terms["expert_load"] / (documents != 0).sum(), load.max() / load.mean(), 1e-6)


@pytest.mark.parametrize("factor, top_k, length, count, places", [
    (1.1, 2, 100, 4, 55), (1.1, 6, 1000, 8, 825), (1.25, 2, 100, 8, 32), (1e-2, 1, 8, 8, 1), (1000.0, 1, 8, 2, 8),
])  # fmt: skip
def test_an_experts_places_are_rounded_up_from_the_exact_product(factor, top_k, length, count, places):
    kind = Experts(dispatch="capacity", capacity_factor=factor, top_k=top_k, count=count)
    assert kind.capacity(length) == places


def test_no_token_sees_another_document():
    cfg, documents = cases.config_of(), cases.batch_of().segments
    params, there = cases.params_of(cfg)["mlp"], documents == 1
    x, other = drawn((*documents.shape, cases.D), (*documents.shape, cases.D))
    other = np.where(there[..., None], x, other)

    def of_document(x):
        out = experts_layer.apply(params, x, cfg, Context(causal() & segments(documents)))[0]
        return jnp.sum(jnp.square(out) * there[..., None]), out

    run = quickly(jax.value_and_grad(of_document, has_aux=True))
    (_, out), grad = run(x)
    (_, out_of_other), _ = run(other)
    np.testing.assert_array_equal(np.asarray(out)[there], np.asarray(out_of_other)[there])
    assert not np.asarray(grad)[~there].any() and np.asarray(grad)[there].any()
    shared = {name.removeprefix("shared_"): w for name, w in params.items() if name.startswith("shared_")}
    close(np.asarray(out)[documents == 0], mlp(x, **shared, activation="swiglu")[documents == 0])  # padding


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_optimizers_know_experts_from_layers(name):
    specs = stack_specs(experts_layer.specs(cases.config_of()), 2)
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
