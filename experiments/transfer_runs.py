"""What studies of learning from other weights share: runs that are planned, trained and kept, and means over seeds.

Every run is a `jaxformer pretrain` in a folder of the workdir, one after the other in one process, so that those of one
shape share their compiled programs. How each ended is in records.jsonl of the results.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer import records
from jaxformer.config import Config, from_mapping, load
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import Parsed, file_path, integer, parser
from jaxformer.runs.pretrain import pretrain
from jaxformer.runtime.program import keep_compiled_programs
from jaxformer.scaling.comparison import student
from jaxformer.storage import files
from jaxformer.training.progress import duration

KEPT = (
    "step", "tokens", "loss", "loss_stderr", "accuracy", "accuracy_stderr", "majority_accuracy", "divergence", "params",
    "flops", "status", "wall_seconds",
)  # fmt: skip
TRIAL = 1000  # seed of the runs that choose a learning rate; none of those that count has it
WIDTH, PRETRAINING_STEPS, SEEDS = 64, 2500, 5


class Planned(NamedTuple):
    """A run of a study.

    Attributes:
      name: of its folder.
      config: what it is a run of.
      changes: field -> text.
      about: what its record says besides how it ended.
    """

    name: str
    config: str
    changes: dict[str, str]
    about: dict[str, Any]


class Mean(NamedTuple):
    """A mean over seeds and its 95 % interval (Student's); of one seed there is none: nan."""

    value: float
    low: float
    high: float

    def text(self, form: str = ".3f") -> str:
        """As a cell of a table."""
        if not np.isfinite(self.low):
            return f"{self.value:{form}}"
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


def over_seeds(values: Sequence[float]) -> Mean:
    """The mean of some values with its interval.

    >>> over_seeds([0.5, 0.7, 0.6]).text()
    '0.600 [0.352, 0.848]'
    >>> over_seeds([0.5]).text("+.1f")
    '+0.5'
    """
    array = np.asarray(values, float)
    if len(array) < 2:
        return Mean(float(array.mean()), np.nan, np.nan)
    half = student(0.975, len(array) - 1) * array.std(ddof=1) / np.sqrt(len(array))
    return Mean(float(array.mean()), float(array.mean() - half), float(array.mean() + half))


def select(found: Sequence[dict[str, Any]], **about: Any) -> list[dict[str, Any]]:
    """The records that say all of this, by seed; runs that choose a learning rate only if asked for by their seed."""
    mine = [each for each in found if all(each.get(name) == value for name, value in about.items())]
    return sorted((each for each in mine if "seed" in about or each.get("seed") != TRIAL), key=lambda r: r["seed"])


def paired(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], field: str) -> Mean | None:
    """The mean over seeds that both have of the difference one - other; None: they have none in common."""
    ours, theirs = ({each["seed"]: each[field] for each in side} for side in (one, other))
    both = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    return over_seeds(both) if both else None


def unfinished(found: Sequence[dict[str, Any]], places: Sequence[dict[str, Any]]) -> list[str]:
    """Lines for a page where not all seeds of all places, each what their records say, have ended; else none."""
    fewest = min(len(select(found, **about)) for about in places)
    if fewest >= SEEDS:
        return []
    return [f"Not all runs have ended yet ({fewest} of {SEEDS} seeds in some places); the command below goes on.", ""]


def best_rate(found: Sequence[dict[str, Any]], field: str = "accuracy", **about: Any) -> str | None:
    """The learning rate of the best of the runs that choose it, more of `field` being better, then less loss; None:
    they have not all ended."""
    trials = select(found, seed=TRIAL, **about)
    if not trials or len(trials) < len(trials[0]["rates"]):
        return None
    return str(max(trials, key=lambda each: (each[field], -each["loss"]))["rate"])


def pretrained(workdir: Path, width: int = WIDTH, steps: int = PRETRAINING_STEPS) -> Planned:
    """The run that the others start from, or learn from: bert_tiny, narrower and for longer."""
    changes = {"model.width": str(width), "train.steps": str(steps), "train.eval_every_steps": "500"}
    return Planned("pretrained", "bert_tiny", changes, {"arm": "pretraining", "seed": 0})


def parsed_of(planned: Planned, workdir: Path) -> Parsed:
    """The command line of a run."""
    given = {**planned.changes, "workdir": str(workdir / planned.name)}
    config: Config = from_mapping(load(planned.config), given)
    return Parsed(config, [], planned.config, given, argparse.Namespace())


def read(out: Path) -> list[dict[str, Any]]:
    """The records that a folder of results has so far."""
    path = out / "records.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def keep(out: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Adds a record to those of a folder of results, in place of one of the same run if it is of one; returns all."""
    name = record.get("run")
    found = [each for each in read(out) if name is None or each["run"] != name] + [record]
    files.write_atomically(out / "records.jsonl", ("\n".join(map(json.dumps, found)) + "\n").encode())
    return found


