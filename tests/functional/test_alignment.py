"""Scores and alignments of Bahdanau and Luong: against plain NumPy in float64, and what must not change them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import alignment as al

B, T, S, N, A = 2, 3, 7, 4, 5


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


TARGET, SOURCE = draw(B, T, N), draw(B, S, N, seed=1)
W, U, V = draw(N, A, seed=2), draw(N, A, seed=3), draw(A, seed=4)
SCORES = {
    "additive": lambda s, h: al.additive_scores(jnp.asarray(s), jnp.asarray(h), W, U, V),
    "dot": lambda s, h: al.dot_scores(jnp.asarray(s), jnp.asarray(h)),
    "general": lambda s, h: al.general_scores(jnp.asarray(s), jnp.asarray(h), W @ U.T),
    "concat": lambda s, h: al.concat_scores(jnp.asarray(s), jnp.asarray(h), np.concatenate([W, U]), V),
}
ONE_PAIR = {  # by hand, of s [N] and h [N]
    "additive": lambda s, h: np.dot(V, np.tanh(W.T @ s + U.T @ h)),
    "dot": np.dot,
    "general": lambda s, h: s @ (W @ U.T) @ h,
    "concat": lambda s, h: np.dot(V, np.tanh(np.concatenate([W, U]).T @ np.concatenate([s, h]))),
}
EACH = pytest.mark.parametrize("name", SCORES)
SOME = pytest.mark.parametrize("name", [n if n == "dot" else pytest.param(n, marks=pytest.mark.slow) for n in SCORES])


@EACH
def test_scores_are_those_of_each_pair(name):
    wanted = [[[ONE_PAIR[name](s, h) for h in source] for s in target] for target, source in zip(TARGET, SOURCE)]  # noqa: B905
    np.testing.assert_allclose(SCORES[name](TARGET, SOURCE), wanted, atol=1e-13)


@EACH
def test_the_order_of_the_source_means_nothing(name):
    """Contents are compared: permuting the source's states permutes the scores and leaves the context as it was."""
    order = np.random.default_rng(0).permutation(S)
    scores = SCORES[name](TARGET, SOURCE)
    moved = SCORES[name](TARGET, SOURCE[:, order])
    np.testing.assert_allclose(moved, scores[..., order], atol=1e-14)
    contexts = [al.context(al.align(s), jnp.asarray(h)) for s, h in ((scores, SOURCE), (moved, SOURCE[:, order]))]
    np.testing.assert_allclose(*contexts, atol=1e-14)


@SOME
def test_other_documents_change_nothing(name):
    """Not in the weights, not in the context, not in any gradient, whatever stands there."""
    target_segments = np.array([[1, 1, 2], [1, 2, 3]])
    source_segments = np.array([[1, 1, 1, 2, 2, 2, 2], [2] * 6 + [1]])
    allowed = target_segments[:, :, None] == source_segments[:, None]

    @jax.jit
    def found(source):
        def run(source):
            weights = al.align(SCORES[name](TARGET, source), allowed)
            contexts = al.context(weights, source)
            return jnp.sum(contexts, -1), (weights, contexts)

        jacobian, others = jax.jacrev(run, has_aux=True)(source)
        return *others, jacobian

    weights, contexts, jacobian = map(np.asarray, found(jnp.asarray(SOURCE)))
    np.testing.assert_array_equal(weights > 0, allowed)
    np.testing.assert_allclose(weights.sum(-1)[:, :2], 1, atol=1e-15)
    assert not weights[1, 2].any() and not contexts[1, 2].any()  # a document without source
    jacobian = np.abs(jacobian).sum(-1)  # [B, T, B, S]
    for row in range(B):
        assert not jacobian[row, :, row][~allowed[row]].any() and not jacobian[row, :, 1 - row].any()
    poison = SOURCE.copy()
    poison[0, 3:] = np.nan
    poisoned = np.asarray(found(jnp.asarray(poison))[0])
    np.testing.assert_array_equal(poisoned[0, :2], weights[0, :2])
    only = jnp.arange(S)[None] < 3
    held = al.context(poisoned[:1, :2], jnp.asarray(poison[:1]), only)
    np.testing.assert_array_equal(held, al.context(weights[:1, :2], jnp.asarray(SOURCE[:1])))


def test_local_alignment():
    positions = jnp.arange(S)[None]
    inside, factors = al.local_windows(jnp.array([[2.0, 6.0]]), positions, 2, gaussian=False)
    assert inside.astype(int).tolist() == [[[1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1]]] and (factors == 1).all()
    centres = jnp.array([[2.25, 5.5]])
    inside, factors = al.local_windows(centres, positions, 2, gaussian=True)
    wanted = [[[np.exp(-((s - p) ** 2) / (2 * (2 / 2) ** 2)) for s in range(S)] for p in (2.25, 5.5)]]
    np.testing.assert_allclose(factors, wanted, atol=1e-15)
    scores = jnp.asarray(draw(1, 2, S))
    weights = al.align(scores, inside, factors)
    plain = np.where(inside, np.exp(scores), 0)
    np.testing.assert_allclose(weights, plain / plain.sum(-1, keepdims=True) * factors, atol=1e-15)
    assert (jnp.sum(weights, -1) < 1).all()  # not normalised again


def test_predicted_positions_lie_in_the_source_and_are_learned():
    lengths = jnp.array([[7.0], [3.0]])
    centres = jax.jit(al.predicted_positions)(jnp.asarray(TARGET), W, V, lengths)
    wanted = np.array(lengths) / (1 + np.exp(-np.tanh(TARGET @ W) @ V))
    np.testing.assert_allclose(centres, wanted, atol=1e-14)

    @jax.jit
    def loss(v):
        inside, factors = al.local_windows(
            al.predicted_positions(jnp.asarray(TARGET), W, v, lengths), jnp.arange(S)[None], 3, gaussian=True
        )
        return jnp.sum(al.align(SCORES["dot"](TARGET, SOURCE), inside, factors)[..., 0])

    change = draw(A, seed=9)
    slope = (loss(V + 1e-6 * change) - loss(V - 1e-6 * change)) / 2e-6
    assert (
        float(jnp.vdot(jax.grad(loss)(jnp.asarray(V)), change)) == pytest.approx(float(slope), rel=1e-6)
        and abs(slope) > 1e-3
    )


def test_no_window_at_all_is_global_alignment():
    scores = SCORES["dot"](TARGET, SOURCE)
    inside, factors = al.local_windows(jnp.zeros((B, T)), jnp.arange(S)[None], S, gaussian=False)
    np.testing.assert_array_equal(al.align(scores, inside, factors), al.align(scores))


def test_maxout():
    assert al.maxout(jnp.array([[1.0, 4.0, -3.0, -2.0]])).tolist() == [[4.0, -2.0]]
