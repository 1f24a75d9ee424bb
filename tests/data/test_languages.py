"""Generated languages: every stated entropy against enumeration, samples against the law, bad parameters."""

import itertools
import math

import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.data import languages
from jaxformer.data import markov as markov_module
from jaxformer.data.batches import Batches, eval_batches
from jaxformer.data.corpus import open_corpus
from jaxformer.data.hierarchy import Hierarchy
from jaxformer.data.markov import Floor, Markov, Noise, corrupted
from jaxformer.data.shuffle import noise as random_bits
from jaxformer.errors import ConfigError

CHAINS = [(2, 1), (2, 3), (3, 2)]
BERT = Noise(0.15, 0.8, 0.1)


def strings(symbols, length):
    return np.array(list(itertools.product(range(symbols), repeat=length))).reshape(-1, length)


def chances(language, rows):
    """P(row), by multiplying along it from a stationary distribution found by solving, not by iteration."""
    size, order = language.symbols, language.order
    contexts = strings(size, order)
    matrix = np.zeros((len(contexts),) * 2)
    for i, context in enumerate(contexts):
        for symbol in range(size):
            matrix[i, [*map(tuple, contexts)].index((*context[1:], symbol))] = language.chances[i, symbol]
    equations = np.vstack([matrix.T - np.eye(len(matrix)), np.ones(len(matrix))])
    start = np.linalg.lstsq(equations, np.eye(len(matrix) + 1)[-1], rcond=None)[0]
    if rows.shape[1] < order:
        return np.array([start[(contexts[:, : rows.shape[1]] == row).all(axis=1)].sum() for row in rows])
    place = {tuple(context): i for i, context in enumerate(contexts.tolist())}
    out = np.array([start[place[tuple(row[:order])]] for row in rows.tolist()])
    for t in range(order, rows.shape[1]):
        out *= [language.chances[place[tuple(row[t - order : t])], row[t]] for row in rows.tolist()]
    return out


