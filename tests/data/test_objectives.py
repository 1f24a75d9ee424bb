import dataclasses

import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.data import tokenizers
from jaxformer.data.objectives import WORDS_PER_TOKEN, corrupt, documents, masked, masking, next_token, word_heads
from jaxformer.data.shuffle import noise


def documents_slowly(tokens, separator_id):
    """(segments, positions) written out, token by token."""
    segments, positions = np.zeros_like(tokens), np.zeros_like(tokens)
    for r, row in enumerate(tokens):
        segment, position = 1, 0
        for t, token in enumerate(row):
            if t and token == separator_id:
                segment, position = segment + 1, 0
            segments[r, t], positions[r, t] = segment, position
            position += 1
    return segments, positions


@pytest.fixture
def rows():
    """[200, 32] tokens with documents of all lengths, empty ones and such that fill a row among them."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(6, 500, (200, 32))
    tokens[rng.random(tokens.shape) < rng.choice([0, 0.05, 0.5], (200, 1))] = 0
    return tokens


def test_documents_are_as_in_the_slow_reference(rows):
    for got, want in zip(documents(rows, 0), documents_slowly(rows, 0), strict=True):
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, want)


def test_next_token_is_the_window_shifted(rows):
    batch = next_token(rows.astype(np.uint16), separator_id=0)
    np.testing.assert_array_equal(batch.tokens, rows[:, :-1])
    np.testing.assert_array_equal(batch.targets, rows[:, 1:])
    assert (batch.weights == 1).all()
    np.testing.assert_array_equal(batch.segments, documents_slowly(rows[:, :-1], 0)[0])
    np.testing.assert_array_equal(batch.positions, documents_slowly(rows[:, :-1], 0)[1])
    assert {field.dtype.name for field in batch[:5]} == {"int32", "float32"}
    assert batch.inputs is None


@pytest.fixture
def big(vocabulary):
    """[2000, 128] tokens of 1000 ordinary ids, a tenth special; (tokens, bits, settings) of the masked objective."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(6, 1006, (2000, 128)).astype(np.int32)
    tokens[rng.random(tokens.shape) < 0.1] = 0
    tokens[:, 5], tokens[:, 6] = 3, 1
    return tokens, noise(0, 0, 2000, WORDS_PER_TOKEN * 128), masking(vocabulary, DataConfig())


def within(count, trials, rate, deviations=5.0):
    """The count of a binomial law is where it is but once in a million."""
    return abs(count - trials * rate) <= deviations * np.sqrt(trials * rate * (1 - rate))


def test_masked_selects_15_percent_of_the_ordinary_tokens(big):
    tokens, bits, settings = big
    batch = masked(tokens, bits, settings, separator_id=0)
    selected = batch.weights == 1
    assert ((batch.weights == 0) | selected).all()
    assert not settings.special[tokens[selected]].any()
    assert within(selected.sum(), (tokens >= 6).sum(), 0.15)
    np.testing.assert_array_equal(batch.targets, tokens)
    np.testing.assert_array_equal(batch.tokens[~selected], tokens[~selected])
    np.testing.assert_array_equal(batch.segments, documents_slowly(tokens, 0)[0])


def test_masked_replaces_80_10_10(big):
    tokens, bits, settings = big
    corrupted, weights = corrupt(tokens, bits, settings)
    selected = weights == 1
    now, was = corrupted[selected], tokens[selected]
    n, v = selected.sum(), len(settings.ordinary_ids)
    assert within((now == settings.tokenizer.mask_id).sum(), n, 0.8)
    assert within((now == was).sum(), n, 0.1 + 0.1 / v)
    other = now[(now != settings.tokenizer.mask_id) & (now != was)]
    assert within(len(other), n, 0.1 * (1 - 1 / v))
    assert not settings.special[other].any()


def test_masked_random_tokens_are_uniform_over_the_ordinary(big):
    tokens, bits, settings = big
    few = dataclasses.replace(
        settings,
        ordinary_ids=np.arange(6, 16, dtype=np.int32),
        data=DataConfig(mask_token_rate=0.0, mask_random_rate=1.0),
    )
    corrupted, weights = corrupt(tokens, bits, few)
    counts = np.bincount(corrupted[weights == 1], minlength=16)
    assert counts[:6].sum() == 0
    for count in counts[6:]:
        assert within(count, counts.sum(), 0.1)


