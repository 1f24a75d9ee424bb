"""Beam search: one beam is greedy choice, enough beams are exhaustive search."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import config, gpt_apply, params_of

from jaxformer import Sublayer
from jaxformer.decoding import Sampling, beam_search, generate
from jaxformer.decoding import cache as kept
from jaxformer.errors import ConfigError
from jaxformer.functional import attention_layer, key_value_cache
from jaxformer.functional import block as blocks
from jaxformer.functional.sublayers import sublayers_of

CFG = config(positions="rotary", num_kv_heads=2, num_layers=1)
PARAMS = params_of(CFG)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [2]]


@pytest.mark.slow
def test_one_beam_is_greedy_choice():
    def chosen(stop):
        return generate(PARAMS, PROMPTS, CFG, sampling=Sampling(temperature=0), max_new_tokens=12, stop=stop)

    stop = [chosen([[0] * 8]).tokens[0, :2].tolist()]  # programs are those of stop sequences of up to 8 tokens
    greedy = chosen(stop)
    for length_penalty in (0.0, 1.0):
        one = beam_search(PARAMS, PROMPTS, CFG, beams=1, length_penalty=length_penalty, max_new_tokens=12, stop=stop)
        np.testing.assert_array_equal(one.tokens[:, 0], greedy.tokens)
        np.testing.assert_array_equal(one.lengths[:, 0], greedy.lengths)
        np.testing.assert_array_equal(one.stopped[:, 0], greedy.stopped)
        np.testing.assert_allclose(one.log_probs[:, 0], greedy.log_probs.sum(axis=1), rtol=1e-4)
    assert greedy.stopped[0] and not greedy.stopped.all()


def every_continuation(params, prompt, cfg, new_tokens, stop, apply=gpt_apply):
    """{tokens: log-probability} of all continuations, ended by the token `stop` or by their length."""
    sequences = np.array(list(itertools.product(range(cfg.vocab_size), repeat=new_tokens)))
    rows = np.concatenate([np.tile(prompt, (len(sequences), 1)), sequences], axis=1)
    logits = np.asarray(apply(params, jnp.asarray(rows), cfg), np.float64)[:, len(prompt) - 1 : -1]
    nats = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = np.take_along_axis(nats, sequences[:, :, None], axis=2)[:, :, 0]
    found = {}
    for sequence, each in zip(sequences.tolist(), nats, strict=True):
        end = sequence.index(stop) + 1 if stop in sequence else new_tokens
        found[tuple(sequence[:end])] = each[:end].sum()
    return found


@pytest.mark.slow
def test_as_many_beams_as_continuations_find_the_best_ones_in_order():
    cfg = config(vocab_size=4, positions="alibi", context_length=8, num_layers=1)
    params = params_of(cfg, seed=3)
    prompt, new_tokens, stop = [1, 2], 3, 3
    found = every_continuation(params, prompt, cfg, new_tokens, stop)
    for length_penalty in (0.0, 0.8):
        score = {tokens: nats / ((5 + len(tokens)) / 6) ** length_penalty for tokens, nats in found.items()}
        expected = sorted(score, key=score.get, reverse=True)
        out = beam_search(
            params, [prompt], cfg, beams=64, length_penalty=length_penalty, max_new_tokens=new_tokens, stop=[stop]
        )
        got = [tuple(t[:n].tolist()) for t, n in zip(out.tokens[0], out.lengths[0], strict=True)]
        real = np.isfinite(out.scores[0])
        assert real.sum() == len(expected) < 64  # beams beyond the last continuation have probability 0
        assert [got[i] for i in np.nonzero(real)[0]] == expected
        np.testing.assert_allclose(out.scores[0][real], [score[t] for t in expected], rtol=1e-4)
        np.testing.assert_allclose(out.log_probs[0][real], [found[t] for t in expected], rtol=1e-4)
        assert [t[-1] == stop for t in expected] == out.stopped[0][real].tolist()
        np.testing.assert_allclose(np.exp(out.log_probs[0].astype(np.float64)).sum(), 1, rtol=1e-5)


@pytest.mark.slow
def test_places_without_a_continuation_are_empty():
    """They were filled with tokens that are suppressed, as continuations of full length."""
    never = [i for i in range(CFG.vocab_size) if i not in (3, 5)]
    out = beam_search(PARAMS, PROMPTS[:2], CFG, beams=8, max_new_tokens=2, stop=[5], suppress=never)
    assert all(x.dtype == np.int32 for x in (out.tokens, out.lengths)) and out.stopped.dtype == bool
    for row in range(2):
        got = {tuple(t[:n].tolist()) for t, n in zip(out.tokens[row], out.lengths[row], strict=True) if n}
        assert got == {(3, 3), (3, 5), (5,)} and np.isfinite(out.log_probs[row, :3]).all()
        assert (out.tokens[row, 3:] == -1).all() and not out.lengths[row, 3:].any() and not out.stopped[row, 3:].any()
        assert np.isneginf(out.log_probs[row, 3:]).all() and np.isneginf(out.scores[row, 3:]).all()


@pytest.mark.slow
def test_each_row_is_searched_as_if_alone_and_beams_report_the_models_probabilities():
    together = beam_search(PARAMS, PROMPTS, CFG, beams=3, max_new_tokens=9, stop=[5], length_penalty=0.6)
    for row, prompt in enumerate(PROMPTS):
        alone = beam_search(PARAMS, [prompt], CFG, beams=3, max_new_tokens=9, stop=[5], length_penalty=0.6)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_allclose(alone.scores[0], together.scores[row], rtol=1e-4)
        for tokens, length, log_prob in zip(
            together.tokens[row], together.lengths[row], together.log_probs[row], strict=True
        ):
            whole = np.zeros((1, 16), int)
            whole[0, : len(prompt) + length] = [*prompt, *tokens[:length]]
            nats = np.asarray(gpt_apply(PARAMS, whole, CFG)[0], np.float64)
            nats -= np.log(np.exp(nats).sum(-1, keepdims=True))
            expected = sum(float(nats[len(prompt) - 1 + i, tokens[i]]) for i in range(length))
            assert log_prob == pytest.approx(expected, rel=1e-4)
            assert (tokens[length:] == -1).all()
        assert len({tuple(t.tolist()) for t in together.tokens[row]}) == 3
        assert (np.diff(together.scores[row]) <= 0).all()


@pytest.mark.slow
def test_more_beams_find_a_better_continuation_than_greedy_choice_somewhere():
    gains = []
    for seed in range(4):
        params = params_of(CFG, seed)
        best = [beam_search(params, PROMPTS, CFG, beams=beams, max_new_tokens=8).log_probs[:, 0] for beams in (1, 6)]
        gains.append(best[1] - best[0])
    assert np.max(gains) > 0.1 and np.mean(gains) > 0


@pytest.mark.slow
def test_suppressed_tokens_and_the_end_of_the_context():
    cfg = config(positions="learned", num_layers=1)
    out = beam_search(params_of(cfg), [[1] * 12, [2]], cfg, beams=2, max_new_tokens=50, suppress=range(6, 24))
    assert out.lengths.tolist() == [[5, 5], [16, 16]]
    assert out.tokens.max() <= 5


@pytest.mark.parametrize("changes", [{"beams": 0}, {"length_penalty": -1.0}, {"length_penalty": float("nan")}])
def test_bad_values_are_one_line(changes):
    (name,) = changes
    with pytest.raises(ConfigError, match=rf"^{name}: .*; accepted: "):
        beam_search(PARAMS, PROMPTS, CFG, **changes)


FORKS = {
    "grouped": {"positions": "rotary", "num_kv_heads": 2},
    "window": {"positions": "t5", "window": 5},
    "strided": {"positions": "alibi", "attention": {"kind": "strided"}},
    "longformer": {"positions": "rotary", "attention": {"kind": "longformer", "global_tokens": 2}},
    "relative": {"positions": "relative", "num_kv_heads": 2},
    "lsh": {"positions": "none", "attention": {"kind": "lsh"}},
    "linear": {"positions": "none", "attention": {"kind": "linear"}},
    "mixed": {"positions": "rotary", "num_layers": 3},
}
BEAMS = 3


def mixed_cache(cfg, rows, length, dtype):
    return attention_layer.init_cache(cfg, rows, length, dtype), jnp.zeros((rows, cfg.width), dtype)


def mixed(params, x, cfg, context):
    """Attention to what is cached, and to a sum that each row keeps for itself."""
    own, total = context.cache
    out, own, terms = attention_layer.apply(params, x, cfg, context._replace(cache=own))
    total = total + jnp.sum(x, axis=1)
    return out + 0.1 * total[:, None], (own, total), terms


def filled(name):
    """(parameters, config, the cache of all prompts, a step)."""
    cfg = config(**{"context_length": 24, **FORKS[name]})
    params, lengths = params_of(cfg), np.array(list(map(len, PROMPTS)))
    prompts = np.array([row + [7] * (7 - len(row)) for row in PROMPTS])
    cache = jax.jit(kept.prefill, static_argnums=(3, 4))(params, prompts, lengths, cfg, 24)[1]
    return params, cfg, cache, jax.jit(kept.step, static_argnums=2)


def copies(cache):
    """The cache with `BEAMS` rows of its own for each row."""
    rows = len(cache.starts)

    def repeated(x):
        return jnp.repeat(x.reshape(rows, -1, *x.shape[1:]), BEAMS, axis=0).reshape(-1, *x.shape[1:])

    return kept.Cache(jax.tree.map(repeated, cache.layers), jnp.repeat(cache.starts, BEAMS), cache.steps)


def copied(cache, parents):
    """The cache of `copies` where each row goes on from another one."""
    rows = (np.arange(len(parents))[:, None] * BEAMS + parents).reshape(-1)
    of_rows = lambda x: x.reshape(len(rows), -1, *x.shape[1:])[rows].reshape(x.shape)  # noqa: E731
    return cache._replace(layers=jax.tree.map(of_rows, cache.layers))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "grouped" else pytest.mark.slow) for n in FORKS])
def test_beams_that_go_on_from_others_get_what_rows_of_their_own_would_get(name, monkeypatch):
    """Every step, beams go on from beams drawn at random; without beams, all that a row keeps is copied. What they
    share is in parts, of which those that are empty so far are not read."""
    monkeypatch.setattr(key_value_cache, "LEAST_SLOTS", 4)
    if name == "mixed":
        made = Sublayer(attention_layer.specs, mixed, attention_layer.cost, mixed_cache)
        monkeypatch.setattr(blocks, "sublayers_of", lambda cfg: {**sublayers_of(cfg), "attention": made})
    params, cfg, cache, step = filled(name)
    steps, rng, rows = 14, np.random.default_rng(0), len(PROMPTS)
    apart, fork = copies(cache), kept.for_beams(cache, BEAMS, steps, cfg)
    if name == "grouped":
        assert len(fork.layers[0]["attention"].parts) == 4
    inherit = jax.jit(kept.inherit, static_argnums=2)
    for number in range(steps):
        if number:
            parents = rng.integers(0, BEAMS, (rows, BEAMS))
            fork, apart = inherit(fork, parents, cfg), copied(apart, parents)
        tokens = jnp.asarray(rng.integers(0, cfg.vocab_size, rows * BEAMS))
        got, fork = step(params, tokens, cfg, fork)
        wanted, apart = step(params, tokens, cfg, apart)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_beams_may_part_later_and_go_on_from_themselves():
    params, cfg, cache, step = filled("grouped")
    rng = np.random.default_rng(1)
    for _ in range(2):
        _, cache = step(params, jnp.asarray(rng.integers(0, cfg.vocab_size, len(PROMPTS))), cfg, cache)
    apart, fork = copies(cache), kept.for_beams(cache, BEAMS, 2 + 3, cfg)
    for _ in range(3):
        tokens = jnp.asarray(rng.integers(0, cfg.vocab_size, len(PROMPTS) * BEAMS))
        got, fork = step(params, tokens, cfg, fork)
        wanted, apart = step(params, tokens, cfg, apart)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5)
