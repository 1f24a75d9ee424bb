"""Benchmark jaxformer against alternatives: alternating runs in one session, with medians, ratios and spread.

    jaxformer benchmark --suite=train --shape=tiny     (needs the extra `peers`: torch, transformers)
    jaxformer benchmark --suite=train --shape=gpt2_1_5b --dtype=bfloat16 --rows=8    (on a GPU: see gpu.sh)
    jaxformer benchmark --suite=memory --shape=gpt2    (needs `peers` too)
    jaxformer benchmark --suite=shakespeare --text=tinyshakespeare.txt    (needs `peers` too)
    jaxformer benchmark --suite=pretrain --shape=gpt2 --pairs=1
    jaxformer benchmark --suite=attention --tokens=1024
    jaxformer benchmark --suite=long --tokens=16384    (rows of 1024 tokens and more; --mechanisms for some of them)
    jaxformer benchmark --suite=sparse --tokens=16384    (needs `peers` too)
    jaxformer benchmark --suite=disentangled --shape=bert_512
    jaxformer benchmark --suite=recurrent --tokens=256
    jaxformer benchmark --suite=mixture --shape=tiny --tokens=4096
    jaxformer benchmark --suite=seq2seq --shape=t5_small --task=beam    (needs `peers` too)
    jaxformer benchmark --suite=data
    jaxformer benchmark --suite=import
    jaxformer benchmark --suite=decode --shape=tiny    (needs `peers` too)
    jaxformer benchmark --suite=decode_lengths --shape=tiny
    jaxformer benchmark --suite=sweep --size=0.1 --pairs=1
    jaxformer benchmark --suite=tokenize    (needs the extra `beam`)

--out FILE.jsonl records every single measurement. On a shared machine, times vary: compare ratios, not times.
"""

import importlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jaxformer.benchmarks import seq2seq
from jaxformer.benchmarks.suite import RULER, Suite
from jaxformer.benchmarks.train import SHAPES
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import file_path, integer, parser

SUITES = (
    "attention",
    "data",
    "decode",
    "decode_lengths",
    "disentangled",
    "import",
    "long",
    "memory",
    "mixture",
    "pretrain",
    "recurrent",
    "seq2seq",
    "shakespeare",
    "sparse",
    "sweep",
    "tokenize",
    "train",
)


def main() -> None:
    """Prints one line per contestant: median, range, and the ratio to the first one's median."""
    arguments = parser(__doc__, "benchmark")
    arguments.add_argument("--suite", required=True, choices=SUITES)
    arguments.add_argument(
        "--pairs", type=integer(1), default=7, metavar="N", help="rounds of alternating runs (default 7)"
    )
    every = (*SHAPES, *(name for name in seq2seq.SHAPES if name not in SHAPES))
    arguments.add_argument(
        "--shape",
        default="tiny",
        choices=every,
        help="train, pretrain, memory, decode, mixture, disentangled, seq2seq: the model",
    )
    arguments.add_argument("--task", choices=seq2seq.TASKS, default="train", help="seq2seq: what is measured")
    arguments.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="train, pretrain, memory, attention, long, sparse, recurrent, decode, mixture, disentangled, seq2seq",
    )
    arguments.add_argument(
        "--tokens",
        type=integer(1),
        default=1024,
        help="attention, sparse, recurrent: length of a row; long: of the longest; mixture: at once",
    )
    arguments.add_argument("--shortest", type=integer(1), default=1024, help="long: length of the shortest row")
    arguments.add_argument("--only", metavar="TEXT", help="train: the contestants whose names contain it (default all)")
    arguments.add_argument("--mechanisms", metavar="NAME,NAME", help="long: which of them (default all)")
    arguments.add_argument(
        "--rows",
        type=integer(1),
        metavar="N",
        help="decode: prompts at once (default 1); train, disentangled, seq2seq: of a step",
    )
    arguments.add_argument("--size", type=float, default=0.1, choices=(0.1, 0.5, 2.0), help="sweep: million parameters")
    arguments.add_argument("--text", type=file_path, metavar="FILE", help="shakespeare, tokenize: the text")
    arguments.add_argument("--out", type=file_path, help="JSONL file to append every measurement to")
    options = arguments.parse_args()
    berts = [name for name, shape in SHAPES.items() if shape.family == "bert"]
    known = {"seq2seq": [*seq2seq.SHAPES], "disentangled": berts}.get(options.suite, [*SHAPES])
    if options.shape not in known:
        raise ConfigError(f"--shape: {options.shape}; --suite={options.suite} accepts {', '.join(known)}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the other contestants need GPU memory too
    # Imports only the chosen suite: the others may need packages that are not installed.
    name = {"import": "imports"}.get(options.suite, options.suite)
    suite: Suite = importlib.import_module(f"jaxformer.benchmarks.{name}").contestants(options)
    measured = alternate(suite.contestants, options.pairs, warm_up=0 if suite.whole else 1)
    for line in lines(suite, measured):
        print(line)
    for line in suite.summary(measured):
        print(line)
    if options.out is not None:
        asked = {key: value for key, value in vars(options).items() if key not in ("out", "text")}
        with open(options.out, "a") as file:
            for name, (unit, values) in measured.items():
                record = {"name": name, "measured": values, "in": unit, "work": suite.work, "unit": suite.unit}
                file.write(json.dumps({**asked, **record, "flop": suite.flop.get(name)}) + "\n")


def alternate(
    contestants: Mapping[str, Callable[[], float | None]], rounds: int, warm_up: int = 1
) -> dict[str, tuple[str, list[float]]]:
    """Unit and values of each contestant, without the warm-up rounds: seconds, or the MiB that it returned."""
    found: dict[str, tuple[str, list[float]]] = {}
    for number in range(warm_up + rounds):
        for name, run in contestants.items():
            began = time.perf_counter()
            mebibytes = run()
            seconds = time.perf_counter() - began
            if number >= warm_up:
                unit, value = ("s", seconds) if mebibytes is None else ("MiB", mebibytes)
                found.setdefault(name, (unit, []))[1].append(value)
    return found


def lines(suite: Suite, measured: Mapping[str, tuple[str, list[float]]]) -> Iterator[str]:
    """One line per contestant: median, range, work per second, and the ratio to the first median in its unit."""
    firsts: dict[str, float] = {}
    ruler = suite.flop.get(RULER, 0.0) / float(np.median(measured[RULER][1])) if RULER in measured else None
    for name, (unit, values) in measured.items():
        median = float(np.median(values))
        first = firsts.setdefault(unit, median)
        shown, factor = ("ms", 1e3) if unit == "s" else (unit, 1.0)
        text = f"{name}: median {factor * median:.4g} {shown}, {factor * min(values):.4g} to {factor * max(values):.4g}"
        if suite.work and name != RULER and unit == "s":
            text += f", {suite.work / median:,.4g} {suite.unit}/s"
        if name in suite.flop:
            rate = suite.flop[name] / median
            text += f", {rate / 1e9:.4g} GFLOP/s"
            if ruler is not None and name != RULER:
                text += f" ({rate / ruler:.2f} of a large product's)"
            if suite.peak:
                text += f" ({rate / suite.peak:.3f} of the chip's peak)"
        yield text if name == RULER else f"{text}, {median / first:.3f} of the first"
