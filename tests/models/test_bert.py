"""BERT: both directions within a document and nothing beyond; masked and next-sentence losses equal float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from flat_config import changed
from model_cases import POSITIONS, SEGMENTS, B, T, config, float64, influence, random_params, reference_extras

from jaxformer.config import LossConfig
from jaxformer.models import bert
from jaxformer.types import Batch

KINDS = {
    "published": config(family="bert", block="post_norm", token_types=2, next_sentence=True),
    "rotary_pre_norm": config(family="bert", positions="rotary", norm="rms_norm", tie_embeddings=False, num_kv_heads=2),
    "t5_window": config(family="bert", block="post_norm", positions="t5", window=2, activation="geglu", use_bias=False),
    "alibi_parallel": config(family="bert", block="parallel", positions="alibi"),
}
RNG = np.random.default_rng(3)
TOKENS, TYPES = RNG.integers(0, 20, (B, T)), RNG.integers(0, 2, (B, T))
PAIRS = np.array([1, -1])  # the second row only fills the batch


def fields(cfg):
    types = jnp.array(TYPES) if cfg.token_types else None
    return {"positions": jnp.array(POSITIONS), "segments": jnp.array(SEGMENTS), "token_types": types}


def reference_hidden(params, cfg):
    params = float64(params)
    allowed = reference.allowed(T, T, window=cfg.attention.window, segments=SEGMENTS)
    frequencies, bias, scale = reference_extras(params, cfg)
    types = TYPES if cfg.token_types else None
    return params, reference.hidden(params, TOKENS, cfg, POSITIONS, allowed, frequencies, bias, scale, types)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_reference(kind):
    cfg = KINDS[kind]
    params = random_params(bert.specs(cfg))
    got = jax.jit(lambda p: bert.apply(p, TOKENS, cfg, **fields(cfg)))(params)
    assert got.dtype == jnp.float32
    wide, x = reference_hidden(params, cfg)
    np.testing.assert_allclose(got, reference.masked_head(wide, x, cfg), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind, dropout", [
    ("published", 0.2),
    *(pytest.param(kind, 0.0, marks=pytest.mark.slow) for kind in ("rotary_pre_norm", "alibi_parallel")),
])  # fmt: skip
def test_exactly_the_tokens_of_the_document_are_felt(kind, dropout):
    cfg = changed(KINDS[kind], vocab_size=B * T, tie_embeddings=False, dropout=dropout)
    rng = jax.random.key(0) if dropout else None
    allowed = reference.allowed(T, T, segments=SEGMENTS)[:, 0]
    influence(lambda p, tokens: bert.apply(p, tokens, cfg, **fields(cfg), rng=rng), bert.specs(cfg), allowed)


def test_without_segments_a_row_is_one_document():
    cfg = changed(KINDS["published"], vocab_size=B * T, tie_embeddings=False)
    allowed = np.ones((B, T, T), bool)
    influence(lambda p, tokens: bert.apply(p, tokens, cfg), bert.specs(cfg), allowed)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_another_documents_tokens_change_nothing_bitwise(dtype):
    cfg = changed(KINDS["published"], dtype=dtype)
    params = random_params(bert.specs(cfg))
    apply = jax.jit(lambda tokens: bert.apply(params, tokens, cfg, **fields(cfg)))
    other = np.where(SEGMENTS == 0, TOKENS, (TOKENS + 7) % 20)
    before, after = (np.asarray(apply(jnp.array(t))) for t in (TOKENS, other))
    np.testing.assert_array_equal(before[SEGMENTS == 0], after[SEGMENTS == 0])
    assert not np.array_equal(before, after)


def make_batch(pairs=True):
    """Every third token is selected; the row's first token carries the pair."""
    weights = (np.arange(B * T).reshape(B, T) % 3 == 0).astype(np.float32)
    arrays = (TOKENS, (TOKENS * 3 + 1) % 20, weights, POSITIONS, SEGMENTS)
    inputs = {"token_types": jnp.array(TYPES)} | ({"pair_labels": jnp.array(PAIRS)} if pairs else {})
    return Batch(*map(jnp.array, arrays), inputs)


def test_masked_and_next_sentence_losses_equal_the_reference():
    cfg, loss_cfg = KINDS["published"], LossConfig(label_smoothing=0.1, chunk_tokens=6)
    params, batch = random_params(bert.specs(cfg)), make_batch()
    objective, metrics = jax.jit(lambda p: bert.loss(p, batch, cfg, loss_cfg))(params)
    wide, x = reference_hidden(params, cfg)
    logits, weights = reference.masked_head(wide, x, cfg), np.asarray(batch.weights)
    loss, nll = reference.cross_entropy(logits, np.asarray(batch.targets), 0.1)
    np.testing.assert_allclose(objective["loss"], ((loss * weights).sum(), weights.sum()), rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"], ((nll * weights).sum(axis=1), weights.sum(axis=1)), rtol=1e-4)

    pooled = np.tanh(x[:, 0] @ wide["pooler"]["w"] + wide["pooler"]["b"])
    pair_logits = pooled @ wide["next_sentence"]["w"] + wide["next_sentence"]["b"]
    first = reference.cross_entropy(pair_logits[:1], PAIRS[:1])[0][0]
    np.testing.assert_allclose(objective["next_sentence"], (first, 1.0), rtol=1e-4)
    np.testing.assert_allclose(metrics["next_sentence_loss"], ([first, 0], [1, 0]), rtol=1e-4)
    right = float(pair_logits[0].argmax() == PAIRS[0])
    np.testing.assert_allclose(metrics["next_sentence_accuracy"], ([right, 0], [1, 0]))
    assert {k: float(v) for k, v in bert.weights(batch, cfg).items()} == {k: float(v[1]) for k, v in objective.items()}


@pytest.mark.slow
def test_a_row_without_a_pair_passes_no_gradient_and_no_nan():
    cfg = KINDS["published"]
    params = jax.tree.map(jnp.array, random_params(bert.specs(cfg)))
    batch = make_batch()
    batch = batch._replace(inputs={**batch.inputs, "pair_labels": jnp.array([-1, -1])}, weights=jnp.zeros((B, T)))

    def total(params):
        objective, _ = bert.loss(params, batch, cfg, LossConfig())
        return sum(sums for sums, _ in objective.values())

    for gradient in jax.tree.leaves(jax.jit(jax.grad(total))(params)):
        assert not np.asarray(gradient).any()


def test_without_pairs_there_is_no_second_term():
    cfg = changed(KINDS["published"], next_sentence=False)
    batch = make_batch(pairs=False)
    params = random_params(bert.specs(cfg))
    objective, metrics = jax.eval_shape(lambda p: bert.loss(p, batch, cfg, LossConfig()), params)
    assert set(objective) == set(bert.weights(batch, cfg)) == {"loss"} and set(metrics) == {"loss", "accuracy"}


def test_groups_follow_the_config():
    common = {"embedding", "embedding_norm", "blocks", "head"}
    assert set(bert.specs(KINDS["published"])) == common | {"pooler", "next_sentence"}
    assert set(bert.specs(KINDS["rotary_pre_norm"])) == common | {"final_norm"}
    assert set(bert.specs(KINDS["published"])["embedding"]) == {"tokens", "positions", "types"}
    assert "table" in bert.specs(KINDS["rotary_pre_norm"])["head"]
