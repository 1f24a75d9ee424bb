"""Span corruption, BART's noises, UL2's mixture and prefixes: what was hidden can be put back, and is drawn as said."""

import math
import re
from collections import Counter

import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.config.denoising import MODES, Denoising, PrefixLM, sentinel_tokens
from jaxformer.config.registry import special_tokens
from jaxformer.data import tokenizers
from jaxformer.data.batches import Batches, eval_batches
from jaxformer.data.corpus import Split
from jaxformer.data.denoising import corrupt_text, infilled, permuted_sentences, rotated, sentence_ends
from jaxformer.data.hidden_spans import hidden_tokens
from jaxformer.data.objectives import rows_of
from jaxformer.data.prefix_lm import prefixed
from jaxformer.data.ragged import Ragged
from jaxformer.data.rows import Lengths
from jaxformer.data.shuffle import noise
from jaxformer.data.span_corruption import corrupt_spans, undo
from jaxformer.data.span_sizes import counts, pair_sizes
from jaxformer.data.windows import Windows
from jaxformer.errors import ConfigError

BASE = tokenizers.train("bytes", [], None)
SQUARE = Lengths(64, 64)
OBJECTIVES = ("span_corruption", "mixture", "denoising")


def within(count, trials, rate, deviations=5.0):
    """The count of a binomial law is where it is but once in a million."""
    return abs(count - trials * rate) <= deviations * np.sqrt(trials * rate * (1 - rate))


def uniform(outcomes, kinds):
    """All of `kinds` outcomes are there, and each as often as the others, as far as 5 deviations of chi2 tell."""
    counted = np.array(list(Counter(outcomes).values()))
    mean = counted.sum() / kinds
    return len(counted) == kinds and ((counted - mean) ** 2 / mean).sum() < kinds - 1 + 5 * math.sqrt(2 * (kinds - 1))


def texts_of(sizes, tokens=None):
    """Texts of some sizes; unless given, each token of a text is its place, from 1000."""
    sizes = np.asarray(sizes)
    text = Ragged(np.zeros(sizes.sum(), np.int32), sizes)
    return text._replace(values=(1000 + text.places if tokens is None else tokens).astype(np.int32))


def bits_of(text, words):
    return noise(7, 0, len(text.values), words)


def corpus(tokenizer, tokens, documents):
    """A split of random bytes in documents of about so many tokens, some of 0 and 1."""
    rng = np.random.default_rng(0)
    ids = rng.choice(tokenizer.encode("abcdefgh. ?"), tokens).astype(np.uint16)
    ids[rng.random(tokens) < 1 / documents] = tokenizer.separator_id
    ids[[0, 1, 3]] = tokenizer.separator_id
    return Split(ids, np.flatnonzero(ids == tokenizer.separator_id), tokens, 0, {})


def prepared(objective, documents=40, rows=2500, lengths=SQUARE, **settings):
    """(tokenizer, data, split, rows of it)"""
    section = {"mixture": "ul2"}.get(objective, objective)
    data = DataConfig(objective=objective, **({section: settings} if settings else {}))
    tokenizer = BASE.with_tokens(special_tokens(data))
    split = corpus(tokenizer, rows * 64, documents)
    return tokenizer, data, split, rows_of(split, tokenizer, data, lengths, False)


def sequences(ids, segments):
    """segment -> ids, of one row."""
    return {int(s): ids[segments == s] for s in np.unique(segments[segments > 0])}


