"""Span corruption: spans of a text are replaced by sentinels, and the target tells what each of them stands for.

    text    thank you for inviting me to your party last week
    source  thank you <0> me to your party <1> week
    target  <0> for inviting <1> last

Source: Raffel et al. 2020, sections 3.1.4 and 3.3. The same with other rates, and with a single span at the end, gives
the denoisers of UL2 (Tay et al. 2022, section 3.1).
"""

import functools

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.config.denoising import MODES, sentinel_tokens
from jaxformer.data.corpus import Split
from jaxformer.data.denoised_rows import DenoisedRows, Denoiser, text_length
from jaxformer.data.hidden_spans import hidden_tokens
from jaxformer.data.ragged import Ragged
from jaxformer.data.rows import Lengths
from jaxformer.data.span_sizes import counts, pair_sizes
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError

WORDS_PER_TOKEN = 2  # random 64-bit words for each token: one for the spans, one for where they begin


def corrupt_spans(
    text: Ragged, bits: np.ndarray, *, rate: float, mean_span: float, roll: bool, sentinels: np.ndarray
) -> tuple[Ragged, Ragged]:
    """(sources, targets) of some texts, without end tokens.

    Args:
      text: P texts of at least 2 tokens.
      bits: [n, 2] random uint64 for each of their tokens.
      rate, mean_span, roll: as of `hidden_tokens`.
      sentinels: ids of the tokens that stand for the first, the second, ... hidden span of a text.
    """
    mask = hidden_tokens(text.sizes, bits, rate, mean_span, roll=roll)
    opens = mask & ~np.append(False, mask[:-1])
    opens[text.begins] = mask[text.begins]
    total = np.cumsum(opens)
    number = total - np.repeat((total - opens)[text.begins], text.sizes) - 1  # of the span, in its text
    marks = sentinels[np.maximum(number, 0)]
    source = Ragged(np.where(mask, marks, text.values), text.sizes).where(~mask | opens)
    both = Ragged(np.stack([marks, text.values], axis=1).ravel(), 2 * text.sizes)
    return source, both.where(np.stack([opens, mask], axis=1).ravel())


def undo(source: np.ndarray, target: np.ndarray, sentinels: np.ndarray) -> np.ndarray:
    """The text that a source and a target were made of, all without end tokens.

    >>> undo(np.array([5, 90, 6, 91]), np.array([90, 7, 8, 91, 9]), np.array([90, 91])).tolist()
    [5, 7, 8, 6, 9]
    """
    inside = np.split(target, np.flatnonzero(np.isin(target, sentinels)))[1:]
    spans = {int(span[0]): span[1:] for span in inside}
    return np.concatenate([source[:0], *(spans.get(int(token), source[i : i + 1]) for i, token in enumerate(source))])


def denoiser(
    rate: float,
    mean_span: float,
    sentinels: np.ndarray,
    *,
    roll: bool = False,
    share: float = 1.0,
    mode: int | None = None,
) -> Denoiser:
    """Span corruption as one of the denoisers of `DenoisedRows`."""
    noise = functools.partial(corrupt_spans, rate=rate, mean_span=mean_span, roll=roll, sentinels=sentinels)
    sizes = functools.partial(pair_sizes, rate=rate, mean_span=mean_span, more=int(mode is not None))
    return Denoiser(noise, sizes, WORDS_PER_TOKEN, share, mode)


def span_rows(split: Split, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool) -> DenoisedRows:
    """The rows of the objective span_corruption, as `Objective.rows`."""
    settings = data.span_corruption
    assert settings is not None
    check_spans(data, lengths)
    ids = tokenizer.ids_of(sentinel_tokens(settings.sentinels))
    each = denoiser(settings.noise_rate, settings.mean_span, ids, roll=settings.roll)
    return DenoisedRows(split, tokenizer, data, lengths, covering, [each])


def ul2_rows(split: Split, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool) -> DenoisedRows:
    """The rows of the objective mixture, as `Objective.rows`: each of one denoiser, drawn by the row's own bits."""
    settings = data.ul2
    assert settings is not None
    check_spans(data, lengths)
    ids = tokenizer.ids_of(sentinel_tokens(settings.sentinels))
    modes = tokenizer.ids_of(MODES) if settings.modes else None
    each = [
        denoiser(rate, mean, ids, share=share, mode=None if modes is None else int(modes[mode]))
        for share, mode, rate, mean in settings.denoisers()
    ]
    return DenoisedRows(split, tokenizer, data, lengths, covering, each)


def check_spans(data: DataConfig, lengths: Lengths) -> None:
    """Raises ConfigError: rows of these lengths hold no text, or one that may have more spans than sentinels."""
    if data.ul2 is not None:
        section, sentinels, more = "ul2", data.ul2.sentinels, int(data.ul2.modes)
        noises = [(rate, mean_span) for _, _, rate, mean_span in data.ul2.denoisers()]
    else:
        assert data.span_corruption is not None
        section, sentinels, more = "span_corruption", data.span_corruption.sentinels, 0
        noises = [(data.span_corruption.noise_rate, data.span_corruption.mean_span)]
    sizes = [functools.partial(pair_sizes, rate=rate, mean_span=mean_span, more=more) for rate, mean_span in noises]
    tokens = np.array([text_length(sizes, data, lengths)])
    most = max(int(counts(tokens, rate, mean_span)[1][0]) for rate, mean_span in noises)
    if most > sentinels:
        raise ConfigError(
            f"config.data.{section}.sentinels: {sentinels}; a row of {lengths.source} can have {most} spans; accepted: "
            f"at least {most}"
        )
