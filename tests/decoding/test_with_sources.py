"""Decoding with a source: cached steps are full passes, ragged sources are each alone, beams share what is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import SMALL, config, params_of
from test_beam import every_continuation

from jaxformer.decoding import Sampling, beam_search, cache, generate, stream
from jaxformer.errors import ConfigError
from jaxformer.models import encoder_decoder

KINDS = {
    "t5": {"norm": "rms_norm", "positions": "t5", "use_bias": False, "scale_output": True, "tie_embeddings": True},
    "bart": {"block": "post_norm", "embedding_norm": True},
    "grouped": {"positions": "rotary", "num_kv_heads": 2, "qk_norm": True, "attention_soft_cap": 3.0, "window": 5},
}
SOURCES = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8, 2, 8]]
START = [[0]] * 3


def make(kind, **changes):
    encoder = {"num_layers": 1, "source_length": 12}
    return config(**{**KINDS[kind], "family": "encoder_decoder", "encoder": encoder, **changes})


@functools.cache
def apply(cfg):
    return jax.jit(lambda p, tokens, source: encoder_decoder.apply(p, tokens, cfg, source_tokens=source))


@pytest.mark.parametrize(
    "kind", ["t5", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "t5")]
)
def test_each_step_is_the_full_pass(kind):
    cfg = make(kind)
    params = params_of(cfg)
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (3, 9))
    lengths = np.array([1, 3, 2])  # of the prompts
    sizes = np.array(list(map(len, SOURCES)))
    padded = np.array([row + [7] * (10 - len(row)) for row in SOURCES])
    at = lengths + np.arange(5)[:, None]

    @jax.jit
    def steps(params):
        hidden, kept = cache.prefill(params, tokens[:, :4], lengths, cfg, 16, source=(padded, sizes))

        def add(kept, fed):
            hidden, kept = cache.step(params, fed, cfg, kept)
            return kept, cache.logits(params, hidden)

        _, later = jax.lax.scan(add, kept, jnp.asarray(tokens[np.arange(3), at[:-1]]))
        return jnp.concatenate([cache.logits(params, hidden)[None], later])

    found = np.asarray(steps(params))
    for row, source in enumerate(SOURCES):
        whole = np.asarray(apply(cfg)(params, tokens[row : row + 1], np.array(source)[None])[0])
        np.testing.assert_allclose(found[:, row], whole[at[:, row] - 1], rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_ragged_batch_is_each_alone(kind):
    cfg = make(kind)
    params, rng = params_of(cfg), jax.random.key(3)
    rngs = jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(3))
    greedy = generate(params, START, cfg, sources=SOURCES, sampling=Sampling(temperature=0), max_new_tokens=7)
    drawn = generate(params, START, cfg, sources=SOURCES, rng=jax.random.clone(rngs), max_new_tokens=7)
    searched = beam_search(params, START, cfg, sources=SOURCES, beams=3, stop=[5], max_new_tokens=7, length_penalty=0.6)
    for row, source in enumerate(SOURCES):
        options = {"sources": [source], "max_new_tokens": 7}
        alone = generate(params, [[0]], cfg, sampling=Sampling(temperature=0), **options)
        np.testing.assert_array_equal(alone.tokens[0], greedy.tokens[row])
        alone = generate(params, [[0]], cfg, rng=jax.random.clone(rngs[row : row + 1]), **options)
        np.testing.assert_array_equal(alone.tokens[0], drawn.tokens[row])
        beams = beam_search(params, [[0]], cfg, beams=3, stop=[5], length_penalty=0.6, **options)
        np.testing.assert_array_equal(beams.tokens[0], searched.tokens[row])
        np.testing.assert_allclose(beams.scores[0], searched.scores[row], rtol=1e-4)
    assert len({tuple(row) for row in greedy.tokens.tolist()}) > 1  # the source matters


@pytest.mark.slow
def test_padding_of_sources_is_not_read():
    cfg = make("t5", num_layers=1)
    params = params_of(cfg)
    array = np.array([row + [0] * (8 - len(row)) for row in SOURCES])
    sizes = list(map(len, SOURCES))
    found = [
        generate(params, START, cfg, sources=np.where(np.arange(8) < np.array(sizes)[:, None], array, fill),
                 source_lengths=sizes, sampling=Sampling(temperature=0), max_new_tokens=6)
        for fill in (0, 9)
    ]  # fmt: skip
    np.testing.assert_array_equal(found[0].log_probs, found[1].log_probs)


@pytest.mark.slow
def test_blocks_of_a_stream_are_the_whole():
    cfg = make("bart", num_layers=1)
    params = params_of(cfg)
    options = {"sources": SOURCES, "sampling": Sampling(temperature=0), "max_new_tokens": 7}
    whole = generate(params, START, cfg, **options)
    parts = [part.tokens for part in stream(params, START, cfg, block=3, **options)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole.tokens)


def check_exhaustive(seed, cfg, new_tokens, length_penalty=0.6, beams=64):
    """As many beams as continuations find all of them, best first; answers how many there are."""
    stop = cfg.vocab_size - 1
    rng = np.random.default_rng(seed)
    params, source = params_of(cfg, seed), rng.integers(0, cfg.vocab_size, 3).tolist()
    found = every_continuation(
        params, [1, 2], cfg, new_tokens, stop,
        lambda p, rows, cfg: apply(cfg)(p, rows, jnp.broadcast_to(jnp.array(source), (len(rows), 3))),
    )  # fmt: skip
    score = {tokens: nats / ((5 + len(tokens)) / 6) ** length_penalty for tokens, nats in found.items()}
    expected = sorted(score, key=score.get, reverse=True)
    out = beam_search(
        params, [[1, 2]], cfg, beams=beams, length_penalty=length_penalty, max_new_tokens=new_tokens, stop=[stop],
        sources=[source],
    )  # fmt: skip
    got = [tuple(t[:n].tolist()) for t, n in zip(out.tokens[0], out.lengths[0], strict=True)]
    assert set(got[: len(expected)]) == set(expected) and not any(got[len(expected) :])
    ranks = [score[tokens] for tokens in got[: len(expected)]]
    np.testing.assert_allclose(ranks, sorted(ranks, reverse=True), rtol=1e-5)  # what scores alike has no order
    np.testing.assert_allclose(out.log_probs[0, : len(expected)], [found[t] for t in got[: len(expected)]], rtol=1e-4)
    np.testing.assert_allclose(out.scores[0, : len(expected)], ranks, rtol=1e-4)
    return got[0] == expected[0]


@pytest.mark.slow
def test_as_many_beams_as_continuations_find_the_best_ones_in_order():
    assert check_exhaustive(3, make("t5", vocab_size=4, num_layers=1), 3)


@pytest.mark.slow
def test_the_same_of_fifty_random_models():
    cfg = make("bart", vocab_size=3, num_layers=1)
    best = [check_exhaustive(seed, cfg, 5, length_penalty=0.1 * (seed % 10), beams=63) for seed in range(50)]
    assert sum(best) >= 49  # the two best may score alike


@pytest.mark.slow
def test_beams_share_what_is_kept_of_a_source():
    """Cross keys and values have the rows of the sources; a step gives each of the beams what it would get alone."""
    cfg = make("grouped")
    params = params_of(cfg)
    sizes, padded = np.array(list(map(len, SOURCES))), np.array([row + [7] * (8 - len(row)) for row in SOURCES])
    fill = jax.jit(cache.prefill, static_argnums=(3, 4))
    _, kept = fill(params, jnp.zeros((3, 1), int), np.ones(3, int), cfg, 8, source=(padded, sizes))
    beams = 4
    fork = jax.jit(cache.for_beams, static_argnums=(1, 2, 3))(kept, beams, 4, cfg)
    (part,) = fork.layers[0]["attention"].parts
    shapes = {"attention": part.value.shape[:-1], "cross": fork.layers[0]["cross"].value.shape[:-1]}
    rows = 3 * cfg.attention.kv_heads
    assert shapes == {"attention": (rows, beams * cfg.attention.window), "cross": (rows, 8)}
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (3, beams))
    step = jax.jit(cache.step, static_argnums=2)
    own = jnp.tile(jnp.arange(beams), (3, 1))
    together, _ = step(params, jnp.array(tokens.reshape(-1)), cfg, cache.inherit(fork, own, cfg))
    for beam in range(beams):
        alone, _ = step(params, jnp.array(tokens[:, beam]), cfg, kept)
        np.testing.assert_allclose(together.reshape(3, beams, -1)[:, beam], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family, options, line", [
    ("encoder_decoder", {},
     "sources: None; model.family=encoder_decoder reads a source; accepted: one for each prompt"),
    ("encoder_decoder", {"sources": [[1]]}, "sources: 1; accepted: one for each of 3 prompts"),
    ("encoder_decoder", {"sources": [[1], [], [2]]}, "sources: row 1 is empty; accepted: at least one token"),
    ("encoder_decoder", {"sources": [[1], [99], [2]]}, "sources: token 99; accepted: 0 to 23"),
    ("encoder_decoder", {"sources": [[1], [2] * 13, [2]]},
     "source: 13 tokens are more than config.model.encoder.source_length 12, which learned positions cannot extend; "
     "accepted: at most 12"),
    ("gpt", {"sources": SOURCES}, "sources: given; model.family=gpt reads none; accepted: None"),
])  # fmt: skip
def test_wrong_sources_are_one_line(family, options, line):
    cfg = make("bart") if family == "encoder_decoder" else config(positions="rotary")
    params = params_of(cfg)
    for function in (functools.partial(generate, sampling=Sampling(temperature=0)), beam_search):
        with pytest.raises(ConfigError) as error:
            function(params, START, cfg, **options)
        assert str(error.value).startswith(line)


def test_sizes_of_the_small_models():
    assert SMALL["vocab_size"] == 24  # which the lines above name
