"""Examples with labels: what a source yields for a task, and how a corpus keeps them.

In a corpus an example is the separator and the tokens of its texts, with the end token between two of them, as any
other document. Beside the tokens stand the characters that each of them covers, so that labels that are places in a
text find their tokens whatever the tokenizer, and the labels, a line of JSON for each example.

>>> example = Example(["to be", "or not"], "maybe")
>>> example, example.texts, example.label
('to beor not', ('to be', 'or not'), 'maybe')
"""

import functools
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers as hf

from jaxformer.data.checked_array import BlockWriter, CheckedArray
from jaxformer.data.corpus_split import Split
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError, DamagedCacheError

_AT_ONCE = 512  # examples that are encoded in one call


class Example(str):
    """The texts of an example end to end, which is what counts of bytes and tokenizers see, with its label.

    Attributes:
      texts: one or several.
      label: what JSON can say; None: it has none, as where labels are to be predicted.
    """

    texts: tuple[str, ...]
    label: Any

    def __new__(cls, texts: Sequence[str], label: Any = None) -> "Example":
        """`texts`: not all of them empty."""
        made = super().__new__(cls, "".join(texts))
        made.texts, made.label = tuple(texts), label
        return made

    def __getnewargs__(self) -> Any:
        return self.texts, self.label  # of a copy, as pickle makes one


class EncodedExample(NamedTuple):
    """Tokens of one example.

    Attributes:
      tokens: [n] int64, the separator first, the end token between two texts.
      covers: [n, 2] int64, first and last (excluded) character of its text that each token covers; 0, 0 of special
        tokens.
    """

    tokens: np.ndarray
    covers: np.ndarray


def encode(examples: Sequence[Example], tokenizer: Tokenizer) -> list[EncodedExample]:
    """The tokens of some examples."""
    texts = [text for each in examples for text in each.texts]
    found = iter(_library(tokenizer).encode_batch(texts, add_special_tokens=False))
    out = []
    for example in examples:
        tokens: list[np.ndarray] = []
        covers: list[np.ndarray] = []
        for number in range(len(example.texts)):
            text = next(found)
            tokens += [np.array([tokenizer.end_id if number else tokenizer.separator_id]), np.array(text.ids, np.int64)]
            covers += [np.zeros((1, 2), np.int64), np.array(text.offsets, np.int64).reshape(-1, 2)]
        out.append(EncodedExample(np.concatenate(tokens).astype(np.int64), np.concatenate(covers)))
    return out


@functools.lru_cache(4)
def _library(tokenizer: Tokenizer) -> hf.Tokenizer:
    """A tokenizer as the library has it, which says what characters a token covers."""
    made = hf.Tokenizer.from_str(tokenizer.content().decode())
    made.encode_special_tokens = True  # read their names as ordinary text; not saved in the file
    return made


@dataclass(frozen=True)
class LabelledSplit(Split):
    """A split of examples with labels.

    Attributes:
      covers: [2 * n] int32, as `EncodedExample.covers`, of all tokens.
      lines: [m] uint8, the labels as lines of JSON.
    """

    covers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    lines: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))

    @functools.cached_property
    def labels(self) -> list[Any]:
        """The label of each example."""
        return [json.loads(line) for line in bytes(self.lines.data).split(b"\n")[:-1]]


def split_of(examples: Sequence[Example], tokenizer: Tokenizer) -> LabelledSplit:
    """Some examples as a split, without a corpus."""
    found = encode(examples, tokenizer)
    sizes = np.array([len(each.tokens) for each in found], np.int64)
    return LabelledSplit(
        np.concatenate([each.tokens for each in found]),
        np.cumsum(sizes) - sizes,
        sum(len(each.encode()) for each in examples),
        0,
        {},
        covers=np.concatenate([each.covers for each in found]).astype(np.int32).ravel(),
        lines=np.frombuffer(b"".join(map(_line, examples)), np.uint8),
    )


def write_split(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    path: Path,
    dtype: str,
    digest: Any,
    compress: bool,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Writes `path`.tokens, .starts, .covers and .lines, and returns what meta.json says of them.

    Args:
      texts: Examples.
      tokenizer, path, dtype, digest, advance: as of `ingest.write_split`.
      compress: not done: no code length is compared with anything.

    Raises:
      ConfigError: a text has no label.
    """
    starts, lines = array("q"), bytearray()
    num_tokens = num_bytes = num_unknown = 0
    names = ("tokens", "covers", "lines")
    tokens_file, covers_file, lines_file = (BlockWriter(path.with_suffix(f".{name}")) for name in names)
    with tokens_file, covers_file, lines_file:
        for batch in _batches(texts):
            for example, found in zip(batch, encode(batch, tokenizer), strict=True):
                starts.append(num_tokens)
                num_tokens += len(found.tokens)
                num_bytes += len(example.encode())
                num_unknown += int(np.count_nonzero(found.tokens == tokenizer.unk_id))
                parts = found.tokens.astype(dtype).tobytes(), found.covers.astype("<i4").tobytes(), _line(example)
                for file, part in zip((tokens_file, covers_file, lines_file), parts, strict=True):
                    file.write(part)
                digest.update(parts[0])
                lines += parts[2]
            advance(sum(len(each.encode()) for each in batch))
    digest.update(lines)
    with BlockWriter(path.with_suffix(".starts")) as starts_file:
        starts_file.write(np.asarray(starts, "<i8").tobytes())
    return {
        "num_tokens": num_tokens, "num_documents": len(starts), "num_bytes": num_bytes, "num_unknown": num_unknown,
        "compressed": {}, "token_sums": tokens_file.sums, "start_sums": starts_file.sums,
        "covers_sums": covers_file.sums, "lines_sums": lines_file.sums,
    }  # fmt: skip


def read_split(folder: Path, split: str, about: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """`covers` and `lines` of a split that `write_split` wrote. Raises DamagedCacheError."""
    out: list[np.ndarray] = []
    for name, dtype in (("covers", "<i4"), ("lines", "u1")):
        sums = about[split].get(f"{name}_sums")
        if not isinstance(sums, str):
            raise DamagedCacheError(f"meta.json says nothing of {split}.{name}")
        try:
            found = CheckedArray(folder / f"{split}.{name}", dtype, sums, most=None, failed=DamagedCacheError)
        except OSError as error:
            raise DamagedCacheError(f"{split}.{name}: {error.strerror}") from None
        out.append(np.asarray(found))
    covers, lines = out
    examples = int(np.count_nonzero(lines == ord("\n")))
    counts = about[split]["num_tokens"], about[split]["num_documents"]
    if (len(covers) // 2, examples) != counts:
        raise DamagedCacheError(f"{split}.covers and {split}.lines do not fit its tokens")
    return covers, lines


def _line(example: Example) -> bytes:
    return json.dumps(example.label).encode() + b"\n"


def _batches(texts: Iterable[str]) -> Iterator[list[Example]]:
    batch: list[Example] = []
    for text in texts:
        if not isinstance(text, Example):
            raise ConfigError("config.data.source: it yields texts without labels; accepted: a source of examples")
        batch.append(text)
        if len(batch) == _AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
