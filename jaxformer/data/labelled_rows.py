"""Rows of examples with labels: windows of tokens that share rows as far as they fit, and what is asked of each.

A task says of each example which windows it has (`Window`). Windows that follow each other share a row, each with a
segment of its own; which share one is the same in every epoch, the order of the rows is not.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data.labelled_text import LabelledSplit
from jaxformer.data.ragged import Ragged, placed
from jaxformer.data.rows import HostBatch, Lengths
from jaxformer.data.sequence_pairs import shared_rows
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.types import Batch


class TokenizedExample(NamedTuple):
    """One example as tokens.

    Attributes:
      number: of the example in its split.
      texts: the tokens of each of its texts.
      covers: of each text [n, 2], the characters that its tokens cover, as of `labelled_text.EncodedExample`.
      label: what the source said; None: to be predicted.
    """

    number: int
    texts: list[np.ndarray]
    covers: list[np.ndarray]
    label: Any


class Window(NamedTuple):
    """What of an example stands in a row.

    Attributes:
      tokens: [n], at most as many as a row holds.
      targets: [n] what is asked at each.
      weights: [n] how much that counts.
      inputs: [n] arrays by name, for `Batch.inputs`.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    inputs: dict[str, np.ndarray]


class Frame(NamedTuple):
    """The special tokens around the texts of an example, and the room between them.

    Attributes:
      length: T, tokens of a row.
      first: the token that it begins with.
      between: the token between two texts.
      last: the token at its end; None: there is none.
    """

    length: int
    first: int
    between: int
    last: int | None

    def room(self, texts: int) -> int:
        """Tokens of that many texts that fit a row. Raises ConfigError: not even one of each."""
        room = self.length - texts - (self.last is not None)
        if room < texts:
            raise ConfigError(
                f"config.model.context_length: {self.length}; an example of {texts} text{'s' * (texts != 1)} needs at "
                f"least {self.length - room + texts}"
            )
        return room

    def around(self, texts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, number of the text that each belongs to), [n] each; a special token belongs to the text that it
        ends, the first one to the first."""
        parts, owners = [np.array([self.first])], [np.array([0])]
        for number, text in enumerate(texts):
            ends = number == len(texts) - 1
            mark = self.last if ends else self.between
            body = text if mark is None else np.append(text, mark)
            parts.append(body)
            owners.append(np.full(len(body), number))
        return np.concatenate(parts), np.concatenate(owners)


def frame_of(tokenizer: Tokenizer, data: DataConfig, lengths: Lengths) -> Frame:
    """The frame of a configuration."""
    assert data.labelled is not None
    if data.labelled.opening == "cls":
        return Frame(lengths.target, tokenizer.cls_id, tokenizer.sep_id, tokenizer.sep_id)
    return Frame(lengths.target, tokenizer.separator_id, tokenizer.sep_id, None)


class LabelledRows:
    """The rows of a split of examples, as `rows.SplitRows`.

    Attributes:
      per_epoch: rows of one epoch, in which every window is once.
      words: 0, no random words.
    """

    words = 0

    def __init__(
        self,
        split: LabelledSplit,
        tokenizer: Tokenizer,
        data: DataConfig,
        lengths: Lengths,
        covering: bool,
        windows: Callable[[TokenizedExample], Iterator[Window]],
        notes: Callable[[], list[str]] = lambda: [],
    ):
        """Makes all windows.

        Args:
          split, tokenizer, data, lengths, covering: as of `Objective.rows`.
          windows: of an example.
          notes: lines about what they leave out.

        Raises:
          ConfigError: as `windows`; there is none at all.
        """
        assert data.labelled is not None
        most = None if covering else data.labelled.max_examples
        parts: list[Window] = []
        for example in tokenized(split, tokenizer, most):
            parts += windows(example)
        what = "held-out" if covering else "training"
        if not parts:
            raise ConfigError(f"config.data: none of the {what} examples has a label to learn")
        sizes = np.array([len(part.tokens) for part in parts], np.int64)
        self._sizes, self._begins = sizes, np.cumsum(sizes) - sizes
        self._tokens = np.concatenate([part.tokens for part in parts]).astype(np.int32)
        self._targets = np.concatenate([part.targets for part in parts]).astype(np.int32)
        self._weights = np.concatenate([part.weights for part in parts]).astype(np.float32)
        self._inputs = {name: np.concatenate([part.inputs[name] for part in parts]) for name in parts[0].inputs}
        length = lengths.target
        self._rows = shared_rows(np.stack([sizes, sizes], axis=1), np.array([length, length]))
        self.per_epoch = len(self._rows) - 1
        self._length, self._pad_id, self.notes = length, tokenizer.pad_id, notes

    def batch(self, index: np.ndarray, seed: int, epoch: np.ndarray, bits: np.ndarray) -> Batch:
        """Some rows; they depend on neither seed nor epoch."""
        count = self._rows[index + 1] - self._rows[index]
        windows = Ragged(np.arange(count.sum()), count)
        chosen = np.repeat(self._rows[index], count) + windows.places
        sizes = self._sizes[chosen]
        inside = Ragged(np.empty(sizes.sum(), np.int64), sizes)
        places = np.repeat(self._begins[chosen], sizes) + inside.places

        def laid(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            return placed(Ragged(values[places], sizes), windows.owner, len(index), self._length)

        tokens, segments, positions = laid(self._tokens)
        return HostBatch(
            tokens=np.where(segments > 0, tokens, np.int32(self._pad_id)),
            targets=laid(self._targets)[0],
            weights=_as_placed(laid, self._weights),
            positions=positions,
            segments=segments,
            inputs={name: _as_placed(laid, values) for name, values in self._inputs.items()} or None,
        )


def _as_placed(laid: Callable[[np.ndarray], Any], values: np.ndarray) -> np.ndarray:
    """`values` in rows, in their own type: `placed` makes int32, and so moves the bits of a float32."""
    return laid(np.ascontiguousarray(values).view(np.int32))[0].view(values.dtype)


def tokenized(split: LabelledSplit, tokenizer: Tokenizer, most: int | None = None) -> Iterator[TokenizedExample]:
    """The examples of a split; of more than `most` only so many, evenly spread."""
    begins, total = np.asarray(split.starts), len(split.starts)
    ends = np.append(begins[1:], len(split.tokens))
    chosen = np.arange(total) if most is None else np.arange(min(most, total)) * total // min(most, total)
    covers = np.asarray(split.covers).reshape(-1, 2)
    labels = split.labels
    for number in chosen.tolist():
        tokens = np.asarray(split.tokens[begins[number] : ends[number]]).astype(np.int64)
        place = covers[begins[number] : ends[number]]
        cuts = np.flatnonzero(tokens[1:] == tokenizer.end_id) + 1  # the first opens the example
        texts = [part[1:] for part in np.split(tokens, cuts)]
        yield TokenizedExample(number, texts, [part[1:] for part in np.split(place, cuts)], labels[number])


class LabelIndex:
    """Numbers of the names of labels.

    >>> index = LabelIndex(("no", "yes"), "held-out")
    >>> index["yes", 0]
    1
    >>> index["maybe", 6]
    Traceback (most recent call last):
    ...
    jaxformer.errors.ConfigError: config.data.labelled.labels: held-out example 7 has the label 'maybe'; accepted: \
no, yes
    """

    def __init__(self, names: Sequence[str], what: str):
        """`what`: of which split, in words."""
        self._numbers = {name: number for number, name in enumerate(names)}
        self._what = what

    def __getitem__(self, key: tuple[str, int]) -> int:
        """The number of a name that an example has. Raises ConfigError: it is none of the names."""
        name, example = key
        if name not in self._numbers:
            known = [*self._numbers][:12]
            more = f" and {len(self._numbers) - 12} more" if len(self._numbers) > 12 else ""
            raise ConfigError(
                f"config.data.labelled.labels: {self._what} example {example + 1} has the label {name!r}; accepted: "
                f"{', '.join(known)}{more}"
            )
        return self._numbers[name]


def index_of(data: DataConfig, covering: bool) -> LabelIndex:
    """The label names of a configuration, which are filled in."""
    assert data.labelled is not None
    return LabelIndex(data.labelled.labels or (), "held-out" if covering else "training")


def in_order(names: set[str]) -> tuple[str, ...]:
    """Names of labels, sorted; numbers by their size.

    >>> in_order({"10", "9"}), in_order({"b", "a", "10"})
    (('9', '10'), ('10', 'a', 'b'))
    """
    numbers = all(name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if numbers else 0, name)))
