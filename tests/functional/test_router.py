"""The router of a mixture of experts: who is chosen, what the gates are, where choices stand, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import close, drawn, quickly, with_gradients

from jaxformer.functional import router

E, K = 4, 2


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def test_gates():
    logits = drawn((50, E))[0] * 2
    probabilities = np.asarray(jax.nn.softmax(logits))
    choose = quickly(router.route, static_argnums=(1, 3))
    gates, chosen = choose(logits, 1)
    close(gates[:, 0], probabilities.max(1))
    np.testing.assert_array_equal(chosen[:, 0], probabilities.argmax(1))
    two, which = choose(logits, 2)
    close(two.sum(1), np.ones(50))
    close(choose(logits, 2, None, False)[0], np.take_along_axis(probabilities, np.asarray(which), 1))
    bias = np.array([0.0, 0.0, 2.0, 0.0])  # chooses, but does not weigh
    gates, chosen = choose(logits, 1, bias)
    assert (np.asarray(chosen) == 2).all()
    close(gates[:, 0], probabilities[:, 2])
    # A gate of a single expert has to tell the router something; one that is divided by itself would not.
    assert np.abs(quickly(jax.grad(lambda x: router.route(x, 1)[0].sum()))(logits)).max() > 0.1
    for wrong in ({"per_token": E + 1}, {"per_token": 1, "renormalize": True}):
        with pytest.raises(ValueError, match="accepted"):
            router.route(logits, **wrong)


def test_a_bias_may_choose_what_has_no_probability():
    bias = jnp.array([-5.0, 0.0, 0.0], jnp.float32)
    compiled = quickly(jax.value_and_grad(lambda logits: router.route(logits, 2, bias)[0][0, 0]))
    for far in (0.0, 40.0, 95.0, 200.0):  # the probabilities of the others are as small as 4e-18, 6e-42 and 0
        gate, gradient = compiled(jnp.array([[far, 0.0, 1.0]], jnp.float32))
        first = 1 / (1 + np.exp(-1 if far < 50 else 1))  # of equal scores the lower number is first
        close((gate, gradient[0, 0]), (first, 0), 1e-6)
        close(np.abs(gradient[0, 1:]), np.full(2, first * (1 - first)), 1e-6)


def test_choices_where_little_is_finite():
    inf = np.inf
    choose = quickly(router.route, static_argnums=1)
    gates, chosen = choose(np.array([[0.0, -inf, -inf], [-inf, -inf, 1.0]]), 2)
    assert chosen.tolist() == [[0, 1], [2, 0]] and gates.tolist() == [[1, 0], [1, 0]]
    assert choose(np.array([[3.0, 2.0, 1.0]]), 2, np.array([0, -inf, -inf]))[1].tolist() == [[0, 1]]
    for bias in (None, np.zeros(3)):  # a NaN shows, whoever is chosen
        assert np.isnan(choose(np.array([[1.0, 2.0, np.nan]]), 2, bias)[0]).all()


@pytest.mark.parametrize("k, renormalize", [(9, None), (20, None), (9, False), (20, False)])
def test_many_choices_of_a_token_are_gates_as_few_are(k, renormalize):
    """From nine on they are found together, or compiling would take minutes."""
    logits, g = drawn((7, 20), (7, k))
    order = np.argsort(-logits, axis=1)[:, :k]

    def gates(x):
        found, chosen = router.route(x, k, None, renormalize)
        return jnp.where(chosen == order, found, jnp.nan)

    def plain(x):
        own = jnp.take_along_axis(jax.nn.softmax(x, axis=-1), order, 1)
        return own if renormalize is False else own / jnp.sum(own, axis=1, keepdims=True)

    close(with_gradients(gates, g, logits), with_gradients(plain, g, logits))


@pytest.mark.parametrize("number", (1, 2, 5))
def test_the_highest_are_those_of_top_k(number):
    scores = np.round(np.random.default_rng(0).normal(size=(7, 40, 5)), 1) + 0.0  # many are equal
    found = jax.jit(router._highest, static_argnums=1)(scores, number)
    np.testing.assert_array_equal(found, jax.lax.top_k(scores, number)[1])


def test_capacity_takes_the_earliest_tokens_of_a_row():
    chosen = np.array([[[0, 1], [0, 2], [1, 0], [0, 1]]] * 2, np.int32)
    chosen[1, 0] = 3  # padding
    within = quickly(router.within_capacity, static_argnums=(1, 2))
    kept, _ = within(chosen, 3, 2)
    assert kept[0].tolist() == [[0, 1], [0, 2], [1, 3], [3, 3]]
    assert kept[1].tolist() == [[3, 3], [0, 2], [1, 0], [3, 1]]
    which = np.random.default_rng(1).integers(0, E + 1, 300).astype(np.int32)
    rank = quickly(router.ranks, static_argnums=1)(which, E)
    assert rank.tolist() == [(which[:i] == which[i]).sum() for i in range(300)]
    # No later token takes a place from an earlier one.
    chosen = np.random.default_rng(0).integers(0, E, (2, 4, K)).astype(np.int32)
    kept, _ = within(chosen, 3, 2)
    for t in range(1, 4):
        other = chosen.copy()
        other[:, t:] = 0
        np.testing.assert_array_equal(within(other, 3, 2)[0][:, :t], kept[:, :t])


@pytest.mark.parametrize("align", (1, 8))
def test_choices_stand_sorted_by_expert_each_beginning_at_a_multiple(align):
    which = np.random.default_rng(2).integers(0, E + 1, 300).astype(np.int32)
    place, sizes, rows = jax.jit(router.sort_by_expert, static_argnums=(1, 2))(which, E, align)
    counts = np.bincount(which, minlength=E)[:E]
    assert sizes.tolist() == [-(-count // align) * align for count in counts]
    assert rows % align == 0 and rows >= sum(sizes)
    for expert, begin in enumerate(np.cumsum(sizes) - sizes):
        assert place[which == expert].tolist() == list(range(begin, begin + counts[expert]))
    assert set(place[which == E].tolist()) == {int(rows)}


def test_balance_is_what_the_paper_says():
    logits = drawn((12, E))[0] * 3

    def balance(logits, counted):
        return router.balance_loss(logits, router.count_choices(router.route(counted, K)[1], E))

    balance = quickly(balance)
    shares = np.bincount(np.argsort(-logits, axis=1)[:, :K].ravel(), minlength=E) / (12 * K)
    whole = balance(logits, logits)
    close(whole / 12, E * np.sum(shares * np.asarray(jax.nn.softmax(logits)).mean(0)), 1e-6)
    # Of parts it is another, unless the choices of the whole batch are counted.
    parts = logits[:6], logits[6:]
    close(sum(balance(part, logits) for part in parts), whole, 1e-6)
    assert abs(sum(balance(part, part) for part in parts) / whole - 1) > 0.005
