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
from typing import Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data import sources, tokenizers
from jaxformer.data.checked_array import BlockWriter
from jaxformer.data.contents import Contents
from jaxformer.data.faults import Faults
from jaxformer.data.progress_bars import Advance, Bar, say
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.storage import json_checksum

FORMAT = 2  # raised whenever the same text and settings would give other files
SAMPLE_BYTES = 30_000_000  # of the training text, evenly spread, that a BPE is trained on
COMPRESS_BYTES = 32_000_000  # held-out text above this is not compressed for comparison: xz -9 does 2 MB/s
PIECE = 1 << 16  # characters the tokenizer is given at once: one long document also keeps all cores busy
BATCH = 1 << 20  # characters of one call; while it runs each token takes some hundred bytes
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
        if faults[split].count:
            what, are = ("lines or examples", "are") if faults[split].count > 1 else ("line or example", "is")
            say(
                f"{faults[split].count} {what} of the {split} text cannot be read and {are} left out; the "
                f"first: {faults[split].first}"
            )
    tokenizer = given if given is not None else _tokenizer(data, lambda: documents("train"), sizes["train"], bar)
    tokenizer.save(folder)
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    digest = hashlib.sha256(tokenizer.fingerprint.encode())
    about: dict[str, Any] = {"dtype": dtype, "tokenizer": json_checksum.digest(tokenizer.content())}
    for split in sources.SPLITS:
        advance = bar(f"tokenising the {split} text", sizes[split])
        compress = split == "validation" and sizes[split] <= COMPRESS_BYTES
        about[split] = _write(documents(split), tokenizer, folder / split, dtype, digest, compress, advance)
        about[split]["num_skipped"] = faults[split].count
        if not about[split]["num_documents"]:
            raise ConfigError(f"config.data: the {split} text is empty (data.max_train_bytes {data.max_train_bytes})")
    contents.confirm(sources.inputs(data), hash_again=not sources.SOURCES[str(data.source)].opens_files)
    return about | {"fingerprint": digest.hexdigest()[:16]}


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
    return tokenizers.train(data.tokenizer, _watched(spread(texts, train_bytes, wanted), advance), data.tokenizer_vocab)


def _watched(texts: Iterable[str], advance: Advance) -> Iterator[str]:
    for text in texts:
        yield text
        advance(len(text.encode()))


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[bool, str]]]:
    """(opens a document, piece) pairs in lists of about BATCH characters."""
    batch: list[tuple[bool, str]] = []
    size = 0
    for text in texts:
        for number, piece in enumerate(pieces(text)):
            batch.append((number == 0, piece))
            size += len(piece)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _write(
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
    separator = np.array([tokenizer.separator_id], dtype)
    with BlockWriter(path.with_suffix(".tokens")) as tokens_file:
        for batch in _batches(texts):
            parts = []
            for (opens, piece), ids in zip(batch, tokenizer.encode_batch([piece for _, piece in batch]), strict=True):
                if opens:
                    starts.append(num_tokens)
                    parts.append(separator)
                    num_tokens += 1
                parts.append(ids.astype(dtype))
                num_tokens += len(ids)
                num_unknown += int(np.count_nonzero(ids == tokenizer.unk_id))
                encoded = piece.encode()
                num_bytes += len(encoded)
                for name, compressor in compressors.items():
                    compressed[name] += len(compressor.compress(encoded))
                advance(len(encoded))
            tokens = np.concatenate(parts).tobytes()
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
