"""The source "tokens": text that was tokenised before, by `jaxformer tokenize`, by Megatron's or by nanoGPT's tools.

Nothing is copied to the cache and no text is read. Of our own shards the manifest says all there is to know. Of other
files the tokenizer has to be given; their bytes are those that it says their tokens stand for.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.config.registry import special_tokens
from jaxformer.data import foreign_tokens, shards, text_files
from jaxformer.data.foreign_tokens import Portion, SeparatorPlaces
from jaxformer.data.shards import Tokenised
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError
from jaxformer.storage.address import place

_ENDING = (".bin",)
_EXACTLY = 1 << 27  # tokens whose bytes are counted; of a longer training text, those of a spread sample are scaled up


def open_tokens(data: DataConfig, *, verify: bool = False) -> Tokenised:
    """The tokens that data.tokens names.

    Args:
      data: tokens, validation_tokens, validation_fraction, tokenizer_file.
      verify: also read every token of our own shards, and compare all with their checksums.

    Raises:
      ConfigError: something is missing or not what was written, the tokens are another tokenizer's; one line. Also
        raised by the arrays, when damage is found as they are used.
    """
    try:
        return _opened(data, verify)
    except OSError as error:
        raise ConfigError(f"config.data.tokens: {data.tokens[0]}: {error.strerror or error}") from None


def _opened(data: DataConfig, verify: bool) -> Tokenised:
    more = special_tokens(data)
    given = Tokenizer.load(data.tokenizer_file).with_tokens(more) if data.tokenizer_file is not None else None
    if (folder := own_folder(data)) is not None:
        if data.validation_tokens:
            raise ConfigError(
                f"config.data.validation_tokens: {data.validation_tokens[0]!r}; {folder} has held-out text "
                "of its own; accepted: none"
            )
        found = shards.read(folder, verify=verify)
        if given is not None and given.fingerprint != found.tokenizer.with_tokens(more).fingerprint:
            raise ConfigError(
                f"config.data.tokens: {folder} was made by the tokenizer {found.tokenizer.fingerprint}, and "
                f"{data.tokenizer_file} is {given.fingerprint}; accepted: shards made by the same"
            )
        return found
    if given is None:
        raise ConfigError(
            "config.data.tokenizer_file: None; .bin files do not say what made them; accepted: their tokenizer.json"
        )
    return _foreign(data, given)


def own_folder(data: DataConfig) -> Path | None:
    """The folder of our own shards, where data.tokens is one; None: other files."""
    if len(data.tokens) != 1:
        if ours := [each for each in data.tokens if (place(each) / shards.MANIFEST).exists()]:
            raise ConfigError(
                f"config.data.tokens: {ours[0]} and {len(data.tokens) - 1} more; accepted: one folder of token shards, "
                "or several as the sources of a data.mixture"
            )
        return None
    folder = place(data.tokens[0])
    foreign = folder.is_dir() and not (folder / shards.MANIFEST).exists() and any(folder.glob("*.bin"))
    return None if foreign or folder.suffix == ".bin" or "*" in str(folder) else folder


def documents(data: DataConfig, *_: Any) -> Iterator[str]:
    """Raises ConfigError: there is no text to read."""
    raise ConfigError("config.data.source: tokens; its text is tokenised already; accepted here: a source of text")


def _foreign(data: DataConfig, tokenizer: Tokenizer) -> Tokenised:
    paths = {"train": _find(data.tokens, "data.tokens")}
    if data.validation_tokens:
        paths["validation"] = _find(data.validation_tokens, "data.validation_tokens")
        paths["train"] = [path for path in paths["train"] if path not in paths["validation"]]
    elif held := [path for path in paths["train"] if "val" in path.stem.split("_")]:  # val.bin, fineweb_val_000000.bin
        paths = {"train": [path for path in paths["train"] if path not in held], "validation": held}
    if not paths["train"]:
        raise ConfigError("config.data.tokens: every file is held out; nothing is left to train on")
    most, arrays, digests = tokenizer.vocab_size - 1, {}, [tokenizer.fingerprint]
    for split, files in paths.items():
        streams = [foreign_tokens.open_stream(path, most, "data.tokens") for path in files]
        if len({stream.documents is None for stream in streams}) > 1:
            raise ConfigError("config.data.tokens: some files have an .idx and some do not; accepted: all or none")
        arrays[split] = foreign_tokens.stream_to_array(
            streams, tokenizer.separator_id, most, lambda problem: ConfigError(f"config.data.tokens: {problem}")
        )
        digests += [split, *(stream.fingerprint for stream in streams)]
    if "validation" not in arrays:
        arrays, share = _cut(arrays["train"], data.validation_fraction, tokenizer.separator_id)
        digests.append(str(share))
    splits = {}
    for split, tokens in arrays.items():
        starts = getattr(tokens, "starts", None)
        splits[split] = {
            "tokens": tokens,
            "starts": SeparatorPlaces(tokens, tokenizer.separator_id) if starts is None else starts,
            "num_bytes": _bytes(tokens, tokenizer.token_bytes, _EXACTLY if split == "train" else len(tokens)),
            "num_unknown": 0, "num_skipped": 0, "compressed": {},
        }  # fmt: skip
    fingerprint = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16]
    return Tokenised(tokenizer, fingerprint, splits, paths["train"][0].parent)


def _find(patterns: tuple[str, ...], field: str) -> list[Path]:
    found = [f"{place(pattern)}/*.bin" if place(pattern).is_dir() else pattern for pattern in patterns]
    return text_files.find(tuple(found), field, _ENDING)


def _cut(tokens: Any, fraction: float, separator: int) -> tuple[dict[str, Any], int]:
    """Both splits, and where the held-out one begins: at the first document after its share of the tokens."""
    if fraction == 0:
        raise ConfigError(
            "config.data.validation_fraction: 0.0 holds nothing out; set it above 0, or set data.validation_tokens"
        )
    begin, step = int(len(tokens) * (1 - fraction)), 1 << 20
    for at in range(max(begin, 1), len(tokens), step):
        here = np.flatnonzero(tokens[at : at + step] == separator)
        if len(here):
            cut = at + int(here[0])
            return {"train": Portion(tokens, 0, cut), "validation": Portion(tokens, cut, len(tokens))}, cut
    raise ConfigError(
        f"config.data.validation_fraction: {fraction}; no document begins in the last {len(tokens) - begin} tokens; "
        "accepted: a larger one, or data.validation_tokens"
    )


def _bytes(tokens: Any, token_bytes: np.ndarray, most: int) -> int:
    """UTF-8 bytes of the tokens: exactly, of at most `most`; scaled up from so many evenly spread ones otherwise."""
    step = 1 << 20
    begins = range(0, len(tokens), step)
    chosen = begins if len(tokens) <= most else begins[:: -(-len(tokens) // most)]
    counted, total = 0, 0
    for begin in chosen:
        ids = tokens[begin : begin + step]
        counted += len(ids)
        total += int(token_bytes[ids].sum(dtype=np.int64))
    return total if counted == len(tokens) else round(total * len(tokens) / max(counted, 1))
