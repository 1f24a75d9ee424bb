import functools

import jax
import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.data.batches import Batches, eval_batches
from jaxformer.errors import ConfigError

OBJECTIVES = {
    "next_token": DataConfig(),
    "masked": DataConfig(objective="masked"),
    "whole_word": DataConfig(objective="masked", whole_word=True),
    "pairs": DataConfig(objective="masked", pairs=True),
}
LENGTHS = [40, 1, 0, 333, 7, 120, 5, 64, 2, 90]


@pytest.fixture(params=OBJECTIVES)
def data(request):
    return OBJECTIVES[request.param]


def joined(parts):
    """One batch of the rows of several."""
    return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_shapes(batch, rows, length, pairs):
    assert {field.shape for field in batch[:5]} == {(rows, length)}
    assert [field.dtype.name for field in batch[:5]] == ["int32", "int32", "float32", "int32", "int32"]
    shapes = {"token_types": (rows, length), "pair_labels": (rows,)} if pairs else None
    assert (batch.inputs and {name: x.shape for name, x in batch.inputs.items()}) == shapes


def test_a_batch_is_a_function_of_seed_and_step(make_split, vocabulary, data):
    def make(seed):
        return Batches(make_split(LENGTHS), vocabulary, data, rows=4, context_length=16, seed=seed)

    one, two = make(3), make(3)
    forward = [one[step] for step in range(30)]
    for step in (29, 0, 17, 17, 3):
        assert_same(two[step], forward[step])
        assert_same(one[step], forward[step])
    assert_shapes(forward[0], 4, 16, data.pairs)
    assert any((a.targets != make(4)[step].targets).any() for step, a in enumerate(forward))
    with pytest.raises(IndexError):
        one[-1]


def test_order_and_offset_depend_on_the_seed(make_split, vocabulary):
    def firsts(split, rows):
        """First token of each row of the first epoch, under ten seeds."""
        made = [Batches(split, vocabulary, DataConfig(), rows=rows, context_length=16, seed=seed) for seed in range(10)]
        return {tuple(batches[0].tokens[:, 0].tolist()) for batches in made}, made[0].rows_per_epoch

    whole = make_split([1000])
    orders = {tuple(np.argsort(row).tolist()) for row in firsts(whole, firsts(whole, 1)[1])[0]}
    assert len(orders) == 10
    offsets, rows = firsts(make_split([30]), 1)  # one window, 15 offsets
    assert rows == 1 and len(offsets) > 3


# Who brings which of six rows: shares in order, every other row, a tensor axis over hosts (both bring the same rows).
HOSTS = {
    "2 shares": [[0, 1, 2], [3, 4, 5]],
    "6 shares": [[0], [1], [2], [3], [4], [5]],
    "unequal": [[0, 1, 2, 3], [4, 5]],
    "in turn": [[0, 2, 4], [1, 3, 5]],
    "scattered": [[0, 1, 5], [2, 3, 4]],
    "the same rows": [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]],
}


def rows_of(batch, rows):
    return jax.tree.map(lambda x: x[rows], batch)


