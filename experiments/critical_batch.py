"""The critical batch size, measured by training with many batch sizes, beside what the gradient noise scale predicts.

    python -m experiments.critical_batch --out=experiments/results/critical_batch
    python -m experiments.critical_batch --out=experiments/results/critical_batch --stage=report

A small GPT is trained for three lengths, each with a cosine to zero: the points. From each, training goes on with
several batch sizes, whose learning rates are searched for again, until the held-out loss has fallen by the same amount.
The updates S and tokens E that this takes lie near (S / S_min - 1) (E / E_min - 1) = 1, and E_min / S_min is the
critical batch. At each point the noise scale is measured as `train.noise_scale` does. One seed of everything is done
before the next begins; the same command continues after a stop.

Source: McCandlish et al. 2018, sections 2.3 and 3 and appendix A; branches: Merrill et al. 2025.
"""

import argparse
import functools
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.critical_batch_page import figure, page
from experiments.critical_batch_search import LENGTH, RATE, Trial, allowed, next_trial, updates_to
from experiments.transfer_runs import keep, read, study, study_flags
from jaxformer.config import CheckpointConfig, Config, from_mapping
from jaxformer.data.mixture import open_text
from jaxformer.modules import make_model
from jaxformer.runs import texts
from jaxformer.runs.pretrain import fit_vocabulary
from jaxformer.runtime.program import program
from jaxformer.training.checkpoint.manager import Checkpoints
from jaxformer.training.gradients import gradients
from jaxformer.training.state import TrainState
from jaxformer.training.sweep.stacked_program import StackedProgram
from jaxformer.types import Model

DROPS = {25: 0.4, 75: 0.4, 225: 0.3}  # updates up to a point -> by how much the loss is then to fall
POINT_ROWS, POINT_RATE = 16, 8e-3
NOISE_BATCHES, NOISE_ROWS, NOISE_PARTS, HELD_OUT_ROWS = 32, 64, 16, 192
SEEDS = 3


def config(seed: int, rows: int, rate: float, steps: int | None = None) -> Config:
    """A run from scratch of so many steps, with a cosine; or (None) a branch, with a constant rate."""
    # Both are a cosine, so that they share programs; a branch's ends where it begins.
    schedule = {"warmup_steps": (steps or 0) // 8, "final_fraction": 0.0 if steps else 1.0}
    return from_mapping({
        "seed": seed,
        "model": {
            "family": "gpt", "num_layers": 2, "width": 64, "context_length": LENGTH,
            "attention": {"num_heads": 2}, "feed_forward": {"activation": "gelu_tanh"},
            "norm": "rms_norm", "positions": "rotary", "use_bias": False, "initializer": "scaled",
        },
        "execution": {"layers": "scan", "steps_per_dispatch": 16},
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 512},
        "optimizer": {"learning_rate": rate, "weight_decay": 0.0, "clip_norm": None, "schedule": "cosine", **schedule},
        "train": {"steps": steps or 100_000, "global_batch_size": rows, "log_every_steps": 16,
                  "eval_every_steps": 100_000, "eval_rows": HELD_OUT_ROWS},
    })  # fmt: skip


