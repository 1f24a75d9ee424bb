"""Metrics of tasks equal their definitions, and their errors shrink as those of a sample of rows do."""

import numpy as np
import pytest
from scipy import stats

from jaxformer.training import task_metrics
from jaxformer.training.evaluate import criterion, stops_early

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("labels", [2, 4])
def test_f1_and_matthews_by_their_definitions(labels):
    predicted, targets = RNG.integers(0, labels, (2, 30, 5))
    targets = np.where(RNG.random((30, 5)) < 0.6, predicted, targets)
    weights = (RNG.random((30, 5)) < 0.8).astype(np.float32)
    found = task_metrics.classification(predicted, targets, weights, labels)
    mine, real = predicted[weights > 0], targets[weights > 0]
    each = []
    for label in range(labels):
        both = ((mine == label) & (real == label)).sum()
        each.append(2 * both / ((mine == label).sum() + (real == label).sum()))
    assert found["f1"].mean == pytest.approx(each[1] if labels == 2 else np.mean(each), rel=1e-12)
    one_hot = np.eye(labels)
    x, y = one_hot[mine] - one_hot[mine].mean(0), one_hot[real] - one_hot[real].mean(0)
    wanted = (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())
    assert found["matthews"].mean == pytest.approx(wanted, rel=1e-12)
    assert 0 < found["f1"].stderr < 0.1 and found["f1"].rows == (weights.any(axis=1)).sum()


def test_correlations_are_those_of_scipy():
    x = RNG.integers(0, 9, (40, 3)).astype(np.float32)  # with ties
    y = x + RNG.normal(0, 4, x.shape).astype(np.float32)
    weights = (RNG.random(x.shape) < 0.7).astype(np.float32)
    found = task_metrics.regression(x, y, weights)
    pair = x[weights > 0], y[weights > 0]
    assert found["pearson"].mean == pytest.approx(stats.pearsonr(*pair)[0], rel=1e-6)
    assert found["spearman"].mean == pytest.approx(stats.spearmanr(*pair)[0], rel=1e-9)
    count = len(pair[0])
    assert found["pearson"].stderr == pytest.approx((1 - found["pearson"].mean ** 2) / np.sqrt(count), rel=0.4)


def test_an_error_is_that_of_a_mean_where_the_metric_is_one():
    """Of rows of one example each, the bootstrap's error of a share is the binomial one."""
    right = (RNG.random(400) < 0.3).astype(float)
    rows = np.stack([right, np.ones(400)], axis=1)
    found = task_metrics.bootstrap(rows, lambda sums: sums[..., 0] / sums[..., 1], 400.0)
    assert found.mean == right.mean()
    assert found.stderr == pytest.approx(np.sqrt(found.mean * (1 - found.mean) / 400), rel=0.2)


def test_early_stopping_at_a_metric_wants_more_of_it():
    found = [{"loss": loss, "f1": f1} for loss, f1 in ((3.0, 0.1), (2.0, 0.5), (1.0, 0.4), (0.5, 0.3))]
    assert stops_early([criterion(each, "f1") for each in found], 2)
    assert not stops_early([criterion(each, None) for each in found], 2)