def markov_nats(language, windows):
    """[R, T]: what the best model loses on each target of rows of text [R, T + 1], which sees it from its start."""
    size, order = language.symbols, language.order
    joint = language.stationary[:, None] * language.chances
    blocks = [joint.reshape(size**length, -1).sum(axis=1) for length in range(order + 2)]
    nats = []
    for place in range(1, windows.shape[1]):
        known = min(place, order)
        number = windows[:, place - known : place + 1] @ size ** np.arange(known, -1, -1)
        nats.append(np.log(blocks[known][number // size]) - np.log(blocks[known + 1][number]))
    return np.stack(nats, axis=1)


def masked_nats(language, clean, seen, noise):
    """[R, T]: what the best model loses on each token of corrupted rows `seen` if it is selected."""
    joint = language.from_others(seen, noise) * noise.likelihood(seen, language.symbols, selected=True)
    right = np.take_along_axis(joint, clean[..., None], axis=-1)[..., 0]
    return np.log(joint.sum(axis=-1)) - np.log(right)


def hierarchy_nats(grammar, strings):
    """[D, tokens]: what the best model loses on each token of whole strings, given those before it: exact sums over all
    continuations, by message passing up the tree."""
    known = []
    for length in range(grammar.tokens + 1):  # log P(a string begins with the first `length` symbols of these)
        seen = np.arange(grammar.tokens) < length
        message = np.where(seen[:, None], strings[..., None] == np.arange(grammar.symbols), 1.0)
        scale = np.zeros(len(strings))
        for rules in reversed(grammar.rules):
            children = message.reshape(len(strings), -1, rules.shape[2], grammar.symbols)
            product = np.ones((*children.shape[:2], *rules.shape[:2]))
            for child in range(rules.shape[2]):
                product = product * children[:, :, child][..., rules[..., child]]
            message = product @ grammar.chances
            largest = message.max(axis=-1, keepdims=True)
            message, scale = message / largest, scale + np.log(largest).sum(axis=(1, 2))
        known.append(scale + np.log(message.mean(axis=(1, 2))))
    return -np.diff(np.stack(known, axis=1), axis=1)


def entropy(p):
    p = np.asarray(p)
    return -(p[p > 0] * np.log(p[p > 0])).sum()


@pytest.mark.parametrize(("symbols", "order"), CHAINS)
def test_entropies_are_differences_of_block_entropies(symbols, order):
    language = Markov(symbols, order, zipf=1.0, seed=3)
    blocks = [0.0] + [entropy(chances(language, strings(symbols, n))) for n in range(1, order + 4)]
    steps = np.diff(blocks)  # H(n + 1) - H(n)
    np.testing.assert_allclose(language.context_entropies, steps[: order + 1], rtol=0, atol=1e-12)
    np.testing.assert_allclose(steps[order:], language.entropy_rate, rtol=0, atol=1e-12)
    for row in (1, order + 2):  # what a row of text costs beyond its first token
        assert language.next_token_floor(row) == pytest.approx((blocks[row + 1] - blocks[1]) / row, abs=1e-12)
        assert language.next_token_floor(row, 0) == pytest.approx(blocks[row] / row, abs=1e-12)
    assert (steps[:-1] > steps[1:] - 1e-12).all() and steps[0] > language.entropy_rate + 1e-3


def test_code_length_of_rows_is_the_log_of_their_chance():
    language = Markov(3, 2, zipf=1.0, seed=1)
    rows = strings(3, 5)
    expected = np.log(chances(language, rows[:, :1])) - np.log(chances(language, rows))
    np.testing.assert_allclose(markov_nats(language, rows).sum(axis=1), expected, atol=1e-12)


def test_sampled_text_has_the_stated_entropy():
    language = Markov(8, 2, zipf=1.0, seed=0)
    text = language.sample(100_000, "train")
    counts = np.zeros((64, 8))
    np.add.at(counts, (text[:-2] * 8 + text[1:-1], text[2:]), 1)
    share = counts / counts.sum(axis=1, keepdims=True)
    plug_in = (counts.sum(axis=1) / counts.sum()) @ [entropy(row) for row in share]
    nats = markov_nats(language, text.reshape(-1, 100))[:, 2:]
    deviation = nats.mean(axis=1).std() / np.sqrt(len(nats))
    assert abs(nats.mean() - language.entropy_rate) < 4 * deviation < 0.05
    bias = 64 * 7 / (2 * len(text))  # Miller-Madow: the plug-in is too low by this
    assert abs(plug_in + bias - language.entropy_rate) < 4 * deviation + bias
    # Each context's next symbols, in standard deviations of a binomial.
    total = counts.sum(axis=1, keepdims=True)
    scores = (counts - total * language.chances) / np.sqrt(total * language.chances * (1 - language.chances) + 1e-9)
    likely = total * language.chances > 25
    assert likely.sum() > 200 and np.abs(scores[likely]).max() < 5 and 0.8 < scores[likely].std() < 1.2


def test_frequencies_fall_like_zipf():
    language = Markov(64, 2, zipf=1.0, seed=0)
    share = language.stationary.reshape(64, 64).sum(axis=0)
    rank = np.arange(1, 65)
    slope = np.polyfit(np.log(rank), np.log(share), 1)[0]
    assert -1.4 < slope < -0.6
    flat = Markov(64, 2, zipf=0.0, seed=0).stationary.reshape(64, 64).sum(axis=0)
    assert abs(np.polyfit(np.log(rank), np.log(flat), 1)[0]) < 0.2


def brute_masked(language, noise, length):
    """Enumerates every row and every reading: P(token | reading, selected), and its entropy averaged over places."""
    size = language.symbols
    rows, readings = strings(size, length), strings(size + 1, length)
    row_chance = chances(language, rows)
    p = np.zeros((2, size, size + 1))  # [selected or unknown, token, reading]
    for a in range(size):
        selected = [noise.mask_random_rate / size] * size + [noise.mask_token_rate]
        selected[a] += 1 - noise.mask_token_rate - noise.mask_random_rate
        p[1, a] = selected
        p[0, a] = np.eye(size + 1)[a] * (1 - noise.mask_rate) + noise.mask_rate * p[1, a]
    floor, posteriors = 0.0, np.zeros((len(readings), length, size))
    for place in range(length):
        joint = np.zeros((len(readings), size))
        for row, chance in zip(rows, row_chance, strict=True):
            weight = np.full(len(readings), chance)
            for t in range(length):
                weight = weight * p[int(t == place), row[t], readings[:, t]]
            joint[:, row[place]] += weight
        posteriors[:, place] = joint / joint.sum(axis=1, keepdims=True)
        floor += (entropy(joint) - entropy(joint.sum(axis=1))) / length
    return readings, posteriors, floor


@pytest.mark.parametrize(("symbols", "order", "length"), [(2, 1, 5), (2, 2, 5), (3, 2, 4), (2, 3, 3)])
def test_masked_floor_is_that_of_enumeration(symbols, order, length):
    noise = Noise(0.3, 0.7, 0.2)
    language = Markov(symbols, order, zipf=1.0, seed=5)
    readings, posteriors, expected = brute_masked(language, noise, length)
    # Messages give each posterior: the code length of every token for every reading.
    for symbol in range(symbols):
        nats = masked_nats(language, np.full_like(readings, symbol), readings, noise)
        np.testing.assert_allclose(nats, -np.log(posteriors[..., symbol]), rtol=0, atol=1e-11)
    # Weighted by the chance of each reading they give the floor, without sampling.
    rows = strings(symbols, length)
    like = [noise.likelihood(readings[:, t], symbols, selected=False) for t in range(length)]
    weight = sum(
        c * np.prod([like[t][:, row[t]] for t in range(length)], axis=0)
        for c, row in zip(chances(language, rows), rows, strict=True)
    )
    assert weight.sum() == pytest.approx(1)
    means = noise.remaining(language.from_others(readings, noise)).mean(axis=1)
    assert weight @ means == pytest.approx(expected, abs=1e-11)
    # And the sampled floor is within its standard error.
    sampled = language.masked_floor(length, noise, rows=2000)
    assert abs(sampled.nats - expected) < 4 * sampled.standard_error < 0.1


@pytest.mark.slow
def test_standard_error_of_the_masked_floor(monkeypatch):
    language = Markov(2, 2, zipf=1.0, seed=5)
    exact = brute_masked(language, BERT, 6)[2]
    scores = []
    for stream in range(100, 160):
        monkeypatch.setitem(markov_module._STREAMS, "floor", stream)
        floor = language.masked_floor(6, BERT, rows=100)
        scores.append((floor.nats - exact) / floor.standard_error)
    assert 0.75 < np.std(scores) < 1.3 and abs(np.mean(scores)) < 4 / np.sqrt(60)


def test_noise_of_the_floor_is_that_of_the_batches(tmp_path):
    data = tiny(tmp_path, source="markov", objective="masked")
    corpus = open_corpus(data, progress=False)
    batch = Batches(corpus.train, corpus.tokenizer, data, rows=400, context_length=32, seed=0)[0]
    seen, clean, scored = np.asarray(batch.tokens), np.asarray(batch.targets), np.asarray(batch.weights) > 0
    inside = (clean != corpus.tokenizer.separator_id).all(axis=1)
    seen, clean, scored = seen[inside], clean[inside] - 6, scored[inside]
    symbol = np.where(seen == corpus.tokenizer.mask_id, 5, seen - 6)
    language = Markov(5, 2, 1.0, 0)
    noise = Noise(data.mask_rate, data.mask_token_rate, data.mask_random_rate)
    nats = np.ma.array(masked_nats(language, clean, symbol, noise), mask=~scored)
    floor = languages.floor(data, 32)
    deviation = np.hypot(nats.std() / np.sqrt(nats.count()), floor.standard_error)
    assert abs(nats.mean() - floor.nats) < 4 * deviation < 0.15
    bits = random_bits(0, 0, 1, 2 * 200_000).reshape(2, 1, -1)
    zeros = np.zeros((1, 200_000), int)
    read = np.bincount(corrupted(zeros, bits, BERT, 5)[0], minlength=6) / 200_000
    expected = BERT.likelihood(np.arange(6), 5, selected=False)[:, 0]
    assert (np.abs(read - expected) < 5 * np.sqrt(expected * (1 - expected) / 200_000)).all()


def tiny(tmp_path, **settings):
    small = {"language_symbols": 5, "language_tokens": 20_000, "cache_dir": str(tmp_path)}
    return DataConfig(**small | {"language_depth": 2, "language_synonyms": 2} | settings)


GRAMMARS = [
    (2, 1, 2, 2, 0.0),
    (3, 2, 2, 2, 0.0),
    (2, 2, 3, 2, 0.0),
    (4, 2, 2, 1, 0.0),
    (2, 2, 2, 2, 0.0),
    (3, 2, 2, 3, 1.0),
    (2, 2, 3, 2, 2.5),
]


@pytest.mark.parametrize(("symbols", "depth", "branching", "synonyms", "zipf"), GRAMMARS)
def test_every_string_of_a_grammar(symbols, depth, branching, synonyms, zipf):
    grammar = Hierarchy(symbols, depth, branching, synonyms, 2, zipf)
    ranks = sum((k + 1) ** -zipf for k in range(synonyms))
    chance = {(root,): 1 / symbols for root in range(symbols)}
    for rules in grammar.rules:
        assert len({tuple(side) for side in rules.reshape(-1, branching).tolist()}) == symbols * synonyms
        grown = {}
        for string, p in chance.items():
            for choice in itertools.product(range(synonyms), repeat=len(string)):
                longer = tuple(int(x) for a, c in zip(string, choice, strict=True) for x in rules[a, c])
                odds = math.prod((k + 1) ** -zipf / ranks for k in choice)
                grown[longer] = grown.get(longer, 0) + p * odds
        chance = grown
    assert entropy(list(chance.values())) == pytest.approx(grammar.document_nats, abs=1e-12)
    # What each token costs, against sums over the strings that go on in the same way.
    every = np.array(list(chance))
    p = np.array(list(chance.values()))
    begins = [np.array([p[(every[:, :n] == row[:n]).all(axis=1)].sum() for row in every]) for n in range(5)]
    nats = hierarchy_nats(grammar, every)
    np.testing.assert_allclose(
        nats[:, :4].cumsum(axis=1), -np.log(np.stack(begins, 1))[:, 1 : nats.shape[1] + 1], atol=1e-12
    )
    assert p @ nats.sum(axis=1) == pytest.approx(grammar.document_nats, abs=1e-12)
    if zipf == 0:  # all strings are equally likely
        np.testing.assert_allclose(nats.sum(axis=1), grammar.document_nats, atol=1e-12)
    assert {tuple(row) for row in grammar.sample(2000, "train").tolist()} <= set(chance)


@pytest.mark.parametrize("zipf", [0.0, 1.5])
def test_strings_are_sampled_as_likely_as_they_are(zipf):
    grammar = Hierarchy(3, 2, 2, 2, 2, zipf)
    strings, counts = np.unique(grammar.sample(24_000, "train"), axis=0, return_counts=True)
    expected = 24_000 * np.exp(-hierarchy_nats(grammar, strings).sum(axis=1))
    assert len(counts) == 3 * 2**3 and expected.sum() == pytest.approx(24_000)
    assert ((counts - expected) ** 2 / expected).sum() < 60  # chi-squared, 23 degrees of freedom: 1 in 30 000


def test_long_documents_do_not_underflow():
    """The chance of one is less than the least float."""
    grammar = Hierarchy(8, 10, 2, 4, seed=0)
    nats = hierarchy_nats(grammar, grammar.sample(1, "train")).sum()
    assert nats == pytest.approx(grammar.document_nats, abs=1e-9) and np.exp(-nats) == 0


@pytest.mark.parametrize("source", ["markov", "hierarchy"])
def test_texts_are_a_function_of_parameters_and_seed(source, tmp_path):
    data = tiny(tmp_path, source=source)
    train, held_out = (list(languages.documents(data, split)) for split in ("train", "validation"))
    assert train == list(languages.documents(data, "train"))
    languages.markov.cache_clear(), languages.hierarchy.cache_clear()
    assert train == list(languages.documents(data, "train"))
    assert sum(map(len, train)) == 20_000 and sum(map(len, held_out)) == 2000
    assert "".join(held_out) not in "".join(train) and held_out != train[: len(held_out)]
    other = tiny(tmp_path, source=source, language_seed=1)
    assert list(languages.documents(other, "train")) != train
    longer = list(languages.documents(tiny(tmp_path, source=source, language_tokens=40_000), "train"))
    assert "".join(longer).startswith("".join(train))


def test_text_of_many_parts(monkeypatch, tmp_path):
    data = tiny(tmp_path, source="hierarchy")
    monkeypatch.setattr(languages, "_TOKENS_AT_ONCE", 1000)
    parts = list(languages.documents(data, "train"))
    assert len(parts) == 5000 and parts[:250] != parts[250:500]


@pytest.mark.parametrize("symbols", [5, 95, 200])
def test_corpus_has_a_token_for_each_symbol(symbols, tmp_path):
    data = tiny(tmp_path, source="markov", language_order=1, language_symbols=symbols)
    corpus = open_corpus(data, progress=False)
    assert corpus.tokenizer.vocab_size == 6 + symbols and corpus.train.num_unknown == 0
    assert corpus.train.num_bytes == 20_000 * (1 if symbols < 95 else 3)
    assert (corpus.train.num_tokens, corpus.validation.num_tokens) == (20_001, 2001)
    assert (corpus.train.num_documents, corpus.validation.num_documents) == (1, 1)
    language = Markov(symbols, 1, 1.0, 0)
    np.testing.assert_array_equal(corpus.train.tokens[1:] - 6, language.sample(20_000, "train"))
    np.testing.assert_array_equal(corpus.validation.tokens[1:] - 6, language.sample(2000, "validation"))
    again = open_corpus(data, progress=False)
    assert (again.directory, again.fingerprint) == (corpus.directory, corpus.fingerprint)
    other = open_corpus(
        tiny(tmp_path, source="markov", language_symbols=symbols, language_order=1, language_seed=1), progress=False
    )
    assert other.directory != corpus.directory and other.fingerprint != corpus.fingerprint


def test_next_token_floor_is_that_of_the_batches(tmp_path):
    data = tiny(tmp_path, source="markov")
    corpus = open_corpus(data, progress=False)
    batch = Batches(corpus.train, corpus.tokenizer, data, rows=600, context_length=20, seed=0)[0]
    windows = np.concatenate([batch.tokens, np.asarray(batch.targets)[:, -1:]], axis=1)
    windows = windows[(windows >= 6).all(axis=1)] - 6
    means = markov_nats(Markov(5, 2, 1.0, 0), windows).mean(axis=1)
    floor = languages.floor(data, 20)
    assert floor.standard_error == 0 and floor.attained and floor.nats > Markov(5, 2, 1.0, 0).entropy_rate
    assert abs(means.mean() - floor.nats) < 4 * means.std() / np.sqrt(len(means)) < 0.1


def test_hierarchy_floor_is_that_of_aligned_rows(tmp_path):
    data = tiny(tmp_path, source="hierarchy")
    corpus = open_corpus(data, progress=False)
    grammar = Hierarchy(5, 2, 2, 2, 0)
    batch = eval_batches(corpus.validation, corpus.tokenizer, data, rows=8, context_length=10)[0]
    tokens, targets = np.asarray(batch.tokens).reshape(-1, 5), np.asarray(batch.targets).reshape(-1, 5)
    assert (tokens[:, 0] == corpus.tokenizer.separator_id).all() and (targets[:, -1] == tokens[0, 0]).all()
    nats = hierarchy_nats(grammar, tokens[:, 1:] - 6).sum() / targets.size
    assert languages.floor(data, 10).nats == pytest.approx(nats, abs=1e-12)
    assert languages.floor(data, 10).attained and not languages.floor(data, 12).attained


@pytest.mark.parametrize(
    ("loss", "stderr", "floor", "below"),
    [
        (1.69, 0.1, (2.0, 0.0, True), True),
        (1.71, 0.1, (2.0, 0.0, True), False),
        (1.59, 0.08, (2.0, 0.06, True), True),  # together 0.1
        (1.71, 0.08, (2.0, 0.06, True), False),
        (1.69, 0.0, (2.0, 0.1, True), True),
        (1.69, 0.1, (2.0, 0.0, False), True),  # a bound, too, is a floor
        (1.69, 0.1, (2.0, 0.0, True, 0.02), False),  # the ends of the split may explain it
        (1.67, 0.1, (2.0, 0.0, True, 0.02), True),
        (1.99, 0.0, (2.0, 0.0, True), True),
        (2.00, 0.0, (2.0, 0.0, True), False),
        (9.99, 0.0, (2.0, 0.0, True), False),
        (0.10, float("nan"), (2.0, 0.0, True), False),  # one row
        (float("nan"), 0.1, (2.0, 0.0, True), False),
    ],
)
def test_a_loss_below_the_floor_is_a_leak(loss, stderr, floor, below):
    line = languages.below_floor(Floor(*floor), loss, stderr)
    assert (line is not None) == below
    assert line is None or (f"{loss:.4f}" in line and "2.0000" in line and "\n" not in line)


def test_ends_of_the_split_move_the_mean_as_little_as_is_said(tmp_path):
    """The best model's exact loss on whole splits of a few rows, against the floor inside the text."""
    data = tiny(tmp_path, source="markov", language_symbols=5, language_order=2, language_tokens=1000)
    assert languages.floor(data, 20).ends == pytest.approx(np.log(5) * 20 / 100)
    language = Markov(5, 2, data.language_zipf, data.language_seed)
    for tokens, length in itertools.product((19, 20, 21, 30, 39, 100), (5, 20)):
        whole, rest = divmod(tokens, length)
        # The first row is predicted from a separator, so from one token less; the last one is cut.
        rows = [(length, 0), *[(length, 1)] * (whole - 1), (rest, 1)] if whole else [(rest, 0)]
        mean = sum(n * language.next_token_floor(n, first) for n, first in rows if n) / tokens
        ends = np.log(5) * length / tokens
        assert -ends < mean - language.next_token_floor(length) < ends


def test_no_floor_is_known_of_other_text(tmp_path):
    assert languages.floor(DataConfig(), 64) is None
    assert languages.floor(tiny(tmp_path, source="hierarchy", objective="masked"), 64) is None


MARKOV, TREE = {"source": "markov"}, {"source": "hierarchy"}
# Ranges of single fields are in the table of tests/test_config.py.
BAD = [
    (MARKOV | {"language_order": 4}, "config.data.language_order: 4; accepted with 32 symbols: 1 to 3"),
    (
        MARKOV | {"language_symbols": 3000},
        "config.data.language_symbols: 3000; a Markov language accepts at most 2048",
    ),
    (
        TREE | {"language_depth": 9, "language_branching": 4},
        "config.data.language_depth: 9; a document has 4**9 tokens; accepted: at most 65536",
    ),
    (
        TREE | {"language_branching": 13, "language_depth": 1},
        "config.data.language_branching: 13; accepted with 32 symbols: 2 to 12",
    ),
    (
        MARKOV | {"validation_fraction": 0.0},
        "config.data.validation_fraction: 0.0; a generated language needs held-out text",
    ),
    (
        MARKOV | {"objective": "masked", "pairs": True},
        "config.data.pairs: True; data.source=markov has no sentences that follow each other",
    ),
    (
        MARKOV | {"objective": "masked", "whole_word": True},
        "config.data.whole_word: True; data.source=markov has no words",
    ),
    (
        TREE | {"tokenizer_file": "x.json"},
        "config.data.tokenizer_file: x.json; data.source=hierarchy has a tokenizer of its own",
    ),
]


@pytest.mark.parametrize(("settings", "line"), BAD, ids=[line.split(":")[0] for _, line in BAD])
def test_bad_parameters(settings, line):
    with pytest.raises(ConfigError) as error:
        DataConfig(**settings)
    assert str(error.value) == line


def test_masked_rows_shorter_than_the_order(tmp_path):
    data = tiny(tmp_path, source="markov", objective="masked", language_order=3)
    with pytest.raises(ConfigError) as error:
        languages.floor(data, 2)
    assert str(error.value) == (
        "config.model.context_length: 2; masked rows of this language need at least language_order 3 tokens"
    )
