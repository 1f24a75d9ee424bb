"""Which tokens of a text span corruption hides: spans whose lengths are drawn by ranking random bits.

Source: Raffel et al. 2020, section 3.1.4.

>>> bits = np.zeros((6, 2), np.uint64)
>>> hidden_tokens(np.array([6]), bits, 0.3, 2.0, roll=False).astype(int).tolist()
[0, 0, 0, 0, 1, 1]
"""

import numpy as np

from jaxformer.data.ragged import Ragged, order_within
from jaxformer.data.shuffle import below
from jaxformer.data.span_sizes import counts


def hidden_tokens(sizes: np.ndarray, bits: np.ndarray, rate: float, mean_span: float, *, roll: bool) -> np.ndarray:
    """Which tokens of some texts are hidden.

    The lengths of the hidden spans are a uniformly random composition of the hidden tokens, those of the spans between
    them one of the others. A text begins with a visible span and ends with a hidden one; with `roll` it is rotated to
    begin anywhere but inside a hidden span, all of these places equally likely.

    Args:
      sizes: [P] tokens of each text, at least 2.
      bits: [n, 2] random uint64 for each token of all texts.
      rate, mean_span: as of `span_sizes.counts`.
      roll: see above.

    Returns:
      [n] bool.
    """
    hidden, spans = counts(sizes, rate, mean_span)
    texts = Ragged(bits[:, 0], sizes)
    owner, places = texts.owner, texts.places
    # The first `hidden` places of a text stand for its hidden tokens, the rest for the visible ones. In each of these
    # groups the first place and those with the lowest bits begin a span.
    visible = places >= hidden[owner]
    first = (places == 0) | (places == hidden[owner])
    order = order_within(4 * owner + 2 * visible + ~first, bits[:, 0])
    rank = np.empty(len(order), np.int64)
    group_begin = np.repeat(texts.begins, sizes) + np.where(visible, hidden[owner], 0)
    rank[order] = np.arange(len(order)) - group_begin[order]
    begins = rank < spans[owner]
    span_sizes = np.bincount(np.cumsum(begins) - 1)  # of each text its hidden spans, then its visible ones
    slots = Ragged(np.arange(2 * spans.sum()), 2 * spans)
    own, slot = slots.owner, slots.places
    taken = slots.begins[own] + slot // 2 + np.where(slot % 2, 0, spans[own])  # visible, hidden, visible, ...
    mask = np.repeat(slot % 2 == 1, span_sizes[taken])
    return _rolled(mask, texts, bits[texts.begins, 1], sizes - hidden + spans) if roll else mask


def _rolled(mask: np.ndarray, texts: Ragged, bits: np.ndarray, choices: np.ndarray) -> np.ndarray:
    """The mask of each text from one of its `choices` places on that are not inside a hidden span, and round."""
    begins, sizes = np.repeat(texts.begins, texts.sizes), np.repeat(texts.sizes, texts.sizes)
    before = mask[begins + (texts.places - 1) % sizes]
    possible = np.flatnonzero(~(mask & before))
    chosen = possible[np.cumsum(choices) - choices + below(choices, bits)]
    shift = np.repeat(chosen - texts.begins, texts.sizes)
    return mask[begins + (texts.places + shift) % sizes]
