"""Which tokens are selected, and what is put in their place, is told by nothing that the model reads beside it.

Rows of all masked objectives as training and evaluation get them, every token one of a kind.
"""

import jax
import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.data.batches import Batches, eval_batches
from jaxformer.data.objectives import masking, word_heads

RATE, LENGTH = 0.15, 48
KINDS = {
    "windows": DataConfig(objective="masked"),
    "whole words": DataConfig(objective="masked", whole_word=True),
    "pairs": DataConfig(objective="masked", pairs=True),
    "pairs of whole words": DataConfig(objective="masked", pairs=True, whole_word=True),
}
MASK = 4


def near(count, trials, rate, cluster=1.0):
    """Whether counts of so many trials (each [K]) are the rate's by chance; `cluster` trials are decided together."""
    deviation = np.sqrt(np.maximum(trials * rate * (1 - rate), 1e-9) * cluster)
    return (np.abs(count - trials * rate) < 5 * deviation + 1e-9).all()


@pytest.fixture(scope="module")
def lengths():
    return np.random.default_rng(0).integers(2, 200, 300).tolist()


@pytest.fixture(params=[(kind, part) for kind in KINDS for part in ("training", "held out")], ids=" ".join)
def rows(request, make_split, vocabulary, lengths):
    """Fields of [R, T]: targets, tokens, selected, ordinary; and words whose tokens are selected together."""
    kind, part = request.param
    data, split = KINDS[kind], make_split(lengths)
    if part == "training":
        made = Batches(split, vocabulary, data, rows=64, context_length=LENGTH, seed=0)
        batches = [made[step] for step in range(120)]
    else:
        batches = list(eval_batches(split, vocabulary, data, rows=64, context_length=LENGTH))
    joined = jax.tree.map(lambda *xs: np.concatenate(xs), *batches)
    ordinary = joined.targets >= 6
    cluster = 3.0 if data.whole_word else 1.0  # tokens of a word
    return joined, joined.weights == 1, ordinary, cluster, masking(vocabulary, data)


def test_selection_does_not_depend_on_the_place(rows):
    """Not on the column, on special tokens and padding beside it, nor on either end of the row or its document."""
    batch, selected, ordinary, cluster, settings = rows
    assert near(selected.sum(0), ordinary.sum(0), RATE, cluster)  # by column
    assert (selected <= ordinary).all()
    special_before = np.pad(~ordinary, ((0, 0), (1, 0)))[:, :-1] & ordinary
    special_after = np.pad(~ordinary, ((0, 0), (0, 1)))[:, 1:] & ordinary
    for where in (special_before, special_after, batch.positions == 0, batch.segments == 1, batch.segments > 1):
        asked = where & ordinary
        assert near((selected & asked).sum(), asked.sum(), RATE, cluster)
    if batch.inputs is not None:
        for label in (-1, 0, 1):
            asked = ordinary & (batch.inputs["pair_labels"] == label)[:, None]
            assert near((selected & asked).sum(), asked.sum(), RATE, cluster)
        for kind in (0, 1):
            asked = ordinary & (batch.inputs["token_types"] == kind)
            assert near((selected & asked).sum(), asked.sum(), RATE, cluster)
    alone = np.tile(np.arange(LENGTH), (len(selected), 1))
    heads = word_heads(batch.targets, settings) if settings.data.whole_word else alone
    np.testing.assert_array_equal(selected, np.take_along_axis(selected, heads, axis=1) & ordinary)


def test_nothing_but_selected_tokens_is_changed_and_no_special_one_is_put_in(rows):
    batch, selected, _, _, settings = rows
    np.testing.assert_array_equal(settings.ordinary_ids, np.arange(6, 50_006))
    np.testing.assert_array_equal(batch.tokens[~selected], batch.targets[~selected])
    assert not (batch.targets == MASK).any()
    put = batch.tokens[selected]
    assert ((put == MASK) | (put >= 6)).all()
    assert ((batch.weights == 0) | (batch.weights == 1)).all() and (batch.weights[batch.segments == 0] == 0).all()
    n, v = selected.sum(), 50_000
    assert near((put == MASK).sum(), n, 0.8) and near((put == batch.targets[selected]).sum(), n, 0.1 + 0.1 / v)


def test_what_is_put_in_does_not_depend_on_the_place_or_the_token(rows):
    """[MASK], a random token or the token itself: as often in every column and whatever the token is."""
    batch, selected, _, _, _ = rows
    hidden, kept = selected & (batch.tokens == MASK), selected & (batch.tokens == batch.targets)
    for found, rate in ((hidden, 0.8), (kept, 0.1)):
        assert near(found.sum(0), selected.sum(0), rate)
        for parity in (0, 1):
            asked = selected & (batch.targets % 2 == parity)
            assert near((found & asked).sum(), asked.sum(), rate)
    random = batch.tokens[selected & ~hidden & ~kept]
    assert abs(random.mean() - (6 + 50_005) / 2) < 5 * 50_000 / np.sqrt(12 * len(random))
    both = selected[:, 1:] & selected[:, :-1]  # one of a pair says nothing of the other
    assert near((hidden[:, 1:] & hidden[:, :-1]).sum(), both.sum(), 0.64)


def test_the_noise_of_a_row_does_not_depend_on_its_text(make_split, vocabulary):
    """The same rows of another text of the same lengths have the same places selected."""
    data = KINDS["pairs"]
    one, other = make_split([60] * 30), make_split([60] * 30)
    other.tokens[other.tokens >= 6] = 6 + (other.tokens[other.tokens >= 6] * 7) % 40_000
    a, b = (Batches(split, vocabulary, data, rows=32, context_length=LENGTH, seed=3) for split in (one, other))
    for step in range(20):
        np.testing.assert_array_equal(a[step].weights, b[step].weights)
        np.testing.assert_array_equal(a[step].inputs["pair_labels"], b[step].inputs["pair_labels"])
