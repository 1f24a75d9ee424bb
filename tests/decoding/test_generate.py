"""generate() and stream(): against repeated full forward passes; ragged rows, stops, limits, one compiled program."""

from dataclasses import replace

import compilations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_config import changed
from small_models import config, gpt_apply, params_of

from jaxformer.decoding import Sampling, cache, generate, generation, prepare_decode_params, stream
from jaxformer.errors import ConfigError

# One layer, one batch and few sizes wherever a law allows it: programs compiled for one test serve the next.
CFG = config(positions="rotary", num_kv_heads=2, num_layers=1)
PARAMS = params_of(CFG)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [2], [7, 1, 8, 2, 8]]
GREEDY = Sampling(temperature=0)
FREE = Sampling(temperature=1.2, top_k=15, top_p=0.95, min_p=0.01, repetition_penalty=1.2)


def stops(*sequences):
    """Those stop sequences, and others that never come: programs are those of five sequences, the longest of eight."""
    return [*sequences, *([token] * 8 for token in range(5 - len(sequences)))]


def drawn(prompts=PROMPTS, seed=1, **options):
    """`generate` with every filter and with stop sequences, by which many tests share one program."""
    options = {"sampling": FREE, "max_new_tokens": 16, "stop": stops(), **options}
    return generate(PARAMS, prompts, CFG, rng=jax.random.key(seed), **options)


def by_hand(params, prompt, cfg, new_tokens, penalty=1.0):
    """Greedy tokens and log-probabilities by one full forward pass for each token; padding on the right is not seen."""
    tokens, log_probs = list(prompt), []
    for _ in range(new_tokens):
        padded = np.zeros((1, cfg.context_length if cfg.positions.kind == "learned" else 32), int)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(gpt_apply(params, padded, cfg))[0, len(tokens) - 1]
        scaled = logits.copy()
        scaled[tokens] = np.where(logits > 0, logits / penalty, logits * penalty)[tokens]
        tokens.append(int(scaled.argmax()))
        log_probs.append(logits[tokens[-1]] - np.log(np.exp(logits.astype(np.float64)).sum()))
    return tokens[len(prompt) :], log_probs