def restored(objective, tokenizer, source, target):
    """The text that a pair was made of, both with their end tokens."""
    assert source[-1] == target[-1] == tokenizer.end_id
    if objective == "denoising":
        return target[:-1]
    modes = tokenizer.ids_of(MODES).tolist() if objective == "mixture" else []
    return undo(source[int(source[0] in modes) : -1], target[:-1], tokenizer.ids_of(sentinel_tokens(100)))


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_was_hidden_can_be_put_back(objective, count):
    """`undo(source, target) == text` in rows of documents of all lengths, of which all but the last are whole."""
    tokenizer, _, split, rows = prepared(objective)
    index, epoch = np.arange(count) % rows.per_epoch, np.arange(count) // rows.per_epoch
    batch = rows.batch(index, 3, epoch, noise(3, 0, count, rows.words))
    windows = Windows(split, rows.text_length, covering=False).read(index, 3, epoch)[0]
    modes, seen = Counter(), 0
    for r in range(count):
        sources = sequences(batch.inputs["source_tokens"][r], batch.inputs["source_segments"][r])
        targets = sequences(batch.targets[r], batch.segments[r])
        assert list(sources) == list(targets) == list(range(1, len(sources) + 1))
        made = [restored(objective, tokenizer, sources[s], targets[s]) for s in sources]
        least = 1 if objective == "denoising" else 2  # tokens of which one can be hidden
        cut = np.flatnonzero(windows[r] == tokenizer.separator_id)
        wanted = [each[each != tokenizer.separator_id] for each in np.split(windows[r], cut)]
        wanted = [each for each in wanted if len(each) >= least][: len(made)]
        for whole, found in zip(wanted[:-1], made[:-1], strict=True):
            np.testing.assert_array_equal(found, whole)
        np.testing.assert_array_equal(made[-1], wanted[-1][: len(made[-1])])
        modes[int(sources[1][0])] += 1
        seen += sum(map(len, made)) / sum(len(each) for each in wanted)
    assert seen > 0.97 * count
    np.testing.assert_array_equal(batch.segments > 0, batch.weights == 1)
    if objective == "mixture":
        for mode, share in zip(tokenizer.ids_of(MODES).tolist(), (2 / 7, 1 / 7, 4 / 7), strict=True):
            assert within(modes[mode], count, share)


def test_a_text_loses_no_more_than_does_not_fit():
    """With one token more of its last document, or the next document, a row would be too long on one side."""
    tokenizer, _, split, rows = prepared("span_corruption", lengths=Lengths(20, 64))
    batch = rows.batch(np.arange(300), 0, np.zeros(300, int), noise(0, 0, 300, rows.words))
    windows = Windows(split, rows.text_length, covering=False).read(np.arange(300), 0, np.zeros(300, int))[0]
    cut = 0
    for r in range(300):
        documents = np.split(windows[r], np.flatnonzero(windows[r] == tokenizer.separator_id))
        sizes = np.array([n for n in ((each != tokenizer.separator_id).sum() for each in documents) if n >= 2])
        source, target = pair_sizes(sizes, 0.15, 3.0)
        fits = (np.cumsum(source) <= 64) & (np.cumsum(target) <= 20)
        used = (batch.inputs["source_segments"][r] > 0).sum(), (batch.segments[r] > 0).sum()
        if fits.all():
            assert used == (source.sum(), target.sum())
            continue
        whole, cut = fits.sum(), cut + 1
        before = np.array([source[:whole].sum(), target[:whole].sum()])
        tries = [before + np.array(pair_sizes(np.array([n]), 0.15, 3.0)).ravel() for n in range(2, sizes[whole])]
        fitting = [tuple(each) for each in tries if (each <= (64, 20)).all()]
        assert used == (fitting[-1] if fitting else tuple(before))
    assert cut > 100


def test_rolled_spans_can_be_put_back():
    """Also where one text ends with a hidden span and the next begins with one."""
    text = texts_of(np.random.default_rng(0).integers(2, 30, 4000))
    sentinels = np.arange(100)
    sides = corrupt_spans(text, bits_of(text, 2), rate=0.4, mean_span=2.0, roll=True, sentinels=sentinels)
    for whole, source, target in zip(text.split(), sides[0].split(), sides[1].split(), strict=True):
        np.testing.assert_array_equal(undo(source, target, sentinels), whole)


def test_the_decoder_reads_the_target_shifted():
    _, _, _, rows = prepared("span_corruption")
    batch = rows.batch(np.arange(50), 0, np.zeros(50, int), noise(0, 0, 50, rows.words))
    inside = batch.positions > 0
    np.testing.assert_array_equal(batch.tokens[:, 1:][inside[:, 1:]], batch.targets[:, :-1][inside[:, 1:]])
    assert (batch.tokens[(batch.positions == 0) & (batch.segments > 0)] == BASE.start_id).all()
    assert (batch.targets[batch.segments == 0] == BASE.pad_id).all() and (batch.segments == 0).any()
    assert {x.dtype.name for x in batch.inputs.values()} == {"int32"} and batch.weights.dtype == np.float32


# source tokens, rate, mean span -> tokens of the text and of the target, by `random_spans_helper` of the package t5.
T5 = {
    (64, 0.2, 2.0): (70, 22), (64, 0.2, 1.0): (63, 27),
    (512, 0.15, 3.0): (568, 114), (512, 0.15, 8.0): (588, 100), (512, 0.5, 8.0): (908, 512),
    (512, 0.15, 64.0): (600, 92), (114, 0.15, 3.0): (126, 26),
}  # fmt: skip


