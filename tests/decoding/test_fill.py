"""fill_mask() proposes what the model's own probabilities say, at every mask and in every row."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import bert_apply, config, params_of

from jaxformer.config import Funnel, FunnelAttention, HeadConfig, ModelConfig, NoPositions
from jaxformer.decoding import fill_mask
from jaxformer.errors import ConfigError
from jaxformer.models import funnel

MASK = 23


def make(**changes):
    cfg = config(family="bert", block="post_norm", token_types=2, next_sentence=True, num_layers=1, **changes)
    return cfg, params_of(cfg)


def rows_of():
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 20, n).tolist() for n in (9, 4, 16)]
    rows[0][2] = rows[0][7] = rows[1][3] = rows[2][15] = MASK
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "positions",
    ["learned", "t5", "rotary", "alibi"],
)
def test_candidates_are_the_most_probable_tokens_at_each_mask(positions):
    cfg, params = make(positions=positions)
    rows = rows_of()
    out = fill_mask(params, rows, cfg, MASK, top_k=4)
    assert list(zip(out.rows.tolist(), out.positions.tolist(), strict=True)) == [(0, 2), (0, 7), (1, 3), (2, 15)]
    for row, position, tokens, found in zip(*out, strict=True):
        alone = np.asarray(bert_apply(params, jnp.asarray(rows[row])[None], cfg)[0, position], np.float64)
        probabilities = np.exp(alone) / np.exp(alone).sum()
        assert tokens.tolist() == np.argsort(-probabilities)[:4].tolist()
        np.testing.assert_allclose(found, probabilities[tokens], rtol=1e-4)


@pytest.mark.slow
def test_token_types_and_padded_arrays():
    cfg, params = make()
    rows = rows_of()
    padded, types = np.full((3, 16), MASK), np.zeros((3, 16), int)
    for row, kind, tokens in zip(padded, types, rows, strict=True):
        row[: len(tokens)] = tokens
        kind[len(tokens) // 2 :] = 1
    out = fill_mask(params, padded, cfg, MASK, lengths=[9, 4, 16], token_types=types)
    assert out.positions.tolist() == [2, 7, 3, 15]  # a mask in the padding is none
    full = bert_apply(params, jnp.asarray(padded[2:]), cfg, token_types=jnp.asarray(types[2:]))
    np.testing.assert_allclose(out.probabilities[3, 0], jax.nn.softmax(full[0, 15]).max(), rtol=1e-4)
    plain = fill_mask(params, rows, cfg, MASK)
    assert not np.allclose(plain.probabilities, out.probabilities, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("separate", [True, False])
def test_a_funnel_fills_rows_of_any_length_each_as_alone(separate):
    cfg = ModelConfig(
        family="funnel", block="post_norm", num_layers=4, width=16, context_length=20, vocab_size=24,
        attention=FunnelAttention(2), positions=NoPositions(),
        funnel=Funnel(blocks=(1, 1, 1), separate_cls=separate, decoder_layers=1),
    )  # fmt: skip
    params, rows = params_of(cfg), rows_of()
    out = fill_mask(params, rows, cfg, MASK, top_k=4)
    for row, position, tokens, found in zip(*out, strict=True):
        size = len(rows[row])
        padded = np.zeros((1, cfg.context_length), int)
        padded[0, :size] = rows[row]
        there = jnp.asarray(np.arange(cfg.context_length)[None] < size, jnp.int32)
        alone = np.asarray(funnel.apply(params, jnp.asarray(padded), cfg, segments=there)[0, position], np.float64)
        probabilities = np.exp(alone) / np.exp(alone).sum()
        assert tokens.tolist() == np.argsort(-probabilities)[:4].tolist()
        np.testing.assert_allclose(found, probabilities[tokens], rtol=1e-4)
    np.testing.assert_array_equal(out.positions, [2, 7, 3, 15])
    longer = fill_mask(params, [*rows, [MASK] * 21], cfg, MASK, top_k=4)
    assert len(longer.rows) == 4 + 21 and np.isfinite(longer.probabilities).all()


def test_suppressed_tokens_are_not_proposed_and_the_rest_adds_up_to_one():
    cfg, params = make()
    out = fill_mask(params, rows_of(), cfg, MASK, top_k=4, suppress=range(4, 24))
    np.testing.assert_array_equal(np.sort(out.tokens, axis=1), [[0, 1, 2, 3]] * 4)
    np.testing.assert_allclose(out.probabilities.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tokens": [[1, 2]]}, "tokens: no mask (id 23); accepted: at least one"),
        ({"tokens": [[MASK] * 17]}, "text: 17 tokens are more than config.model.context_length 16"),
        ({"top_k": 0}, "top_k: 0; accepted: 1 to 24"),
        ({"top_k": 5, "suppress": range(20)}, "top_k: 5; accepted: at most 4"),
        ({"cfg": config()}, "config.model.family: gpt; filling in masks needs bert or funnel"),
        (
            {"cfg": replace(make()[0], head=HeadConfig(task="regression", outputs=1))},
            "config.model.head: that of regression; filling in masks needs the family's own head; accepted: a model",
        ),
    ],
)
def test_bad_requests_are_one_line(changes, line):
    cfg, params = make()
    options = {"tokens": [[1, MASK]], "cfg": cfg, **changes}
    with pytest.raises(ConfigError) as error:
        fill_mask(params, options.pop("tokens"), options.pop("cfg"), MASK, **options)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
    if "learned positions" in str(error.value):
        longer, longer_params = make(positions="rotary")
        assert len(fill_mask(longer_params, [[MASK] * 17], longer, MASK).rows) == 17
