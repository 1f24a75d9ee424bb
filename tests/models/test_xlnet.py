"""Permutation language modelling: what is seen by the order and the documents, its rows, and how it is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import SEGMENTS, B, T, config, influence, random_params

from jaxformer.config import Execution, LossConfig, MeshConfig, Permutation
from jaxformer.data.permuted_rows import permuted
from jaxformer.models import xlnet
from jaxformer.parallel.mesh import make_mesh

ORDER = np.array([[0, 3, 1, 0, 2, 0, 4, 0], [0, 0, 5, 1, 2, 0, 4, 3]])
DISENTANGLED = {"kind": "disentangled", "span": 3, "distance": "clipped"}


def cfg_of(positions="relative", **fields):
    return config(family="xlnet", block="post_norm", positions=positions, **fields)


@pytest.mark.parametrize("order, positions", [
    (ORDER, "relative"), pytest.param(None, "rotary", marks=pytest.mark.slow),
    pytest.param(ORDER, DISENTANGLED, marks=pytest.mark.slow),
], ids=["order", "left to right", "disentangled"])  # fmt: skip
def test_a_token_is_predicted_from_those_before_it_in_the_order_and_its_document(order, positions):
    """Exactly zero influence of itself, of later ones and of other documents; from left to right it is causal."""
    cfg = cfg_of(positions, tie_embeddings=False)
    number = np.broadcast_to(np.arange(1, T + 1), (B, T)) if order is None else order
    allowed = (number[:, None, :] < number[:, :, None]) & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
    given = {"order": None if order is None else jnp.asarray(order), "segments": jnp.asarray(SEGMENTS)}
    influence(jax.jit(lambda p, tokens: xlnet.apply(p, tokens, cfg, **given)), xlnet.specs(cfg), allowed)


def batch_of(seed=0):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**63, (4, T)).astype(np.uint64)
    return permuted(rng.integers(0, 20, (4, T)), bits, Permutation(2), separator_id=0)


@pytest.mark.slow
def test_few_query_streams_are_those_of_all():
    cfg, batch = cfg_of(), jax.tree.map(jnp.asarray, batch_of())
    params, fields = random_params(xlnet.specs(cfg)), {"segments": batch.segments, "order": batch.inputs["order"]}
    run = jax.jit(lambda p, predicted: xlnet.apply(p, batch.tokens, cfg, predicted=predicted, **fields))
    every, few = run(params, None), run(params, batch.inputs["predicted"])
    wanted = np.take_along_axis(np.asarray(every), np.asarray(batch.inputs["predicted"])[:, :, None], axis=1)
    np.testing.assert_allclose(few, wanted, atol=1e-5)


@pytest.mark.parametrize("execution, shape", [
    pytest.param(Execution(layers="scan", remat="full", attention="chunked"), None, marks=pytest.mark.slow),
    pytest.param(Execution(layers="scan", attention="chunked"), (2, 1, 2, 1), marks=pytest.mark.slow),
], ids=["scan", "mesh"])  # fmt: skip
def test_how_it_is_computed_changes_nothing(execution, shape):
    cfg, batch = cfg_of(), jax.tree.map(jnp.asarray, batch_of())
    params = jax.tree.map(jnp.asarray, random_params(xlnet.specs(cfg)))

    def run(execution):
        def total(params):
            return xlnet.loss(params, batch, cfg, LossConfig(), execution=execution)[0]["loss"][0]

        return jax.jit(jax.value_and_grad(total))(params)

    wanted = run(Execution(attention="xla"))
    if shape is None:
        found = run(execution)
    else:
        with jax.set_mesh(make_mesh(MeshConfig(*shape), jax.devices()[:4])):
            found = jax.device_get(run(execution))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, wanted)
    assert float(jnp.abs(wanted[1]["query"]["start"]).max()) > 0.01


def test_the_rows():
    rng = np.random.default_rng(0)
    tokens, length = rng.integers(0, 9, (4000, 12)), 12
    batch = permuted(tokens, rng.integers(0, 2**63, tokens.shape).astype(np.uint64), Permutation(4), separator_id=0)
    order, places = batch.inputs["order"], batch.inputs["predicted"]
    assert places.shape == (4000, 3) and (np.diff(places, axis=1) > 0).all()
    assert (batch.weights == (order > 0)).all() and not order[tokens == 0].any()
    assert all(set(row[row > 0]) == {1, 2, 3} for row in order[(tokens > 0).sum(1) >= 3])
    assert (np.take_along_axis(order, places, axis=1)[(tokens > 0).sum(1) >= 3] > 0).all()
    full = order[(tokens > 0).all(axis=1)]  # every place is equally likely to be any of the numbers
    share, error = (full == 2).mean(axis=0), 4 * (length * len(full)) ** -0.5
    assert abs(share - 1 / length).max() < error
