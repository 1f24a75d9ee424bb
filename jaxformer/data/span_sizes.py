"""How many tokens span corruption hides of a text, in how many spans, and what the two sides of the pair then hold.

As `random_spans_helper` and `random_spans_noise_mask` of the package t5 count. Source: Raffel et al. 2020, section 3.3.

>>> longest([lambda sizes: pair_sizes(sizes, 0.15, 3.0)], Lengths(target=114, source=512))
568
"""

from collections.abc import Callable, Sequence

import numpy as np

from jaxformer.data.rows import Lengths

# ``sizes of texts [n] -> (source, target)``, [n] each: the tokens that these have at most, end tokens included. Both
# grow with the size, and are 0 for texts too short to hide anything of.
Sizes = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def counts(sizes: np.ndarray, rate: float, mean_span: float) -> tuple[np.ndarray, np.ndarray]:
    """(hidden tokens, spans) of texts of some sizes, [P] int64 each; (0, 0) below 2 tokens.

    >>> [each.tolist() for each in counts(np.array([1, 2, 568]), 0.15, 3.0)]
    [[0, 1, 85], [0, 1, 28]]
    """
    able = sizes >= 2
    hidden = np.where(able, np.clip(np.rint(sizes * rate), 1, np.maximum(sizes - 1, 1)), 0).astype(np.int64)
    spans = np.maximum(np.rint(hidden / mean_span), able)
    return hidden, np.minimum(spans, np.minimum(hidden, sizes - hidden)).astype(np.int64)


def pair_sizes(sizes: np.ndarray, rate: float, mean_span: float, more: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(source, target) tokens of texts of some sizes, end tokens and `more` of the source included; 0 where nothing can
    be hidden.

    >>> [int(each[0]) for each in pair_sizes(np.array([568]), 0.15, 3.0)]
    [512, 114]
    """
    hidden, spans = counts(sizes, rate, mean_span)
    return np.where(hidden > 0, sizes - hidden + spans + 1 + more, 0), np.where(hidden > 0, hidden + spans + 1, 0)


def longest(sizes: Sequence[Sizes], lengths: Lengths) -> int:
    """The most tokens of a text of which both sides fit a row, by whichever of `sizes` they are counted; 0: none."""
    assert lengths.source is not None
    tries = np.arange(lengths.source + lengths.target + 1)
    fits = np.ones(len(tries), bool)
    for each in sizes:
        source, target = each(tries)
        fits &= (source <= lengths.source) & (target <= lengths.target)
    return int(np.flatnonzero(fits)[-1])
