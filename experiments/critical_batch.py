"""The critical batch size, measured by training with many batch sizes, beside what the gradient noise scale predicts.

    python -m experiments.critical_batch --out=experiments/results/critical_batch
    python -m experiments.critical_batch --out=experiments/results/critical_batch --stage=report

A small GPT is trained from scratch with several batch sizes, whose learning rates are searched for. The updates S and
tokens E that a run needs until its held-out loss has come down to a goal lie near
(S / S_min - 1) (E / E_min - 1) = 1, and E_min / S_min is the critical batch of that goal. Of each batch size the best
run is then made once more, and the noise scale measured on its way as `train.noise_scale` does.

If an update with batch B is worth 1 / (1 + noise scale / B) of one without noise, the critical batch is the mean noise
scale over updates until the goal, each weighted by what it is worth. One seed of everything is done before the next
begins; the same command continues after a stop.

Source: McCandlish et al. 2018, sections 2.3 and 3 and appendix D.
"""

import argparse
import functools
import math
import time
from typing import Any

import jax
import numpy as np

from experiments.critical_batch_page import figure, page
from experiments.critical_batch_search import (
    BATCHES,
    GOALS,
    LENGTH,
    RATE,
    Trial,
    allowed,
    best_trial,
    next_trial,
    updates_to,
)
from experiments.transfer_runs import keep, read, study, study_flags
from jaxformer.config import Config, from_mapping
from jaxformer.data.mixture import open_text
from jaxformer.modules import make_model
from jaxformer.runs import texts
from jaxformer.runs.pretrain import fit_vocabulary
from jaxformer.runtime.program import program
from jaxformer.training.gradients import gradients
from jaxformer.training.sweep.stacked_program import StackedProgram
from jaxformer.types import Model

NOISE_BATCHES, NOISE_ROWS, NOISE_PARTS, NOISE_APART = 16, 64, 16, 1.25  # measured again after so many times the updates
WARMUP, HELD_OUT_ROWS, SEEDS = 16, 192, 3


def config(seed: int, rows: int, rate: float) -> Config:
    """A run from scratch, at a constant rate after WARMUP updates."""
    return from_mapping({
        "seed": seed,
        "model": {
            "family": "gpt", "num_layers": 2, "width": 64, "context_length": LENGTH,
            "attention": {"num_heads": 2}, "feed_forward": {"activation": "gelu_tanh"},
            "norm": "rms_norm", "positions": "rotary", "use_bias": False, "initializer": "scaled",
        },
        "execution": {"layers": "scan", "steps_per_dispatch": 16},
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 512},
        "optimizer": {"learning_rate": rate, "weight_decay": 0.0, "clip_norm": None, "schedule": "constant",
                      "warmup_steps": WARMUP},
        "train": {"steps": 100_000, "global_batch_size": rows, "log_every_steps": 16,
                  "eval_every_steps": 100_000, "eval_rows": HELD_OUT_ROWS},
    })  # fmt: skip


