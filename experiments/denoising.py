"""Objectives that hide text, on a Markov language: how close models come to the least loss that any model can have.

    python -m experiments.denoising --workdir=runs/denoising --out=experiments/results/denoising
    python -m experiments.denoising --workdir=runs/denoising --out=experiments/results/denoising --only=mixture

Each run is a `jaxformer pretrain` in a folder of the workdir, one after the other. The same command continues after a
stop; what has run is in records.jsonl of the results, from which figure and page are made anew each time.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer import records
from jaxformer.config import Config, from_mapping, load
from jaxformer.data.markov import Markov
from jaxformer.data.markov_spans import distant_entropies, span_bracket
from jaxformer.data.rows import Lengths
from jaxformer.data.span_sizes import counts, longest, pair_sizes
from jaxformer.errors import ProgramError
from jaxformer.runs.command_line import file_path, parser
from jaxformer.runtime.program import program
from jaxformer.scaling import plotting
from jaxformer.storage import files

RUNS: dict[str, tuple[str, str, dict[str, str]]] = {  # name -> what it is, config, changes
    "span_corruption": (
        "T5's spans",
        "denoising_entropy:span_corruption",
        {"train.steps": "5000", "train.eval_every_steps": "1000"},
    ),
    "spans_of_32": (
        "T5's spans, 32 symbols",
        "denoising_entropy:span_corruption",
        {
            "train.steps": "5000",
            "train.eval_every_steps": "1000",
            "train.eval_rows": "1280",
            "data.language_symbols": "32",
        },
    ),
    "last_span": ("UL2's S alone", "denoising_entropy:last_span", {}),
    "prefix_lm": ("prefix LM, a GPT", "denoising_entropy:prefix_lm", {}),
    "mixture": (
        "UL2's mixture",
        "denoising_entropy:mixture",
        {"train.steps": "5000", "train.eval_every_steps": "1000"},
    ),
    "regular": (
        "UL2's R alone",
        "denoising_entropy:mixture",
        {"train.steps": "5000", "train.eval_every_steps": "1000", "data.ul2.sequential": "0", "data.ul2.extreme": "0"},
    ),
}
KEPT = ("kind", "run", "step", "tokens", "loss", "loss_stderr", "floor", "floor_stderr", "params", "seconds")


def train(name: str, workdir: Path) -> None:
    """One run, from where it stopped.

    Raises:
      ProgramError: it failed; with the last line that it said.
    """
    _, config, changes = RUNS[name]
    flags = [f"--config.{field}={value}" for field, value in {"workdir": str(workdir / name), **changes}.items()]
    done = subprocess.run([sys.executable, "-m", "jaxformer", "pretrain", config, *flags], check=False)
    if done.returncode:
        raise ProgramError(f"{name} ended with exit code {done.returncode}")


def finished(name: str, workdir: Path) -> list[dict[str, Any]]:
    """The evaluations and the end of a run; nothing of one that has not ended."""
    path = workdir / name / "records.jsonl"
    found = records.latest(records.load(path)) if path.exists() else []
    if not any(each["kind"] == "final" for each in found):
        return []
    kept = [each | {"run": name} for each in found if each["kind"] in ("eval", "final")]
    return [{key: each[key] for key in KEPT if key in each} for each in kept]


def gather(workdir: Path, out: Path) -> list[dict[str, Any]]:
    """The records of all finished runs: those that the results have, and new ones."""
    path = out / "records.jsonl"
    before = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    found: list[dict[str, Any]] = []
    for name in RUNS:
        found += finished(name, workdir) or [each for each in before if each["run"] == name]
    if found:
        files.write_atomically(path, ("\n".join(map(json.dumps, found)) + "\n").encode())
    return found


def end_of(found: Sequence[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The final record of a run."""
    return next((each for each in found if each["run"] == name and each["kind"] == "final"), None)


def above(record: dict[str, Any], floor: float) -> float:
    """How far a loss is above its floor, as a part of it."""
    return record["loss"] / floor - 1


