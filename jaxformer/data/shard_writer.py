"""Writes the folders that `shards` reads.

>>> import tempfile
>>> folder = Path(tempfile.mkdtemp())
>>> tokenizer = tokenizers.train("bytes", [], None)
>>> for split in ("train", "validation"):
...     for number, texts in enumerate((["to be", "or"], ["not to be"])):
...         _ = write(folder, split, number, texts, tokenizer, about="example")
>>> finish(folder, tokenizer, {"train": 2, "validation": 2}, about="example")
>>> tokenised = shards.read(folder)
>>> tokenised.splits["train"]["tokens"][:3].tolist() == [tokenizer.separator_id, *tokenizer.encode("to")]
True
>>> np.asarray(tokenised.splits["train"]["starts"]).tolist(), tokenised.splits["train"]["num_bytes"]
([0, 6, 9], 16)
"""

import contextlib
import json
import os
import secrets
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.data import checked_array, encoding, shards, tokenizers  # noqa: F401
from jaxformer.data.lazy_array import BLOCK_BYTES
from jaxformer.data.position_hash import PositionHash
from jaxformer.data.shards import COUNTS, FORMAT, MANIFEST, MOST_SHARD, dtype, name
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.storage import files, json_checksum, ranged, scratch


def write(
    folder: Path,
    split: str,
    number: int,
    texts: Iterable[str],
    tokenizer: Tokenizer,
    *,
    about: str,
    num_skipped: int = 0,
) -> dict[str, Any]:
    """Writes one shard, unless it is there already; a kill leaves it absent or whole.

    Args:
      folder: exists.
      split, number: of the shard.
      texts: its documents; read only if the shard is not there.
      tokenizer: makes their tokens.
      about: what the shard is made of; another shard of this name is written again.
      num_skipped: lines and examples of the split left out before; counted at shard 0.

    Returns:
      What the shard's json says.

    Raises:
      OSError: the folder cannot be written.
    """
    base = name(split, number)
    found = _finished(folder, base, about)
    if found is not None:
        return found
    mark = f".{os.getpid()}-{secrets.token_hex(4)}"
    starts, hashed = array("q"), PositionHash()
    num_bytes = num_unknown = 0
    with scratch.beside(folder) as here, contextlib.ExitStack() as stack:
        temporary = {ending: here / f".{base}.{ending}{mark}" for ending in ("tokens", "starts")}
        for path in temporary.values():
            stack.callback(path.unlink, missing_ok=True)
        with checked_array.BlockWriter(temporary["tokens"], BLOCK_BYTES) as tokens_file:
            for batch in encoding.encoded(texts, tokenizer, dtype(tokenizer)):
                starts.extend((batch.starts + hashed.count).tolist())
                hashed.update(batch.tokens)
                num_bytes += batch.num_bytes
                num_unknown += batch.num_unknown
                tokens_file.write(batch.tokens.tobytes())
        with checked_array.BlockWriter(temporary["starts"], BLOCK_BYTES) as starts_file:
            starts_file.write(np.asarray(starts, "<i8").tobytes())
        for ending, path in temporary.items():
            files.move_here(folder / f"{base}.{ending}", path)
    made = {
        "about": about, "num_tokens": hashed.count, "num_documents": len(starts), "num_bytes": num_bytes,
        "num_unknown": num_unknown, "num_skipped": num_skipped, "hash": f"{hashed.value:016x}",
        "token_sums": tokens_file.sums, "start_sums": starts_file.sums,
    }  # fmt: skip
    files.write_atomically(folder / f"{base}.json", _json(made))
    return made


def is_finished(folder: Path, split: str, number: int, about: str, sizes: Mapping[str, int] | None = None) -> bool:
    """True if that shard is there, whole, and made of what `about` says; `sizes` of the folder's files, if known."""
    return _finished(folder, name(split, number), about, sizes) is not None


def finish(folder: Path, tokenizer: Tokenizer, counts: dict[str, int], about: str) -> None:
    """Writes tokenizer.json and the manifest of a folder all of whose shards are there; `counts` of each split.

    Raises:
      ConfigError: a shard is missing; OSError: the folder cannot be written.
    """
    splits: dict[str, list[dict[str, Any]]] = {}
    sizes = ranged.sizes(folder)
    for split, count in counts.items():
        splits[split] = []
        for number in range(count):
            base = name(split, number)
            found = _finished(folder, base, about, sizes)
            if found is None:
                raise ConfigError(f"--out: {folder}: {base} is missing; start again, and it is written")
            entry = {key: found[key] for key in (*COUNTS, "hash")}
            splits[split].append({**entry, "json": json_checksum.digest(_json(found))})
    tokenizer.save(folder)
    manifest = {
        "format": FORMAT, "dtype": dtype(tokenizer), "tokenizer": json_checksum.digest(tokenizer.content()),
        "about": about, "splits": splits,
    }  # fmt: skip
    files.write_atomically(folder / MANIFEST, json.dumps(json_checksum.add_checksum(manifest), indent=1))


def _json(made: dict[str, Any]) -> bytes:
    """The file that says what a shard holds."""
    return json.dumps(json_checksum.add_checksum(made)).encode()


def _finished(folder: Path, base: str, about: str, sizes: Mapping[str, int] | None = None) -> dict[str, Any] | None:
    """What the json of a shard says, if all of the shard is there."""
    if sizes is not None and f"{base}.json" not in sizes:
        return None
    found = json_checksum.read_verified(folder / f"{base}.json", MOST_SHARD)
    if found is None or found["about"] != about:
        return None
    try:
        names = [f"{base}.{ending}" for ending in ("tokens", "starts")]
        there = [files.look(folder / each)[0] if sizes is None else sizes[each] for each in names]
    except (FileNotFoundError, KeyError):
        return None
    tokens, starts = there
    whole = starts == 8 * found["num_documents"] and tokens in (2 * found["num_tokens"], 4 * found["num_tokens"])
    return found if whole else None
