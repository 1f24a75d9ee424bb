"""DeBERTa as settings of the bert family: beside BERT, packed rows, the enhanced mask decoder."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import SEGMENTS, B, T, config, influence, random_params

from jaxformer.config import Execution, LossConfig, MeshConfig
from jaxformer.models import bert
from jaxformer.parallel.mesh import make_mesh
from jaxformer.types import Batch

V3 = {"kind": "disentangled", "span": 4, "max_distance": 16}
V1 = {"kind": "disentangled", "distance": "clipped", "span": 3, "shared_projections": False, "norm": False}
TOKENS = np.random.default_rng(0).integers(0, 20, (B, T))


def deberta(positions=V3, **fields):
    enhanced = {"token_types": 0, "mask_decoder": "enhanced"}
    return config(family="bert", block="post_norm", positions=positions, bert=enhanced, **fields)


def test_without_distances_it_is_bert():
    """Tables of zeros, and the scale of BERT."""
    cfg = config(family="bert", block="post_norm", positions=V1)
    cfg = dataclasses.replace(cfg, attention=dataclasses.replace(cfg.attention, scale=0.5))
    params = random_params(bert.specs(cfg))
    own = params["blocks"]["attention"].pop("positions")
    plain = {**params, "embedding": {"tokens": params["embedding"]["tokens"]}}
    params["blocks"]["attention"]["positions"] = jax.tree.map(np.zeros_like, own)
    of_bert = config(family="bert", block="post_norm", positions="none")
    both = jax.jit(lambda params, plain: (bert.apply(params, TOKENS, cfg), bert.apply(plain, TOKENS, of_bert)))
    np.testing.assert_array_equal(*both(params, plain))


@pytest.mark.parametrize("positions, block", [
    (V3, "post_norm"), pytest.param(V1, "pre_norm", marks=pytest.mark.slow),
], ids=["v3", "v1"])  # fmt: skip
def test_no_token_sees_another_document(positions, block):
    cfg = dataclasses.replace(deberta(positions, tie_embeddings=False), block=block)
    run = jax.jit(lambda params, tokens: bert.apply(params, tokens, cfg, segments=jnp.asarray(SEGMENTS)))
    influence(run, bert.specs(cfg), SEGMENTS[:, :, None] == SEGMENTS[:, None, :])


def loss(cfg, params, execution):
    weights = (np.random.default_rng(1).random((B, T)) < 0.5).astype(np.float32)
    batch = Batch(TOKENS, TOKENS, weights, np.arange(T)[None].repeat(B, 0), SEGMENTS)
    return bert.loss(params, jax.tree.map(jnp.asarray, batch), cfg, LossConfig(), execution=execution)[0]["loss"][0]


@pytest.mark.parametrize("execution, shape", [
    pytest.param(Execution(layers="scan", remat="full", attention="chunked"), None, marks=pytest.mark.slow),
    pytest.param(Execution(layers="scan", remat="dots", attention="chunked"), (1, 2, 2, 1), marks=pytest.mark.slow),
], ids=["scan", "mesh"])  # fmt: skip
def test_how_it_is_computed_changes_nothing(execution, shape):
    cfg = deberta()
    params = jax.tree.map(jnp.asarray, random_params(bert.specs(cfg)))
    wanted = jax.jit(jax.value_and_grad(lambda p: loss(cfg, p, Execution(attention="xla"))))(params)
    run = jax.jit(jax.value_and_grad(lambda p: loss(cfg, p, execution)))
    if shape is None:
        found = run(params)
    else:
        with jax.set_mesh(make_mesh(MeshConfig(*shape), jax.devices()[:4])):
            found = jax.device_get(run(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, wanted)
    assert float(jnp.abs(wanted[1]["mask_decoder"]["positions"]).max()) > 0.01


def test_the_mask_decoder_sees_where_a_token_stands():
    """The same document later in the row: without absolute positions the states are the same, with them not."""
    tokens, segments = np.tile(TOKENS[:, :4], 2), np.repeat([[1] * 4 + [2] * 4], B, axis=0)
    cfg = deberta()
    params = random_params(bert.specs(cfg))
    fields = {"segments": jnp.asarray(segments)}
    both = jax.jit(lambda p: (bert.hidden(p, tokens, cfg, **fields), bert.decoded(p, tokens, cfg, **fields)[0]))
    plain, out = map(np.asarray, both(params))
    np.testing.assert_allclose(plain[:, :4], plain[:, 4:], atol=1e-5)
    assert np.abs(out[:, :4] - out[:, 4:]).max() > 0.1
