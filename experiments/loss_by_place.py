"""What the mechanisms of a comparison do at one size: the loss by a token's place in its document, and their speed.

    python -m experiments.loss_by_place --out=experiments/results/mechanisms --runs=runs/places

For every ladder in the folder that has ended, the run of one width that its largest budget allows is trained again by
itself, with the rate that was best there, and measured on the whole held-out text. Then all of them make updates in
turns. What is in places.jsonl is not done again, nor are the turns while speed.jsonl has all ladders.
`experiments.multipliers` shows both on its page.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.loss_by_place_page import PLACES, SPEED, lines_of
from jaxformer import records
from jaxformer.config import from_mapping
from jaxformer.errors import ConfigError
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs.command_line import Parsed, file_path, integer, parser
from jaxformer.runs.comparing import RECORDS
from jaxformer.runs.evaluation import evaluate
from jaxformer.runs.pretrain import pretrain
from jaxformer.runtime.program import program
from jaxformer.scaling.ladder import LadderRun, StudyConfig, run_config
from jaxformer.training.optim import make_optimizer
from jaxformer.training.step import compile_steps
from jaxformer.types import Batch

WIDTH, ROUNDS, UPDATES = 60, 7, 20


def ladders(out: Path) -> dict[str, Path]:
    """Name -> folder of the ladders that have ended. Raises ConfigError: there is none."""
    found = {path.parent.name: path.parent for path in sorted(out.glob(f"*/{RECORDS}"))}
    if not found:
        raise ConfigError(f"--out: {out} has no ladder that ended; accepted: the folder of a comparison")
    return found


def longest_run(folder: Path, width: int) -> tuple[Any, dict[str, Any]]:
    """(its config, its final record): of a width, the run with the most updates and then the least loss."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    study: StudyConfig = from_mapping(manifest["config"], {}, StudyConfig)
    finals = [each for each in records.load(folder / RECORDS, more=records.STUDY) if each["kind"] == "final"]
    mine = [each for each in finals if each["width"] == width]
    if not mine:
        raise ConfigError(f"--width: {width}; accepted: {', '.join(str(each) for each in study.ladder.widths)}")
    best = max(mine, key=lambda each: (each["step"], -each["loss"]))
    run = LadderRun(best["run"], width, best["step"], best["learning_rate"], best["seed"], "ladder")
    vocab = study.model.vocab_size or study.data.tokenizer_vocab
    return run_config(replace(study, model=replace(study.model, vocab_size=vocab)), run), best


def trained(name: str, folder: Path, runs: Path, width: int) -> dict[str, Any]:
    """The record of a ladder: its run trained again, and its loss by place."""
    config, before = longest_run(folder, width)
    workdir = runs / name
    config = replace(config, workdir=str(workdir))
    pretrain(Parsed(config, [], "", {"workdir": str(workdir)}, argparse.Namespace()))
    found = evaluate(workdir, by_position=True)
    of = {key: before[key] for key in ("run", "step", "tokens", "params", "flops")}
    whole = {key: found[key] for key in ("loss", "loss_stderr")}
    return {"variant": name, **of, "loss_in_ladder": before["loss"], **whole, "by_position": found["by_position"]}


def updates(folder: Path, width: int) -> Any:
    """A function that makes `UPDATES` updates of a ladder's model and returns their seconds."""
    config, _ = longest_run(folder, width)
    config = replace(config, execution=replace(config.execution, steps_per_dispatch=UPDATES))
    mesh, model = make_mesh(config.mesh, jax.devices()[:1]), make_model(config.model, config.loss, config.execution)
    with jax.set_mesh(mesh):
        steps = compile_steps(model, make_optimizer(config.optimizer, config.train.steps, model.specs), mesh, config)
        rows, length = config.train.global_batch_size, config.model.context_length
        tokens = np.random.default_rng(0).integers(0, config.model.vocab_size or 1, (rows, length), dtype=np.int32)
        at = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
        memory = config.model.memory or 0
        before = {"memory_tokens": tokens[:, :memory], "memory_positions": at[:, :memory],
                  "memory_segments": np.ones((rows, memory), np.int32)}  # fmt: skip
        arrays: Any = (tokens, tokens, np.ones(tokens.shape, np.float32), at + memory, np.ones_like(tokens),
                       before if memory else None)  # fmt: skip
        batch = Batch(*arrays)
        chunk = steps.place_chunk([batch] * UPDATES)
        state = [steps.init()]

    def run() -> float:
        with jax.set_mesh(mesh):
            since = time.perf_counter()
            state[0], metrics = steps.train(state[0], *chunk)
            jax.block_until_ready(metrics)
            return time.perf_counter() - since

    run()
    return run


def speeds(found: dict[str, Path], width: int) -> list[dict[str, Any]]:
    """A record for each: seconds of `UPDATES` updates, in turns."""
    made = {name: updates(folder, width) for name, folder in found.items()}
    seconds = [{name: run() for name, run in made.items()} for _ in range(ROUNDS)]
    config, _ = longest_run(next(iter(found.values())), width)
    tokens = UPDATES * config.train.global_batch_size * config.model.context_length
    return [
        {"variant": name, "width": width, "tokens": tokens, "seconds": [round(each[name], 6) for each in seconds]}
        for name in found
    ]


def main() -> None:
    """Trains and measures what is not there yet."""
    arguments = parser(__doc__, "loss_by_place")
    arguments.add_argument("--out", type=file_path, required=True, metavar="DIR", help="folder with the ladders")
    arguments.add_argument("--runs", type=file_path, required=True, metavar="DIR", help="where runs are kept")
    arguments.add_argument("--width", type=integer(1), default=WIDTH, help="of all runs")
    options = arguments.parse_args()
    found, places = ladders(options.out), options.out / PLACES
    done = {each["variant"] for each in lines_of(places)}
    for name, folder in found.items():
        if name not in done:
            record = trained(name, folder, options.runs, options.width)
            with open(places, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    if {each["variant"] for each in lines_of(options.out / SPEED)} != found.keys():
        text = "".join(json.dumps(each) + "\n" for each in speeds(found, options.width))
        (options.out / SPEED).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    program(main)
