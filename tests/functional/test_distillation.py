"""The student's loss is the naive one in value and gradient, and nothing is learned from a teacher that is oneself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.functional import layers
from jaxformer.functional.distillation import cosine_distance, distillation_loss
from jaxformer.functional.losses import VocabularyProjection

B, T, D, E, V = 3, 10, 4, 6, 13
RNG = np.random.default_rng(0)
TARGETS = RNG.integers(0, V, (B, T), np.int32)
WEIGHTS = RNG.random((B, T)) * (RNG.random((B, T)) < 0.6)
STUDENT = {"hidden": RNG.normal(size=(B, T, D)), "table": RNG.normal(size=(V, D)) * 2, "bias": RNG.normal(size=V),
           "params": {"w": RNG.normal(size=(D, D))}}  # fmt: skip
TEACHER = {"hidden": RNG.normal(size=(B, T, E)), "table": RNG.normal(size=(V, E)), "bias": RNG.normal(size=V)}
OPTIONS = dict(temperature=3.0, soft_weight=0.7, hard_weight=0.4, label_smoothing=0.1, z_loss=1e-2)


def transform(params, x):
    return layers.gelu(layers.linear(x, params["w"]))


def chunked(student, teacher, weights, **options):
    of = VocabularyProjection(**student, transform=transform, soft_cap=9.0)
    return distillation_loss(of, VocabularyProjection(**teacher, soft_cap=5.0), jnp.array(TARGETS), weights, **options)


def naive(student, teacher, weights, temperature, soft_weight, hard_weight, label_smoothing, z_loss):
    """The same with all logits at once, differentiated by jax.grad."""
    x = transform(student["params"], student["hidden"].reshape(-1, D)).reshape(B, T, D)
    logits = jnp.einsum("btd,vd->btv", x, student["table"]) + student["bias"][None, None]
    logits = 9 * jnp.tanh(logits / 9)
    theirs = jnp.einsum("btd,vd->btv", teacher["hidden"], teacher["table"]) + teacher["bias"][None, None]
    theirs = 5 * jnp.tanh(theirs / 5)
    log_p = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(log_p, jnp.array(TARGETS)[..., None], axis=-1)[..., 0]
    hard = (1 - label_smoothing) * nll - label_smoothing * jnp.mean(log_p, axis=-1)
    hard = hard + z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    p, q = jax.nn.softmax(theirs / temperature), jax.nn.softmax(logits / temperature)
    divergence = jnp.sum(p * jnp.log(p / q), axis=-1)
    total = jnp.sum(weights * (soft_weight * temperature**2 * divergence + hard_weight * hard))
    return total, (jnp.sum(weights * nll, axis=1), jnp.sum(weights * divergence, axis=1))


def test_equals_the_naive_loss_and_the_teacher_learns_nothing():
    def both(student, teacher, weights):
        def ours(student, teacher):
            out = chunked(student, teacher, weights, chunk_tokens=9, **OPTIONS)  # blocks of three columns
            return out.total, (out.nll_rows, out.divergence_rows)

        def plain(student):
            return naive(student, teacher, weights, **OPTIONS)

        found = jax.value_and_grad(ours, argnums=(0, 1), has_aux=True)(student, teacher)
        return found, jax.value_and_grad(plain, has_aux=True)(student), ours(student, teacher)

    with jax.enable_x64(True):
        (got, (gradient, of_teacher)), wanted, alone = jax.jit(both)(
            *jax.tree.map(jnp.array, (STUDENT, TEACHER, WEIGHTS))
        )
    for a, b in zip(jax.tree.leaves((got, gradient, alone)), jax.tree.leaves((*wanted, wanted[0])), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(of_teacher))


def test_a_teacher_that_is_the_student_has_no_gradient():
    def total(student, weights):
        of = VocabularyProjection(**student, transform=transform)
        teacher = jax.tree.map(jax.lax.stop_gradient, of._replace(transform=None))
        out = distillation_loss(
            of, teacher._replace(transform=transform), jnp.array(TARGETS), weights, hard_weight=0.0, chunk_tokens=9
        )
        x = student["hidden"]
        return out.total + cosine_distance(x, 2 * x, weights), out.divergence_rows

    with jax.enable_x64(True):
        given = jax.tree.map(jnp.array, (STUDENT, WEIGHTS))
        (value, rows), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(*given)
    np.testing.assert_allclose((value, *rows), 0.0, atol=1e-13)
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_allclose(leaf, 0.0, atol=1e-13)


@pytest.mark.peers
def test_the_loss_is_torchs():
    """As the recipe of DistilBERT has it: KLDivLoss of softened probabilities, CosineEmbeddingLoss of hidden states."""
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    states = RNG.normal(size=(2, B, T, D))
    tensors = [torch.tensor(x, requires_grad=i == 0) for i, x in enumerate([states[0], states[1], STUDENT["table"]])]
    ours, theirs, table = tensors
    soft = F.kl_div(
        F.log_softmax(ours @ table.T / 2, -1).reshape(-1, V), F.softmax(theirs @ table.T / 2, -1).reshape(-1, V),
        reduction="batchmean",
    )  # fmt: skip
    hard = F.cross_entropy((ours @ table.T).reshape(-1, V), torch.tensor(TARGETS).long().reshape(-1))
    cosine = F.cosine_embedding_loss(ours.reshape(-1, D), theirs.reshape(-1, D), torch.ones(B * T))
    wanted = 5 * 2**2 * soft + 2 * hard + cosine
    wanted.backward()

    def total(hidden, teacher, table):
        weights = jnp.ones((B, T))
        of, by = VocabularyProjection(hidden, table), VocabularyProjection(teacher, table)
        out = distillation_loss(of, by, jnp.array(TARGETS), weights)
        return (out.total + cosine_distance(hidden, teacher, weights)) / out.weight

    with jax.enable_x64(True):
        value, gradient = jax.jit(jax.value_and_grad(total))(*map(jnp.array, (*states, STUDENT["table"])))
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-12)
    np.testing.assert_allclose(gradient, ours.grad.numpy(), rtol=1e-9, atol=1e-14)
