"""A Markov language over V symbols, and the least loss that any model can reach on its next or masked tokens.

>>> language = markov(symbols=4, order=1, zipf=1.0, seed=0)
>>> bool(language.entropy_rate == language.context_entropies[1] < language.context_entropies[0] < np.log(4))
True
"""

import functools
import math
from array import array
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from jaxformer.data.shuffle import below, bits_of, fractions
from jaxformer.errors import ConfigError

_STREAMS = {"train": 16, "validation": 17, "floor": 18, "table": 19}  # of `shuffle.bits_of`
_FLOOR_ROWS = 256  # sampled for the masked entropy bound
_BLOCK = 1 << 22  # numbers that message passing holds at once


class Floor(NamedTuple):
    """The entropy bound: the least expected loss of any model on validation rows.

    Attributes:
      nats: per predicted token.
      standard_error: of `nats`, if it is a mean over sampled rows; 0.0 if it is a closed form.
      attained: the best model reaches `nats`; False: it is only a lower bound.
      ends: nats by which the mean over a whole split may differ, because its first and last rows differ from others.
    """

    nats: float
    standard_error: float
    attained: bool
    ends: float = 0.0


class Noise(NamedTuple):
    """BERT's corruption (`objectives.corrupt`): the rate of selected tokens, and of masked and random among them."""

    mask_rate: float
    mask_token_rate: float
    mask_random_rate: float

    def likelihood(self, seen: np.ndarray, symbols: int, *, selected: bool) -> np.ndarray:
        """[..., V]: P(seen | the token was a), for a selected token, or for one that may or may not be selected.

        Args:
          seen: [...] integers; `symbols` stands for [MASK].
          symbols: V.
          selected: True if it is known to be selected. Only selected tokens have a loss, so the model may assume this
            of the token it predicts, but not of the others.
        """
        rate = 1.0 if selected else self.mask_rate
        hidden, other = rate * self.mask_token_rate, rate * self.mask_random_rate / symbols
        same = seen[..., None] == np.arange(symbols)
        visible = same * (1 - hidden - rate * self.mask_random_rate) + other
        return np.where((seen == symbols)[..., None], hidden, visible)

    def remaining(self, chances: np.ndarray) -> np.ndarray:
        """[...] nats: entropy of a selected token given its own noisy reading and [..., V] its chances from the others.

        H(token) + H(reading | token) - H(reading), with the noise as a channel, in closed form.
        """
        other = self.mask_random_rate / chances.shape[-1]
        kept = max(0.0, 1 - self.mask_token_rate - self.mask_random_rate)
        reading = other + kept * chances
        agrees, differs = chances * (other + kept), chances * other
        visible = _minus_plogp(agrees) + (chances.shape[-1] - 1) * _minus_plogp(differs) - _minus_plogp(reading)
        return (self.mask_token_rate * _minus_plogp(chances) + visible).sum(axis=-1)


def _minus_plogp(p: np.ndarray) -> np.ndarray:
    return -p * np.log(np.where(p > 0, p, 1.0))


