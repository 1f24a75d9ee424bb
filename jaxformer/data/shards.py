"""Token shards: a folder of tokenised text, in as many files as were asked for, written by `jaxformer tokenize`.

    tokens.json                     the manifest, written last: a folder without it is not finished
    tokenizer.json                  what made the tokens
    train-00000.tokens              uint16 or uint32, little-endian; each document opened by the tokenizer's separator
    train-00000.starts              int64: where in this file each document's separator stands
    train-00000.json                counts, and CRC-32 of each 64 KiB block of both files; written after them
    validation-00000.tokens  ...    the held-out text in the same way

Documents are never cut: each lies whole in one shard, and the shards end to end are the text in its order. The manifest
holds for each shard its counts and the hash of its json file, so that a few megabytes are read at start-up, and nothing
else before a token of a shard is asked for.

`shard_writer` writes it, and has an example.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.data import checked_array, tokenizers
from jaxformer.data.lazy_array import LazyArray, Part
from jaxformer.data.position_hash import PositionHash, joined
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.storage import files, json_checksum, ranged

MANIFEST = "tokens.json"
FORMAT = 1
SPLITS = ("train", "validation")
_MOST_MANIFEST = 1 << 28  # a million shards
MOST_SHARD = 1 << 28  # 2 TB of tokens in one shard
COUNTS = ("num_tokens", "num_documents", "num_bytes", "num_unknown", "num_skipped")


class Tokenised(NamedTuple):
    """A text that is tokens already.

    Attributes:
      tokenizer: what made them.
      fingerprint: 16 hexadecimal digits of all tokens and the tokenizer, however they are cut into shards.
      splits: "train" and "validation" -> tokens, starts, num_bytes, num_unknown, compressed, num_skipped, as of
        `corpus.Split`.
      directory: where the files are.
    """

    tokenizer: Tokenizer
    fingerprint: str
    splits: dict[str, dict[str, Any]]
    directory: Path


def name(split: str, number: int) -> str:
    """Of a shard's files, without ending.

    >>> name("train", 7)
    'train-00007'
    """
    return f"{split}-{number:05}"


def dtype(tokenizer: Tokenizer) -> str:
    """Of the tokens in a shard."""
    return "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"


def read(folder: Path, *, verify: bool = False) -> Tokenised:
    """The tokens of a folder: its manifest is read and the sizes of its files are looked at, no more.

    Args:
      folder: with a manifest.
      verify: also read every token, and compare all with their checksums.

    Raises:
      ConfigError: something is missing, or is not what was written. Also raised by an array, when damage is found as
        it is used.
    """
    about = manifest(folder)
    tokenizer = _tokenizer(folder, about)
    try:
        sizes = ranged.sizes(folder)
    except OSError as error:
        raise _failed(folder, error.strerror or str(error), error) from None
    splits: dict[str, dict[str, Any]] = {}
    hashes: list[Any] = []
    for split in SPLITS:
        entries = about["splits"][split]
        parts: dict[str, list[Part]] = {"tokens": [], "starts": []}
        before = 0
        for number, entry in enumerate(entries):
            base = name(split, number)
            shard = functools.partial(_shard, folder, base, entry)
            for ending, kind, count, most, add in (
                ("tokens", about["dtype"], entry["num_tokens"], tokenizer.vocab_size - 1, 0),
                ("starts", "<i8", entry["num_documents"], max(entry["num_tokens"] - 1, 0), before),
            ):
                file, wanted = f"{base}.{ending}", count * np.dtype(kind).itemsize
                if sizes.get(file) != wanted:
                    has = f"has {sizes[file]} bytes, not {wanted}" if file in sizes else "is missing"
                    raise _failed(folder, f"{file} {has}")
                part = Part(
                    file, functools.partial(ranged.open_ranged, folder / file, wanted), kind, count,
                    sums=functools.partial(_sums, shard, ending), most=most, failed=functools.partial(_failed, folder),
                    add=add,
                )  # fmt: skip
                parts[ending].append(part)
            before += entry["num_tokens"]
        arrays = {"tokens": LazyArray(parts["tokens"], about["dtype"]), "starts": LazyArray(parts["starts"], "<i8")}
        if not len(arrays["starts"]):
            raise _failed(folder, f"no document in {split}")
        hashes += [f"{joined((int(e['hash'], 16), e['num_tokens']) for e in entries):016x}", before]
        total = {count: sum(entry[count] for entry in entries) for count in COUNTS[2:]}
        splits[split] = {**arrays, **total, "compressed": {}}
        if verify:
            _verify(folder, arrays["tokens"], arrays["starts"], hashes[-2])
    fingerprint = hashlib.sha256(json.dumps([tokenizer.fingerprint, hashes]).encode()).hexdigest()[:16]
    return Tokenised(tokenizer, fingerprint, splits, folder)


def manifest(folder: Path) -> dict[str, Any]:
    """What the manifest says. Raises ConfigError: there is none, or it is not what was written."""
    try:
        about = json_checksum.verified(json_checksum.parse(files.read_bytes(folder / MANIFEST, _MOST_MANIFEST)))
    except FileNotFoundError:
        begun = any(folder.glob("train-*.json")) if folder.is_dir() else False
        why = "was begun and not finished: start jaxformer tokenize again" if begun else f"has no {MANIFEST}"
        raise ConfigError(
            f"config.data.tokens: {folder} {why}; accepted: a folder that jaxformer tokenize wrote, or .bin files"
        ) from None
    except OSError as error:
        raise _failed(folder, f"{MANIFEST}: {error.strerror or error}", error) from None
    except ValueError:
        about = None
    try:
        if about is None or about["format"] != FORMAT or about["dtype"] not in ("<u2", "<u4"):
            raise ValueError
        for split in SPLITS:
            for entry in about["splits"][split]:
                if not all(isinstance(entry[count], int) and 0 <= entry[count] < 2**53 for count in COUNTS):
                    raise ValueError
                int(entry["hash"], 16)
                entry["json"].encode()
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _failed(folder, f"{MANIFEST} is not what was written") from None
    return about


def _verify(folder: Path, tokens: LazyArray, starts: LazyArray, wanted: str) -> None:
    hashed, step = PositionHash(), 1 << 22
    for begin in range(0, len(tokens), step):
        hashed.update(tokens[begin : begin + step])
    for begin in range(0, len(starts), step):
        starts[begin : begin + step]
    if f"{hashed.value:016x}" != wanted:
        raise _failed(folder, "the tokens are not those of the manifest")


def _tokenizer(folder: Path, about: dict[str, Any]) -> Tokenizer:
    try:
        content = files.read_bytes(folder / tokenizers.FILE_NAME, tokenizers.MOST_BYTES)
    except OSError as error:
        raise _failed(folder, f"{tokenizers.FILE_NAME}: {error.strerror or error}", error) from None
    if json_checksum.digest(content) != about.get("tokenizer"):
        raise _failed(folder, f"{tokenizers.FILE_NAME} is not the one that the tokens were made by")
    return Tokenizer.parse(content.decode(), folder / tokenizers.FILE_NAME)


def _shard(folder: Path, base: str, entry: dict[str, Any]) -> dict[str, Any]:
    """The json of a shard, which the manifest's entry has the hash of."""
    try:
        content = files.read_bytes(folder / f"{base}.json", MOST_SHARD)
        if json_checksum.digest(content) != entry["json"]:
            raise _failed(folder, f"{base}.json is not what was written")
    except OSError as error:
        raise _failed(folder, f"{base}.json: {error.strerror or error}", error) from None
    return json_checksum.parse(content)


def _sums(shard: Any, ending: str) -> np.ndarray:
    return checked_array.numbers(shard()["token_sums" if ending == "tokens" else "start_sums"])


def _failed(folder: Path, problem: str, error: OSError | None = None) -> ConfigError:
    if error is not None and not isinstance(error, FileNotFoundError):  # nothing says that what was written is damaged
        return ConfigError(f"config.data.tokens: {folder}: {problem}")
    return ConfigError(
        f"config.data.tokens: {folder}: {problem}; remove {MANIFEST} and the .json of that shard, and start "
        "jaxformer tokenize again: it writes what is missing"
    )
