"""Languages whose entropy is known: what the best possible model loses on them, in nats per token.

Three kinds: an order-k Markov chain over V symbols with Zipfian frequencies; the random hierarchy model, a grammar of
fixed depth; and pairs whose targets follow from their sources but for a choice among synonyms (`transduction`).
Language and text are pure functions of parameters and seed; training and held-out text are independent samples.
Parameters are in the ranges that `DataConfig` accepts.

The corpus has one token per symbol. A Markov split is one long document, so a row is a stretch of a stationary chain:
its first target is predicted from one token, the second from two. A document of the hierarchy is one string.

>>> data = DataConfig(source="markov", language_symbols=4, language_order=1)
>>> [len(text) for text in documents(data, "validation")]
[200000]
>>> bool(0 < floor(data, 64).nats < np.log(4))
True
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.config.text import READ_BY
from jaxformer.data import transduction
from jaxformer.data.hierarchy import Hierarchy, hierarchy
from jaxformer.data.markov import Floor, Markov, Noise, markov
from jaxformer.data.markov_spans import length_nats, span_bracket
from jaxformer.data.rows import Lengths
from jaxformer.data.span_sizes import longest, pair_sizes
from jaxformer.data.transduction import text as _text

_TOKENS_AT_ONCE = 1 << 20


def floor(data: DataConfig, context_length: int, source_length: int | None = None) -> Floor | None:
    """The floor of the objective of a configuration; None where none is known (natural text, masked hierarchy).

    Of hidden spans it is that of rows of one document, see `markov_spans`.

    It holds for rows of context_length tokens inside the text. The first and last rows of a split differ (a separator,
    fewer tokens), which moves the mean over n tokens by less than log(V) * context_length / n: `ends` of the Floor. If
    context_length is a multiple of branching**depth + 1, every row holds whole strings of the hierarchy, and the floor
    is attained.

    Raises:
      ConfigError: rows shorter than the order of a masked Markov language.
    """
    if data.mixture is not None:
        return _mixed_floor(data, context_length, source_length)
    if data.source == "transduction":
        return Floor(transduction.target_nats(data), 0.0, True) if data.objective == "pairs" else None
    ends = math.log(data.language_symbols) * context_length / _symbols_of(data, "validation")
    if data.source == "markov":
        language = _markov(data)
        if data.objective == "next_token":
            return Floor(language.next_token_floor(context_length), 0.0, True, ends)
        if data.objective == "segment_recurrence":
            return None
        if data.objective == "masked":
            noise = Noise(data.mask_rate, data.mask_token_rate, data.mask_random_rate)
            return language.masked_floor(context_length, noise)._replace(ends=ends)
        if language.order == 1 and data.objective == "prefix_lm":  # each token depends on the one before it
            return Floor(language.entropy_rate, 0.0, True, ends)
        if language.order == 1 and source_length is not None:
            return _span_floor(data, language, Lengths(context_length, source_length), ends)
    if data.source == "hierarchy" and data.objective == "next_token":
        grammar = _hierarchy(data)
        length = grammar.tokens + 1  # the separator is a token too; where it comes is known
        return Floor(grammar.document_nats / length, 0.0, context_length % length == 0, ends)
    return None


def _span_floor(data: DataConfig, language: Markov, lengths: Lengths, ends: float) -> Floor | None:
    """Of hidden spans: the nats of all targets over their tokens, a mean over denoisers by their shares of the rows."""
    if data.span_corruption is not None:
        settings = data.span_corruption
        noises, roll, mode = [(1.0, settings.noise_rate, settings.mean_span)], settings.roll, 0
    elif data.ul2 is not None:
        noises = [(share, rate, mean_span) for share, _, rate, mean_span in data.ul2.denoisers()]
        roll, mode = False, int(data.ul2.modes)
    else:
        return None
    sizes = [functools.partial(pair_sizes, rate=rate, mean_span=mean_span, more=mode) for _, rate, mean_span in noises]
    tokens = longest(sizes, lengths)
    total = nats = variance = 0.0
    for share, *noise in noises:
        found, (of_lengths, error) = (
            span_bracket(language, tokens, *noise, roll=roll),
            length_nats(language, tokens, *noise, roll=roll),
        )
        total += share * found.tokens
        nats += share * (found.low + of_lengths)
        variance += (share * error) ** 2
    told = len(noises) == 1 or bool(mode)  # by which denoiser a text was made noisy
    return Floor(nats / total, math.sqrt(variance) / total, told, ends)


def _mixed_floor(data: DataConfig, context_length: int, source_length: int | None) -> Floor | None:
    """Of a mixture of languages: the mean by their shares, as if the model knew which one a row is of."""
    assert data.mixture is not None
    found = {name: floor(part, context_length, source_length) for name, part in data.parts().items()}
    known = [(data.mixture.shares()[name], each) for name, each in found.items() if each is not None]
    if len(known) < len(found):
        return None
    return Floor(
        sum(share * each.nats for share, each in known),
        math.hypot(*(share * each.standard_error for share, each in known)),
        False,
        sum(share * each.ends for share, each in known),
    )


def below_floor(floor: Floor, loss: float, loss_stderr: float) -> str | None:
    """One line if a held-out loss is lower than any model can get without having seen what it predicts; else None.

    Lower means: by more than 3 standard errors (of loss and floor together) and what the ends of the split may do.

    Args:
      floor: of `floor`.
      loss: nats per predicted token, a mean over held-out rows.
      loss_stderr: its standard error; nan (a single row) says nothing, and nothing is concluded.

    >>> exact = Floor(1.5, 0.0, True)
    >>> below_floor(exact, 1.48, 0.01) is None  # two standard errors
    True
    >>> print(below_floor(exact, 1.3, 0.01).split(":")[0])
    held-out loss 1.3000 ± 0.0100 is 20.0 standard errors below the floor of 1.5000 nats per token
    """
    combined = math.hypot(loss_stderr, floor.standard_error)
    missing = floor.nats - floor.ends - loss
    if not missing > 3 * combined:  # nan: not
        return None
    by = f"{missing / combined:.1f} standard errors" if combined > 0 else f"{missing:.4f}"
    return (
        f"held-out loss {loss:.4f} ± {loss_stderr:.4f} is {by} below the floor of {floor.nats:.4f} nats per token: "
        "what is to be predicted leaks into what the model reads"
    )


def documents(data: DataConfig, split: str) -> Iterator[str]:
    """The documents of a split: about language_tokens symbols to train on, validation_fraction of that held out.

    Args:
      data: source "markov" or "hierarchy" and the language fields.
      split: "train" or "validation".
    """
    tokens = _symbols_of(data, split)
    if data.source == "markov":
        language = _markov(data)
        yield _text(language.sample(tokens, split), language.symbols)
        return
    grammar = _hierarchy(data)
    wanted = -(-tokens // grammar.tokens)
    at_once = max(1, _TOKENS_AT_ONCE // grammar.tokens)
    for part, first in enumerate(range(0, wanted, at_once)):
        strings = grammar.sample(min(at_once, wanted - first), split, part)
        text = _text(strings.reshape(-1), grammar.symbols)
        for begin in range(0, len(text), grammar.tokens):
            yield text[begin : begin + grammar.tokens]


def settings(data: DataConfig) -> dict[str, Any]:
    """The fields that a language and its text depend on."""
    fields = transduction.settings(data)
    return {name: value for name, value in fields.items() if READ_BY[name] != ("transduction",)}


def _symbols_of(data: DataConfig, split: str) -> int:
    share = data.validation_fraction if split == "validation" else 1.0
    return max(1, round(data.language_tokens * share))


def alphabet(symbols: int) -> str:
    """The character of each symbol, in the order of their token ids: ASCII if there are enough signs, else ideographs.

    >>> alphabet(4), len(alphabet(95).encode())
    ('!"#$', 285)
    """
    return _text(np.arange(symbols), symbols)


def _markov(data: DataConfig) -> Markov:
    return markov(data.language_symbols, data.language_order, data.language_zipf, data.language_seed)


def _hierarchy(data: DataConfig) -> Hierarchy:
    return hierarchy(
        data.language_symbols,
        data.language_depth,
        data.language_branching,
        data.language_synonyms,
        data.language_seed,
        data.language_rule_zipf,
    )
