"""Prompts of a prefix language model: the prompt is read from both sides, what follows it token by token."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import config, gpt_apply, params_of

from jaxformer import decoding
from jaxformer.config import from_mapping
from jaxformer.data.decoding_text import decoding_text
from jaxformer.data.tokenizers import train
from jaxformer.decoding import Sampling, beam_search, cache, generate
from jaxformer.errors import ConfigError
from jaxformer.models import gpt
from jaxformer.programs import generate as program
from jaxformer.runs.pretrain import Run

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 7, 1], [5]]
TOTAL = 12


@pytest.mark.slow
@pytest.mark.parametrize("positions, window", [("rotary", None), ("t5", 4)])
def test_each_step_is_the_full_pass_with_that_prefix(positions, window):
    with jax.enable_x64(True):
        cfg = config(positions=positions, window=window, num_kv_heads=2, dtype="float64")
        params = params_of(cfg, dtype=np.float64)
        tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (3, TOTAL))
        lengths = np.array(list(map(len, PROMPTS)))
        prefix = jnp.asarray(np.arange(TOTAL) < lengths[:, None])
        rows, at = np.arange(3), lengths + np.arange(4)[:, None]

        @jax.jit
        def all_of(params):
            """Logits of the full passes with the prefix and without, and of each step."""
            hidden, kept = cache.prefill(params, tokens[:, :6], lengths, cfg, length=TOTAL, prefix_lm=True)

            def add(kept, fed):
                hidden, kept = cache.step(params, fed, cfg, kept)
                return kept, cache.logits(params, hidden)

            _, later = jax.lax.scan(add, kept, jnp.asarray(tokens[rows, at[:-1]]))
            steps = jnp.concatenate([cache.logits(params, hidden)[None], later])
            return gpt.apply(params, tokens, cfg, prefix=prefix), gpt.apply(params, tokens, cfg), steps

        full, causal, steps = map(np.asarray, all_of(params))
        np.testing.assert_allclose(steps, full[rows, at - 1], rtol=1e-9, atol=1e-9)
        assert np.abs(full[0, 5] - causal[0, 5]).max() > 1e-2  # the prefix matters
        np.testing.assert_allclose(full[2], causal[2], rtol=1e-9, atol=1e-9)  # of one token it does not


@pytest.mark.slow
def test_answers_are_those_of_the_model_that_was_trained():
    cfg = config(positions="rotary", num_layers=1)
    params, options = params_of(cfg), {"max_new_tokens": 4}
    greedy = generate(params, PROMPTS, cfg, sampling=Sampling(temperature=0), prefix_lm=True, **options)
    beam = beam_search(params, PROMPTS, cfg, beams=1, prefix_lm=True, **options)
    np.testing.assert_array_equal(beam.tokens[:, 0], greedy.tokens)
    np.testing.assert_allclose(beam.log_probs[:, 0], greedy.log_probs.sum(axis=1), rtol=1e-4)
    for row, prompt in enumerate(PROMPTS):
        whole = np.zeros((1, 16), int)
        whole[0, : len(prompt) + 4] = [*prompt, *greedy.tokens[row]]
        logits = gpt_apply(params, whole, cfg, prefix=jnp.arange(16)[None] < len(prompt))[0]
        nats = np.asarray(jax.nn.log_softmax(logits))[len(prompt) - 1 :][:4]
        np.testing.assert_array_equal(nats.argmax(axis=-1), greedy.tokens[row])
        np.testing.assert_allclose(nats.max(axis=-1), greedy.log_probs[row], rtol=1e-3)


def test_another_family_is_refused():
    cfg = config(family="encoder_decoder", encoder={"num_layers": 1, "source_length": 12})
    with pytest.raises(
        ConfigError, match=r"^prefix_lm: True; model.family=encoder_decoder is trained on pairs, .*; acc"
    ):
        generate(params_of(cfg), [[1]], cfg, sources=[[2]], sampling=Sampling(temperature=0), prefix_lm=True)


@pytest.mark.parametrize("objective", ["prefix_lm", "next_token"])
def test_the_program_reads_prompts_as_the_run_was_trained(objective, monkeypatch):
    asked = []
    monkeypatch.setattr(decoding, "generate", lambda *_, **options: asked.append(options))
    tokenizer = train("bytes", [], vocab_size=None)
    wanted = {"data": {"objective": objective}, "model": {"vocab_size": tokenizer.vocab_size}}
    run = Run(from_mapping(wanted), None, tokenizer, 0)
    options = {"prompt": ["ab"], "source": [], "max_new_tokens": 4, "num_samples": 1, "seed": 0, "beam": None}
    options |= {"stream": False, "stop": [], "workdir": "w"}
    program.generated(run, decoding_text(tokenizer, run.config), Sampling(), argparse.Namespace(**options))
    assert asked[0]["prefix_lm"] == (objective == "prefix_lm")
