"""Does the best learning rate of a small model stay the best of a larger one? muP beside the standard parametrisation.

    python -m experiments.rate_transfer --out=experiments/results/transfer
    python -m experiments.rate_transfer --out=experiments/results/transfer --stage=report

GPTs of growing width, and of growing depth, each trained with five learning rates a factor of 2 apart, under both
parametrisations. muP promises that the best of the five stays where it is. One seed of every model is trained before
the next begins. The same command continues after a stop: runs that have ended are in records.jsonl of the results.

`--ablations` adds two variants of muP, by which others explain most of its effect: the rate of the tables falls with
the width as that of the matrices does, and weight decay is not multiplied. Sources: Yang et al. 2022, figure 1; Dey et
al. 2025.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.rate_transfer_optima import FACTORS
from experiments.rate_transfer_page import figure, page
from experiments.transfer_runs import keep, read, study, study_flags
from jaxformer.config import Config, from_mapping
from jaxformer.data.mixture import open_text
from jaxformer.models.flops import count_parameters, training_flops
from jaxformer.modules import make_model
from jaxformer.runs import texts
from jaxformer.runs.command_line import integer
from jaxformer.runs.pretrain import fit_vocabulary
from jaxformer.runtime.program import program
from jaxformer.training.sweep import scheduler
from jaxformer.training.sweep.trunks import Member

BASE_WIDTH, BASE_LAYERS, HEAD_WIDTH, BASE_RATE = 64, 2, 32, 1.2e-2
WIDTHS, DEPTHS = (64, 128, 256, 384), (2, 4, 8)
STEPS, SEEDS = 128, 3
BASE = {"kind": "mup", "base_width": BASE_WIDTH, "base_layers": BASE_LAYERS}
KINDS = {
    "standard": {"kind": "standard"},
    "mup": BASE,
    "mup_tables": {**BASE, "embedding_rate_exponent": -1.0},
    "mup_decay": {**BASE, "decay_exponent": 0.0},
}
ABLATIONS = ("mup_tables", "mup_decay")


class Point(NamedTuple):
    """One run. `factor` multiplies BASE_RATE."""

    kind: str
    width: int
    layers: int
    factor: float
    seed: int

    @property
    def name(self) -> str:
        """Of the run's file."""
        return f"{self.kind},width={self.width},layers={self.layers},factor={self.factor:g},seed={self.seed}"


def sizes() -> list[tuple[int, int]]:
    """(width, layers), those that cost little first; the base belongs to both sweeps and comes once."""
    every = {(width, BASE_LAYERS) for width in WIDTHS} | {(BASE_WIDTH, layers) for layers in DEPTHS}
    return sorted(every, key=lambda size: size[0] ** 2 * size[1])


def groups(seeds: int, ablations: bool = False) -> Iterator[list[Point]]:
    """Runs that differ in their rate alone, seed by seed; ablations have no runs at the base, where they are muP."""
    for seed in range(seeds):
        for size in sizes():
            for kind in ("standard", "mup"):
                yield [Point(kind, *size, factor, seed) for factor in FACTORS]
    for seed in range(seeds if ablations else 0):
        for width in WIDTHS[1:]:
            for kind in ABLATIONS:
                yield [Point(kind, width, BASE_LAYERS, factor, seed) for factor in FACTORS]