@pytest.mark.parametrize("case", T5)
def test_rows_are_exactly_full_as_in_t5(case):
    source, rate, mean = case
    text, target = T5[case]
    options = {"lengths": Lengths(target, source), "noise_rate": rate, "mean_span": mean, "sentinels": 10_000}
    _, _, split, rows = prepared("span_corruption", documents=10**9, rows=100, **options)
    split.tokens[split.starts] = 100
    assert rows.text_length == text
    batch = rows.batch(np.arange(4), 0, np.zeros(4, int), noise(0, 0, 4, rows.words))
    assert (batch.weights == 1).all() and (batch.inputs["source_segments"] == 1).all()


def test_all_placements_of_the_spans_are_alike():
    """Of 10 tokens 3 in 2 spans are hidden: 2 compositions of these, 6 of the visible ones."""
    text = texts_of(np.full(30_000, 10))
    assert [each.tolist() for each in counts(np.array([10]), 0.3, 1.5)] == [[3], [2]]
    masks = hidden_tokens(text.sizes, bits_of(text, 2), 0.3, 1.5, roll=False).reshape(-1, 10)
    assert uniform(map(bytes, masks), 12)
    assert not masks[:, 0].any() and masks[:, -1].all()


def test_rolled_spans_begin_and_end_anywhere():
    """Each of 10 - 3 + 2 places to begin at is as likely: 2 of these begin with a hidden span, 2 end with one."""
    text = texts_of(np.full(30_000, 10))
    masks = hidden_tokens(text.sizes, bits_of(text, 2), 0.3, 1.5, roll=True).reshape(-1, 10)
    assert (masks.sum(axis=1) == 3).all()
    assert (np.diff(masks, axis=1, prepend=False).__and__(masks).sum(axis=1) == 2).all()
    for edge in (0, -1):
        assert within(masks[:, edge].sum(), len(masks), 2 / 9)
    one = texts_of(np.full(30_000, 6))
    assert uniform(map(bytes, hidden_tokens(one.sizes, bits_of(one, 2), 0.3, 2.0, roll=True).reshape(-1, 6)), 5)


def test_spans_of_texts_of_all_lengths():
    sizes = np.arange(2, 300)
    text = texts_of(sizes)
    for rate, mean in ((0.15, 3.0), (0.5, 3.0), (0.9, 1.0), (0.25, math.inf)):
        mask = hidden_tokens(sizes, bits_of(text, 2), rate, mean, roll=False)
        hidden, spans = counts(sizes, rate, mean)
        opens = mask & ~np.append(False, mask[:-1])
        np.testing.assert_array_equal(np.bincount(text.owner[mask], minlength=len(sizes)), hidden)
        np.testing.assert_array_equal(np.bincount(text.owner[opens], minlength=len(sizes)), spans)
        assert (np.abs(hidden - sizes * rate) <= 1).all() and (spans >= 1).all()


def test_infilling_hides_a_share_in_spans_of_poisson_lengths():
    text = texts_of(np.full(200, 2000))
    found = infilled(text, bits_of(text, 2), 0.3, 3.0, mask_id=4).split()
    alone: Counter = Counter()
    masks = 0
    for source in found:
        kept = source[source != 4]
        assert len(kept) == 1400 and (np.diff(kept) > 0).all()
        masks += len(source) - 1400
        inside = np.flatnonzero(source == 4)
        inside = inside[(inside > 0) & (inside < len(source) - 1)]
        inside = inside[(source[inside - 1] != 4) & (source[inside + 1] != 4)]
        alone.update((source[inside + 1] - source[inside - 1] - 1).tolist())
    assert (
        abs(masks / 200 - (200 + 0.5)) < 1
    )  # renewals of mean 3 and variance 3 until 600: 200 + 1/2 + (3 + 9)/18 - ...
    total = sum(alone.values())
    for length in range(7):
        assert within(alone[length], total, math.exp(-3) * 3**length / math.factorial(length)), length


def test_where_infilling_puts_its_spans():
    """A span of 2 of 5 tokens: each of 4 places is as likely. A source is never longer than its text."""
    text = texts_of(np.full(20_000, 5))
    sources = infilled(text, bits_of(text, 2), 0.4, 50.0, mask_id=4).split()
    assert uniform([bytes(source == 4) for source in sources], 4)
    sizes = np.repeat(np.arange(1, 40), 200)
    text = texts_of(sizes)
    source = infilled(text, bits_of(text, 2), 0.3, 1.0, mask_id=4)
    assert (source.sizes <= sizes).all()
    np.testing.assert_array_equal(source.where(source.values != 4).sizes, sizes - np.rint(sizes * 0.3).astype(int))


