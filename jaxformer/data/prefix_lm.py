"""Prefix language modelling: a decoder-only model sees the beginning of each document from both sides and predicts the
rest, token by token.

Source: Raffel et al. 2020, section 3.2.1; Liu et al. 2018, section 4.2.

>>> windows = np.array([[0, 7, 8, 9, 0, 5, 6]])
>>> batch = prefixed(windows, np.zeros((1, 6), np.uint64), PrefixLM(0.5, 0.5), separator_id=0)
>>> batch.inputs["prefix"].astype(int).tolist(), batch.weights.astype(int).tolist()
([[1, 1, 0, 0, 1, 0]], [[0, 1, 1, 1, 1, 1]])
"""

import functools
from collections.abc import Callable

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.config.denoising import PrefixLM
from jaxformer.data.rows import HostBatch, documents
from jaxformer.data.shuffle import fractions
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.types import Batch


def prefixed(windows: np.ndarray, bits: np.ndarray, settings: PrefixLM, *, separator_id: int) -> Batch:
    """Predict each token behind the prefix of its document from those before it, and from all of the prefix.

    Args:
      windows: [R, T + 1] integers, stretches of a corpus.
      bits: [R, T] random uint64; those of its first token draw a document's prefix.
      settings: how long prefixes are.
      separator_id: opens a document. As a target it says "the document ends here".

    Returns:
      Batch of [R, T], `inputs` prefix: [R, T] bool. Targets inside a prefix have weight 0: they are seen.
    """
    windows = windows.astype(np.int32)
    tokens, targets = windows[:, :-1], windows[:, 1:]
    segments, positions = documents(tokens, separator_id)
    begins = positions == 0
    document = np.cumsum(begins) - 1  # of all rows
    sizes = np.bincount(document)
    share = settings.least + (settings.most - settings.least) * fractions(bits[begins])
    length = np.minimum((sizes + 1) * share, sizes).astype(np.int32)[document].reshape(tokens.shape)  # 0 to all
    prefix = positions < length
    weights = (positions + 1 >= length).astype(np.float32)
    return HostBatch(tokens, targets, weights, positions, segments, {"prefix": prefix})


def prepare(tokenizer: Tokenizer, data: DataConfig) -> Callable[[np.ndarray, np.ndarray], Batch]:
    """The objective prefix_lm, as `Objective.prepare`."""
    assert data.prefix_lm is not None
    return functools.partial(prefixed, settings=data.prefix_lm, separator_id=tokenizer.separator_id)
