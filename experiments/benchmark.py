"""Measure jaxformer beside what one would use instead: alternating runs in one session, medians, ratios and spread.

    python -m experiments.benchmark --suite=train --shape=tiny     (needs the extra `peers`: torch, transformers)
    python -m experiments.benchmark --suite=attention --tokens=1024
    python -m experiments.benchmark --suite=data
    python -m experiments.benchmark --suite=import
    python -m experiments.benchmark --suite=decode --shape=tiny    (needs the extra `peers` as well)
    python -m experiments.benchmark --suite=sweep --size=0.1 --pairs=1

--out FILE.jsonl keeps every single measurement. Timings on a shared machine wander: believe ratios, not times.
"""

import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments.benchmarks.train import SHAPES
from jaxformer.command_line import parser
from jaxformer.config import ConfigError
from jaxformer.process import program

SUITES = ("attention", "data", "decode", "import", "sweep", "train")


def main() -> None:
    """Prints one line per contestant: median, spread, and the ratio to the first."""
    arguments = parser(__doc__, "benchmark")
    arguments.add_argument("--suite", required=True, choices=SUITES)
    arguments.add_argument("--pairs", type=int, default=7, metavar="N", help="rounds of alternating runs (default 7)")
    arguments.add_argument("--shape", default="tiny", choices=SHAPES, help="train, decode: the GPT's shape")
    arguments.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="train, attention, decode"
    )
    arguments.add_argument("--tokens", type=int, default=1024, help="attention: length of the row")
    arguments.add_argument("--rows", type=int, default=1, metavar="N", help="decode: prompts at once (default 1)")
    arguments.add_argument("--size", type=float, default=0.1, choices=(0.1, 0.5, 2.0), help="sweep: million parameters")
    arguments.add_argument("--out", type=Path, help="JSONL file to append every measurement to")
    options = arguments.parse_args()
    if options.pairs < 1:
        raise ConfigError(f"--pairs: {options.pairs}; accepted: at least 1")
    # Only the suite that is asked for is imported: others may need what is not installed.
    name = {"import": "imports"}.get(options.suite, options.suite)
    contestants, unit, work = importlib.import_module(f"experiments.benchmarks.{name}").contestants(options)
    times = alternate(contestants, options.pairs)
    first = None
    for name, found in times.items():
        median = float(np.median(found))
        first = median if first is None else first
        rate = f", {work / median:,.4g} {unit}/s" if work else ""
        print(f"{name}: median {1e3 * median:.4g} ms, {1e3 * min(found):.4g} to {1e3 * max(found):.4g}{rate}, "
              f"{median / first:.3f} of the first")  # fmt: skip
        if options.out is not None:
            record = {"suite": options.suite, "name": name, "seconds": found, "work": work, "unit": unit}
            record |= {key: value for key, value in vars(options).items() if key not in ("out", "suite")}
            with open(options.out, "a") as file:
                file.write(json.dumps(record) + "\n")


def alternate(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant in every round, after one round that only warms up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    program(main)