def blind(config: Config) -> float | None:
    """About what a model loses on hidden spans that does not look at its source, in nats per target token: the first
    symbol of each span is drawn anew, and others depend on the one before. None: other objectives.

    Between this and the floor lies all that cross attention can gain.
    """
    settings = config.data.span_corruption
    if config.data.objective != "span_corruption" or settings is None:
        return None
    shape = Lengths(config.model.context_length, config.source_length)
    size = functools.partial(pair_sizes, rate=settings.noise_rate, mean_span=settings.mean_span, more=0)
    tokens = longest([size], shape)
    language = Markov(config.data.language_symbols, 1, config.data.language_zipf, config.data.language_seed)
    hidden, spans = (int(each[0]) for each in counts(np.array([tokens]), settings.noise_rate, settings.mean_span))
    bracket = span_bracket(language, tokens, settings.noise_rate, settings.mean_span, roll=settings.roll)
    alone = float(distant_entropies(language, 64)[-1])  # of a symbol by itself
    nats = spans * alone + (hidden - spans) * language.entropy_rate + bracket.high - bracket.low
    return nats / bracket.tokens


def figure(found: Sequence[dict[str, Any]]) -> Any:
    """How far each run is above its floor, against the target tokens that it has seen."""
    with plotting.matplotlib().rc_context(plotting.STYLE | {"font.size": 13.0, "legend.fontsize": 12.0}):
        drawn, axes = plotting.panel()
        mine = [name for name in RUNS if end_of(found, name)]
        for i, name in enumerate(mine):
            floor = (end_of(found, name) or {})["floor"]
            curve = [each for each in found if each["run"] == name and each["kind"] == "eval"]
            axes.plot(
                [each["tokens"] / 1e6 for each in curve], [100 * above(each, floor) for each in curve],
                label=RUNS[name][0], marker=plotting.marker(i), **plotting.line_style(i, len(mine)),
            )  # fmt: skip
        axes.axhline(1.0, color="0.5", linewidth=1, linestyle=":")
        axes.set(yscale="log", xlabel="million target tokens", ylabel="above the floor, %")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return drawn


def page(found: Sequence[dict[str, Any]]) -> str:
    """The page, in Markdown."""
    rows, missing = [], []
    for name, (label, _, _) in RUNS.items():
        end = end_of(found, name)
        if end is None:
            missing.append(name)
            continue
        loss, floor = (f"{end[key]:.4f} ± {end[f'{key}_stderr']:.4f}" for key in ("loss", "floor"))
        unseeing = blind(from_mapping(load(RUNS[name][1]), RUNS[name][2]))
        cells = [label, str(end["step"]), floor, loss, f"{100 * above(end, end['floor']):.2f} %"]
        cells.append("" if unseeing is None else f"{unseeing:.4f}")
        rows.append(f"| {' | '.join(cells)} |")
    rest = [
        "",
        f"Not trained yet: {', '.join(missing)}; the command above goes on with them.",
    ]
    return "\n".join([
        "# denoising: objectives that hide text, beside the least loss of any model",
        "",
        "    python -m experiments.denoising --workdir=runs/denoising --out=experiments/results/denoising",
        "",
        "On text of a Markov language (of 8 symbols unless said) the least loss of each objective is known "
        "(`jaxformer/data/markov_spans.py`). Losses are of all held-out text, in nats per target token, with standard "
        "errors; no run may end below its floor. Two layers of width 128 on each side.",
        "",
        "![how far each run is above its floor, against the target tokens seen](above.svg)",
        "",
        "| objective | updates | floor | loss | above it | without looking at the source |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        "The last column is about what a model loses that does not look at its source: it draws the first symbol of a "
        "span anew, and knows from the target alone how much is left to restore. Between it and the floor lies all "
        "that cross attention can gain.",
        "",
        "What they are worth to a model of novels, at equal FLOP: [objectives](../objectives/README.md).",
        *(rest if missing else []),
        "",
    ])  # fmt: skip


def main() -> None:
    """Trains what is missing, gathers records, and writes figure and page."""
    arguments = parser(__doc__, "denoising")
    arguments.add_argument("--out", type=file_path, required=True, metavar="DIR", help="folder of records and page")
    arguments.add_argument("--workdir", type=file_path, default=Path("runs/denoising"), help="of the runs")
    arguments.add_argument("--only", choices=tuple(RUNS), help="one run alone (default: all)")
    arguments.add_argument("--stage", choices=("train", "report"), help="one stage alone (default: both)")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in RUNS if options.only is None else (options.only,):
        if options.stage != "report" and not end_of(gather(options.workdir, options.out), name):
            train(name, options.workdir)
    if options.stage != "train":
        found = gather(options.workdir, options.out)
        files.write_atomically(options.out / "above.svg", plotting.encoded(figure(found), "svg", bbox_inches="tight"))
        files.write_atomically(options.out / "README.md", page(found).encode())
        print(options.out / "README.md")


if __name__ == "__main__":
    program(main)
