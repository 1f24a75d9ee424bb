"""Long rows: what each mechanism costs, what it still finds in them, and how near two of them come to attention.

    python -m experiments.long_context --out=experiments/results/long_context
    python -m experiments.long_context --out=experiments/results/long_context --only=slopes --tokens=65536
    python -m experiments.long_context --out=experiments/results/long_context --stage=report

Four parts: slopes of time and memory against the row (needs a quiet machine), FAVOR's error against its features,
recall of needles, Reformer's duplication. What has been measured is in records.jsonl of the results; the same command
goes on with the rest, and makes figures and page anew each time.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments import long_context_favor, long_context_figures, long_context_page, long_context_tasks
from experiments.transfer_runs import keep, read, write
from jaxformer.benchmarks.long import MECHANISMS, lengths
from jaxformer.benchmarks.suite import process
from jaxformer.errors import ConfigError, ProgramError
from jaxformer.runs.command_line import file_path, integer, parser
from jaxformer.runtime.program import keep_compiled_programs, program
from jaxformer.scaling import plotting

Point = dict[str, Any]  # what tells a record from the others of its part
TRAINED = ("full", "4", "2", "1")  # rounds that duplication is trained with


class Part(NamedTuple):
    """One part of the study.

    Attributes:
      points: options -> what is to be measured, one record each, in order.
      measure: (point, options) -> what else its record says.
    """

    points: Callable[[Any], Iterator[Point]]
    measure: Callable[[Point, Any], dict[str, Any]]


def rows(options: Any) -> Iterator[Point]:
    """Every mechanism at every length that it is measured with, short rows first."""
    asked = list(MECHANISMS) if options.mechanisms is None else options.mechanisms.split(",")
    for name in asked:
        if name not in MECHANISMS:
            raise ConfigError(f"--mechanisms: {name!r} is not one of {', '.join(MECHANISMS)}")
    for tokens in lengths(options.tokens):
        for name in asked:
            if tokens <= (MECHANISMS[name].longest or tokens):
                yield {"mechanism": name, "tokens": tokens}


def cost(point: Point, options: Any) -> dict[str, Any]:
    """Seconds of each run and MiB of temporaries, forward and backward, by `jaxformer benchmark` in its own process."""
    tokens, about = point["tokens"], {"threads": len(os.sched_getaffinity(0)), "jax": jax.__version__}
    about |= {"load": round(os.getloadavg()[0], 2)}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.jsonl"
        suite = "--suite=long", f"--mechanisms={point['mechanism']}", f"--tokens={tokens}", f"--shortest={tokens}"
        process("-m", "jaxformer", "benchmark", *suite, f"--pairs={options.pairs}", f"--out={out}")
        measured = {each["in"]: each for each in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    return {"seconds": measured["s"]["measured"], "mib": measured["MiB"]["measured"][0], **about}


def seeds_of(name: str, values: tuple[str, ...]) -> Callable[[Any], Iterator[Point]]:
    """The points of a part with a model for each value and seed; the first seed of all comes first."""

    def points(options: Any) -> Iterator[Point]:
        for seed in range(options.seeds):
            yield from ({name: value, "seed": seed} for value in values)

    return points


PARTS: dict[str, Part] = {
    "favor": Part(
        lambda options: (each._asdict() for each in long_context_favor.estimates()),
        lambda point, options: long_context_favor.measure(long_context_favor.Estimate(**point)),
    ),
    "needle": Part(
        seeds_of("mixer", tuple(long_context_tasks.MIXERS)), lambda point, options: long_context_tasks.needle(**point)
    ),
    "duplication": Part(
        seeds_of("trained", TRAINED), lambda point, options: long_context_tasks.duplication(**point)
    ),
    "slopes": Part(rows, cost),
}  # fmt: skip


def missing(part: str, found: list[dict[str, Any]], options: Any) -> Iterator[Point]:
    """The points of a part that no record is of."""
    mine = [each for each in found if each["part"] == part]
    for point in PARTS[part].points(options):
        if not any(point.items() <= each.items() for each in mine):
            yield point


def run(part: str, options: Any) -> None:
    """Measures what is missing of a part; each record is kept as soon as it is there. A benchmark that fails, as for
    want of memory, is said, and stays missing."""
    for point in list(missing(part, read(options.out), options)):
        try:
            record = {"part": part, **point, **PARTS[part].measure(point, options)}
        except ProgramError as error:
            print(f"{part}, {point}: {error}", flush=True)
            continue
        keep(options.out, record)
        print(json.dumps(record), flush=True)


def main() -> None:
    """Measures what is missing, and writes records, figures and page."""
    arguments = parser(__doc__, "long_context")
    arguments.add_argument("--out", type=file_path, required=True, metavar="DIR", help="folder of records and page")
    arguments.add_argument("--only", choices=tuple(PARTS), help="one part alone (default: all)")
    arguments.add_argument("--stage", choices=("measure", "report"), help="one stage alone (default: both)")
    arguments.add_argument("--tokens", type=integer(1), default=65536, help="slopes: of the longest row")
    arguments.add_argument("--mechanisms", metavar="NAME,NAME", help="slopes: which of them (default all)")
    arguments.add_argument("--pairs", type=integer(1), default=5, metavar="N", help="slopes: runs of each")
    arguments.add_argument("--seeds", type=integer(1), default=3, help="needle, duplication: models of each")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage != "report":
        keep_compiled_programs()
        for part in PARTS if options.only is None else (options.only,):
            run(part, options)
    if options.stage != "measure":
        found = read(options.out)
        drawn = {
            name: plotting.encoded(draw(mine), "svg", bbox_inches="tight")
            for name, draw in long_context_figures.FIGURES.items()
            if (mine := long_context_page.of_part(found, name))
        }
        for path in write(options.out, drawn, long_context_page.page(found)):
            print(path)


if __name__ == "__main__":
    program(main)