@pytest.mark.parametrize("sizes", [[1], [1, 1, 1], [1, 40], [40, 1], [1, 40, 1]], ids=str)
def test_infilling_leaves_texts_alone_of_which_nothing_is_hidden(sizes):
    text = texts_of(np.array(sizes))
    sources = infilled(text, bits_of(text, 2), 0.3, 3.0, mask_id=4).split()
    for source, whole in zip(sources, text.split(), strict=True):
        assert source.tolist() == whole.tolist() if len(whole) == 1 else 4 in source


def test_sentences_are_shuffled_whole():
    text = "One. Two two? Three three three... and"
    ids = BASE.encode(text)
    many = Ragged(np.tile(ids, 20_000), np.full(20_000, len(ids)))
    out = permuted_sentences(many, bits_of(many, 1)[:, 0], sentence_ends(BASE)).values.reshape(20_000, -1)
    orders = Counter(map(bytes, out))
    sentences = ["One.", " Two two?", " Three three three...", " and"]
    assert uniform(list(orders.elements()), 24)
    for order in orders:
        decoded = BASE.decode(np.frombuffer(order, np.int32))
        assert "".join(sorted(sentences, key=decoded.index)) == decoded


def test_rotation_begins_anywhere():
    text = texts_of(np.full(20_000, 6))
    out = rotated(text, bits_of(text, 2), 0.5).values.reshape(-1, 6) - 1000
    np.testing.assert_array_equal((out - out[:, :1]) % 6, np.tile(np.arange(6), (20_000, 1)))
    assert within((out[:, 0] == 0).sum(), 20_000, 0.5 + 0.5 / 6)
    assert uniform(out[out[:, 0] > 0, 0].tolist(), 5)


@pytest.mark.parametrize("name", ["mask_rate", "deletion_rate"])
def test_masking_and_deletion_have_their_rates(name):
    text = texts_of([3, 4000, 500, 10_000])
    settings = Denoising(permute_sentences=False, infilling_rate=0.0, **{name: 0.2})
    source, target = corrupt_text(text, bits_of(text, 6), settings=settings, mask_id=4, ends=np.zeros(0, bool))
    assert target is text
    kept = source.where(source.values != 4)
    assert within(len(text.values) - len(kept.values), len(text.values), 0.2)
    for before, after in zip(text.split(), kept.split(), strict=True):
        assert (np.diff(after) > 0).all() and np.isin(after, before).all()
    np.testing.assert_array_equal(source.sizes, text.sizes if name == "mask_rate" else kept.sizes)


def test_each_denoiser_of_ul2_hides_its_share():
    """Rows of one document: the mode, the hidden tokens and the spans of a row are those of one of the denoisers."""
    tokenizer, data, split, rows = prepared("mixture", documents=10**9, rows=3000, lengths=Lengths(100, 100))
    split.tokens[split.starts] = 100
    batch = rows.batch(np.arange(2000) % rows.per_epoch, 0, np.zeros(2000, int), noise(0, 0, 2000, rows.words))
    sentinels = tokenizer.ids_of(sentinel_tokens(100))
    source = batch.inputs["source_tokens"]
    spans = np.isin(source, sentinels).sum(axis=1)
    found = Counter(
        zip(source[:, 0].tolist(), (batch.weights.sum(axis=1) - spans - 1).tolist(), spans.tolist(), strict=True)
    )
    wanted: Counter = Counter()
    for share, mode, rate, mean in data.ul2.denoisers():
        hidden, count = counts(np.array([rows.text_length]), rate, mean)
        wanted[int(tokenizer.ids_of(MODES)[mode]), float(hidden[0]), int(count[0])] += share
    assert found.keys() == wanted.keys() and len(wanted) == 7
    assert all(within(found[each], 2000, wanted[each]) for each in wanted)
    last = source[source[:, 0] == tokenizer.ids_of(MODES)[1]]
    assert (last[:, 1 : int(rows.text_length * 0.7)] < 262).all()  # S hides the end alone


