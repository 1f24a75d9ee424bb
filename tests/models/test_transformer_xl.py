"""Transformer-XL: beside one long row, what gradients leave out, packed rows, batches, decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import config, random_params

from jaxformer import decoding
from jaxformer.config import Execution, LossConfig, MeshConfig
from jaxformer.models import gpt, transformer_xl
from jaxformer.parallel.mesh import make_mesh
from jaxformer.types import Batch

M, N = 5, 8
TOKENS = np.random.default_rng(0).integers(0, 20, (2, M + N))
SEGMENTS = np.array([[1] * 3 + [2] * 6 + [3] * 4, [1] * (M + N)])
RELATIVE = ("relative", "rotary", "alibi", "t5")


def cfg_of(positions="relative", **fields):
    return config(family="transformer_xl", memory=M, positions=positions, **fields)


def fields_of(tokens=TOKENS, segments=SEGMENTS):
    """(tokens, fields) of `transformer_xl.apply`."""
    places = np.broadcast_to(np.arange(M + N), tokens.shape)
    fields = {"positions": places[:, M:], "segments": segments[:, M:], "memory_tokens": tokens[:, :M],
              "memory_positions": places[:, :M], "memory_segments": segments[:, :M]}  # fmt: skip
    return jnp.asarray(tokens[:, M:]), jax.tree.map(jnp.asarray, fields)


@pytest.mark.parametrize("positions", [RELATIVE[0], *(pytest.param(p, marks=pytest.mark.slow) for p in RELATIVE[1:])])
def test_its_logits_are_those_of_one_long_row(positions):
    cfg = cfg_of(positions)
    params = jax.tree.map(jnp.asarray, random_params(transformer_xl.specs(cfg)))
    tokens, fields = fields_of()

    @jax.jit
    def both(params):
        whole = gpt.apply(params, jnp.asarray(TOKENS), config(positions=positions), segments=jnp.asarray(SEGMENTS))
        return transformer_xl.apply(params, tokens, cfg, **fields), whole[:, M:]

    np.testing.assert_allclose(*both(params), atol=1e-5)


def test_no_gradient_goes_through_the_memory_and_no_token_sees_another_document():
    """The table row of each token: the memory's get none, though they change what is seen; nor do other documents."""
    cfg = cfg_of(tie_embeddings=False, vocab_size=2 * (M + N))
    params = jax.tree.map(jnp.asarray, random_params(transformer_xl.specs(cfg)))
    tokens, fields = fields_of(np.arange(2 * (M + N)).reshape(2, -1))

    weights = np.arange(1.0, 2 * (M + N) + 1, dtype=np.float32)

    @jax.jit
    @jax.value_and_grad
    def of_place(table, row, place):
        own = {**params, "embedding": {"tokens": table}}
        return transformer_xl.apply(own, tokens, cfg, **fields)[row, place] @ weights

    table = params["embedding"]["tokens"]
    place = 5  # the second of its document
    gradient = np.abs(np.asarray(of_place(table, 0, place)[1])).sum(axis=1)
    assert (gradient > 0).nonzero()[0].tolist() == [M + 4, M + 5]
    gradient = np.abs(np.asarray(of_place(table, 1, place)[1])).sum(axis=1)
    assert (gradient > 0).nonzero()[0].tolist() == list(range(M + N + M, M + N + M + place + 1))
    for row, seen in ((0, False), (1, True)):  # the memory's own tokens
        moved = table.at[row * (M + N) + 1].multiply(jnp.arange(table.shape[1]))
        assert bool(of_place(moved, row, place)[0] != of_place(table, row, place)[0]) == seen


@pytest.mark.parametrize("execution, shape", [
    pytest.param(Execution(layers="scan", remat="full", attention="chunked"), None, marks=pytest.mark.slow),
    pytest.param(Execution(layers="scan", attention="chunked"), (2, 1, 2, 1), marks=pytest.mark.slow),
], ids=["scan", "mesh"])  # fmt: skip
def test_how_it_is_computed_changes_nothing(execution, shape):
    cfg = cfg_of()
    params = jax.tree.map(jnp.asarray, random_params(transformer_xl.specs(cfg)))
    tokens, fields = fields_of()
    inputs = {name: x for name, x in fields.items() if name in transformer_xl.MEMORY}
    batch = Batch(tokens, tokens, jnp.ones(tokens.shape), fields["positions"], fields["segments"], inputs)

    def run(execution):
        def total(params):
            return transformer_xl.loss(params, batch, cfg, LossConfig(), execution=execution)[0]["loss"][0]

        return jax.jit(jax.value_and_grad(total))(params)

    wanted = run(Execution(attention="xla"))
    if shape is None:
        found = run(execution)
    else:
        with jax.set_mesh(make_mesh(MeshConfig(*shape), jax.devices()[:4])):
            found = jax.device_get(run(execution))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, wanted)


@pytest.mark.slow
def test_it_decodes_as_a_gpt():
    cfg = cfg_of()
    params = jax.tree.map(jnp.asarray, random_params(transformer_xl.specs(cfg)))
    tokens = jnp.asarray(TOKENS)

    @jax.jit
    def both(params):
        hidden, cache = decoding.prefill(params, tokens[:, :9], jnp.full(2, 9), cfg, 16)

        def add(cache, token):
            hidden, cache = decoding.step(params, token, cfg, cache)
            return cache, decoding.logits(params, hidden)

        _, later = jax.lax.scan(add, cache, tokens[:, 9:11].T)
        steps = jnp.concatenate([decoding.logits(params, hidden)[None], later]).swapaxes(0, 1)
        return steps, transformer_xl.apply(params, tokens, cfg)[:, 8:11]

    np.testing.assert_allclose(*both(params), atol=1e-5)
