"""The random hierarchy model: strings of a grammar of fixed depth whose entropy is known.

>>> grammar = hierarchy(symbols=4, depth=2, branching=2, synonyms=2, seed=0)
>>> grammar.sample(5, "train").shape, round(grammar.document_nats / math.log(2), 6)
((5, 4), 5.0)
>>> skewed = hierarchy(symbols=4, depth=2, branching=2, synonyms=2, seed=0, zipf=1.0)  # chances 2/3 and 1/3
>>> round(skewed.document_nats / math.log(2), 6)
4.754888
"""

import functools
import math

import numpy as np

from jaxformer.data.shuffle import below, bits_of, fractions, keys, permuted

_STREAMS = {"train": 20, "validation": 21, "rules": 22}  # of `shuffle.bits_of`


class Hierarchy:
    """The random hierarchy model: a root symbol, each symbol of a level replaced by one of m strings of s symbols.

    All V * m right-hand sides of a level are different (needs m <= V**(s - 1)), so a string has one derivation and its
    entropy is exactly log V + nodes * H, where H is the entropy of the choice among a symbol's m rules: log m if they
    are equally likely. With chances that fall as rank**-zipf, rare rules are learned long after frequent ones.

    Source: Cagnetta et al. 2024, "How Deep Neural Networks Learn Compositional Data: The Random Hierarchy Model";
    Cagnetta et al. 2025, "Learning curves theory for hierarchically compositional data with power-law distributed
    features".

    Attributes:
      symbols: V, of every level.
      tokens: of a string, s**L.
      rules: [V, m, s] of each level from the root down.
      chances: [m] of a symbol's rules, the same for every symbol and level.
      document_nats: entropy of a string.
    """

    def __init__(self, symbols: int, depth: int, branching: int, synonyms: int, seed: int, zipf: float = 0.0):
        """Draws the rules of each level: the first V * m of a shuffle of all V**s strings."""
        self.symbols, self._seed = symbols, seed
        self.tokens = branching**depth
        nodes = sum(branching**level for level in range(depth))
        weights = np.arange(1, synonyms + 1) ** -zipf
        self.chances = weights / weights.sum()
        self.document_nats = math.log(symbols) - nodes * float(np.sum(self.chances * np.log(self.chances)))
        count, digits = symbols * synonyms, symbols ** np.arange(branching - 1, -1, -1)
        self.rules = []
        for level in range(depth):
            key = keys(seed, _STREAMS["rules"], np.full(count, level))
            strings = permuted(np.arange(count), symbols**branching, key)
            self.rules.append((strings[:, None] // digits % symbols).reshape(symbols, synonyms, branching))

    def sample(self, documents: int, stream: str, number: int = 0) -> np.ndarray:
        """[documents, tokens] int64, independent strings; arguments as for `Markov.sample`."""
        nodes = (self.tokens - 1) // (self.rules[0].shape[2] - 1)
        bits = bits_of(self._seed, _STREAMS[stream], number, documents * (1 + nodes)).reshape(documents, -1)
        strings, used = below(self.symbols, bits[:, :1]), 1
        bounds = np.cumsum(self.chances)[:-1]  # without the last, which should be 1 but may round below it
        for rules in self.rules:
            width = strings.shape[1]
            chosen = np.searchsorted(bounds, fractions(bits[:, used : used + width]), side="right")
            strings, used = rules[strings, chosen].reshape(documents, -1), used + width
        return strings

    def next_token_nats(self, strings: np.ndarray) -> np.ndarray:
        """[D, tokens] nats: the best model's loss on each token of whole strings [D, tokens], given those before it.

        The mean of a row's sum is `document_nats`. Exact sums over all continuations, by message passing up the tree.
        """
        known = np.stack([self._log_chance(strings, length) for length in range(self.tokens + 1)], axis=1)
        return -np.diff(known, axis=1)

    def _log_chance(self, strings: np.ndarray, length: int) -> np.ndarray:
        """[D] log P(a string begins with the first `length` symbols of these)."""
        seen = np.arange(self.tokens) < length
        message = np.where(seen[:, None], strings[..., None] == np.arange(self.symbols), 1.0)
        scale = np.zeros(len(strings))
        for rules in reversed(self.rules):
            children = message.reshape(len(strings), -1, rules.shape[2], self.symbols)
            product = np.ones((*children.shape[:2], *rules.shape[:2]))
            for child in range(rules.shape[2]):
                product = product * children[:, :, child][..., rules[..., child]]
            message = product @ self.chances
            largest = message.max(axis=-1, keepdims=True)
            message, scale = message / largest, scale + np.log(largest).sum(axis=(1, 2))
        return scale + np.log(message.mean(axis=(1, 2)))


hierarchy = functools.lru_cache(maxsize=2)(Hierarchy)  # the same, cached
