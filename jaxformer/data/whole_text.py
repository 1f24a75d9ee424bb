"""Files as one held-out text, whole, in the tokens of a tokenizer that exists: to evaluate a run on other text."""

import hashlib
from pathlib import Path

import numpy as np

from jaxformer.config import DataConfig
from jaxformer.data import ingest, text_files
from jaxformer.data.corpus import Split
from jaxformer.data.faults import Faults
from jaxformer.data.progress_bars import bars
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.errors import ConfigError


def read(data: DataConfig, tokenizer: Tokenizer, folder: Path, *, progress: bool = True) -> tuple[Split, list[Path]]:
    """All text of data.files, none of it left to train on, and the files that it is in.

    Args:
      data: files; separator, text_field and on_error say how they are read.
      tokenizer: makes the tokens.
      folder: empty, for the tokens, which are memory-mapped: keep it while they are used.
      progress: show on standard error what is done.

    Raises:
      ConfigError: as of `text_files.find` and `text_files.documents`; the text changes while it is read.
    """
    files = text_files.find(data.files, "data.files")

    def texts(faults: Faults):
        for path in files:
            yield from text_files.documents(
                path, separator=data.separator, text_field=data.text_field, field="data.files", faults=faults
            )

    faults = Faults(data.on_error)
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    with bars(progress) as bar:
        size = sum(len(text.encode()) for text in ingest.watched(texts(faults), bar("reading the text", None)))
        if progress:
            ingest.tell_left_out(faults, "the text")
        about = ingest.write_split(
            texts(Faults(data.on_error)), tokenizer, folder / "text", dtype, hashlib.sha256(),
            size <= ingest.COMPRESS_BYTES, bar("tokenising the text", size),
        )  # fmt: skip
    if about["num_bytes"] != size:
        raise ConfigError("config.data.files: the text changed while it was read; start again when nobody writes to it")
    tokens, starts = (
        np.memmap(folder / f"text.{name}", kind, mode="r") for name, kind in (("tokens", dtype), ("starts", "<i8"))
    )
    split = Split(tokens, starts, size, about["num_unknown"], about["compressed"], faults.count)
    return split, files
