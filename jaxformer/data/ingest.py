"""Tokenises both splits of a corpus into a folder, in one pass over text of any length, with bounded memory."""

import functools
import hashlib
import itertools
import lzma
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.config.registry import special_tokens
from jaxformer.data import labelled_text, sources, tokenizers
from jaxformer.data.checked_array import BlockWriter
from jaxformer.data.contents import Contents
from jaxformer.data.faults import Faults
from jaxformer.data.pair_text import Pair
from jaxformer.data.progress_bars import Advance, Bar, say
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.storage import json_checksum

FORMAT = 2  # raised whenever the same text and settings would give other files
SAMPLE_BYTES = 30_000_000  # of the training text, evenly spread, that a BPE is trained on
COMPRESS_BYTES = 32_000_000  # held-out text above this is not compressed for comparison: xz -9 does 2 MB/s
PIECE = 1 << 16  # characters the tokenizer is given at once: one long document also keeps all cores busy
BATCH = 1 << 20  # characters of one call; while it runs each token takes some hundred bytes
OPENS, TURNS = 1, 2  # marks of `batched`
_LINE_END = re.compile(r"(?<=\S)(?=[\r\n])")


def build(
    data: DataConfig, folder: Path, bar: Bar, contents: Contents, given: Tokenizer | None = None
) -> dict[str, Any]:
    """Writes tokenizer.json and the tokens and document starts of both splits into a folder.

    Args:
      data: source and tokenizer.
      folder: exists; holds none of these.
      bar: shows progress.
      contents: what every file must hold, each time it is read.
      given: the tokenizer of data.tokenizer_file.

    Returns:
      What meta.json says of them.

    Raises:
      ConfigError: any fault of the text, a change while it was read; OSError: the folder cannot be written.
    """
    documents = functools.partial(sources.documents, data, open_file=contents.open)
    sizes = dict.fromkeys(sources.SPLITS, 0)
    faults = {split: Faults(data.on_error) for split in sources.SPLITS}
    for split in sources.SPLITS:
        advance = bar(f"reading the {split} text", None)
        for text in documents(split, faults[split]):
            size = len(text.encode())
            advance(size)
            sizes[split] += size
        tell_left_out(faults[split], f"the {split} text")
    tokenizer = given if given is not None else _tokenizer(data, lambda: documents("train"), sizes["train"], bar)
    tokenizer = tokenizer.with_tokens(special_tokens(data))
    tokenizer.save(folder)
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    write = write_split if data.labelled is None else labelled_text.write_split
    about: dict[str, Any] = {"dtype": dtype, "tokenizer": json_checksum.digest(tokenizer.content())}
    for split in sources.SPLITS:
        advance = bar(f"tokenising the {split} text", sizes[split])
        compress = split == "validation" and sizes[split] <= COMPRESS_BYTES
        about[split] = write(documents(split), tokenizer, folder / split, dtype, digest, compress, advance)
        about[split]["num_skipped"] = faults[split].count
        if not about[split]["num_documents"]:
            raise ConfigError(f"config.data: the {split} text is empty (data.max_train_bytes {data.max_train_bytes})")
    contents.confirm(sources.inputs(data), hash_again=not sources.SOURCES[str(data.source)].opens_files)
    return about | {"fingerprint": digest.hexdigest()[:16]}


def tell_left_out(faults: Faults, where: str) -> None:
    """Says on standard error how many lines and examples were left out, if any were, and what was wrong with one."""
    if faults.count:
        what, are = ("lines or examples", "are") if faults.count > 1 else ("line or example", "is")
        say(f"{faults.count} {what} of {where} cannot be read and {are} left out; the first: {faults.first}")


def pieces(text: str) -> Iterator[str]:
    """Cuts a text into pieces of about PIECE characters that tokenise to the same ids as the whole.

    Cuts are before the end of a line with no space before it, where our BPE always ends a token; a text with no such
    place for 4 * PIECE characters is cut anywhere.
    """
    begin = 0
    while len(text) - begin > PIECE:
        limit = begin + 4 * PIECE
        match = _LINE_END.search(text, begin + PIECE, limit)
        end = match.end() if match else min(limit, len(text))
        yield text[begin:end]
        begin = end
    if begin < len(text):
        yield text[begin:]


def spread(texts: Iterable[str], total: int, wanted: int) -> Iterator[str]:
    """About `wanted` of `total` bytes of some texts, evenly spread.

    >>> list(spread(iter("abcdef"), total=6, wanted=3))
    ['a', 'c', 'e']
    """
    seen = taken = 0
    for text in texts:
        size = len(text.encode())
        if taken * total <= seen * wanted:
            taken += size
            yield text
        seen += size


