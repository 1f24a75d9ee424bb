"""Held-out losses of several sources and of all together."""

import math

import numpy as np
import pytest

from jaxformer.training.evaluate import HeldOut, evaluate, evaluate_sources, sources_of


def batches(seed, count=5):
    dice = np.random.default_rng(seed)
    return [(dice.uniform(1, 3, 4) * 16, np.full(4, 16.0)) for _ in range(count)]


def loss(params, batch, frozen):
    return {"loss": batch, "accuracy": (batch[0] / 9, batch[1])}


def found(held_out, **settings):
    return evaluate_sources(loss, lambda batch: batch, None, held_out, **settings)


def test_one_without_a_name_is_itself():
    whole = found(sources_of(batches(0), 3.0))
    alone = evaluate(loss, lambda batch: batch, None, batches(0))
    assert whole.sources == {} and (whole.values["loss"], whole.values["loss_stderr"]) == alone["loss"][:2]
    assert whole.values["bits_per_byte"] == alone["loss"].mean / 3 / math.log(2)


def test_several_are_weighed_by_their_shares():
    parts = {"a": HeldOut(batches(1), 0.9, 2.0), "b": HeldOut(batches(2, 9), 0.1, 5.0)}
    whole, each = found(parts)
    assert whole["loss"] == pytest.approx(0.9 * each["a"]["loss"] + 0.1 * each["b"]["loss"], rel=1e-14)
    assert whole["loss_stderr"] == pytest.approx(
        math.hypot(0.9 * each["a"]["loss_stderr"], 0.1 * each["b"]["loss_stderr"])
    )
    assert whole["accuracy"] == pytest.approx(whole["loss"] / 9) and whole["rows"] == 56
    # Of the text that the rows stand for: 0.9 * 2 + 0.1 * 5 bytes for each token.
    assert whole["bits_per_byte"] == pytest.approx(whole["loss"] / 2.3 / math.log(2))
    assert each["b"]["bits_per_byte"] == pytest.approx(each["b"]["loss"] / 5 / math.log(2))
    assert "bits_per_byte" not in found(parts | {"b": HeldOut(batches(2), 0.1)}).values


def test_a_sample_is_used_where_it_is_asked_for_and_there():
    parts = {"a": HeldOut(batches(1), 0.5, 2.0, sample=batches(2, 3)), "b": HeldOut(batches(3), 0.5, 2.0)}
    drawn, whole = found(parts, sample=True), found(parts)
    assert [values["rows"] for values in drawn.sources.values()] == [12, 20]
    assert [values["rows"] for values in whole.sources.values()] == [20, 20]
    alone = evaluate(loss, lambda batch: batch, None, batches(2, 3))["loss"]
    assert (drawn.sources["a"]["loss"], drawn.sources["a"]["loss_stderr"]) == alone[:2]
    assert drawn.sources["b"] == whole.sources["b"]
