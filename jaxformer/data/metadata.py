"""meta.json of a cached corpus: describes its files, with checksums of them and of itself. Reading it checks all of it,
because a cache is not trusted."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.data import checked_array, tokenizers
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import DamagedCacheError
from jaxformer.storage import files, json_checksum

META = "meta.json"
_MOST_BYTES = 1 << 26  # enough for 8 TB of tokens
_COUNTS = ("num_tokens", "num_documents", "num_bytes", "num_unknown", "num_skipped")


def write(folder: Path, about: dict[str, Any]) -> None:
    """Writes meta.json: `about`, and a checksum of it. Raises OSError."""
    files.write_atomically(folder / META, json.dumps(json_checksum.add_checksum(about), indent=1))


def read(folder: Path) -> dict[str, Any]:
    """meta.json of a folder.

    Returns:
      "key", "settings", "dtype", "fingerprint", "tokenizer" (checksum), and of each split "num_tokens",
      "num_documents", "num_bytes", "num_unknown", "compressed", "token_sums", "start_sums".

    Raises:
      DamagedCacheError: it is missing, not what was written, or holds impossible values.
    """
    about = json_checksum.read_verified(folder / META, _MOST_BYTES)
    if about is None:
        raise DamagedCacheError(f"{META} is not what was written")
    try:
        possible = about["dtype"] in ("<u2", "<u4") and all(
            _possible(about[split]) for split in ("train", "validation")
        )
    except (KeyError, TypeError, AttributeError):
        possible = False
    if not possible:
        raise DamagedCacheError(f"{META} holds impossible values")
    return about


def read_tokenizer(folder: Path, about: dict[str, Any]) -> Tokenizer:
    """The tokenizer beside a meta.json. Raises DamagedCacheError if it is not the one that was written."""
    name = tokenizers.FILE_NAME
    try:
        content = files.read_bytes(folder / name, tokenizers.MOST_BYTES)
    except OSError as error:
        raise DamagedCacheError(f"{name}: {error.strerror}") from None
    if json_checksum.digest(content) != about.get("tokenizer"):
        raise DamagedCacheError(f"{name} is not what was written")
    try:
        return Tokenizer.parse(content.decode(), folder / name)
    except ValueError as error:  # ConfigError is one
        raise DamagedCacheError(f"{name}: {error}") from None


def read_split(folder: Path, split: str, about: dict[str, Any], tokenizer: Tokenizer, at_once: float) -> list[Any]:
    """[tokens, starts] of a split, memory-mapped.

    Args:
      folder: of the corpus.
      split: "train" or "validation".
      about: meta.json.
      tokenizer: every token id must be one of its ids.
      at_once: a file of at most this many bytes is verified now and returned as a plain np.memmap; a longer one is a
        CheckedArray, which verifies before use.

    Raises:
      DamagedCacheError: a file is not what was written.
    """
    sizes, out = about[split], []
    for name, dtype, count, sums, most in (
        ("tokens", about["dtype"], sizes["num_tokens"], sizes["token_sums"], tokenizer.vocab_size - 1),
        ("starts", "<i8", sizes["num_documents"], sizes["start_sums"], sizes["num_tokens"] - 1),
    ):
        try:
            array = checked_array.CheckedArray(
                folder / f"{split}.{name}", dtype, sums, most=most, failed=DamagedCacheError
            )
        except OSError as error:
            raise DamagedCacheError(f"{split}.{name}: {error.strerror}") from None
        if len(array) != count:
            raise DamagedCacheError(f"{split}.{name} holds {len(array)} numbers, not {count}")
        out.append(np.asanyarray(array) if array.nbytes <= at_once or name == "starts" else array)
    starts = np.asarray(out[1])
    if starts[0] != 0 or not (starts[1:] > starts[:-1]).all():
        raise DamagedCacheError(f"{split}.starts holds impossible values")
    return out


def _possible(split: dict[str, Any]) -> bool:
    counts = [*split["compressed"].values(), *(split[name] for name in _COUNTS)]
    numbers = all(isinstance(count, int) and 0 <= count < 2**53 for count in counts)
    texts = isinstance(split["token_sums"], str) and isinstance(split["start_sums"], str)
    return numbers and texts and split["num_tokens"] >= split["num_documents"] > 0
