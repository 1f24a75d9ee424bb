"""Pairs of sequences whose alignment is known, and with it the least loss of any model on their targets.

Four tasks: copy, reverse, sort, and translate, which exchanges neighbours by a hidden order of the symbols and then
replaces each symbol by one of its synonyms, drawn at random. Sources are uniformly random. Given its source, a target
of T symbols has the entropy T * H, where H is that of the choice among synonyms; where it ends is known.

>>> language = Transduction("translate", symbols=6, shortest=3, longest=5, synonyms=2, block=2, seed=0)
>>> source, target = language.sample(1000, "train")
>>> bool((source.sizes == target.sizes).all()), round(language.symbol_nats, 4)
(True, 0.6931)
>>> first = source.split()[0]
>>> language.alignment(first).tolist(), bool(np.isin(target.split()[0], language.synonyms[first]).all())
([0, 1, 3, 2], True)
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.pair_text import Pair
from jaxformer.data.ragged import Ragged
from jaxformer.data.shuffle import below, bits_of, fractions, keys, permuted

TASKS = ("copy", "reverse", "sort", "translate")
_STREAMS = {"train": 24, "validation": 25, "synonyms": 26, "order": 27}  # of `shuffle.bits_of`
_AT_ONCE = 4096  # pairs


class Transduction:
    """One language.

    Attributes:
      task: one of TASKS.
      symbols: V, of the sources.
      alphabet: number of symbols of sources and targets together.
      synonyms: [V, m] the symbols that stand for each in a target; [V, 1], itself, unless the task is translate.
      chances: [m] of a symbol's synonyms, the same for all.
      symbol_nats: H, entropy of the choice among synonyms.
    """

    def __init__(
        self, task: str, symbols: int, shortest: int, longest: int, synonyms: int, block: int, seed: int,
        zipf: float = 0.0,
    ):  # fmt: skip
        """Draws synonyms and the hidden order.

        Args:
          task, symbols: see above.
          shortest, longest: symbols of a source, all lengths between equally likely.
          synonyms: m of translate.
          block: translate sorts each `block` symbols that follow each other by the hidden order; 1: their order stays.
          seed: of the language and its text.
          zipf: the chances of a symbol's synonyms fall as rank ** -zipf.
        """
        self.task, self.symbols, self._seed, self._block = task, symbols, seed, block
        self._shortest, self._longest = shortest, longest
        own = np.arange(symbols)
        if task == "translate":
            count = symbols * synonyms
            drawn = permuted(np.arange(count), count, keys(seed, _STREAMS["synonyms"], np.zeros(count, int)))
            self.synonyms = symbols + drawn.reshape(symbols, synonyms)
            weights = np.arange(1, synonyms + 1) ** -zipf
        else:
            self.synonyms, weights = own[:, None], np.ones(1)
        self.chances = weights / weights.sum()
        self.alphabet = int(self.synonyms.max()) + 1
        self.symbol_nats = float(-(self.chances * np.log(self.chances)).sum())
        self._order = permuted(own, symbols, keys(seed, _STREAMS["order"], np.zeros(symbols, int)))

    def alignment(self, source: np.ndarray) -> np.ndarray:
        """[T] the place in a source, [T] symbols, that each symbol of its target comes from."""
        return self._aligned(Ragged(source, np.array([len(source)])))

    def _aligned(self, sources: Ragged) -> np.ndarray:
        """[n] as `alignment`, of sources end to end."""
        places, owner = sources.places, sources.owner
        if self.task == "reverse":
            return np.repeat(sources.sizes, sources.sizes) - 1 - places
        if self.task == "sort":
            return places[np.lexsort((places, sources.values, owner))]
        if self.task == "translate":
            return places[np.lexsort((places, self._order[sources.values], places // self._block, owner))]
        return places

    def lengths(self, pairs: int, stream: str, number: int = 0) -> np.ndarray:
        """[pairs] int64, symbols of each source of `sample`."""
        return self._drawn(pairs, stream, number)[0]

    def sample(self, pairs: int, stream: str, number: int = 0) -> tuple[Ragged, Ragged]:
        """(sources, targets), independent; arguments as for `Markov.sample`."""
        sizes, bits = self._drawn(pairs, stream, number)
        used = np.arange(self._longest) < sizes[:, None]
        symbol_bits, synonym_bits = (bits[:, 1:].reshape(pairs, 2, -1)[:, which][used] for which in (0, 1))
        sources = Ragged(below(self.symbols, symbol_bits), sizes)
        aligned = sources.values[np.repeat(sources.begins, sizes) + self._aligned(sources)]
        bounds = np.cumsum(self.chances)[:-1]
        chosen = np.searchsorted(bounds, fractions(synonym_bits), side="right")
        return sources, Ragged(self.synonyms[aligned, chosen], sizes)

    def _drawn(self, pairs: int, stream: str, number: int) -> tuple[np.ndarray, np.ndarray]:
        words = 1 + 2 * self._longest
        bits = bits_of(self._seed, _STREAMS[stream], number, pairs * words).reshape(pairs, words)
        return self._shortest + below(self._longest - self._shortest + 1, bits[:, 0]), bits


transduction = functools.lru_cache(maxsize=2)(Transduction)  # the same, cached


def language(data: DataConfig) -> Transduction:
    """The language of a configuration."""
    return transduction(
        data.language_task, data.language_symbols, data.language_shortest, data.language_longest,
        data.language_synonyms, data.language_block, data.language_seed, data.language_rule_zipf,
    )  # fmt: skip


def parts(data: DataConfig, split: str) -> list[int]:
    """Pairs of each part of a split, which `Transduction.sample` makes by number: about language_tokens symbols of
    sources and targets to train on, and validation_fraction of that held out."""
    share = data.validation_fraction if split == "validation" else 1.0
    wanted = max(1, round(data.language_tokens * share / (data.language_shortest + data.language_longest)))
    return [min(_AT_ONCE, wanted - begin) for begin in range(0, wanted, _AT_ONCE)]


def documents(data: DataConfig, split: str) -> Iterator[str]:
    """The pairs of a split, as texts of the characters of `languages.alphabet`."""
    drawn = language(data)
    for number, count in enumerate(parts(data, split)):
        source, target = (
            [text(each, drawn.alphabet) for each in side.split()] for side in drawn.sample(count, split, number)
        )
        yield from map(Pair, source, target)


def target_nats(data: DataConfig) -> float:
    """Nats per target token of the held-out pairs that the best possible model loses, end tokens among the tokens."""
    drawn = language(data)
    sizes = np.concatenate([drawn.lengths(n, "validation", i) for i, n in enumerate(parts(data, "validation"))])
    return float(sizes.sum() * drawn.symbol_nats / (sizes + 1).sum())


def settings(data: DataConfig) -> dict[str, Any]:
    """The fields that the language and its text depend on."""
    return {name: value for name, value in vars(data).items() if name.startswith("language_")}


def text(symbols: np.ndarray, alphabet: int) -> str:
    """Symbols as characters, in the order of their token ids: ASCII if there are enough signs, else ideographs."""
    first = ord("!") if alphabet <= ord("~") - ord("!") + 1 else 0x4E00
    return (symbols + first).astype("<u4").tobytes().decode("utf-32-le")
