"""The bracket of hidden spans of a Markov text, against all texts and masks written out."""

import itertools
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from jaxformer.config import DataConfig, from_mapping, load
from jaxformer.config.registry import special_tokens
from jaxformer.data import languages, tokenizers
from jaxformer.data.corpus import Split
from jaxformer.data.hidden_spans import hidden_tokens
from jaxformer.data.markov import markov
from jaxformer.data.markov_spans import distant_entropies, length_nats, part_chances, span_bracket
from jaxformer.data.objectives import rows_of
from jaxformer.data.ragged import Ragged
from jaxformer.data.rows import Lengths
from jaxformer.data.span_corruption import corrupt_spans
from jaxformer.data.span_sizes import counts


def masks(tokens, rate, mean, roll):
    """(mask, chance) of each that `hidden_tokens` can draw, by their definition."""
    hidden, spans = (int(each[0]) for each in counts(np.array([tokens]), rate, mean))

    def compositions(total, parts):
        for cuts in itertools.combinations(range(1, total), parts - 1):
            yield np.diff([0, *cuts, total])

    all_ = [
        np.repeat(np.arange(2 * spans) % 2 == 1, np.stack([visible, noisy], axis=1).ravel())
        for visible in compositions(tokens - hidden, spans)
        for noisy in compositions(hidden, spans)
    ]
    if roll:
        all_ = [np.roll(m, -k) for m in all_ for k in range(tokens) if not (m[k] and m[k - 1])]
    return [(mask, 1 / len(all_)) for mask in all_]


def entropies(language, tokens, rate, mean, roll):
    """H(target | source) and H(target | source, mask), by all texts and all masks."""
    chance = {}
    for text in itertools.product(range(language.symbols), repeat=tokens):
        steps = [language.chances[a, b] for a, b in itertools.pairwise(text)]
        chance[text] = language.stationary[text[0]] * math.prod(steps)
    seen, known = defaultdict(lambda: defaultdict(float)), defaultdict(lambda: defaultdict(float))
    for number, (mask, share) in enumerate(masks(tokens, rate, mean, roll)):
        opens = mask & ~np.append(False, mask[:-1])
        for text, p in chance.items():
            source = tuple(-1 if o else x for x, m, o in zip(text, mask, opens, strict=True) if o or not m)
            target = tuple(y for x, m, o in zip(text, mask, opens, strict=True) if m for y in ([-1, x] if o else [x]))
            seen[source][target] += p * share
            known[source, number][target] += p * share

    def entropy(joint):
        return -sum(p * math.log(p / sum(row.values())) for row in joint.values() for p in row.values() if p)

    return entropy(seen), entropy(known)


@pytest.mark.parametrize(
    ("tokens", "rate", "mean", "roll"),
    [
        (7, 0.45, 1.5, False),
        pytest.param(7, 0.45, 1.5, True, marks=pytest.mark.slow),
        (6, 0.5, 1.0, False),
        (6, 0.5, 9.0, False),
        (6, 0.4, 9.0, True),
    ],
)
def test_the_bracket_holds_what_all_texts_and_masks_give(tokens, rate, mean, roll):
    language = markov(3, 1, 1.0, 0)
    found = span_bracket(language, tokens, rate, mean, roll=roll)
    exact, given_the_mask = entropies(language, tokens, rate, mean, roll)
    assert abs(found.low - given_the_mask) < 1e-12
    assert found.low - 1e-12 <= exact <= found.high + 1e-12
    hidden, spans = (int(each[0]) for each in counts(np.array([tokens]), rate, mean))
    assert found.tokens == hidden + spans + 1
    if math.comb(hidden - 1, spans - 1) > 1:  # how long a span is can be guessed from the source, but not known
        assert found.low + 0.1 < exact < found.high - 0.001
    else:
        assert found.low == found.high
    nats, error = length_nats(language, tokens, rate, mean, roll=roll)
    assert abs(found.low + nats - exact) <= 4 * error + 1e-12 and error < 0.01


def test_the_masks_that_are_drawn_are_those_of_the_bracket():
    for roll in (False, True):
        wanted = defaultdict(float)
        for mask, share in masks(7, 0.45, 1.5, roll):
            wanted[bytes(mask)] += share
        sizes = np.full(20_000, 7)
        bits = np.random.default_rng(0).integers(0, 2**64, (140_000, 2), dtype=np.uint64)
        drawn = hidden_tokens(sizes, bits, 0.45, 1.5, roll=roll).reshape(-1, 7)
        kinds, found = np.unique(drawn, axis=0, return_counts=True)
        assert {bytes(kind) for kind in kinds} == wanted.keys()
        for kind, count in zip(kinds, found, strict=True):
            share = wanted[bytes(kind)]
            assert abs(count - 20_000 * share) < 5 * math.sqrt(20_000 * share * (1 - share))


def test_chances_of_parts():
    for total, parts in ((7, 3), (6, 1), (5, 5), (9, 2)):
        sizes = [np.diff([0, *cuts, total])[0] for cuts in itertools.combinations(range(1, total), parts - 1)]
        np.testing.assert_allclose(part_chances(total, parts), np.bincount(sizes, minlength=total + 1) / len(sizes))