class Markov:
    """A chain in which the last `order` symbols determine the distribution of the next.

    The chance of symbol x is rank(x)**-zipf times a random factor for each suffix of the context (the last symbol, the
    last two, ...), so that symbols and contexts have about Zipfian frequencies and each longer context is informative.
    All chances are positive, so there is one stationary distribution, from which text is drawn from the first token on.

    Attributes:
      symbols, order: V and k.
      chances: [V**k, V] P(next | context); a context is a number in base V, its newest symbol the last digit.
      stationary: [V**k] P(context).
      context_entropies: [k + 1] nats: entropy of a token given only the 0, 1, ... k tokens before it.
      entropy_rate: the last of these, nats per token.
    """

    def __init__(self, symbols: int, order: int, zipf: float, seed: int):
        """Computes the table, V**(k + 1) numbers, and its stationary distribution."""
        self.symbols, self.order, self._seed = symbols, order, seed
        logits = -zipf * np.log(np.arange(1, symbols + 1))
        for length in range(1, order + 1):
            uniform = fractions(bits_of(seed, _STREAMS["table"], length, symbols ** (length + 1))) + 2.0**-54
            factor = np.log(uniform / (1 - uniform)) / math.sqrt(order)  # logistic: standard deviation 1.8 in all
            logits = logits[None] + factor.reshape(symbols, *logits.shape)
        logits = logits.reshape(-1, symbols)
        self.chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        self.chances /= self.chances.sum(axis=1, keepdims=True)
        self.stationary = self._stationary()
        joint = self.stationary[:, None] * self.chances
        blocks = [joint.reshape(symbols**length, -1).sum(axis=1) for length in range(order + 2)]
        self.context_entropies = np.diff([_minus_plogp(block).sum() for block in blocks])
        self.context_entropies[-1] = self.stationary @ _minus_plogp(self.chances).sum(axis=1)
        self.entropy_rate = float(self.context_entropies[-1])

    def _stationary(self) -> np.ndarray:
        """Power iteration down to rounding error."""
        share = np.full(self.symbols**self.order, self.symbols**-self.order)
        for _ in range(100_000):
            new = (share[:, None] * self.chances).reshape(self.symbols, -1).sum(axis=0)
            new /= new.sum()
            change, share = np.abs(new - share).sum(), new
            if change < 1e-14:
                return share
        raise ConfigError("config.data.language_zipf: this chain mixes too slowly to compute its frequencies")

    def sample(self, tokens: int, stream: str, number: int = 0) -> np.ndarray:
        """[tokens] int64, a sample of the stationary chain.

        Args:
          tokens: at least 1.
          stream: "train", "validation" or "floor"; samples of different streams are independent.
          number: of the sample; samples with different numbers are independent.
        """
        uniform = array("d", fractions(bits_of(self._seed, _STREAMS[stream], number, tokens + 1)).tobytes())
        steps, size, contexts = self._cumulative, self.symbols, self.symbols**self.order
        context = min(int(np.searchsorted(np.cumsum(self.stationary), uniform[0], "right")), contexts - 1)
        out = array("q", bytes(8 * tokens))
        for place in range(tokens):
            begin = context * size
            symbol = bisect_right(steps, uniform[place + 1], begin, begin + size - 1) - begin
            out[place] = symbol
            context = (begin + symbol) % contexts
        return np.frombuffer(out, np.int64)

    @functools.cached_property
    def _cumulative(self) -> array:
        return array("d", np.cumsum(self.chances, axis=1).tobytes())

    def next_token_floor(self, row_tokens: int, first_context: int = 1) -> float:
        """Nats per target, the exact mean over a row: position j sees first_context + j tokens of its row.

        Args:
          row_tokens: targets per row.
          first_context: tokens from which the first target is predicted; 1 in rows of `objectives.next_token`.
        """
        known = np.minimum(first_context + np.arange(row_tokens), self.order)
        return float(self.context_entropies[known].mean())

    def masked_floor(self, row_tokens: int, noise: Noise, rows: int = _FLOOR_ROWS) -> Floor:
        """Nats per selected token, averaged over the positions of a row.

        A mean over sampled rows and noise, with the exact posterior of every token given all others by forward-backward
        message passing, and the noise of the token itself integrated out. Control variates reduce the variance: the
        loss from the k nearest tokens alone, whose expectation is known exactly. The sampled rows are independent and
        the only source of error, so the standard error is that of their corrected means.

        Args:
          row_tokens: tokens per row.
          noise: how rows are corrupted.
          rows: how many are sampled.

        Raises:
          ConfigError: fewer tokens in a row than the order.
        """
        bits = bits_of(self._seed, _STREAMS["floor"], 0, 2 * rows * row_tokens).reshape(2, rows, row_tokens)
        clean = np.stack([self.sample(row_tokens, "floor", 1 + row) for row in range(rows)])
        seen = corrupted(clean, bits, noise, self.symbols)
        means = noise.remaining(self.from_others(seen, noise)).mean(axis=1)
        known = 0
        if row_tokens > self.order:
            near = np.stack([self._excess_of_nearest(seen, noise, left) for left in range(self.order + 1)], axis=1)
            slopes = np.linalg.lstsq(near - near.mean(axis=0), means - means.mean(), rcond=None)[0]
            means, known = means - near @ slopes, near.shape[1]
        return Floor(float(means.mean()), float(means.std(ddof=1 + known) / math.sqrt(rows)), True)

    def _excess_of_nearest(self, seen: np.ndarray, noise: Noise, left: int) -> np.ndarray:
        """[R]: mean loss per row of a model that sees `left` tokens before and k - left after the one it predicts,
        minus the exact expectation of that loss."""
        size, order = self.symbols, self.order
        joint = (self.stationary[:, None] * self.chances).reshape((size,) * (order + 1))
        joint = np.moveaxis(joint, left, 0)
        readings = noise.likelihood(np.arange(size + 1), size, selected=False)
        for _ in range(order):  # replaces each neighbour by its noisy reading
            joint = np.tensordot(joint, readings, axes=(1, 1))
        joint = np.moveaxis(joint, 0, -1)
        share = joint.sum(axis=-1)
        nats = noise.remaining(joint / np.maximum(share, 1e-300)[..., None])
        places = np.arange(seen.shape[1] - order)
        neighbours = tuple(seen[:, places + offset] for offset in range(order + 1) if offset != left)
        return nats[neighbours].mean(axis=1) - (share * nats).sum()

    def from_others(self, seen: np.ndarray, noise: Noise) -> np.ndarray:
        """[R, T, V]: P(token | the readings of all other tokens of its row); `seen` [R, T], V stands for [MASK]."""
        rows, length = seen.shape
        if length < self.order:
            raise ConfigError(
                f"config.model.context_length: {length}; masked rows of this language need at least "
                f"language_order {self.order} tokens"
            )
        at_once = max(1, _BLOCK // (length * len(self.stationary)))
        parts = [seen[first : first + at_once] for first in range(0, rows, at_once)]
        return np.concatenate([self._messages(noise.likelihood(p, self.symbols, selected=False)) for p in parts])

    def _messages(self, evidence: np.ndarray) -> np.ndarray:
        """Forward-backward over the contexts of k symbols; `evidence` [R, T, V] is P(read | symbol)."""
        rows, length, size = evidence.shape
        order = self.order
        table = self.chances.reshape(size, -1, size).transpose(1, 0, 2)  # [middle, oldest, newest]

        def first_block(without: int) -> np.ndarray:
            block = np.broadcast_to(self.stationary, (rows, len(self.stationary)))
            block = block.reshape(rows, *(size,) * order)
            for place in range(order):
                if place != without:
                    shape = [rows] + [size if axis == place else 1 for axis in range(order)]
                    block = block * evidence[:, place].reshape(shape)
            return block

        arriving = {}  # place -> P(context that ends here, everything read before here)
        forward = first_block(-1).reshape(rows, -1)
        for place in range(order, length):
            forward = forward / forward.sum(axis=1, keepdims=True)
            before = forward.reshape(rows, size, -1).transpose(2, 0, 1)
            arriving[place] = (before @ table).transpose(1, 0, 2)
            forward = (arriving[place] * evidence[:, place, None, :]).reshape(rows, -1)
        out = np.empty_like(evidence)
        backward = np.ones((rows, len(self.stationary)))
        for place in range(length - 1, order - 1, -1):
            backward = (backward / backward.sum(axis=1, keepdims=True)).reshape(rows, -1, size)
            out[:, place] = (arriving.pop(place) * backward).sum(axis=1)
            after = (backward * evidence[:, place, None, :]).transpose(1, 2, 0)
            backward = (table @ after).transpose(2, 1, 0).reshape(rows, -1)
        backward = backward / backward.sum(axis=1, keepdims=True)
        for place in range(order):
            block = first_block(place) * backward.reshape(rows, *(size,) * order)
            out[:, place] = block.sum(axis=tuple(axis + 1 for axis in range(order) if axis != place))
        return out / out.sum(axis=-1, keepdims=True)


markov = functools.lru_cache(maxsize=2)(Markov)  # the same, cached


def corrupted(clean: np.ndarray, bits: np.ndarray, noise: Noise, symbols: int) -> np.ndarray:
    """[R, T] the symbols `clean` after the noise; V stands for [MASK]; `bits` [2, R, T] random uint64."""
    action = (bits[1] >> np.uint64(32)) * 2.0**-32
    replaced = np.where(action < noise.mask_token_rate + noise.mask_random_rate, below(symbols, bits[1]), clean)
    read = np.where(action < noise.mask_token_rate, symbols, replaced)
    return np.where(fractions(bits[0]) < noise.mask_rate, read, clean)