@pytest.mark.parametrize("hosts", [pytest.param(x, marks=() if x == "scattered" else pytest.mark.slow) for x in HOSTS])
def test_a_host_has_its_rows_of_the_whole_batch(make_split, vocabulary, data, hosts):
    """Through several epochs, whose borders fall inside batches."""
    split = make_split(LENGTHS)

    def make(own):
        return Batches(split, vocabulary, data, rows=6, context_length=16, seed=1, host_row_indices=own)

    whole = make(None)
    shares = [(np.array(own), make(np.array(own))) for own in HOSTS[hosts]]
    for step in range(3 * whole.rows_per_epoch // 6 + 2):
        for own, share in shares:
            assert_shapes(share[step], len(own), 16, data.pairs)
            assert_same(share[step], rows_of(whole[step], own))


@pytest.mark.parametrize("name", ["next_token", pytest.param("masked", marks=pytest.mark.slow)])
def test_no_token_is_read_twice_in_an_epoch(make_split, vocabulary, name):
    split = make_split([700, 300])
    batches = Batches(split, vocabulary, OBJECTIVES[name], rows=1, context_length=16, seed=0)
    originals = "tokens" if name == "next_token" else "targets"
    orders, offsets = [], set()
    for epoch in range(12):
        first = epoch * batches.rows_per_epoch
        rows = np.concatenate([getattr(batches[first + i], originals) for i in range(batches.rows_per_epoch)])
        ordinary = rows[rows >= 6]
        assert len(set(ordinary.tolist())) == len(ordinary)
        assert rows.size == batches.tokens_per_epoch >= split.num_tokens - 3 * 16
        for row in rows:  # consecutive tokens of the corpus
            place = row - 6
            assert (np.diff(np.where(row >= 6, place, place + 6)[row >= 6]) <= 2).all()
        begins = np.sort(np.where(rows[:, 0] >= 6, rows[:, 0] - 6, 0))
        offsets.add(int(begins[1] % 16))
        orders.append(tuple(rows[:, 0]))
    assert len(set(orders)) == 12
    assert len(offsets) > 4


def test_every_offset_and_the_last_token_are_reached(make_split, vocabulary):
    split = make_split([130])  # 131 tokens: 7 windows of 16 and room for 16 offsets
    batches = Batches(split, vocabulary, DataConfig(), rows=7, context_length=16, seed=0)
    assert batches.rows_per_epoch == 7
    epochs = [batches[epoch] for epoch in range(300)]
    starts = {int(epoch.tokens.min(where=epoch.tokens >= 6, initial=999)) for epoch in epochs}
    assert len(starts) == 15  # offsets 0 (its first token is the separator) and 1 share the smallest ordinary token
    assert max(int(epoch.targets.max()) for epoch in epochs) >= int(split.tokens[-4])


@pytest.mark.parametrize("name", ["next_token", "masked"])
@pytest.mark.parametrize("size", [17, 20, 31, 33, 40, 48, 50, 65, 131])
def test_what_is_read_how_often_is_what_the_docstring_says(make_split, vocabulary, name, size):
    """Targets of 600 epochs, counted, against the law of `Windows`."""
    length, epochs = 16, 600
    split = make_split([size - 1])
    make = functools.partial(Batches, split, vocabulary, OBJECTIVES[name], context_length=length, seed=0)
    batches = make(rows=1)
    targets = make(rows=epochs * batches.rows_per_epoch)[0].targets.ravel()  # all of them at once
    often = np.bincount(np.where(targets >= 6, targets - 6, 0), minlength=size) / epochs
    n, first = (size - 1, 0) if name == "next_token" else (size, 1)
    whole = n // length
    assert batches.rows_per_epoch == max(whole - 1, 1)
    unread = n % length + 1 if whole > 1 else 0
    offsets = min(length, n - batches.rows_per_epoch * length + 1)
    place = np.arange(size)
    from_end = size - unread - place  # 1 for the last that is read
    expected = np.clip(np.minimum(np.minimum(place + first, from_end), offsets) / offsets, 0, 1)
    if batches.rows_per_epoch == 1:  # both ends in one window
        reached = [[o <= p - 1 + first < o + length for o in range(offsets)] for p in place]
        expected = np.mean(reached, axis=1)
    assert (abs(often - expected) <= 5 * np.sqrt(expected * (1 - expected) / epochs)).all()
    assert (often[size - unread :] == 0).all() and (often[1 : size - unread] > 0).all()
    assert batches.notes() == (
        [f"the last {unread} of {size} training tokens fill no row of 16 and are never read"]
        if unread > 0.01 * size
        else []
    )


def test_a_note_is_made_of_what_is_left_out_only_where_it_is_much(make_split, vocabulary):
    def notes(lengths, data=OBJECTIVES["next_token"]):
        return Batches(make_split(lengths), vocabulary, data, rows=2, context_length=16, seed=0).notes()

    assert notes([16 * 3 + 7]) == ["the last 8 of 56 training tokens fill no row of 16 and are never read"]
    assert notes([2000]) == []
    assert notes([20] * 200, OBJECTIVES["pairs"]) == []
    (line,) = notes([20] * 4, OBJECTIVES["pairs"])
    assert line.endswith("% of the rows have no next-sentence label: too few documents for a random span of another")


def test_an_error_inside_held_out_rows_is_not_taken_for_their_end(make_split, vocabulary):
    """A token beyond the vocabulary's tables is an IndexError, which would end a loop over a sequence in silence."""
    split = make_split([60, 60])
    split.tokens[3] = vocabulary.vocab_size
    batches = eval_batches(split, vocabulary, OBJECTIVES["masked"], rows=1, context_length=16)
    with pytest.raises(IndexError, match="out of bounds"):
        list(batches)


def test_segments_and_positions_restart_at_documents(make_split, vocabulary):
    batches = Batches(make_split([5, 9, 3, 60]), vocabulary, DataConfig(), rows=2, context_length=20, seed=0)
    for step in range(20):
        batch = batches[step]
        opens = (batch.tokens == 0) & (np.arange(20) > 0)
        np.testing.assert_array_equal(np.diff(batch.segments, axis=1) == 1, opens[:, 1:])
        assert (batch.positions[opens] == 0).all() and (batch.segments[:, 0] == 1).all()
        assert (np.diff(batch.positions, axis=1)[~opens[:, 1:]] == 1).all() and (batch.positions[:, 0] == 0).all()


def test_masked_noise_is_fresh_in_every_epoch(make_split, vocabulary):
    split = make_split([64])  # one window and one offset only: the same 65 tokens in every step
    batches = Batches(split, vocabulary, OBJECTIVES["masked"], rows=1, context_length=65, seed=0)
    weights = np.concatenate([batches[step].weights for step in range(400)])
    assert len({row.tobytes() for row in weights}) == 400
    rate = weights[:, 1:].mean(axis=0)
    assert (abs(rate - 0.15) < 5 * np.sqrt(0.15 * 0.85 / 400)).all()


def test_epochs_counts_rows(make_split, vocabulary):
    batches = Batches(make_split([1000]), vocabulary, DataConfig(), rows=8, context_length=10, seed=0)
    assert batches.rows_per_epoch == 99 and batches.tokens_per_epoch == 990
    assert batches.epochs(99) == pytest.approx(8.0)


def test_a_corpus_of_exactly_one_row_works_and_a_shorter_one_does_not(make_split, vocabulary):
    split = make_split([16])
    batch = Batches(split, vocabulary, DataConfig(), rows=2, context_length=16, seed=0)[5]
    assert (batch.targets[0] == split.tokens[1:]).all()
    with pytest.raises(ConfigError) as error:
        Batches(split, vocabulary, DataConfig(), rows=2, context_length=17, seed=0)
    assert str(error.value) == (
        "config.model.context_length: a row of 17 tokens needs 18; the training text has 17 (16 bytes)"
    )


@pytest.mark.parametrize("own", [[0, 6], [-1, 2], [[0, 1]]], ids=str)
def test_rows_that_are_not_there_are_refused(make_split, vocabulary, own):
    for make in (
        lambda **kw: Batches(make_split([99]), vocabulary, DataConfig(), context_length=8, seed=0, **kw),
        lambda **kw: eval_batches(make_split([99]), vocabulary, DataConfig(), context_length=8, **kw),
    ):
        with pytest.raises(ValueError, match=r"^host_row_indices: .* from 0 to 5$"):
            make(rows=6, host_row_indices=np.array(own))


@pytest.mark.parametrize("length", [7, 16, 1000])
def test_evaluation_asks_for_every_token_once(make_split, vocabulary, length):
    split = make_split(LENGTHS)
    batches = eval_batches(split, vocabulary, DataConfig(), rows=4, context_length=length)
    targets = np.concatenate([batch.targets[batch.weights == 1] for batch in batches])
    np.testing.assert_array_equal(targets, split.tokens[1:])
    tokens = np.concatenate([batch.tokens[batch.weights == 1] for batch in batches])
    np.testing.assert_array_equal(tokens, split.tokens[:-1])
    for batch in batches:
        assert_shapes(batch, 4, length, False)
        filling = batch.weights == 0
        assert (batch.tokens[filling] == 1).all() and (batch.segments[filling] == 0).all()
        assert (batch.segments[~filling] > 0).all() and (batch.targets[filling] == 1).all()
    assert len(batches[-2:]) == min(2, len(batches)) and len(list(batches)) == len(batches)


def test_masked_evaluation_reads_every_token_once(make_split, vocabulary):
    split = make_split(LENGTHS)
    batches = eval_batches(split, vocabulary, OBJECTIVES["masked"], rows=4, context_length=16)
    targets = np.concatenate([batch.targets[batch.segments > 0] for batch in batches])
    np.testing.assert_array_equal(targets, split.tokens)
    assert all((batch.weights[batch.segments == 0] == 0).all() for batch in batches)


def test_evaluation_is_the_same_for_any_batch_size_and_any_hosts(make_split, vocabulary, data):
    split = make_split(LENGTHS)

    def real_rows(parts):
        out = joined(parts)
        real = out.segments.any(axis=1)
        return rows_of(out, real)

    def make(rows, own=None):
        return eval_batches(split, vocabulary, data, rows=rows, context_length=16, host_row_indices=own)

    want = real_rows(list(make(4)))
    assert_same(real_rows(list(make(6))), want)
    assert_same(real_rows(list(make(1))), want)
    assert want.weights.sum() > 0
    whole = make(6)
    for own in (np.array(own) for hosts in HOSTS.values() for own in hosts):
        part = make(6, own)
        assert len(part) == len(whole)
        for batch, all_rows in zip(part, whole, strict=True):
            assert_same(batch, rows_of(all_rows, own))


def test_evaluation_of_some_rows_spreads_them(make_split, vocabulary):
    split = make_split([999])
    whole = np.concatenate(
        [b.targets for b in eval_batches(split, vocabulary, DataConfig(), rows=1, context_length=10)]
    )
    some = eval_batches(split, vocabulary, DataConfig(), rows=4, context_length=10, max_rows=10)
    assert len(some) == 3
    targets = np.concatenate([b.targets[b.segments.any(axis=1)] for b in some])
    np.testing.assert_array_equal(targets, whole[::10])
    more = eval_batches(split, vocabulary, DataConfig(), rows=4, context_length=10, max_rows=10**6)
    assert sum(b.weights.sum() for b in more) == 999


def test_filling_rows_of_pairs_have_no_label(make_split, vocabulary):
    batches = eval_batches(make_split([30, 30, 30]), vocabulary, OBJECTIVES["pairs"], rows=4, context_length=16)
    labels = np.concatenate([batch.inputs["pair_labels"] for batch in batches])
    filling = np.concatenate([~batch.segments.any(axis=1) for batch in batches])
    assert 0 < filling.sum() < 4
    assert (labels[filling] == -1).all() and {0, 1} <= set(labels[~filling].tolist())
