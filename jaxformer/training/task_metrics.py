"""Metrics of tasks that are no means over tokens, with standard errors by the bootstrap over rows.

All follow from counts or sums of each row, so that a resample of rows is a product of matrices; scikit-learn, whose
functions the tests compare with, would have to see every example again for each of them.

>>> estimates = classification(np.array([[0, 1], [1, 1]]), np.array([[0, 1], [0, 1]]), np.ones((2, 2)), 2)
>>> round(estimates["f1"].mean, 3), round(estimates["matthews"].mean, 3)
(0.8, 0.577)
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from jaxformer.training.metrics import WeightedMean, estimate

RESAMPLES = 200


def bootstrap(rows: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], weight: float) -> WeightedMean:
    """A statistic of the sum of all rows, and its standard error over resamples of the rows.

    Args:
      rows: [R, K] counts or sums of each row; rows of zeros do not count.
      statistic: of sums [..., K]; returns [...].
      weight: for the record.

    Source: Efron 1979, section 2.
    """
    rows = rows[np.any(rows != 0, axis=1)].astype(np.float64)
    count = len(rows)
    whole = float(statistic(rows.sum(axis=0))) if count else math.nan
    if count < 2:
        return WeightedMean(whole, math.nan, weight, count)
    times = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    found = statistic(times.astype(np.float64) @ rows)
    return WeightedMean(whole, float(np.nanstd(found, ddof=1)) if np.isfinite(found).any() else math.nan, weight, count)


def classification(
    predicted: np.ndarray, targets: np.ndarray, weights: np.ndarray, labels: int
) -> dict[str, WeightedMean]:
    """F1 and Matthews' correlation.

    F1 is that of the second label where there are two (as GLUE has it for MRPC and QQP), else the mean over labels that
    occur. Of three labels and more the correlation is Gorodkin's.

    Args:
      predicted, targets: [R, T] labels.
      weights: [R, T]; above 0 where a label is asked for.
      labels: how many there are.

    Sources: Matthews 1975; Gorodkin 2004, section 2.
    """
    asked = weights > 0
    row, count = np.nonzero(asked)[0], len(predicted)

    def counted(label: np.ndarray) -> np.ndarray:
        flat = np.bincount(row * labels + label, minlength=count * labels)
        return flat.reshape(count, labels)

    guess, truth = predicted[asked], targets[asked]
    hits = np.where(guess == truth, truth, labels)
    true = np.bincount(row * (labels + 1) + hits, minlength=count * (labels + 1)).reshape(count, labels + 1)[:, :-1]
    rows = np.concatenate([true, counted(guess), counted(truth)], axis=1)
    total = float(asked.sum())
    return {"f1": bootstrap(rows, _f1, total), "matthews": bootstrap(rows, _matthews, total)}


def _thirds(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    hits, guessed, real = np.split(sums, 3, axis=-1)
    return hits, guessed, real


def _f1(sums: np.ndarray) -> np.ndarray:
    hits, guessed, real = _thirds(sums)
    both = guessed + real
    each = np.divide(2 * hits, both, out=np.zeros_like(both), where=both > 0)
    if each.shape[-1] == 2:
        return each[..., 1]
    return each.sum(axis=-1) / np.maximum((both > 0).sum(axis=-1), 1)


def _matthews(sums: np.ndarray) -> np.ndarray:
    hits, guessed, real = _thirds(sums)
    total, right = real.sum(axis=-1), hits.sum(axis=-1)
    above = right * total - (guessed * real).sum(axis=-1)
    below = np.sqrt((total**2 - (guessed**2).sum(axis=-1)) * (total**2 - (real**2).sum(axis=-1)))
    return np.divide(above, below, out=np.zeros_like(np.asarray(above, float)), where=below > 0)


def regression(predicted: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> dict[str, WeightedMean]:
    """Pearson's and Spearman's correlation of [R, T] numbers where `weights` are above 0; ranks are those of the whole
    set."""
    from scipy.stats import rankdata

    asked, row = weights > 0, np.nonzero(weights > 0)[0]
    total = float(asked.sum())

    def sums(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x, y = x - x.mean(), y - y.mean()  # about the mean, or the squares lose their digits
        parts = np.ones_like(x), x, y, x * x, y * y, x * y
        return np.stack([np.bincount(row, part, minlength=len(weights)) for part in parts], axis=1)

    x, y = predicted[asked].astype(np.float64), targets[asked].astype(np.float64)
    return {
        "pearson": bootstrap(sums(x, y), _correlation, total),
        "spearman": bootstrap(sums(rankdata(x), rankdata(y)), _correlation, total),
    }


def _correlation(sums: np.ndarray) -> np.ndarray:
    count, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
    above = count * xy - x * y
    below = np.sqrt(np.maximum((count * xx - x * x) * (count * yy - y * y), 0))
    return np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below > 0)


def normalized(answer: str) -> list[str]:
    """The words of an answer as SQuAD's official evaluation compares them.

    >>> normalized("The  Cat's hat.")
    ['cats', 'hat']
    """
    bare = "".join(character for character in answer.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def answers(given: Sequence[str], right: Sequence[Sequence[str]]) -> dict[str, WeightedMean]:
    """Exact match and F1 of answers to questions, the best over the right answers to each.

    Args:
      given: the answers, "" for none.
      right: of each question its right answers; none: it has no answer.

    Source: Rajpurkar et al. 2016, section 6.1; Rajpurkar et al. 2018.

    >>> found = answers(["the hat", "a red hat", ""], [["hat"], ["hat", "cap"], []])
    >>> round(found["exact_match"].mean, 3), round(found["f1"].mean, 3)
    (0.667, 0.889)
    """
    exact, f1 = [], []
    for answer, accepted in zip(given, right, strict=True):
        words, others = normalized(answer), [normalized(each) for each in accepted if normalized(each)] or [[]]
        exact.append(float(words in others))
        f1.append(max(_overlap(words, other) for other in others))
    return {"exact_match": estimate(exact, np.ones(len(exact))), "f1": estimate(f1, np.ones(len(f1)))}


def _overlap(words: list[str], others: list[str]) -> float:
    if not words or not others:
        return float(words == others)
    same = sum((Counter(words) & Counter(others)).values())
    return 2 * same / (len(words) + len(others))
