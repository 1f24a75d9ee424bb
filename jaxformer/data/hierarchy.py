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


hierarchy = functools.lru_cache(maxsize=2)(Hierarchy)  # the same, cached
