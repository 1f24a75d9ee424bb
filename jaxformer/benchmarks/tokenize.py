"""Tokenising a text into shards beside the library `tokenizers` alone, which does the same work and writes nothing."""

import itertools
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jaxformer.benchmarks.suite import Suite
from jaxformer.config import DataConfig
from jaxformer.data import ingest, sources
from jaxformer.data.tokenizers import Tokenizer
from jaxformer.runs import tokenization

SHARDS, FILES = 16, 8


def contestants(options) -> Suite:
    """`tokenizers` alone on text that lies in memory; our shards in this process; by Beam with one process, and two.

    The text is that of --text, or the standard library's. All have the same tokenizer, trained on it before.
    """
    given = DataConfig() if options.text is None else DataConfig(files=(str(options.text),))
    folder = Path(tempfile.mkdtemp(prefix="jaxformer-tokenize-"))
    texts = list(itertools.chain.from_iterable(sources.documents(given, split) for split in sources.SPLITS))
    for number in range(FILES):
        lines = [json.dumps({"text": text}) for text in texts[number::FILES]]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    data = DataConfig(files=(str(folder / "*.jsonl"),), tokenizer_vocab=32_000)
    tokenization.tokenize(data, folder / "first", SHARDS, here)
    data = replace(data, tokenizer_file=str(folder / "first" / "tokenizer.json"))
    backend = Tokenizer.load(folder / "first")._backend
    batches = [[piece for _, piece in batch] for batch in ingest.batched(texts)]

    def alone() -> None:
        for batch in batches:
            backend.encode_batch_fast(batch, add_special_tokens=False)

    def ours(run: Callable[[Path], tokenization.Run]) -> None:
        out = folder / "out"
        tokenization.tokenize(data, out, SHARDS, run(out))
        shutil.rmtree(out)

    def beam(*flags: str) -> Callable[[], None]:
        return lambda: ours(lambda out: tokenization.beam(out, ["--runner=DirectRunner", *flags]))

    found = {
        "tokenizers alone": alone,
        "shards, in this process": lambda: ours(lambda out: here),
        "shards, by Beam in one process": beam(),
        "shards, by Beam in two processes": beam("--direct_num_workers=2", "--direct_running_mode=multi_processing"),
    }
    return Suite(found, "bytes", sum(len(text.encode()) for text in texts))


def here(function, items) -> None:
    """Does the items one after the other, in this process."""
    for item in items:
        function(item)
