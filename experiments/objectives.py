"""Which objective prepares a small model best to go on with a text: five of them, on novels, at equal FLOP.

    python -m experiments.objectives --files='books/train-*.txt.xz' --validation=books/validation.txt.xz \\
        --out=experiments/results/objectives
    python -m experiments.objectives --out=experiments/results/objectives --stage=report

The losses of objectives that hide different tokens cannot be compared. So each run is tuned on one task afterwards:
to write what follows a stretch of a novel, the same pairs of stretches, in the same tokens, for all. `scratch` makes
all its updates on that task. The same command continues after a stop: runs are kept in the workdir, how they ended in
records.jsonl.
"""

import math
from pathlib import Path
from typing import Any

from experiments import stretches
from experiments.objectives_page import ARMS, figure, page
from experiments.transfer_runs import Planned, parsed_of, study, study_flags, train
from jaxformer.errors import ConfigError
from jaxformer.models.flops import training_flops
from jaxformer.runtime.program import program
from jaxformer.storage import files

LEAST_FLOP = 1e12  # a fifth of it is tens of updates
FLOP, TUNING = 1e13, 0.2  # of the first part of a run, and of tuning as a part of it
SEEDS = 3
PAIRS, HELD_OUT, HELD_OUT_TEXTS = 30_000, 2000, 500
TRAIN_BYTES = 24_000_000
FIELDS = {  # of the task: where its texts are in a line
    "pairs": {"data.source_field": "source", "data.target_field": "target"},
    "instructions": {"data.text_field": "source", "data.labelled.label_field": "target"},
}


def config_of(kind: str) -> str:
    """The config of a run."""
    return f"pretraining_objectives:{kind}"


def prepare(options: Any) -> dict[str, Path]:
    """Writes what all runs share, and returns where it is: a tokenizer, pairs, held-out pairs and held-out texts.

    Raises:
      ConfigError: it is not there yet, and no files were given; or there are none.
    """
    names = {"tokenizer": "tokenizer.json"} | stretches.FILES | {"texts": "texts.txt"}
    paths = {name: options.workdir / file for name, file in names.items()}
    if all(path.exists() for path in paths.values()):
        return paths
    for flag in ("files", "validation"):
        if not getattr(options, flag):
            raise ConfigError(f"--{flag}: none; accepted: a glob of text files, or --stage=report")
    training = stretches.pairs_of("files", options.files, options.separator, PAIRS)
    held_out = stretches.pairs_of("validation", options.validation, options.separator, HELD_OUT)
    stretches.write(options.workdir, training, held_out)
    texts = ["".join(pair) for pair in held_out[:: max(len(held_out) // HELD_OUT_TEXTS, 1)]]
    files.write_atomically(paths["texts"], options.separator.join(texts).encode())
    return paths


def steps(kind: str, flop: float, workdir: Path) -> int:
    """The updates of a kind of run that so much compute pays for."""
    tuned_on = {"data.files": "x.jsonl", **FIELDS.get(kind, {})}
    config = parsed_of(Planned(kind, config_of(kind), tuned_on, {}), workdir).config
    tokens = config.model.context_length * config.train.global_batch_size
    return round(flop / (tokens * training_flops(config.model, config.data)))


def task_fields(kind: str, paths: dict[str, Path]) -> dict[str, str]:
    """What changes where a run learns the task."""
    return {"data.files": str(paths["pairs"]), "data.validation_files": str(paths["held_out"]), **FIELDS[kind]}


def pretraining(arm: str, seed: int, options: Any, paths: dict[str, Path]) -> Planned:
    """The first part of a run."""
    kind, flop = ARMS[arm].kind, options.flop
    given = {
        "seed": str(seed), "train.steps": str(steps(kind, flop, options.workdir)), "checkpoint.keep": "1",
        "data.tokenizer_file": str(paths["tokenizer"]),
    }  # fmt: skip
    if kind in FIELDS:
        given |= task_fields(kind, paths)
    else:
        given |= {
            "data.files": options.files, "data.validation_files": str(paths["texts"]),
            "data.separator": options.separator, "data.max_train_bytes": str(TRAIN_BYTES),
        }  # fmt: skip
    about = {"arm": arm, "part": "pretraining", "seed": seed}
    return Planned(f"{arm},seed={seed}", config_of(kind), given, about)


def tuning(arm: str, seed: int, options: Any, paths: dict[str, Path]) -> Planned:
    """The second part: the task, from the weights of the first."""
    kind = ARMS[arm].task
    count = steps(kind, options.flop * TUNING, options.workdir)
    given = {
        "seed": str(seed), "train.steps": str(count), "optimizer.learning_rate": "2e-3", "checkpoint.keep": "1",
        "init_from": str(options.workdir / f"{arm},seed={seed}"), "train.eval_every_steps": str(count),
        "optimizer.warmup_steps": str(count // 10), **task_fields(kind, paths),
    }  # fmt: skip
    return Planned(f"{arm},seed={seed},tuned", config_of(kind), given, {"arm": arm, "part": "tuning", "seed": seed})


def run(options: Any) -> bool:
    """Trains what is missing, seed by seed. Returns False: it was stopped, or only planned."""
    paths = prepare(options)
    parts = pretraining, tuning
    planned = [part(arm, seed, options, paths) for seed in range(options.seeds) for arm in ARMS for part in parts]
    return train(planned, options.workdir, options.out, options.plan_only) and not options.plan_only


def main() -> None:
    """Trains what is missing, and writes figure and page."""
    flags = study_flags(__doc__, "objectives", "runs/objectives", seeds=SEEDS)
    flags.add_argument("--files", help="texts to learn from: a glob")
    flags.add_argument("--validation", help="other texts, held out: a glob")
    flags.add_argument("--separator", default="\f", help="between documents (default: a form feed)")
    flags.add_argument("--flop", type=float, default=FLOP, help="of the first part of a run (default: 1e13)")
    options = flags.parse_args()
    if not LEAST_FLOP <= options.flop < math.inf:
        raise ConfigError(f"--flop: {options.flop:g}; accepted: a finite number, at least {LEAST_FLOP:g}")
    if not options.separator:
        raise ConfigError("--separator: ''; accepted: the text between two documents")
    for flag in ("out", "workdir"):
        if getattr(options, flag).is_file():
            raise ConfigError(f"--{flag}: {getattr(options, flag)} is a file; accepted: a folder")
    study(options, run, lambda found: {"loss": figure(found)}, page)


if __name__ == "__main__":
    program(main)
