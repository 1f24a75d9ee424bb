"""Tokenise text once, on as many machines as there are, into shards that every run reads from then on:

    jaxformer tokenize --config.data.files='books/*.jsonl' --out=tokens --shards=64
    jaxformer pretrain gpt_tiny --config.data.tokens=tokens

An Apache Beam pipeline (extra `beam`). --runner names where it runs, and what follows -- is handed to that runner:

    jaxformer tokenize corpus.py --out=/mnt/tokens --shards=4096 --runner=FlinkRunner -- --flink_master=host:8081

The same text gives the same bytes on any runner, with any number of workers. What is killed goes on where it was when
it is started again. All workers have to see the files and --out under the same names. The tokenizer is that of
--config.data.tokenizer_file, or trained first.
"""

import sys
import time

from jaxformer.data import shards
from jaxformer.runs import tokenization
from jaxformer.runs.command_line import integer, parse_config, parser, workdir_text
from jaxformer.storage.address import place


def main(argv: list[str] | None = None) -> None:
    """Writes the folder and prints what is in it."""
    words = sys.argv[1:] if argv is None else argv
    at = words.index("--") if "--" in words else len(words)
    arguments = parser(__doc__, "tokenize")
    arguments.add_argument("--out", required=True, type=workdir_text, metavar="DIR", help="folder for the shards")
    arguments.add_argument(
        "--shards", type=integer(1, 99_999), default=16, metavar="N", help="of the training text (16)"
    )
    arguments.add_argument("--runner", default="DirectRunner", metavar="NAME", help="Beam's runner (DirectRunner)")
    parsed = parse_config(arguments, words[:at], needed=False)
    options = parsed.options
    tokenization.need_beam()
    began = time.perf_counter()
    out = place(options.out).absolute()
    run = tokenization.beam(out, [f"--runner={options.runner}", *words[at + 1 :]])
    fresh = tokenization.tokenize(parsed.config.data, out, options.shards, run, parsed.source)
    found = shards.read(out)
    for split, about in found.splits.items():
        print(f"{split}: {len(about['tokens'])} tokens, {len(about['starts'])} documents, {about['num_bytes']} bytes")
    seconds = time.perf_counter() - began
    print(f"{out}: corpus {found.fingerprint}; {fresh} shards written in {seconds:.1f} s")
    print(f"to train on it: --config.data.tokens={options.out}")
