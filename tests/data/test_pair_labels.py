"""The next-sentence label can be told from A and B together, and from nothing else.

Every token of these splits is one of a kind, so a test may ask for anything that a model that knows the text by heart
could know of A, or of B and its place in the row.
"""

from typing import NamedTuple

import numpy as np
import pytest

from jaxformer.config import DataConfig
from jaxformer.data.batches import Batches, eval_batches

PAIRS = DataConfig(objective="masked", pairs=True)
SEP = 3


class Rows(NamedTuple):
    """Of the labelled rows of some batches, [R] each: the label, and where in the split A and B lie."""

    label: np.ndarray
    begin_a: np.ndarray
    size_a: np.ndarray
    begin_b: np.ndarray
    size_b: np.ndarray
    document_a: np.ndarray
    document_b: np.ndarray


def rows_of(split, batches):
    """(Rows, the part of the rows that has no label)."""
    parts, unlabelled, rows = [], 0, 0
    for batch in batches:
        kept = batch.inputs["pair_labels"] >= 0
        unlabelled, rows = unlabelled + (~kept).sum(), rows + len(kept)
        target = batch.targets[kept]
        first = (target == SEP).argmax(axis=1)
        used = (batch.segments[kept] > 0).sum(axis=1)
        begin_a, begin_b = target[:, 1] - 6, target[np.arange(len(target)), first + 1] - 6
        documents = (np.searchsorted(split.starts, begin, side="right") - 1 for begin in (begin_a, begin_b))
        parts.append((batch.inputs["pair_labels"][kept], begin_a, first - 1, begin_b, used - first - 2, *documents))
    return Rows(*(np.concatenate(x).astype(np.int64) for x in zip(*parts, strict=True))), unlabelled / rows


def train(split, vocabulary, length, seeds, steps, rows):
    for seed in seeds:
        batches = Batches(split, vocabulary, PAIRS, rows=rows, context_length=length, seed=seed)
        yield from (batches[step] for step in range(steps))


def features(split, rows):
    """What A with its length tells, and what B with its place does: two of {name: [R] numbers}.

    Not both together: that A and B are of documents of different lengths, say, is what the label is about.
    """
    sizes = np.diff(np.append(split.starts, len(split.tokens))) - 1
    offset_a = rows.begin_a - split.starts[rows.document_a] - 1
    offset_b = rows.begin_b - split.starts[rows.document_b] - 1
    size_a, size_b = sizes[rows.document_a], sizes[rows.document_b]
    left = size_b - offset_b - rows.size_b
    of_a = {
        "size of A": rows.size_a,
        "A opens its document": offset_a == 0,
        "offset of A": offset_a,
        "size of A's document": size_a,
        "A's part of its document": rows.size_a / size_a,
        "parity of the first token of A": rows.begin_a % 2,
    }
    of_b = {
        "B opens its document": offset_b == 0,
        "B is where it would be if A opened its document": offset_b == rows.size_a,
        "offset of B": offset_b,
        "offset of B, part of its document": offset_b / size_b,
        "place of B": rows.size_a + 2,
        "size of B": rows.size_b,
        "tokens in the row": rows.size_a + rows.size_b,
        "A's part of the row": rows.size_a / (rows.size_a + rows.size_b),
        "B ends its document": left == 0,
        "distance of B's end from its document's": left,
        "size of B's document": size_b,
        "B's part of its document": rows.size_b / size_b,
        **{f"offset of B is a multiple of {n}": offset_b % n == 0 for n in (2, 3, 5, 16)},
        **{f"place of B is a multiple of {n}": rows.size_a % n == 0 for n in (2, 16)},
        "parity of the first token of B": rows.begin_b % 2,
    }
    return of_a, of_b


def no_better_than_chance(right, what):
    """Whether so many guesses are right by chance but once in 300,000 times."""
    assert right.mean() < 0.5 + 4.5 * 0.5 / np.sqrt(len(right)), f"{what}: right in {right.mean():.4f} of {len(right)}"


def logistic(x, y, steps=300):
    """A logistic regression on features and their squares; returns guess(x)."""
    mean, spread = x.mean(axis=0), x.std(axis=0) + 1e-9

    def expand(x):
        z = (x - mean) / spread
        return np.concatenate([z, z**2, np.ones((len(z), 1))], axis=1)

    z, w = expand(x), 0.0
    w = np.zeros(z.shape[1])
    for _ in range(steps):
        w -= 0.3 * z.T @ (1 / (1 + np.exp(-np.clip(z @ w, -30, 30))) - y) / len(z)
    return lambda x: expand(x) @ w > 0


def tree(x, y, depth):
    """A decision tree, greedy by errors over eighths of each feature; returns guess(x)."""
    best = (abs(2 * y.sum() - len(y)), None, None)
    for f in range(x.shape[1] if depth and len(y) > 50 else 0):
        for cut in np.unique(np.quantile(x[:, f], np.linspace(0.0, 0.99, 9))):
            low = x[:, f] <= cut
            gain = abs(2 * y[low].sum() - low.sum()) + abs(2 * y[~low].sum() - (~low).sum())
            best = max(best, (gain, f, cut), key=lambda each: each[0])
    _, f, cut = best
    if f is None:
        return lambda x: np.full(len(x), 2 * y.sum() > len(y))
    low = x[:, f] <= cut
    left, right = tree(x[low], y[low], depth - 1), tree(x[~low], y[~low], depth - 1)
    return lambda x: np.where(x[:, f] <= cut, left(x), right(x))


