"""GPT: no token sees the future or another document; logits and loss equal float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from flat_config import changed
from model_cases import POSITIONS, SEGMENTS, B, T, config, float64, influence, random_params, reference_extras

from jaxformer.config import Execution, LossConfig
from jaxformer.kernels.attention import xla
from jaxformer.models import gpt
from jaxformer.specs import init_params
from jaxformer.types import Batch

KINDS = {
    "gpt2": config(activation="gelu_tanh"),
    "llama": config(
        norm="rms_norm", activation="swiglu", use_bias=False, positions="rotary", num_kv_heads=2, tie_embeddings=False,
        rotary_scaling="yarn", rotary_factor=2.0,
        rotary_original_length=4,
    ),
    "alibi_parallel": config(block="parallel", positions="alibi", num_kv_heads=1, attention_soft_cap=3.0),
    "qk_norm": config(norm="rms_norm", qk_norm=True, positions="rotary", num_kv_heads=2, window=5),
    "t5_post_norm": config(block="post_norm", positions="t5", activation="relu"),
    "2017": config(block="post_norm", positions="sinusoidal", activation="relu"),
    "window": config(positions="none", window=2, activation="geglu"),
}  # fmt: skip
TOKENS = np.random.default_rng(3).integers(0, 20, (B, T))


def reference_logits(params, cfg):
    params = float64(params)
    allowed = reference.allowed(T, T, causal=True, window=cfg.attention.window, segments=SEGMENTS)
    frequencies, bias, scale = reference_extras(params, cfg)
    x = reference.hidden(params, TOKENS, cfg, POSITIONS, allowed, frequencies, bias, scale)
    return x @ params.get("head", {"table": params["embedding"]["tokens"]})["table"].T


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_reference(kind):
    cfg = KINDS[kind]
    params = random_params(gpt.specs(cfg))
    got = jax.jit(lambda p: gpt.apply(p, TOKENS, cfg, positions=jnp.array(POSITIONS), segments=jnp.array(SEGMENTS)))(
        params
    )
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, reference_logits(params, cfg), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "kind, dropout",
    [
        ("llama", 0.0),
        pytest.param("alibi_parallel", 0.2, marks=pytest.mark.slow),
        pytest.param("gpt2", 0.2, marks=pytest.mark.slow),
        pytest.param("t5_post_norm", 0.0, marks=pytest.mark.slow),
    ],
)
def test_exactly_the_earlier_tokens_of_the_document_are_felt(kind, dropout):
    cfg = changed(KINDS[kind], vocab_size=B * T, tie_embeddings=False)
    cfg = dataclasses.replace(cfg, dropout=dropout)
    rng = jax.random.key(0) if dropout else None
    allowed = reference.allowed(T, T, causal=True, segments=SEGMENTS)[:, 0]
    segments, positions = jnp.array(SEGMENTS), jnp.array(POSITIONS)
    influence(
        lambda p, tokens: gpt.apply(p, tokens, cfg, positions=positions, segments=segments, rng=rng),
        gpt.specs(cfg), allowed,
    )  # fmt: skip


def test_a_window_reaches_as_far_as_the_layers_carry_it():
    cfg = changed(KINDS["window"], window=3, vocab_size=2 * T, tie_embeddings=False)
    allowed = reference.allowed(T, T, causal=True, window=1 + cfg.num_layers * (3 - 1))[:, 0].repeat(B, axis=0)
    influence(lambda p, tokens: gpt.apply(p, tokens, cfg), gpt.specs(cfg), allowed)


def test_rows_longer_than_a_block_of_queries():
    length = xla.QUERY_BLOCK + 5
    cfg = config(num_layers=1, positions="rotary", context_length=length, vocab_size=length, tie_embeddings=False)
    segments = (np.arange(length) > 50).astype(int)[None]
    allowed = reference.allowed(length, length, causal=True, segments=segments)[:, 0]
    rows = [0, 50, 51, xla.QUERY_BLOCK - 1, xla.QUERY_BLOCK, length - 1]
    influence(
        lambda p, tokens: gpt.apply(p, tokens, cfg, segments=jnp.array(segments)), gpt.specs(cfg), allowed, rows
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_another_documents_tokens_change_nothing_bitwise(dtype):
    cfg = changed(KINDS["llama"], dtype=dtype)
    params = random_params(gpt.specs(cfg))
    positions, segments = jnp.array(POSITIONS), jnp.array(SEGMENTS)
    apply = jax.jit(lambda tokens: gpt.apply(params, tokens, cfg, positions=positions, segments=segments))
    other = np.where(SEGMENTS == 1, TOKENS, (TOKENS + 7) % 20)
    before, after = (np.asarray(apply(jnp.array(t))) for t in (TOKENS, other))
    np.testing.assert_array_equal(before[SEGMENTS == 1], after[SEGMENTS == 1])
    assert not np.array_equal(before, after)


def test_a_packed_document_is_the_document_alone():
    cfg = KINDS["llama"]
    params = random_params(gpt.specs(cfg))
    packed = jax.jit(lambda p: gpt.apply(p, TOKENS, cfg, positions=jnp.array(POSITIONS), segments=jnp.array(SEGMENTS)))(
        params
    )
    alone = jax.jit(lambda p: gpt.apply(p, TOKENS[:1, 3:7], cfg))(params)
    np.testing.assert_allclose(packed[0, 3:7], alone[0], rtol=1e-4, atol=1e-4)


def make_batch():
    """Next tokens as targets; the last token of each document has none."""
    targets = np.roll(TOKENS, -1, axis=1)
    weights = (np.roll(SEGMENTS, -1, axis=1) == SEGMENTS) & (np.arange(T) < T - 1)
    arrays = (TOKENS, targets, weights.astype(np.float32), POSITIONS, SEGMENTS)
    return Batch(*map(jnp.array, arrays))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_next_token_loss_equals_the_reference(kind):
    cfg, loss_cfg = KINDS[kind], LossConfig(label_smoothing=0.1, z_loss=1e-2, chunk_tokens=6)
    params, batch = random_params(gpt.specs(cfg)), make_batch()
    objective, metrics = jax.jit(lambda p: gpt.loss(p, batch, cfg, loss_cfg))(params)
    logits, weights = reference_logits(params, cfg), np.asarray(batch.weights)
    loss, nll = reference.cross_entropy(logits, np.asarray(batch.targets), 0.1, 1e-2)
    np.testing.assert_allclose(objective["loss"], ((loss * weights).sum(), weights.sum()), rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"], ((nll * weights).sum(axis=1), weights.sum(axis=1)), rtol=1e-4)
    right = logits.argmax(axis=-1) == np.asarray(batch.targets)
    np.testing.assert_allclose(metrics["accuracy"][0], (right * weights).sum(axis=1))
    assert gpt.weights(batch, cfg).keys() == objective.keys()
    assert float(gpt.weights(batch, cfg)["loss"]) == float(objective["loss"][1])


@pytest.mark.slow
def test_scan_and_unroll_drop_the_same():
    outs = []
    for layers in ("scan", "unroll"):
        cfg, execution = config(dropout=0.3, attention_dropout=0.3), Execution(layers=layers)
        params = random_params(gpt.specs(cfg))
        run = jax.jit(lambda p, r, cfg=cfg, e=execution: gpt.apply(p, TOKENS, cfg, rng=r, execution=e))
        outs.append(run(params, jax.random.key(1)))
    np.testing.assert_allclose(*outs, rtol=1e-4, atol=1e-4)
    assert not np.allclose(outs[0], jax.jit(lambda p: gpt.apply(p, TOKENS, cfg))(params), atol=0.1)


@pytest.mark.slow
def test_a_fresh_model_knows_nothing():
    """GPT-2's initialisation starts at about ln V nats."""
    cfg = config(vocab_size=64, tie_embeddings=True)
    params = init_params(gpt.specs(cfg), jax.random.key(0))
    objective, _ = jax.jit(lambda p: gpt.loss(p, make_batch(), cfg, LossConfig()))(params)
    assert abs(float(objective["loss"][0] / objective["loss"][1]) - np.log(64)) < 0.05


def test_more_tokens_than_learned_positions_are_refused():
    cfg = KINDS["gpt2"]
    params = random_params(gpt.specs(cfg))
    with pytest.raises(ValueError, match=r"9 tokens are more than the 8 positions of model.context_length"):
        gpt.apply(params, jnp.zeros((1, T + 1), int), cfg)
    rows = jnp.arange(T + 1)[None] % T  # packed rows restart, and may be longer
    out = jax.eval_shape(lambda p: gpt.apply(p, jnp.zeros((1, T + 1), int), cfg, positions=rows), params)
    assert out.shape == (1, T + 1, 20)


def test_an_open_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size is None; set it"):
        gpt.specs(config(vocab_size=None))


def test_groups_follow_the_config():
    assert set(gpt.specs(KINDS["gpt2"])) == {"embedding", "blocks", "final_norm"}
    assert set(gpt.specs(KINDS["2017"])) == {"embedding", "blocks"}
    assert set(gpt.specs(KINDS["llama"])) == {"embedding", "blocks", "final_norm", "head"}
    assert set(gpt.specs(KINDS["llama"])["embedding"]) == {"tokens"}
    assert set(gpt.specs(KINDS["t5_post_norm"])["embedding"]) == {"tokens", "t5"}
