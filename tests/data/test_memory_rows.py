"""Rows behind a memory are those of next_token, with the tokens that lie before them."""

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.batches import Batches, eval_batches

T, M = 10, 6
OBJECTIVE = DataConfig(objective="segment_recurrence")


def test_batches_are_those_of_next_token_with_what_lies_before_them(make_split, vocabulary):
    split, shape = make_split([40, 1, 0, 63, 7]), {"rows": 3, "context_length": T}
    plain = Batches(split, vocabulary, DataConfig(), seed=0, **shape)
    ours = Batches(split, vocabulary, OBJECTIVE, seed=0, source_length=M, **shape)
    for step in (7, 0, 7):  # a pure function of the step
        a, b = plain[step], ours[step]
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.targets, b.targets)
        assert b.weights.min() == 1
        for number, row in enumerate(b.tokens):
            before, segments = (b.inputs[f"memory_{name}"][number] for name in ("tokens", "segments"))
            ordinary = np.flatnonzero(row > 6)[0]  # every token is another one
            start = int(np.flatnonzero(split.tokens == row[ordinary])[0]) - ordinary
            there = split.tokens[max(0, start - M) : start]
            np.testing.assert_array_equal(before[M - len(there) :], there)
            opens = np.cumsum(np.concatenate([there, row]) == vocabulary.separator_id)[len(there) - 1 :]
            assert len(there) < M or (b.segments[number] - segments[-1]).tolist() == (opens[1:] - opens[0]).tolist()


def test_evaluation_counts_every_token_once(make_split, vocabulary):
    split = make_split([40, 1, 0, 63, 7])
    held_out = eval_batches(split, vocabulary, OBJECTIVE, rows=3, context_length=T, source_length=M)
    assert sum(batch.weights.sum() for batch in held_out) == len(split.tokens) - 1
    first = held_out[0]
    assert not first.inputs["memory_segments"][0].any()  # nothing lies before the first row
    assert (first.inputs["memory_tokens"][0] == vocabulary.pad_id).all()
    np.testing.assert_array_equal(first.inputs["memory_tokens"][1], split.tokens[T - M : T])