@pytest.mark.parametrize("length", [128, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "low, high", [(2, 30), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((20, 400), (20, 100), (100, 1000)))]
)
def test_nothing_but_a_and_b_together_predicts_the_label(make_split, vocabulary, low, high, length):
    lengths = np.random.default_rng(low).integers(low, high + 1, 40_000 // high)
    split = make_split(lengths.tolist())
    rows, unlabelled = rows_of(split, train(split, vocabulary, length, range(30), 1, rows=512))
    assert unlabelled < 0.2 and len(rows.label) > 12_000
    no_better_than_chance(rows.label == 0, "always 'follows'")
    no_better_than_chance(rows.label == 1, "always 'random'")
    check_classifiers(split, rows)


def check_classifiers(split, rows):
    y, fit = rows.label, np.arange(len(rows.label)) % 2 == 0
    for known in features(split, rows):
        for name, column in known.items():
            if len(set(column.tolist())) == 2:
                no_better_than_chance((column > 0) == y, name)
                no_better_than_chance((column > 0) != y, f"not {name}")
            x = column.astype(float)[:, None]
            no_better_than_chance(tree(x[fit], y[fit], 3)(x[~fit]) == y[~fit], name)
        x = np.stack([column.astype(float) for column in known.values()], axis=1)
        what = ", ".join(known)
        no_better_than_chance(logistic(x[fit], y[fit])(x[~fit]) == y[~fit], f"logistic regression on {what}")
        no_better_than_chance(tree(x[fit], y[fit], 5)(x[~fit]) == y[~fit], f"tree on {what}")


CORPORA = {
    "like": [100] * 6,
    "one longer than all others": [900, 40, 60, 50, 29],
    "short ones": [2, 3, 4, 5, 6, 7, 8, 9, 10, 3, 2, 2],
    "all sizes": [200, 5, 80, 2, 1, 0, 333, 29, 150, 31],
    "two": [40, 25],
    "whole rows": [29 * 4, 29 * 2, 29 * 6],
}


def alike(cells, label):
    """Chi-square of two samples over the cells that 20 rows or more are in, against its mean and deviation."""
    number = np.ravel_multi_index(cells.T, cells.max(axis=0) + 1)
    _, cell = np.unique(number, return_inverse=True)
    counts = np.stack([np.bincount(cell.ravel()[label == value], minlength=cell.max() + 1) for value in (0, 1)])
    counts = counts[:, counts.sum(axis=0) >= 20]
    expected = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0) / counts.sum()
    freedom = max(counts.shape[1] - 1, 1)
    return ((counts - expected) ** 2 / expected).sum() < freedom + 6 * np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "corpus", [pytest.param(c, marks=pytest.mark.slow if n % 2 else ()) for n, c in enumerate(CORPORA)]
)
def test_a_with_its_length_and_b_with_its_place_are_alike_under_both_labels(make_split, vocabulary, corpus):
    """Of a split so small that each span is met often, also where one document is most of the text."""
    split = make_split(CORPORA[corpus])
    rows, unlabelled = rows_of(split, train(split, vocabulary, 32, range(10), 10, rows=960))
    assert 0 < unlabelled < 0.9
    assert set(rows.label) == {0, 1}
    no_better_than_chance(rows.label == 0, "always 'follows'")
    no_better_than_chance(rows.label == 1, "always 'random'")
    assert ((rows.document_a == rows.document_b) == (rows.label == 0)).all()
    for name, cells in {
        "B's document": [rows.document_b],
        "B's document and its place": [rows.document_b, rows.size_a],
        "B, its length and its place": [rows.begin_b, rows.size_b, rows.size_a],
        "A's document": [rows.document_a],
        "A and its length": [rows.begin_a, rows.size_a],
        "both lengths": [rows.size_a, rows.size_b],
    }.items():
        assert alike(np.stack(cells, axis=1), rows.label), name


def test_rows_without_a_label_are_those_whose_second_stretch_is_of_the_same_document(make_split, vocabulary):
    """Of five documents alike it is one in five; of many, hardly any."""
    for documents, expected in ((5, 0.2), (2, 0.5), (400, 1 / 400)):
        split = make_split([60] * documents)
        _, unlabelled = rows_of(split, train(split, vocabulary, 32, range(10), 5, rows=640))
        n = 10 * 5 * 640
        assert abs(unlabelled - expected) < 5 * np.sqrt(expected * (1 - expected) / n), documents


def test_evaluation_does_not_tell_the_label_either(make_split, vocabulary):
    split = make_split(np.random.default_rng(0).integers(2, 300, 250).tolist())
    rows, unlabelled = rows_of(split, eval_batches(split, vocabulary, PAIRS, rows=16, context_length=32))
    assert unlabelled < 0.05 and len(rows.label) > 1400
    check_classifiers(split, rows)
    for cells in ([rows.size_a], [rows.size_b]):
        assert alike(np.stack(cells, axis=1), rows.label)
