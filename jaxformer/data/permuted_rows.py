"""Permutation language modelling: predict the last tokens of a random order of the row from those before them.

One order of a row is, for each document in it, a random order of that document, and all orders of it are equally
likely. Separators come first: they are context, and never predicted.

Source: Yang et al. 2019, sections 2.2 and 2.3 (partial prediction).

>>> bits = np.array([[5, 1, 9, 3, 7, 2]], np.uint64) << np.uint64(40)
>>> batch = permuted(np.array([[0, 7, 8, 0, 5, 6]]), bits, Permutation(3), separator_id=0)
>>> batch.inputs["order"].tolist(), batch.inputs["predicted"].tolist()
([[0, 0, 2, 0, 1, 0]], [[2, 4]])
"""

import functools
from collections.abc import Callable

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.config.permutation import Permutation
from jaxformer.data.rows import HostBatch, documents
from jaxformer.data.shuffle import fractions
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.types import Batch


def permuted(windows: np.ndarray, bits: np.ndarray, settings: Permutation, *, separator_id: int) -> Batch:
    """Predict the last tokens of a random order.

    Args:
      windows: [R, T] integers.
      bits: [R, T] random uint64.
      settings: how many are predicted.
      separator_id: opens a document.

    Returns:
      Batch of [R, T]; targets are the windows, weights 1 on the predicted tokens. `inputs`: order [R, T] int32, 0 for
      context, 1 to P for the others; predicted [R, P] int32, their places from left to right.
    """
    tokens = windows.astype(np.int32)
    segments, positions = documents(tokens, separator_id)
    number, ordinary = settings.number(tokens.shape[1]), tokens != separator_id
    places = np.argsort(np.where(ordinary, fractions(bits), -1.0), axis=1, kind="stable")
    rank = np.argsort(places, axis=1, kind="stable")
    order = np.where(ordinary, np.maximum(rank - (tokens.shape[1] - number) + 1, 0), 0).astype(np.int32)
    predicted = np.sort(places[:, -number:], axis=1).astype(np.int32)
    inputs = {"order": order, "predicted": predicted}
    return HostBatch(tokens, tokens, (order > 0).astype(np.float32), positions, segments, inputs)


def prepare(tokenizer: Tokenizer, data: DataConfig) -> Callable[[np.ndarray, np.ndarray], Batch]:
    """The objective permutation, as `Objective.prepare`."""
    assert data.permutation is not None
    return functools.partial(permuted, settings=data.permutation, separator_id=tokenizer.separator_id)