def test_prefixes_of_documents():
    rng = np.random.default_rng(0)
    windows = rng.integers(6, 99, (4000, 33))
    windows[rng.random(windows.shape) < 0.1] = 0
    batch = prefixed(windows, noise(0, 0, 4000, 32), PrefixLM(), separator_id=0)
    prefix = batch.inputs["prefix"]
    same = batch.segments[:, 1:] == batch.segments[:, :-1]
    assert not (prefix[:, 1:] & ~prefix[:, :-1] & same).any()  # a prefix is where the document begins
    np.testing.assert_array_equal(batch.weights[:, :-1] == 0, prefix[:, 1:] & same)  # what is seen is not predicted
    assert (batch.weights[:, -1] == 1).all()
    whole = np.flatnonzero((windows[:, :32] != 0)[:, 1:].all(axis=1))
    assert len(whole) > 50 and within(prefix[whole].mean(axis=1).mean() * len(whole) * 12, len(whole) * 12, 0.5)
    assert prefixed(windows, noise(0, 0, 4000, 32), PrefixLM(0.0, 0.0), separator_id=0).weights.all()
    half = prefixed(windows, noise(0, 0, 4000, 32), PrefixLM(0.5, 0.5), separator_id=0)
    sizes = np.bincount(batch.segments[0])
    np.testing.assert_array_equal(
        np.bincount(half.segments[0], half.inputs["prefix"][0]), (sizes + 1) // 2 * (sizes > 0)
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_row_does_not_depend_on_who_asks(objective):
    tokenizer, data, split, _ = prepared(objective, rows=300)
    shape = {"rows": 12, "context_length": 64, "source_length": 60, "seed": 5}
    whole = Batches(split, tokenizer, data, **shape)[3]
    own = [9, 0, 4]
    part = Batches(split, tokenizer, data, **shape, host_row_indices=np.array(own))[3]
    other = Batches(split, tokenizer, data, **shape | {"seed": 6})[3]
    for mine, all_, another in zip(part[:5] + tuple(part.inputs.values()), whole[:5] + tuple(whole.inputs.values()),
                                   other[:5] + tuple(other.inputs.values()), strict=True):  # fmt: skip
        np.testing.assert_array_equal(mine, all_[own])
        assert (all_ != another).any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_held_out_rows_cover_the_text_once(objective):
    """Every token of the split is in one target or visible in one source; what fills the last batch counts nothing."""
    tokenizer, data, split, _ = prepared(objective, documents=10**9, rows=21)
    batches = eval_batches(split, tokenizer, data, rows=8, context_length=64, source_length=60)
    first, out = int(objective != "denoising"), []  # the first text has one token, of which none can be hidden
    for batch in batches:
        for r in range(8):
            source = sequences(batch.inputs["source_tokens"][r], batch.inputs["source_segments"][r])
            target = sequences(batch.targets[r], batch.segments[r])
            out += [restored(objective, tokenizer, source[s], target[s]) for s in target]
    np.testing.assert_array_equal(np.concatenate(out), split.tokens[split.tokens != tokenizer.separator_id][first:])
    assert not batches[-1].inputs["source_segments"][-1].any() and not batches[-1].weights[-1].any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_rows_of_documents_too_short_to_hide_anything_of(objective):
    """They are padding, and nothing else."""
    tokenizer, data, split, _ = prepared(objective, rows=20)
    split.tokens[::2] = split.tokens[1 :: 2 if objective == "denoising" else 4] = tokenizer.separator_id
    rows = rows_of(split, tokenizer, data, SQUARE, False)
    batch = rows.batch(np.arange(3), 0, np.zeros(3, int), noise(0, 0, 3, rows.words))
    assert not batch.weights.any() and not batch.segments.any() and (batch.tokens == tokenizer.pad_id).all()
    assert not batch.inputs["source_segments"].any()


def test_rows_that_hold_no_text_and_too_few_sentinels():
    with pytest.raises(ConfigError, match=r"model.context_length: 1 and model.encoder.source_length 64 hold no text"):
        prepared("span_corruption", lengths=Lengths(1, 64))
    with pytest.raises(
        ConfigError, match=r"span_corruption.sentinels: 20; a row of 512 can have 28 spans; accepted: at"
    ):
        prepared("span_corruption", lengths=Lengths(114, 512), sentinels=20)
    notes = prepared("span_corruption", documents=5, lengths=Lengths(14, 64))[3].notes()
    assert len(notes) == 1 and re.fullmatch(
        r"[3-5]\d% of the text fits no row, because documents are short .*", notes[0]
    )
    notes = prepared("span_corruption", documents=1000, lengths=Lengths(64, 64))[3].notes()
    assert notes == ["no row uses more than 14 tokens of config.model.context_length 64"]