def ended(planned: Planned, workdir: Path) -> dict[str, Any] | None:
    """The record of a run that has ended, with its loss as [FLOP, loss] at each evaluation on the way; else None."""
    path = workdir / planned.name / "records.jsonl"
    found = records.latest(records.load(path)) if path.exists() else []
    end = next((each for each in found if each["kind"] == "final"), None)
    if end is None:
        return None
    kept = {name: round(end[name], 6) if isinstance(end[name], float) else end[name] for name in KEPT if name in end}
    each_token = end["flops"] / end["tokens"]
    evaluations = [each for each in found if each["kind"] == "eval" and each.get("split", "validation") == "validation"]
    curve = [[each["tokens"] * each_token, round(each["loss"], 4)] for each in evaluations]
    return {"run": planned.name, **planned.about, **kept, **({"curve": curve} if len(curve) > 1 else {})}


def train(runs: Sequence[Planned], workdir: Path, out: Path, plan_only: bool = False) -> bool:
    """Trains the runs that have no record yet, one after the other, each from where it stopped.

    Returns:
      False: a signal ended it, or it was only to be planned and there is something to do; the same command goes on.
    """
    for each in runs:
        record = ended(each, workdir)
        if record is not None:
            keep(out, record)
    known = {each["run"]: each for each in read(out)}
    todo = [each for each in runs if each.name not in known]
    spent = [each["wall_seconds"] for name, each in known.items() if "wall_seconds" in each and name != "pretrained"]
    left = f", about {duration(len(todo) * float(np.median(spent)))}" if spent and todo else ""
    print(f"{len(runs)} runs, {len(todo)} to do{left}: {', '.join(each.name for each in todo) or 'none'}", flush=True)
    for number, each in enumerate(todo if not plan_only else (), 1):
        print(f"\n== run {number} of {len(todo)}: {each.name}", flush=True)
        if pretrain(parsed_of(each, workdir)).status == "interrupted":
            return False
        record = ended(each, workdir)
        assert record is not None
        keep(out, record)
    return not (plan_only and todo)


def study_flags(about: str, name: str, workdir: str | None, **numbers: int) -> argparse.ArgumentParser:
    """The flags of a study with records and a page, some numbers of at least 1. `workdir` None: it needs none."""
    flags = parser(about, name)
    flags.add_argument("--out", type=file_path, required=True, metavar="DIR", help="folder of records and page")
    if workdir is not None:
        flags.add_argument("--workdir", type=file_path, default=Path(workdir), help="of the runs")
    flags.add_argument("--stage", choices=("train", "report"), help="one stage alone (default: both)")
    flags.add_argument("--plan-only", action="store_true", help="print what would be trained, and end")
    for option, value in numbers.items():
        flags.add_argument(f"--{option.replace('_', '-')}", type=integer(1), default=value, help=f"default: {value}")
    return flags


def arguments(about: str, name: str, steps: int, width: int = WIDTH) -> argparse.ArgumentParser:
    """The flags of such a study."""
    numbers = {"seeds": SEEDS, "width": width, "pretraining_steps": PRETRAINING_STEPS, "steps": steps}
    return study_flags(about, name, "runs/transfer", **numbers)


def write(folder: Path, figures: dict[str, Any], page: str) -> list[Path]:
    """Writes figures (bytes of SVG) and README.md of a folder; returns the paths."""
    for name, drawn in figures.items():
        files.write_atomically(folder / f"{name}.svg", drawn)
    files.write_atomically(folder / "README.md", page.encode())
    return [*(folder / f"{name}.svg" for name in figures), folder / "README.md"]


def checked(out: Path) -> list[dict[str, Any]]:
    """The records of a folder. Raises ConfigError: there are none yet."""
    found = read(out)
    if not found:
        raise ConfigError(f"--out: {out} has no records.jsonl yet; accepted: --stage=train first")
    return found


def study(
    options: argparse.Namespace,
    run: Callable[[argparse.Namespace], bool],
    figures: Callable[[list[dict[str, Any]]], dict[str, Any]],
    page: Callable[[list[dict[str, Any]]], str],
) -> None:
    """Trains what is missing, and writes figures and page; what `--stage` says of it.

    Args:
      options: as of `arguments`.
      run: trains; False: there is more to do.
      figures, page: records -> bytes of SVG by name, and text.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage != "report":
        keep_compiled_programs()
        if not run(options):
            return
    if options.stage != "train":
        found = checked(options.out)
        for path in write(options.out, figures(found), page(found)):
            print(path)