def _tokenizer(data: DataConfig, texts_again: Callable[[], Iterator[str]], train_bytes: int, bar: Bar) -> Tokenizer:
    alphabet = sources.SOURCES[str(data.source)].alphabet
    if alphabet is not None:  # also a symbol that the sample lacks has its token
        return tokenizers.train("chars", [alphabet(data)], None)
    texts = itertools.chain.from_iterable(map(pieces, texts_again()))
    wanted = train_bytes if data.tokenizer == "chars" else min(train_bytes, SAMPLE_BYTES)
    advance = bar(f"making the {data.tokenizer} tokenizer", wanted)
    return tokenizers.train(data.tokenizer, watched(spread(texts, train_bytes, wanted), advance), data.tokenizer_vocab)


def watched(texts: Iterable[str], advance: Advance) -> Iterator[str]:
    """The same texts; tells `advance` how many bytes they have."""
    for text in texts:
        yield text
        advance(len(text.encode()))


def batched(texts: Iterable[str]) -> Iterator[list[tuple[int, str]]]:
    """(mark, piece) pairs in lists of about BATCH characters; the mark says whether it OPENS a document, TURNS to the
    target of a pair or, 0, goes on."""
    batch: list[tuple[int, str]] = []
    size = 0
    for text in texts:
        sides = (text.source, text.target) if isinstance(text, Pair) else (text,)
        for mark, side in zip((OPENS, TURNS), sides, strict=False):
            for number, piece in enumerate(pieces(side)):
                batch.append((0 if number else mark, piece))
                size += len(piece)
                if size >= BATCH:
                    yield batch
                    batch, size = [], 0
    if batch:
        yield batch


class Encoded(NamedTuple):
    """The tokens of one batch.

    Attributes:
      tokens: [n].
      starts: [d] int64, where in `tokens` the separators of documents stand that begin in this batch.
      num_bytes: UTF-8 bytes of its text.
      num_unknown: tokens that are [UNK].
    """

    tokens: np.ndarray
    starts: np.ndarray
    num_bytes: int
    num_unknown: int


def encode(batch: list[tuple[int, str]], tokenizer: Tokenizer, dtype: str) -> Encoded:
    """The tokens of some (mark, piece) pairs, each document opened by the tokenizer's separator, each target by its end
    token."""
    ids = tokenizer.encode_batch([piece for _, piece in batch])
    marks = {OPENS: np.array([tokenizer.separator_id], dtype), TURNS: np.array([tokenizer.end_id], dtype)}
    parts, starts, place = [], [], 0
    for (mark, _), found in zip(batch, ids, strict=True):
        if mark == OPENS:
            starts.append(place)
        if mark:
            parts.append(marks[mark])
            place += 1
        parts.append(found.astype(dtype))
        place += len(found)
    tokens = np.concatenate(parts)
    unknown = int(np.count_nonzero(tokens == tokenizer.unk_id))
    return Encoded(tokens, np.array(starts, np.int64), sum(len(piece.encode()) for _, piece in batch), unknown)


def write_split(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    path: Path,
    dtype: str,
    digest: Any,
    compress: bool,
    advance: Advance,
) -> dict[str, Any]:
    """Writes `path`.tokens and `path`.starts, and returns what meta.json says of them."""
    # memLevel 9 as the gzip program has it (the gzip module takes 8): within 0.2 % of the program's size, often equal.
    # wbits 31 is deflate in gzip's container.
    compressors: dict[str, Any] = {
        "gzip -9": zlib.compressobj(9, zlib.DEFLATED, 31, 9),
        "xz -9": lzma.LZMACompressor(preset=9),
    } if compress else {}  # fmt: skip
    compressed = dict.fromkeys(compressors, 0)
    starts = array("q")
    num_tokens = num_bytes = num_unknown = 0
    with BlockWriter(path.with_suffix(".tokens")) as tokens_file:
        for batch in batched(texts):
            found = encode(batch, tokenizer, dtype)
            starts.extend((num_tokens + found.starts).tolist())
            num_tokens += len(found.tokens)
            num_bytes += found.num_bytes
            num_unknown += found.num_unknown
            for name, compressor in compressors.items():
                compressed[name] += sum(len(compressor.compress(piece.encode())) for _, piece in batch)
            advance(found.num_bytes)
            tokens = found.tokens.tobytes()
            digest.update(tokens)
            tokens_file.write(tokens)
    with BlockWriter(path.with_suffix(".starts")) as starts_file:
        starts_file.write(np.asarray(starts, "<i8").tobytes())
    return {
        "num_tokens": num_tokens,
        "num_documents": len(starts),
        "num_bytes": num_bytes,
        "num_unknown": num_unknown,
        "compressed": {name: size + len(compressors[name].flush()) for name, size in compressed.items()},
        "token_sums": tokens_file.sums,
        "start_sums": starts_file.sums,
    }
