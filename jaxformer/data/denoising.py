"""BART's objective: restore a text from one whose sentences are shuffled and whose spans are hidden, or worse.

Five noises, each of which may be left out: sentence permutation, document rotation, text infilling, token masking and
token deletion. The source is never longer than the text; the target is the text.

Source: Lewis et al. 2020, section 2.2.
"""

import functools
import math

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.config.denoising import Denoising
from jaxformer.data.corpus import Split
from jaxformer.data.denoised_rows import DenoisedRows, Denoiser
from jaxformer.data.ragged import Ragged, order_within
from jaxformer.data.rows import Lengths
from jaxformer.data.shuffle import below, fractions
from jaxformer.data.token_roles import check_mask
from jaxformer.data.tokenizers import Tokenizer

WORDS_PER_TOKEN = 6  # random 64-bit words for each token: two for infilling and for rotation, one for each other noise


def permuted_sentences(text: Ragged, bits: np.ndarray, ends: np.ndarray) -> Ragged:
    """The sentences of each text in a random order, all orders equally likely.

    Args:
      text: P texts.
      bits: [n] random uint64.
      ends: [V] bool, the tokens that end a sentence; one that another follows does not.
    """
    ending = ends[text.values]
    ending[:-1] &= ~(ending[1:] & (text.owner[1:] == text.owner[:-1]))
    opens = np.append(True, ending[:-1])
    opens[text.begins] = True
    sentence = np.cumsum(opens) - 1
    order = order_within(text.owner, bits[opens][sentence])  # tokens of a sentence stay in order
    return Ragged(text.values[order], text.sizes)


def rotated(text: Ragged, bits: np.ndarray, rate: float) -> Ragged:
    """A share of the texts from a random token on, what stood before it at the end; `bits`: [n, 2]."""
    first = bits[text.begins]
    shift = np.where(fractions(first[:, 0]) < rate, below(text.sizes, first[:, 1]), 0)[text.owner]
    begins, sizes = np.repeat(text.begins, text.sizes), np.repeat(text.sizes, text.sizes)
    return Ragged(text.values[begins + (text.places + shift) % sizes], text.sizes)


def infilled(text: Ragged, bits: np.ndarray, rate: float, mean_span: float, mask_id: int) -> Ragged:
    """Each text with spans of it replaced by one [MASK] each, of whatever length; spans of no token insert one.

    Of l tokens, l * rate rounded are hidden, in spans of Poisson lengths, the last of them cut; spans of no token are
    left out where they would make the source longer than the text. Their places among the tokens that stay are
    uniformly random.

    Args:
      text: P texts.
      bits: [n, 2] random uint64.
      rate, mean_span: see above.
      mask_id: of [MASK].
    """
    owner = text.owner
    hidden = np.rint(text.sizes * rate).astype(np.int64)
    drawn = np.searchsorted(_poisson(mean_span), fractions(bits[:, 0]), side="right")  # a span for each token, and more
    drawn[text.begins + text.sizes - 1] = text.sizes  # the last one hides what the others have not
    total = np.cumsum(drawn)
    before = total - drawn - np.repeat((total - drawn)[text.begins], text.sizes)
    used = before < hidden[owner]
    spans = Ragged(np.minimum(drawn, hidden[owner] - before), text.sizes).where(used)
    hidden = np.bincount(spans.owner, spans.values, minlength=len(hidden)).astype(np.int64)
    empty = spans.values == 0
    count = np.cumsum(empty)
    earlier = count - np.repeat(np.append(count - empty, 0)[spans.begins], spans.sizes)  # a text may have no span
    allowed = hidden - np.bincount(spans.owner[~empty], minlength=len(hidden))
    spans = spans.where(~empty | (earlier <= allowed[spans.owner]))
    # Spans and tokens that stay, in a row: which are spans is random, and then each says how many tokens it stands for.
    slots = Ragged(np.empty(0, np.int64), text.sizes - hidden + spans.sizes)
    slots = slots._replace(values=np.arange(slots.sizes.sum()))
    own = slots.owner
    draw = bits[text.begins[own] + slots.places, 1]
    order = order_within(own, draw)
    rank = np.empty(len(order), np.int64)
    rank[order] = slots.places
    is_span = rank < spans.sizes[own]
    length = np.ones(len(own), np.int64)
    length[is_span] = spans.values
    place = np.cumsum(length) - length
    tokens = text.values[np.minimum(place, len(text.values) - 1)]  # a span of no token may stand at the very end
    return Ragged(np.where(is_span, np.int32(mask_id), tokens), slots.sizes)


def _poisson(mean: float) -> np.ndarray:
    """The chance of at most 0, 1, 2, ... by the Poisson law, up to where nothing is left to a float64."""
    count = np.arange(int(mean + 12 * math.sqrt(mean) + 30))
    log_factorial = np.cumsum(np.log(np.maximum(count, 1)))
    return np.cumsum(np.exp(count * math.log(mean) - mean - log_factorial))


def corrupt_text(
    text: Ragged, bits: np.ndarray, *, settings: Denoising, mask_id: int, ends: np.ndarray
) -> tuple[Ragged, Ragged]:
    """(sources, targets) of some texts, without end tokens; the targets are the texts.

    Args:
      text: P texts of at least 1 token.
      bits: [n, 6] random uint64 for each of their tokens.
      settings: the noises.
      mask_id: of [MASK].
      ends: [V] bool, tokens that end a sentence.
    """
    source = permuted_sentences(text, bits[:, 0], ends) if settings.permute_sentences else text
    if settings.rotation_rate:
        source = rotated(source, bits[:, 1:3], settings.rotation_rate)
    if settings.infilling_rate:
        source = infilled(source, bits[:, 3:5], settings.infilling_rate, settings.mean_span, mask_id)
    if settings.mask_rate or settings.deletion_rate:
        draw = bits[text.begins[source.owner] + source.places, 5]
        masked = fractions(draw << np.uint64(32)) < settings.mask_rate
        source = source._replace(values=np.where(masked, np.int32(mask_id), source.values))
        source = source.where(fractions(draw) >= settings.deletion_rate)
    return source, text


def sentence_ends(tokenizer: Tokenizer) -> np.ndarray:
    """[V] bool: the token ends with a full stop, a question mark, an exclamation mark or a line end."""
    return np.array([piece.rstrip(b" \t\"')").endswith((b".", b"!", b"?", b"\n")) for piece in tokenizer.pieces], bool)


def text_rows(split: Split, tokenizer: Tokenizer, data: DataConfig, lengths: Lengths, covering: bool) -> DenoisedRows:
    """The rows of the objective denoising, as `Objective.rows`."""
    assert data.denoising is not None
    check_mask(tokenizer, "denoising")
    noise = functools.partial(
        corrupt_text, settings=data.denoising, mask_id=tokenizer.mask_id, ends=sentence_ends(tokenizer)
    )

    def sizes(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (texts + 1) * (texts > 0), (texts + 1) * (texts > 0)

    return DenoisedRows(split, tokenizer, data, lengths, covering, [Denoiser(noise, sizes, WORDS_PER_TOKEN)])