class Branches:
    """The compiled programs, and what they need of the text."""

    def __init__(self, workdir: Path):
        """Opens the text; programs are compiled at first use."""
        self.workdir = workdir
        self.corpus = open_text(config(0, 1, RATE).data)
        one = self._fitted(0, HELD_OUT_ROWS, RATE, None)
        self.model = make_model(one.model, one.loss, one.execution, one.optimizer.freeze, one.tune)
        self.held_out = texts.held_out_of(one, self.corpus)[""].sample
        self._noise = jax.jit(functools.partial(_noise_sums, model=self.model))

    def _fitted(self, seed: int, rows: int, rate: float, steps: int | None) -> Config:
        return fit_vocabulary(config(seed, rows, rate, steps), self.corpus.tokenizer)

    @functools.cache  # noqa: B019 (there is one object)
    def program(self, rows: int) -> StackedProgram:
        """Training with a batch size."""
        made = self._fitted(0, rows, RATE, None)
        return StackedProgram(self.model, made, 1, texts.batches_of(made, self.corpus)[0])

    def loss(self, of: StackedProgram, states: TrainState) -> float:
        """Held out, of the one member of a program."""
        assert self.held_out is not None
        sums = of.evaluate(jax.tree.map(lambda x: x[0], states.params), self.held_out[0])
        total, weight = jax.device_get((sums[0] if isinstance(sums, tuple) else sums)["loss"])
        return float(np.sum(total) / np.sum(weight))

    @functools.lru_cache(1)  # noqa: B019
    def point(self, steps: int, seed: int) -> TrainState:
        """The state after a run from scratch, as it was kept, or trained now."""
        of = self.program(POINT_ROWS)
        store = Checkpoints(self.workdir / f"point={steps},seed={seed}", CheckpointConfig(keep=1))
        if (kept := store.restore(of.abstract_member())) is not None:
            return kept[0]
        made = self._fitted(seed, POINT_ROWS, POINT_RATE, steps)
        source, states = texts.batches_of(made, self.corpus), of.init([made])
        for first in range(0, steps, of.capacity):
            batches = [source[i] for i in range(first, min(first + of.capacity, steps))]
            states, _ = of.train(states, [made], of.place([batches]))
        state = of.member(states, 0)
        store.save(steps, state)
        store.close()
        return state

    def noise(self, steps: int, seed: int) -> dict[str, Any]:
        """The record of a point: its loss, the loss to reach, and the noise scale."""
        begin, of = time.perf_counter(), self.program(POINT_ROWS)
        state = self.point(steps, seed)
        loss = self.loss(of, of.stack([state]))
        source = texts.batches_of(self._fitted(2000 + seed, NOISE_ROWS, RATE, None), self.corpus)
        every = np.array([self._noise(state.params, source[i], jax.random.key(i)) for i in range(NOISE_BATCHES)])
        variance, square = every.mean(0)
        return {
            "run": f"noise,point={steps},seed={seed}", "what": "noise", "point": steps, "seed": seed,
            "loss": round(loss, 5), "target": round(loss - DROPS[steps], 5), "gradient_variance": float(variance),
            "gradient_square": float(square), "noise_scale": float(variance / square),
            "seconds": round(time.perf_counter() - begin, 1),
        }  # fmt: skip

    def branch(self, trial: Trial, target: float, most: float) -> dict[str, Any]:
        """The record of a trial."""
        begin, of = time.perf_counter(), self.program(trial.rows)
        made = self._fitted(1000 + trial.seed, trial.rows, RATE * 2.0**trial.exponent, None)
        source = texts.batches_of(made, self.corpus)
        states = [of.stack([self.point(trial.point, trial.seed)])]

        def advance(first: int, count: int) -> None:
            chunk = of.place([[source[i] for i in range(first, first + count)]])
            states[0], _ = of.train(states[0], [made], chunk)

        updates = updates_to(target, advance, lambda: self.loss(of, states[0]), most, of.capacity)
        reached = math.isfinite(updates)
        return {
            "run": trial.name, "what": "branch", **trial._asdict(), "rate": made.optimizer.learning_rate,
            "updates": round(updates, 2) if reached else None,
            "tokens": round(updates * trial.rows * LENGTH) if reached else None,
            "seconds": round(time.perf_counter() - begin, 1),
        }  # fmt: skip


def _noise_sums(params: Any, batch: Any, rng: Any, *, model: Model) -> Any:
    """[2]: the estimates of the gradient's variance and square of one batch."""
    _, _, sums, _ = gradients(params, batch, rng, model=model, micro_batches=NOISE_PARTS, noise_scale=True)
    return jax.numpy.stack(sums["noise_scale"])


def run(options: argparse.Namespace) -> bool:
    """Measures what is missing. Returns False: it was only to be planned."""
    options.workdir.mkdir(parents=True, exist_ok=True)
    branches = None
    for seed in range(options.seeds):
        for point in DROPS:
            while True:
                found = read(options.out)
                about = [r for r in found if r["what"] == "noise" and (r["point"], r["seed"]) == (point, seed)]
                trial = next_trial(found, point, seed)
                if about and trial is None:
                    break
                if options.plan_only:
                    print(f"next: seed {seed}, the point after {point} updates, {trial or 'its noise scale'}")
                    return False
                branches = branches or Branches(options.workdir)
                if not about:
                    record = branches.noise(point, seed)
                else:
                    assert trial is not None
                    record = branches.branch(trial, about[0]["target"], allowed(found, trial))
                keep(options.out, record)
                print(record, flush=True)
    return True


def main() -> None:
    """Measures what is missing, and writes figure and page."""
    options = study_flags(__doc__, "critical_batch", "runs/critical_batch", seeds=SEEDS).parse_args()
    study(options, run, lambda found: {"critical_batch": figure(found)}, page)


if __name__ == "__main__":
    program(main)