class Runs:
    """The compiled programs, and what they need of the text."""

    def __init__(self) -> None:
        """Opens the text; programs are compiled at first use."""
        self.corpus = open_text(config(0, 1, RATE).data)
        one = self._fitted(0, HELD_OUT_ROWS, RATE)
        self.model = make_model(one.model, one.loss, one.execution, one.optimizer.freeze, one.tune)
        self.held_out = texts.held_out_of(one, self.corpus)[""].sample
        self._noise = jax.jit(functools.partial(_noise_sums, model=self.model))

    def _fitted(self, seed: int, rows: int, rate: float) -> Config:
        return fit_vocabulary(config(seed, rows, rate), self.corpus.tokenizer)

    @functools.cache  # noqa: B019 (there is one object)
    def program(self, rows: int) -> StackedProgram:
        """Training with a batch size."""
        made = self._fitted(0, rows, RATE)
        return StackedProgram(self.model, made, 1, texts.batches_of(made, self.corpus)[0])

    def loss(self, of: StackedProgram, params: Any) -> float:
        """Held out."""
        assert self.held_out is not None
        sums = of.evaluate(params, self.held_out[0])
        total, weight = jax.device_get((sums[0] if isinstance(sums, tuple) else sums)["loss"])
        return float(np.sum(total) / np.sum(weight))

    @functools.cache  # noqa: B019
    def _noise_rows(self, seed: int) -> Any:
        return texts.batches_of(self._fitted(2000 + seed, NOISE_ROWS, RATE), self.corpus)

    def noise(self, params: Any, seed: int, number: int) -> list[float]:
        """[2]: variance and square of the gradient, of rows that a seed has for its measurement of this number."""
        source, first = self._noise_rows(seed), number * NOISE_BATCHES
        found = [self._noise(params, source[i], jax.random.key(i)) for i in range(first, first + NOISE_BATCHES)]
        return [float(f"{each:.5g}") for each in np.mean(found, axis=0)]

    def train(self, trial: Trial, most: float, *, noise: bool = False) -> dict[str, Any]:
        """The record of a trial; with the noise scale, or with the updates that it needs to each goal."""
        begin, of = time.perf_counter(), self.program(trial.rows)
        made = self._fitted(trial.seed, trial.rows, RATE * 2.0**trial.exponent)
        source, states = texts.batches_of(made, self.corpus), [of.init([made])]
        seen: list[list[float]] = []

        def advance(first: int, count: int) -> None:
            for start in range(first, first + count, of.capacity):
                rows = [source[i] for i in range(start, min(start + of.capacity, first + count))]
                states[0], _ = of.train(states[0], [made], of.place([rows]))

        def params() -> Any:
            return of.member(states[0], 0).params

        def watch(step: int) -> None:
            if noise and (not seen or step >= max(seen[-1][0] * NOISE_APART, 1)):
                seen.append([step, *self.noise(params(), trial.seed, len(seen))])

        found = updates_to(GOALS, advance, lambda: self.loss(of, params()), most, watch)
        what = "noise" if noise else "updates"
        updates = [round(each, 2) if math.isfinite(each) else None for each in found]
        return {
            "run": f"{what},{trial.name}", "what": what, **trial._asdict(), "rate": made.optimizer.learning_rate,
            what: seen if noise else updates, "seconds": round(time.perf_counter() - begin, 1),
        }  # fmt: skip


def _noise_sums(params: Any, batch: Any, rng: Any, *, model: Model) -> Any:
    """[2]: the estimates of the gradient's variance and square of one batch."""
    _, _, sums, _ = gradients(params, batch, rng, model=model, micro_batches=NOISE_PARTS, noise_scale=True)
    return jax.numpy.stack(sums["noise_scale"])


def run(options: argparse.Namespace) -> bool:
    """Trains what is missing. Returns False: it was only to be planned."""
    runs = None
    for seed in range(options.seeds):
        while True:
            found = read(options.out)
            trial, noise = next_trial(found, seed), False
            if trial is None:
                known = {(each["rows"], each["seed"]) for each in found if each["what"] == "noise"}
                left = [best_trial(found, rows, seed) for rows in BATCHES if (rows, seed) not in known]
                if not left:
                    break
                trial, noise = left[0], True
            if options.plan_only:
                print(f"next: {trial}{' with its noise scale' * noise}")
                return False
            runs = runs or Runs()
            record = runs.train(trial, math.inf if noise else allowed(found, trial), noise=noise)
            keep(options.out, record)
            print(record["run"], record.get("updates", ""), f"{record['seconds']:.0f} s", flush=True)
    return True


def main() -> None:
    """Trains what is missing, and writes figure and page."""
    options = study_flags(__doc__, "critical_batch", None, seeds=SEEDS).parse_args()
    study(options, run, lambda found: {"critical_batch": figure(found)}, page)


if __name__ == "__main__":
    program(main)