@pytest.mark.parametrize(
    ("rates", "law"),
    [
        ((1.0, 1.0, 0.0), lambda now, was: (now == 4).all()),
        ((1.0, 0.0, 0.0), lambda now, was: (now == was).all()),
        ((0.0, 1.0, 0.0), lambda now, was: len(now) == 0),
    ],
)
def test_masked_extreme_rates_are_exact(big, rates, law):
    tokens, bits, settings = big
    settings = dataclasses.replace(settings, data=DataConfig(**dict(zip(RATES, rates, strict=True))))
    corrupted, weights = corrupt(tokens, bits, settings)
    assert rates[0] == 0 or (weights == (tokens >= 6)).all()
    assert law(corrupted[weights == 1], tokens[weights == 1])


RATES = ("mask_rate", "mask_token_rate", "mask_random_rate")


def test_masked_selection_replacement_and_neighbours_are_independent(big):
    tokens, bits, settings = big
    corrupted, weights = corrupt(tokens, bits, settings)
    both = (tokens[:, :-1] >= 6) & (tokens[:, 1:] >= 6)
    assert within(((weights[:, :-1] == 1) & (weights[:, 1:] == 1) & both).sum(), both.sum(), 0.15**2)
    hidden = corrupted == settings.tokenizer.mask_id
    pairs = (weights[:, :-1] == 1) & (weights[:, 1:] == 1) & both
    assert within((hidden[:, :-1] & hidden[:, 1:] & pairs).sum(), pairs.sum(), 0.64)


def words_slowly(tokenizer, row):
    """Word number of each token of a row, from the text: a word is letters and digits, with the space before it."""
    numbers, number, text = [], -1, ""
    for token in row:
        piece = tokenizer.decode([token])
        special = token in tokenizer.special_ids
        continues = not special and piece[:1].isalnum() and text[-1:].isalnum()
        number += not continues
        numbers.append(number)
        text = "" if special else piece
    return np.array(numbers)


@pytest.fixture(scope="module")
def code():
    """A BPE of some Python, and [300, 48] rows of it with separators."""
    text = "def encode(self, text):\n    return self.tokens_of[text] + 'unbelievable' * 12345\n" * 40
    tokenizer = tokenizers.train("bpe", [text], 290)
    ids = np.concatenate([[tokenizer.separator_id], tokenizer.encode(text[:1900])])
    return tokenizer, np.resize(ids, 300 * 48).reshape(300, 48).astype(np.int32)


def test_whole_words_are_selected_together(code):
    tokenizer, tokens = code
    settings = masking(tokenizer, DataConfig(whole_word=True))
    bits = noise(0, 0, 300, WORDS_PER_TOKEN * 48)
    corrupted, weights = corrupt(tokens, bits, settings)
    longest, heads, selected_heads = 0, 0, 0
    for row, weight in zip(tokens, weights, strict=True):
        words = words_slowly(tokenizer, row)
        for word in range(words[-1] + 1):
            inside = weight[words == word]
            assert inside.min() == inside.max()
            longest = max(longest, len(inside))
            ordinary = row[words == word][0] not in tokenizer.special_ids
            heads += ordinary
            selected_heads += ordinary and inside[0] == 1
    assert longest > 2
    assert within(selected_heads, heads, 0.15)
    assert not settings.special[tokens[weights == 1]].any()
    assert (corrupt(tokens, bits, dataclasses.replace(settings, data=DataConfig()))[1] != weights).any()
    assert within((corrupted[weights == 1] == settings.tokenizer.mask_id).sum(), (weights == 1).sum(), 0.8)


def test_a_word_does_not_go_on_behind_a_special_token(code):
    tokenizer, _ = code
    (piece,) = tokenizer.encode("self")
    tokens = np.array([[piece, piece, tokenizer.sep_id, piece, piece]], np.int32)
    heads = word_heads(tokens, masking(tokenizer, DataConfig(whole_word=True)))
    assert heads[0, [0, 1, 3, 4]].tolist() == [0, 0, 3, 3]


def test_neighbouring_words_are_selected_apart(code):
    tokenizer, tokens = code
    settings = masking(tokenizer, DataConfig(whole_word=True, mask_rate=0.5))
    weights = corrupt(tokens, noise(0, 0, 300, WORDS_PER_TOKEN * 48), settings)[1]
    differ = same = 0
    for row, weight in zip(tokens, weights, strict=True):
        words = words_slowly(tokenizer, row)
        edges = np.flatnonzero(np.diff(words))
        edges = [e for e in edges if row[e] not in tokenizer.special_ids and row[e + 1] not in tokenizer.special_ids]
        differ += sum(weight[e] != weight[e + 1] for e in edges)
        same += sum(weight[e] == weight[e + 1] for e in edges)
    assert within(differ, differ + same, 0.5)
