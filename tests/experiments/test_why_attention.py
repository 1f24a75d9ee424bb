"""Why attention: what counts as right, what is read of attention, and a page that says what the records do."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import why_attention, why_attention_page
from experiments import why_attention_reading as reading
from jaxformer.data.transduction import Transduction
from jaxformer.functional import attention_layer
from jaxformer.functional.layer import norm
from jaxformer.models import embedding, encoder_decoder
from jaxformer.specs import init_params

RESULT = Path(__file__).parents[2] / "experiments" / "results" / "why_attention"


class Words:
    """Symbols as ids from 10 on."""

    start, end, suppress = 1, 2, ()

    class tokenizer:  # noqa: N801
        @staticmethod
        def encode(text, strict):
            return 10 + np.array([ord(sign) - ord("!") for sign in text])


def made(name="transformer", **model):
    changes = {"model.vocab_size": "64", "model.width": "16", **{f"model.{k}": v for k, v in model.items()}}
    return why_attention.config_of(name, changes)


def test_an_answer_is_right_if_every_symbol_is_a_synonym_of_the_right_one_and_it_ends_there():
    config = made()
    drawn = Transduction("translate", 16, 4, 40, 2, 2, config.data.language_seed)
    pairs = reading.pairs_of(config, Words, 5, 0, 3)
    assert pairs.source_ids.shape == pairs.target_ids.shape == (3, 6)
    assert (pairs.source_ids[:, -1] == Words.end).all() and (pairs.target_ids[:, 0] == Words.start).all()
    aligned = np.take_along_axis(pairs.sources, pairs.aligned, axis=1)
    assert not (np.sort(pairs.aligned, axis=1) != np.arange(5)).any()
    for synonym in (0, 1):  # either is right
        out = np.hstack([10 + drawn.synonyms[aligned][:, :, synonym], np.full((3, 1), Words.end)])
        assert reading.right(out, pairs, drawn, Words).all()
    out[0, 2] = out[0, 2] % 10  # another symbol
    out[1, 5] = 11  # goes on
    out[2, 4:] = Words.end, -1  # ends before
    found = reading.right(out, pairs, drawn, Words)
    assert found.sum(axis=1).tolist() == [5, 5, 4] and not found[0, 2] and not found[1, 5]


@pytest.mark.slow
def test_the_weights_are_those_that_the_model_attends_with():
    """Of one layer with one head that does nothing but attend to the source: its output is made of them."""
    cfg = made(num_layers="1", **{"attention.num_heads": "1"}).model
    params = init_params(encoder_decoder.specs(cfg), jax.random.key(0))
    for name, leaf in (("attention", "w_out"), ("attention", "b_out"), ("mlp", "w_down"), ("mlp", "b_down")):
        params["blocks"][name][leaf] = jnp.zeros_like(params["blocks"][name][leaf])
    pairs = reading.pairs_of(made(), Words, 6, 0, 2)
    (weights,) = reading.attention_weights(params, pairs, cfg)
    assert weights.shape == (2, 7, 7) and 0 <= reading.misaligned(weights, pairs) <= 1
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
    encode = jax.jit(encoder_decoder.encode, static_argnums=3)
    states = encode(params, pairs.source_ids, jnp.full(2, 7), cfg).states
    x = embedding.embed(params["embedding"], pairs.target_ids, jnp.arange(7), cfg)
    cross = jax.tree.map(lambda a: a[0], params["blocks"]["cross"])
    value = attention_layer.project(cross, x, states, cfg)[2]
    read = attention_layer.project_out(cross, jnp.einsum("BTS,BSHK->BTHK", weights, value), cfg)
    whole = jax.jit(encoder_decoder.hidden, static_argnums=2)
    hidden = whole(params, pairs.target_ids, cfg, source_tokens=pairs.source_ids)
    np.testing.assert_allclose(norm(params["final_norm"], x + read, cfg), hidden, rtol=1e-4, atol=1e-5)


def record(model, seed, exact, misaligned=0.1):
    lengths = list(why_attention.LENGTHS)
    return {
        "model": model, "seed": seed, "pairs": 10, "layer": None if model == "none" else 1, "lengths": lengths,
        "exact": [exact * (1 if length < 21 or model != "none" else 0.5) for length in lengths],
        "symbols": [1.0] * len(lengths), "misaligned": [] if model == "none" else [misaligned] * len(lengths),
        "params": 1000, "steps": 5, "tokens": 50, "floor": 0.6, "losses": [[5, 0.7]],
    }  # fmt: skip


def test_the_table_is_means_over_seeds_with_their_intervals():
    found = [record("none", 0, 0.8), record("none", 1, 0.9), record("transformer", 0, 1.0)]
    assert why_attention_page.table(found, "exact")[2:] == [
        "| no attention | 0.850 [0.215, 1.000] | 0.850 [0.215, 1.000] | 0.425 [0.107, 0.743] | 0.425 [0.107, 0.743] |",
        "| Transformer | 1.000 | 1.000 | 1.000 | 1.000 |",
    ]
    assert why_attention_page.table(found, "misaligned")[2:] == ["| Transformer | 0.100 | 0.100 | 0.100 | 0.100 |"]


def test_the_page_is_what_the_records_say_and_the_claim_holds():
    found = why_attention_page.records(RESULT / "records.jsonl")
    assert (RESULT / "README.md").read_text(encoding="utf-8") == why_attention_page.page(found)
    assert all((RESULT / f"{name}.svg").exists() for name in why_attention_page.PICTURES)
    lengths = np.array(found[0]["lengths"])
    short, long = lengths <= 10, lengths > 30
    for name in why_attention_page.LABELS:
        exact = why_attention_page.of_model(found, name, "exact")
        assert len(exact) >= 3
        fall = why_attention_page.over_seeds(exact[:, short].mean(axis=1) - exact[:, long].mean(axis=1))
        assert fall.low > 0.5 if name == "none" else fall.high < 0.1


@pytest.mark.slow
def test_the_whole_program_in_little(tmp_path, monkeypatch):
    flags = [f"--out={tmp_path / 'out'}", f"--workdir={tmp_path / 'w'}", "--seeds=2", "--pairs=2", "--only=bahdanau"]
    monkeypatch.setattr("sys.argv", ["why_attention", *flags, "--steps=2"])
    monkeypatch.setattr(why_attention, "LENGTHS", range(4, 7))
    monkeypatch.setattr(why_attention, "LANGUAGE", why_attention.LANGUAGE | {"data.language_tokens": "20000"})
    monkeypatch.setattr(why_attention, "keep_compiled_programs", lambda: None)
    why_attention.main()
    kept = (tmp_path / "out" / "records.jsonl").read_bytes()
    assert [json.loads(line)["seed"] for line in kept.splitlines()] == [0, 1]
    assert all(
        (tmp_path / "out" / name).stat().st_size > 1000 for name in ("accuracy.svg", "alignments.svg", "README.md")
    )
    monkeypatch.setattr(why_attention, "train", None)  # what is there is not made again
    monkeypatch.setattr("sys.argv", [*sys.argv, "--stage=train"])
    why_attention.main()
    assert (tmp_path / "out" / "records.jsonl").read_bytes() == kept
