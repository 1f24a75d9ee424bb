import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.data.batches import Batches, eval_batches
from jaxformer.errors import ConfigError

PAIRS = DataConfig(objective="masked", pairs=True)
PAD, CLS, SEP = 1, 2, 3
LENGTHS = [200, 5, 80, 2, 1, 0, 333, 29, 150, 31]


def spans(row):
    """(A, B) of a row of targets."""
    ends = np.flatnonzero(row == SEP)
    assert row[0] == CLS and len(ends) == 2
    assert (row[ends[1] + 1 :] == PAD).all()
    return row[1 : ends[0]], row[ends[0] + 1 : ends[1]]


def document(split, token):
    """Number of the document that a token (each is one of a kind) is in."""
    return int(np.searchsorted(split.starts, token - 6, side="right"))


@pytest.fixture
def many(make_split, vocabulary):
    split = make_split(LENGTHS)
    batches = Batches(split, vocabulary, PAIRS, rows=8, context_length=32, seed=0)
    return split, [batches[step] for step in range(120)], batches


def test_b_follows_a_or_comes_from_another_document(many):
    split, batches, _ = many
    labels = []
    for batch in batches:
        for row, label in zip(batch.targets, batch.inputs["pair_labels"], strict=True):
            a, b = spans(row)
            assert len(a) and len(b)
            assert (np.diff(a) == 1).all() and (np.diff(b) == 1).all()
            for span in (a, b):  # inside one document, no separator
                assert document(split, span[0]) == document(split, span[-1])
                assert (span >= 6).all()
            if label == 1:
                assert document(split, a[0]) != document(split, b[0])
            else:
                assert b[0] == a[-1] + 1
            labels.append(label)
    assert set(labels) == {-1, 0, 1}
    labels = [label for label in labels if label >= 0]
    assert abs(np.mean(labels) - 0.5) < 5 * 0.5 / np.sqrt(len(labels))


def test_fields_say_what_each_place_is(many):
    for batch in many[1][:20]:
        for r, row in enumerate(batch.targets):
            a, b = spans(row)
            used = len(a) + len(b) + 3
            np.testing.assert_array_equal(batch.segments[r], np.arange(32) < used)
            np.testing.assert_array_equal(batch.positions[r], np.where(np.arange(32) < used, np.arange(32), 0))
            types = np.zeros(32, int)
            types[len(a) + 2 : used] = 1
            np.testing.assert_array_equal(batch.inputs["token_types"][r], types)


def test_only_ordinary_tokens_are_selected(many):
    selected = ordinary = 0
    for batch in many[1]:
        on = batch.weights == 1
        assert (batch.targets[on] >= 6).all()
        np.testing.assert_array_equal(batch.tokens[~on], batch.targets[~on])
        selected, ordinary = selected + on.sum(), ordinary + (batch.targets >= 6).sum()
    assert abs(selected - 0.15 * ordinary) < 5 * np.sqrt(0.15 * 0.85 * ordinary)


@pytest.mark.slow
def test_random_b_is_any_other_stretch_equally_often(make_split, vocabulary):
    split = make_split([29 * 4, 29 * 2, 29 * 6])  # stretches of 29 tokens, so that no offset is free
    batches = Batches(split, vocabulary, PAIRS, rows=12, context_length=32, seed=0)
    assert batches.rows_per_epoch == 12
    seen = {}
    for step in range(1500):
        batch = batches[step]
        for row in batch.targets[batch.inputs["pair_labels"] == 1]:
            a, b = spans(row)
            seen.setdefault(document(split, a[0]), []).append(int(b[-1]))  # where its stretch ends
    for number, others in ((1, 8), (2, 10), (3, 6)):
        values, counts = np.unique(seen[number], return_counts=True)
        expected = counts.sum() / others
        assert len(values) == others
        assert ((counts - expected) ** 2 / expected).sum() < others - 1 + 6 * np.sqrt(2 * (others - 1))


def test_a_and_what_follows_it_are_read_once_in_an_epoch(many, vocabulary):
    split, _, batches = many
    starts = []
    for epoch in range(4):
        first = epoch * batches.rows_per_epoch
        single = Batches(split, vocabulary, PAIRS, rows=1, context_length=32, seed=0)
        rows = [single[first + i] for i in range(single.rows_per_epoch)]
        read = np.concatenate(
            [np.concatenate(spans(b.targets[0])[: 2 - int(b.inputs["pair_labels"][0])]) for b in rows]
        )
        assert len(set(read.tolist())) == len(read)
        starts.append(sorted(int(spans(b.targets[0])[0][0]) for b in rows))
    assert starts[0] != starts[1]  # a fresh offset


def test_evaluation_covers_every_document_of_two_tokens(make_split, vocabulary):
    split = make_split(LENGTHS)
    batches = eval_batches(split, vocabulary, PAIRS, rows=4, context_length=32)
    first = {int(spans(row)[0][0]) for batch in batches for row in batch.targets[batch.segments.any(axis=1)]}
    want = set()
    for start, length in zip(split.starts, LENGTHS, strict=True):
        want |= {int(start) + 7 + i for i in range(0, length - 1, 29)}
    assert first == want


def test_padding_of_a_short_document_does_not_tell_the_label(make_split, vocabulary):
    split = make_split([10] * 40)
    batches = Batches(split, vocabulary, PAIRS, rows=8, context_length=32, seed=0)
    used = {-1: set(), 0: set(), 1: set()}
    for step in range(50):
        for segments, label in zip(batches[step].segments, batches[step].inputs["pair_labels"], strict=True):
            used[int(label)].add(int(segments.sum()))
    assert used == {-1: {13}, 0: {13}, 1: {13}}


def test_bad_input(make_split, vocabulary):
    with pytest.raises(ConfigError) as error:
        Batches(make_split([100, 1]), vocabulary, PAIRS, rows=1, context_length=32, seed=0)
    assert str(error.value) == (
        "config.data.pairs: True needs at least 2 documents of 2 tokens in each split, one has 1; "
        "set data.separator, or give several files"
    )
    with pytest.raises(ConfigError) as error:
        Batches(make_split([100, 100]), vocabulary, PAIRS, rows=1, context_length=4, seed=0)
    assert str(error.value) == "config.model.context_length: 4; data.pairs needs at least 5"
    with pytest.raises(ConfigError) as error:
        Batches(make_split([100, 3]), vocabulary, PAIRS, rows=1, context_length=32, seed=0)
    assert str(error.value) == (
        "config.data.pairs: True needs two documents of like length in each split, so that a random span is not told "
        "by its length; give more documents"
    )