def test_far_apart_symbols_are_independent():
    language = markov(5, 1, 1.0, 1)
    entropy = distant_entropies(language, 200)
    assert entropy[0] == 0 and abs(entropy[1] - language.entropy_rate) < 1e-12
    assert abs(entropy[200] - language.context_entropies[0]) < 1e-9 and (np.diff(entropy) >= -1e-12).all()
    with pytest.raises(ValueError, match=r"^order 2; accepted: 1$"):
        span_bracket(markov(3, 2, 1.0, 0), 10, 0.5, 3.0)


def test_floors_of_configurations():
    fields = {"source": "markov", "language_symbols": 8, "language_order": 1, "language_tokens": 100_000}
    data = DataConfig(**fields, objective="span_corruption", span_corruption={"sentinels": 50})
    language = markov(8, 1, 1.0, 0)
    bracket, (nats, error) = span_bracket(language, 568, 0.15, 3.0), length_nats(language, 568, 0.15, 3.0)
    found = languages.floor(data, 114, 512)
    assert found[:3] == ((bracket.low + nats) / 114, error / 114, True) and 0 < found.standard_error < 0.01
    assert bracket.low < found.nats * 114 < bracket.high
    assert languages.floor(DataConfig(**fields | {"language_order": 2}, objective="span_corruption"), 114, 512) is None
    assert languages.floor(DataConfig(**fields, objective="denoising"), 114, 512) is None
    prefix = languages.floor(DataConfig(**fields, objective="prefix_lm"), 64)
    assert (prefix.nats, prefix.attained) == (language.entropy_rate, True)


@pytest.mark.parametrize("kind", ["span_corruption", "last_span", "mixture", "prefix_lm"])
def test_the_config_of_each_has_a_floor_and_full_rows(kind):
    config = from_mapping(load(f"denoising_entropy:{kind}"))
    floor = languages.floor(config.data, config.model.context_length, config.source_length)
    assert floor.attained and 1 < floor.nats < math.log(8) and floor.standard_error < 0.001
    if kind != "prefix_lm":
        data = replace(config.data, language_tokens=1000)
        tokenizer = tokenizers.train("chars", [languages.alphabet(8)], None).with_tokens(special_tokens(data))
        split = Split(np.full(1000, 7, np.uint16), np.array([0]), 1000, 0, {})
        lengths = Lengths(config.model.context_length, config.source_length)
        assert not [note for note in rows_of(split, tokenizer, data, lengths, False).notes() if "no row uses" in note]


@pytest.mark.slow
def test_floor_of_a_mixture_of_denoisers():
    """The mean over rows: nats of all targets over their tokens, of texts as long as the mixture's own."""
    fields = {"source": "markov", "language_symbols": 8, "language_order": 1, "language_tokens": 100_000}
    language = markov(8, 1, 1.0, 0)
    data = DataConfig(**fields, objective="mixture")
    noises = ((0.15, 3.0), (0.15, 8.0), (0.25, math.inf), (0.5, 3.0), (0.5, 8.0), (0.15, 64.0), (0.5, 64.0))
    each = [span_bracket(language, 140, *noise) for noise in noises]
    lengths = [length_nats(language, 140, *noise)[0] for noise in noises]
    found = languages.floor(data, 94, 128)
    nats = sum(bracket.low for bracket in each) + sum(lengths)
    assert found.nats == pytest.approx(nats / sum(bracket.tokens for bracket in each), rel=1e-12) and found.attained
    assert 0 < found.standard_error < 0.005
    unsaid = languages.floor(DataConfig(**fields, objective="mixture", ul2={"modes": False}), 94, 127)
    assert not unsaid.attained
    only_last = DataConfig(**fields, objective="mixture", ul2={"regular": 0.0, "extreme": 0.0, "modes": False})
    bracket = span_bracket(language, 169, 0.25, math.inf)
    assert languages.floor(only_last, 128, 128) == (bracket.low / bracket.tokens, 0.0, True, math.log(8) * 128 / 10_000)


def test_a_model_that_knows_the_language_loses_what_the_bracket_says():
    """The Bayes-optimal loss on single spans (which end the text, so that nothing but the chain matters), sampled."""
    language = markov(4, 1, 1.0, 0)
    text = Ragged(language.sample(40 * 4000, "validation").astype(np.int32), np.full(4000, 40))
    bits = np.random.default_rng(0).integers(0, 2**64, (len(text.values), 2), dtype=np.uint64)
    source, target = corrupt_spans(text, bits, rate=0.25, mean_span=math.inf, roll=False, sentinels=np.array([9]))
    last = source.values[source.begins + source.sizes - 2]
    nats = 0.0
    for before, span in zip(last, target.split(), strict=True):
        chain = [before, *span[1:]]
        nats -= sum(math.log(language.chances[a, b]) for a, b in itertools.pairwise(chain))
    bracket = span_bracket(language, 40, 0.25, math.inf)
    assert bracket.low == bracket.high and abs(nats / 4000 - bracket.low) < 5 * 0.8 * math.sqrt(10 / 4000)