def config(point: Point, steps: int = STEPS) -> Config:
    """The whole configuration of a run."""
    return from_mapping({
        "seed": point.seed,
        "model": {
            "family": "gpt", "num_layers": point.layers, "width": point.width, "context_length": 64,
            "attention": {"num_heads": point.width // HEAD_WIDTH}, "feed_forward": {"activation": "gelu_tanh"},
            "norm": "rms_norm", "positions": "rotary", "use_bias": False, "initializer": "scaled",
            "parametrization": KINDS[point.kind],
        },
        "execution": {"layers": "scan", "steps_per_dispatch": 16},
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 512},
        "optimizer": {"learning_rate": BASE_RATE * point.factor, "warmup_steps": steps // 8},
        "train": {"steps": steps, "global_batch_size": 16, "log_every_steps": steps, "eval_rows": 512},
    })  # fmt: skip


def asked(
    planned: Sequence[Sequence[Point]],
    known: Sequence[str],
    member: Callable[[Point], Any],
    found: Mapping[str, Any],
) -> list[Any]:
    """The members that a sweep should have trained, given those that have ended: up to the first group that lacks one.

    Args:
      planned: groups of runs, in order.
      known: names of runs that have ended before the sweep began.
      member: of a run.
      found: names of those that have ended in it.
    """
    out: list[Any] = []
    for group in planned:
        mine = [point for point in group if point.name not in known]
        out += map(member, mine)
        if any(point.name not in found for point in mine):
            break
    return out


def record(point: Point, final: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run."""
    names = ("loss", "loss_stderr", "status", "step", "tokens", "flops", "params", "learning_rate")
    about = {name: round(final[name], 6) if isinstance(final[name], float) else final[name] for name in names}
    return {"run": point.name, **point._asdict(), **about, "seconds": round(final["seconds"], 1)}


def run(options: argparse.Namespace) -> bool:
    """Trains what is missing. Returns False: it was stopped, or only planned."""
    planned = list(groups(options.seeds, options.ablations))
    points = {point.name: point for group in planned for point in group}
    known = [each["run"] for each in read(options.out)]
    todo = [name for name in points if name not in known]
    print(f"{len(points)} runs, {len(todo)} to do", flush=True)
    if options.plan_only or not todo:
        return not options.plan_only
    first = config(planned[0][0], options.steps)
    corpus = open_text(first.data)
    fitted = functools.lru_cache(None)(lambda point: fit_vocabulary(config(point, options.steps), corpus.tokenizer))

    def member(point: Point) -> Member:
        made = fitted(point)
        tokens = made.train.steps * made.train.global_batch_size * made.model.context_length
        counts = count_parameters(made.model)
        fields = {"params": counts.total, "params_non_embedding": counts.non_embedding}
        return Member(point.name, made, {**fields, "flops": training_flops(made.model, made.data) * tokens})

    def ask(found: Mapping[str, dict[str, Any]]) -> list[Member]:
        kept = {each["run"] for each in read(options.out)}
        for name in found:
            if name not in kept:
                keep(options.out, record(points[name], found[name]))
        return asked(planned, known, member, found)

    sources = scheduler.Sources(
        model=lambda c: make_model(c.model, c.loss, c.execution, c.optimizer.freeze, c.tune),
        batches=functools.lru_cache(8)(lambda c: texts.batches_of(c, corpus)),
        held_out=functools.lru_cache(1)(lambda c: texts.held_out_of(c, corpus)),
    )
    options.workdir.mkdir(parents=True, exist_ok=True)
    gflop = sum(member(points[name]).fields["flops"] for name in todo) / 1e9
    try:
        scheduler.run(ask, options.workdir, sources, at_once=options.at_once, expected_gflop=gflop)
    except scheduler.Interrupted:
        return False
    return True


def main() -> None:
    """Trains what is missing, and writes figure and page."""
    flags = study_flags(__doc__, "rate_transfer", "runs/rate_transfer", seeds=SEEDS)
    flags.add_argument("--ablations", action="store_true", help="the variants of muP as well")
    flags.add_argument("--steps", type=integer(8), default=STEPS, help=f"default: {STEPS}")
    flags.add_argument("--at-once", type=integer(1), default=1, help="rates that train together")
    options = flags.parse_args()
    planned = sum(map(len, groups(options.seeds, options.ablations)))
    study(options, run, lambda found: {"transfer": figure(found)}, lambda found: page(found, planned))


if __name__ == "__main__":
    program(main)
