"""Numbers for people, against numpy and against repeated sampling."""

import math

import numpy as np
import pytest

from jaxformer.training import metrics


def test_ratio_estimate_of_equal_rows_is_the_textbook_mean():
    x = np.random.default_rng(0).normal(3, 2, 200)
    got = metrics.estimate(4 * x, np.full(200, 4.0))
    assert got.mean == pytest.approx(x.mean())
    assert got.stderr == pytest.approx(x.std(ddof=1) / math.sqrt(200))
    assert (got.weight, got.rows) == (800, 200)


def test_stderr_is_the_spread_of_repeated_samples():
    rng = np.random.default_rng(1)

    def sample():  # rows of unequal length whose tokens share an offset
        w = rng.integers(1, 40, 60).astype(float)
        offset = rng.normal(0, 1, 60)
        return w * (2 + offset) + rng.normal(0, 1, 60) * np.sqrt(w), w

    found = [metrics.estimate(*sample()) for _ in range(2000)]
    spread = np.std([e.mean for e in found])
    assert np.mean([e.stderr for e in found]) == pytest.approx(spread, rel=0.05)
    # tokens taken as independent would claim far too much
    assert spread > 3 / math.sqrt(60 * 20)


def test_rows_without_weight_are_padding():
    assert metrics.estimate([1, 3, 0, 0], [1, 1, 0, 0]) == metrics.estimate([1, 3], [1, 1])
    one, none = metrics.estimate([2], [4]), metrics.estimate([0], [0])
    assert one.mean == 0.5 and math.isnan(one.stderr)
    assert math.isnan(none.mean) and none.rows == 0


def test_collect_joins_batches_and_adds_in_float64():
    batches = [{"loss": (np.float32([1, 2]), np.float32([1, 1]))}, {"loss": (np.float32([6]), np.float32([2]))}]
    assert metrics.collect(batches)["loss"] == metrics.estimate([1, 2, 6], [1, 1, 2])
    big = [{"loss": (np.float32([2**24]), np.float32([1]))}, {"loss": (np.float32([1]), np.float32([1]))}]
    assert metrics.collect(big)["loss"].mean == (2**24 + 1) / 2


def test_evaluation_for_people():
    rows = {"loss": metrics.WeightedMean(2 * math.log(2), 0.1 * math.log(2), 400.0, 10)}
    out = metrics.evaluation({**rows, "accuracy": metrics.WeightedMean(0.25, 0.01, 400.0, 10)}, bytes_per_token=4)
    assert out["perplexity"] == pytest.approx(4)
    assert out["bits_per_byte"] == pytest.approx(0.5)
    assert out["bits_per_byte_stderr"] == pytest.approx(0.025)
    assert (out["accuracy"], out["accuracy_stderr"], out["weight"], out["rows"]) == (0.25, 0.01, 400, 10)
    assert "bits_per_byte" not in metrics.evaluation(rows)
    for loss, perplexity in (1e4, math.inf), (math.inf, math.inf), (700.0, math.exp(700)), (math.nan, math.nan):
        got = metrics.evaluation({"loss": metrics.WeightedMean(loss, 0.0, 1.0, 1)})["perplexity"]
        np.testing.assert_equal(got, perplexity)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("cpu", None),
        ("TPU v99", None),
    ],
)
def test_peaks(kind, peak):
    used = metrics.mfu(1e6, 1e8, kind, 4)
    assert used is None if peak is None else used == pytest.approx(1e14 / (4 * peak))
    assert metrics.mfu(1e6, None, kind, 4) is None
