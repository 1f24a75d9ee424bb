"""What the best possible model loses on hidden spans of an order-1 Markov text.

Given where the hidden spans are, each depends on the symbols beside it alone. Of n symbols between two visible ones

    H(X_1 .. X_n | X_0, X_n+1) = (n + 1) h - H(X_n+1 | X_0),

and of n at one end of the text n h, with the entropy rate h: a sum in closed form, `low`. How long each span is the
model is not told either, and all ways to cut the hidden tokens into spans are alike before the source is seen. That
adds at most the logarithm of their number, which gives `high`, and what it adds exactly (`length_nats`) follows from
the chances of the visible symbols so many steps apart. A loss below is a leak.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxformer.data.hidden_spans import hidden_tokens
from jaxformer.data.markov import Markov
from jaxformer.data.shuffle import bits_of
from jaxformer.data.span_sizes import counts

_STREAM = 28  # of `shuffle.bits_of`
_MOST_WORK = 2e8  # products of numbers, and
_MOST_ROWS = 4096  # rows that `length_nats` looks at


class Bracket(NamedTuple):
    """Nats of a whole target that the best possible model loses: at least `low`, at most `high`, of `tokens` tokens."""

    low: float
    high: float
    tokens: int


def powers(language: Markov, most: int) -> Iterator[np.ndarray]:
    """[V, V] P(X_n | X_0) of an order-1 chain for n from 1 to `most`; from where nothing changes any more the limit."""
    limit = np.broadcast_to(language.stationary, language.chances.shape)
    power, done = language.chances, False
    for _ in range(most):
        yield power
        if not done:
            power = power @ language.chances
            done = bool(np.abs(power - limit).max() < 1e-13)
        if done:
            power = limit


def distant_entropies(language: Markov, most: int) -> np.ndarray:
    """[most + 1] nats: H(X_n | X_0) of an order-1 chain, for n from 0 on."""
    weights = language.stationary[:, None]
    return np.array([0.0, *(-(weights * p * np.log(np.where(p > 0, p, 1.0))).sum() for p in powers(language, most))])


def part_chances(total: int, parts: int) -> np.ndarray:
    """[total + 1] the chance that a part of a uniformly random composition of `total` in `parts` is 0, 1, ...

    >>> part_chances(3, 2).tolist()
    [0.0, 0.5, 0.5, 0.0]
    """
    out = np.zeros(total + 1)
    if parts == 1:
        out[total] = 1.0
        return out
    ways = math.comb(total - 1, parts - 1)
    for size in range(1, total - parts + 2):
        out[size] = math.comb(total - size - 1, parts - 2) / ways
    return out


def span_bracket(language: Markov, tokens: int, rate: float, mean_span: float, *, roll: bool = False) -> Bracket:
    """The bracket of a text of `tokens` tokens; rate, mean_span and roll as of `hidden_spans.hidden_tokens`.

    Raises:
      ValueError: the language is not of order 1.
    """
    if language.order != 1:
        raise ValueError(f"order {language.order}; accepted: 1")
    hidden, spans = (int(each[0]) for each in counts(np.array([tokens]), rate, mean_span))
    chances = part_chances(hidden, spans)
    sizes, h = np.arange(hidden + 1), language.entropy_rate
    between = float(chances @ ((sizes + 1) * h - distant_entropies(language, hidden + 1)[1:]))
    at_an_end = float(chances @ sizes) * h
    # Of the places to begin at, `spans` are before a hidden span and as many behind one.
    ends = 2 * spans / (tokens - hidden + spans) if roll else 1
    low = (spans - ends) * between + ends * at_an_end
    return Bracket(low, low + math.log(math.comb(hidden - 1, spans - 1)), hidden + spans + 1)


@functools.lru_cache(maxsize=16)
def length_nats(
    language: Markov, tokens: int, rate: float, mean_span: float, *, roll: bool = False
) -> tuple[float, float]:
    """(nats, standard error): what the best model loses of a whole target because it does not know how long spans are.

    The mean over sampled rows of -log P(lengths | source), which for each row is exact: with P_n the chances of symbols
    n steps apart, lengths n_1, n_2, ... have the weight of the product of P_{n_k + 1}(symbol before, symbol behind)
    over the spans that are not at an end of the text, and the sum of that over all lengths is a coefficient of a
    product of polynomials. Added to `Bracket.low` it is what the best model loses. Arguments and errors as of
    `span_bracket`.
    """
    if language.order != 1:
        raise ValueError(f"order {language.order}; accepted: 1")
    hidden, spans = (int(each[0]) for each in counts(np.array([tokens]), rate, mean_span))
    if math.comb(hidden - 1, spans - 1) == 1:
        return 0.0, 0.0
    longest = hidden - spans + 1
    work = spans * hidden * longest
    rows = int(min(_MOST_ROWS, max(64, _MOST_WORK / work), max(64, 500_000 / tokens)))
    text = language.sample(rows * tokens, "floor").reshape(rows, tokens)
    bits = bits_of(0, _STREAM, rows, rows * tokens * 2).reshape(-1, 2)
    mask = hidden_tokens(np.full(rows, tokens), bits, rate, mean_span, roll=roll).reshape(rows, tokens)
    edges = np.pad(mask, ((0, 0), (1, 1)))
    begin = np.nonzero(edges[:, 1:] & ~edges[:, :-1])[1].reshape(rows, spans)
    end = np.nonzero(edges[:, :-1] & ~edges[:, 1:])[1].reshape(rows, spans)
    inside = (begin > 0) & (end < tokens)
    before = np.take_along_axis(text, np.maximum(begin - 1, 0), axis=1)
    behind = np.take_along_axis(text, np.minimum(end, tokens - 1), axis=1)
    weights = np.zeros((spans, rows, longest + 1))
    for size, power in enumerate(powers(language, longest + 1)):
        if size:  # a span of so many symbols; at an end of the text all sizes are alike
            weights[:, :, size] = np.where(inside, power[before, behind], 1.0).T
    own = np.take_along_axis(weights, (end - begin).T[:, :, None], axis=2)[:, :, 0]
    nats = _log_coefficient(weights, hidden) - np.log(own).sum(axis=0)
    return float(nats.mean()), float(nats.std(ddof=1) / math.sqrt(rows))


def _log_coefficient(factors: np.ndarray, degree: int) -> np.ndarray:
    """[R] log of the coefficient of x ** degree in the product of [s, R, n] polynomials, none with a negative one."""
    _, rows, width = factors.shape
    product = np.zeros((rows, degree + 1))
    product[:, 0] = 1.0
    scale = np.zeros(rows)
    for factor in factors:
        padded = np.pad(product, ((0, 0), (width - 1, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=1)
        product = np.einsum("rnj,rj->rn", windows, factor[:, ::-1])
        largest = product.max(axis=1)
        product /= largest[:, None]
        scale += np.log(largest)
    return scale + np.log(product[:, degree])