@pytest.mark.parametrize(
    ("window", "penalty"), [(6, 1.6), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((None, 1.6), (6, 1.0)))]
)
def test_greedy_tokens_are_those_of_repeated_full_passes(window, penalty):
    cfg = changed(CFG, window=window)
    sampling = Sampling(temperature=0, repetition_penalty=penalty)
    out = generate(PARAMS, PROMPTS, cfg, sampling=sampling, max_new_tokens=16)
    assert out.lengths.tolist() == [16] * 4 and not out.stopped.any()
    for row, prompt in enumerate(PROMPTS):
        tokens, log_probs = by_hand(PARAMS, prompt, cfg, 16, penalty)
        assert out.tokens[row].tolist() == tokens
        # The model's own probabilities, whatever the penalty.
        np.testing.assert_allclose(out.log_probs[row], log_probs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_ragged_batch_gives_what_each_prompt_gives_alone():
    rngs = jax.random.split(jax.random.key(5), 4)
    options = {"sampling": FREE, "max_new_tokens": 16, "stop": stops([3, 3], [11])}
    together = generate(PARAMS, PROMPTS, CFG, rng=rngs, **options)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(PARAMS, [prompt], CFG, rng=rngs[row : row + 1], **options)
        assert alone.tokens[0].tolist() == together.tokens[row].tolist()
        assert alone.lengths[0] == together.lengths[row] and alone.stopped[0] == together.stopped[row]
        np.testing.assert_allclose(alone.log_probs[0], together.log_probs[row], rtol=1e-4, atol=1e-5)


def test_padding_is_never_read_and_lists_are_padded_arrays():
    padded = np.full((4, 16), 23)
    for row, prompt in zip(padded, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    lengths = [len(p) for p in PROMPTS]
    out, other = drawn(), drawn(jnp.asarray(padded), lengths=lengths)
    np.testing.assert_array_equal(out.tokens, other.tokens)


def test_the_same_key_gives_the_same_tokens_and_another_key_others():
    first, again, other = (drawn(seed=seed).tokens for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any(axis=1).all()
    same = drawn([PROMPTS[0]] * 4).tokens
    assert len({tuple(row) for row in same.tolist()}) == 4  # rows draw on their own
    options = {"sampling": FREE, "max_new_tokens": 16, "stop": stops()}
    old_style = generate(PARAMS, PROMPTS, CFG, rng=jax.random.PRNGKey(1), **options).tokens
    np.testing.assert_array_equal(first, old_style)


ROWS = 256  # of the tests that count what comes


@pytest.mark.slow
def test_tokens_come_as_often_as_the_model_says():
    each = [generate(PARAMS, [[3, 1, 4]] * ROWS, CFG, rng=jax.random.key(seed), max_new_tokens=1) for seed in range(16)]
    tokens, log_probs = (np.concatenate([getattr(out, name)[:, 0] for out in each]) for name in ("tokens", "log_probs"))
    probabilities = np.asarray(jax.nn.softmax(gpt_apply(PARAMS, jnp.array([[3, 1, 4]]), CFG)[0, -1]))
    frequency = np.bincount(tokens, minlength=24) / len(tokens)
    bound = 4.5 * np.sqrt(probabilities * (1 - probabilities) / len(tokens))
    assert (np.abs(frequency - probabilities) <= bound).all()
    np.testing.assert_allclose(np.exp(log_probs), probabilities[tokens], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.optimized  # two programs: to the last bit as users compile them
def test_a_stream_is_generate_in_blocks():
    options = {"rng": jax.random.key(3), "sampling": FREE, "max_new_tokens": 14, "stop": [[8, 10], [20, 8]]}
    whole = generate(PARAMS, PROMPTS, CFG, **options)
    for block in (1, 3, 8):
        parts = list(stream(PARAMS, PROMPTS, CFG, block=block, **options))
        for name in ("tokens", "log_probs"):
            joined = np.concatenate([getattr(part, name) for part in parts], axis=1)
            np.testing.assert_array_equal(joined, getattr(whole, name)[:, : joined.shape[1]])
        np.testing.assert_array_equal(sum(part.lengths for part in parts), whole.lengths)
        np.testing.assert_array_equal(parts[-1].stopped, whole.stopped)
        assert [part.tokens.shape[1] for part in parts[:2]] == [1, block]
        assert all((part.tokens >= 0).any() for part in parts)  # none after the last row is done
    one = {**options, "stop": [[3], [0] * 8], "suppress": [token for token in range(24) if token != 3]}
    assert len(list(stream(PARAMS, PROMPTS, CFG, **one))) == 1  # each row's first token ends it


@pytest.mark.slow
def test_the_stream_writes_into_the_cache_it_was_given():
    """Keys and values are the only arrays of their size that a stream holds; from block to block they stay in place."""
    others = {id(x) for x in jax.live_arrays()}

    def places():
        return {x.unsafe_buffer_pointer() for x in jax.live_arrays() if id(x) not in others and x.size > 4 * 64}

    options = {"rng": jax.random.key(3), "sampling": FREE, "max_new_tokens": 16, "stop": [[0] * 8, [1] * 8]}
    given = stream(PARAMS, PROMPTS, CFG, block=4, **options)
    next(given)
    before = places()
    assert len(before) >= 2
    for _ in range(3):
        next(given)
        assert places() == before


@pytest.mark.slow
def test_one_program_serves_all_lengths_settings_and_seeds_of_a_size():
    cfg = changed(CFG, norm_epsilon=2e-5)  # a model of its own, so that no other test has compiled it
    for seed, (length, new, temperature, stop) in enumerate(
        [(3, 5, 0.7, [1]), (9, 16, 1.3, [[2, 3]]), (16, 9, 2.0, [4])]
    ):
        with compilations.counted() as programs:
            generate(
                PARAMS, [list(range(1, length + 1))], cfg, rng=jax.random.key(seed), max_new_tokens=new,
                stop=[*stop, [1, 2]], sampling=Sampling(temperature, top_k=3 + seed, top_p=0.9 - seed / 10),
            )  # fmt: skip
        assert bool(programs) == (seed == 0), programs


def test_a_row_ends_with_its_first_stop_sequence_which_is_part_of_it():
    free = drawn(seed=2).tokens
    pair, single = free[0, 6:8].tolist(), int(free[2, 9])
    out = drawn(seed=2, stop=stops(pair, [single]))
    for row in range(4):
        ends = [i + 1 for i in range(16) if free[row, i] == single or (i and free[row, i - 1 : i + 1].tolist() == pair)]
        end = min(ends, default=16)
        assert out.lengths[row] == end and out.stopped[row] == bool(ends)
        assert out.tokens[row, :end].tolist() == free[row, :end].tolist()
        assert (out.tokens[row, end:] == -1).all() and (out.log_probs[row, end:] == 0).all()
    assert out.stopped[0] and out.stopped[2]


def test_a_stop_sequence_does_not_begin_in_the_prompt():
    first = int(drawn(max_new_tokens=1).tokens[0, 0])
    across, within = [PROMPTS[0][-1], first], [first]
    for stop, ends in ((across, False), (within, True)):
        assert (drawn(max_new_tokens=4, stop=stops(stop)).lengths[0] == 1) == ends


def test_the_loop_ends_when_every_row_has(monkeypatch):
    steps, real = [], cache.step

    def counted(*args):
        jax.debug.callback(lambda: steps.append(1))
        return real(*args)

    monkeypatch.setattr(cache, "step", counted)
    cfg = changed(CFG, norm_epsilon=3e-5)  # a model of its own: its programs are traced with the counter in them

    def tokens(*ends):
        steps.clear()
        out = generate(PARAMS, PROMPTS, cfg, sampling=GREEDY, max_new_tokens=16, stop=stops(*ends))
        jax.effects_barrier()
        return out.tokens, len(steps)

    first, number = tokens()
    assert number == 15
    assert tokens(*([token] for token in first[:, 0].tolist()))[1] == 0


def test_learned_positions_end_with_the_context_and_others_go_on():
    cfg = config(positions="learned", num_layers=1)  # context 16
    params = params_of(cfg)
    out = generate(params, PROMPTS, cfg, sampling=GREEDY, max_new_tokens=100)
    # The last token needs no position of its own: it is never read.
    assert out.lengths.tolist() == [17 - len(p) for p in PROMPTS] and not out.stopped.any()
    assert out.tokens.shape == (4, 16)
    for row, prompt in enumerate(PROMPTS):
        assert out.tokens[row, : out.lengths[row]].tolist() == by_hand(params, prompt, cfg, out.lengths[row])[0]
    full = generate(params, [list(range(16))] * 4, cfg, sampling=GREEDY, max_new_tokens=100)
    assert full.lengths.tolist() == [1] * 4
    with pytest.raises(ConfigError, match=r"prompt: 17 tokens .*context_length 16, which learned .*at most 16"):
        generate(params, [list(range(17))], cfg, sampling=GREEDY)
    for positions in ("sinusoidal", "rotary", "alibi", "t5", "none"):
        cfg = config(positions=positions, num_layers=1)
        request, _ = generation.make_request(
            PARAMS, [list(range(17))], cfg, lengths=None, max_new_tokens=99, stop=(), suppress=()
        )
        assert request.limits.tolist() == [99]


def test_suppressed_tokens_never_come():
    out = drawn([PROMPTS[0]] * 4, suppress=np.arange(4, 24))
    assert set(np.unique(out.tokens)) == {0, 1, 2, 3}


@pytest.mark.parametrize("columns", [pytest.param(each, marks=pytest.mark.slow) for each in (False, True)])
def test_parameters_made_ready_once_generate_the_same(columns):
    cfg = replace(CFG, dtype="bfloat16")
    once = prepare_decode_params(PARAMS, cfg, columns=columns)
    assert once["blocks"][0]["mlp"]["b_up"].dtype == jnp.float32
    out, same = (generate(p, PROMPTS[:1], cfg, rng=jax.random.key(0), max_new_tokens=16) for p in (PARAMS, once))
    assert out.lengths.tolist() == [16]
    np.testing.assert_allclose(out.log_probs[:, :2], same.log_probs[:, :2], rtol=0.05, atol=0.05)
    if columns:  # what CPUs take by themselves
        np.testing.assert_array_equal(out.tokens, same.tokens)


def test_every_draw_is_independent_of_the_one_before_and_of_the_other_rows():
    # A model that predicts the same distribution after everything.
    constant = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), PARAMS)
    constant["final_norm"]["bias"] += 1.0
    constant["head"]["table"][:3, 0] = 9.0, 8.0, 7.5
    probabilities = np.asarray(jax.nn.softmax(gpt_apply(constant, jnp.array([[1]]), CFG)[0, 0])).astype(np.float64)
    tokens = np.stack([
        generate(constant, [[1]] * ROWS, CFG, rng=jax.random.key(seed), max_new_tokens=16).tokens for seed in range(3)
    ])  # fmt: skip
    for pairs in ((tokens[:, :, :-1], tokens[:, :, 1:]), (tokens[:, :-1], tokens[:, 1:])):
        counts = np.zeros((24, 24))
        np.add.at(counts, (pairs[0].ravel(), pairs[1].ravel()), 1)
        expected = np.outer(probabilities, probabilities)
        deviation = np.sqrt(expected * (1 - expected) / counts.sum())
        assert (np.abs(counts / counts.sum() - expected) <= 5 * deviation + 1e-4).all()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"prompts": []}, "prompts: none; accepted: at least one"),
        ({"prompts": [[1], []]}, "prompts: row 1 is empty; accepted: at least one token"),
        ({"prompts": [[1, 24]]}, "prompts: token 24; accepted: 0 to 23"),
        ({"prompts": np.ones((1, 2))}, "prompts: float64 of shape (1, 2); accepted: integers [rows, tokens]"),
        ({"prompts": np.ones((2, 2), int), "lengths": [1, 3]}, "lengths: [1, 3]; accepted: one for each of 2 rows"),
        ({"lengths": [1]}, "lengths: given beside a list of prompts"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0; accepted: at least 1"),
        ({"rng": None}, "rng: None; sampling at temperature 1.0 needs a key"),
        (
            {"rng": jax.random.split(jax.random.key(0), 3)},
            "rng: keys of shape (3,); accepted: one key, or one for each",
        ),
        ({"stop": [[]]}, "stop: an empty sequence"),
        ({"stop": [99]}, "stop: token 99; accepted: 0 to 23"),
        ({"suppress": range(24)}, "suppress: all tokens"),
        ({"cfg": config(family="bert")}, "config.model.family: bert; generating text needs gpt"),
        ({"cfg": config(vocab_size=None)}, "config.model.vocab_size: None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("function", [generate, stream])
def test_bad_requests_are_one_line_each_before_anything_runs(function, changes, line):
    options = {"prompts": [[1, 2]], "cfg": CFG, "rng": jax.random.key(0), **changes}
    with pytest.raises(ConfigError) as error:
        function(PARAMS, options.pop("prompts"), options.pop("cfg"), **options)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
