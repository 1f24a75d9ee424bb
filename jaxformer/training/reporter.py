"""A run's reports: one record per logging window and evaluation, the progress display, trackers."""

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer import records
from jaxformer.errors import RecordError, TrainingDiverged
from jaxformer.runtime.peak_memory import peak_memory
from jaxformer.tracking.trackers import Trackers
from jaxformer.training.goodput import goodput
from jaxformer.training.metrics import mfu
from jaxformer.training.progress import Progress
from jaxformer.training.step import StepMetrics
from jaxformer.training.stopwatch import Stopwatch

SCORES = ("f1", "matthews", "pearson", "spearman", "exact_match")  # metrics that are no share of the tokens


class Reporter:
    """Turns metrics fetched from the devices into records; on processes other than 0 writes nothing.

    A train record covers the steps that this process made since the previous one: `loss` is the sum over their tokens /
    their weight (comparable with the evaluation's), `objective` what was minimised, `seconds` the time since this
    process began to train. Skipped steps count only in `skipped`. `spent` in every record: where the time went so far.

    Args:
      path: of the records.
      every: steps between two train records.
      total: steps of the run.
      tokens_per_step: of the whole batch.
      max_bad_steps: the run ends after this many steps in a row that are not finite.
      progress: the display.
      mesh: the training devices.
      flops_per_token: of the model, forward and backward; None: no MFU.
      trackers: get every record, too.
      stopwatch: of this start.
    """

    def __init__(
        self,
        path: Path,
        *,
        every: int,
        total: int,
        tokens_per_step: int,
        max_bad_steps: int,
        progress: Progress,
        mesh: Mesh,
        flops_per_token: float | None = None,
        trackers: Trackers | None = None,
        stopwatch: Stopwatch | None = None,
    ):
        self._path, self._every, self._total, self._max_bad = path, every, total, max_bad_steps
        self.tokens_per_step = tokens_per_step
        self._progress, self._mesh, self._flops = progress, mesh, flops_per_token
        self._writes = jax.process_index() == 0
        if self._writes and (said := records.set_aside(path)):
            progress.line(f"note: {said}")
        self._trackers, self.stopwatch = trackers, stopwatch or Stopwatch()
        self._began = time.perf_counter()
        self._window: list[StepMetrics] = []
        self._last: float | None = None  # when the last metrics arrived
        self._excluded = 0.0  # seconds since then that were not spent on training
        self._timed = (0, 0.0)  # steps and seconds since the last train record

    def add(self, start: int, count: int, metrics: StepMetrics, done: float | None = None) -> None:
        """Adds the metrics (NumPy, leading axis over steps) of the `count` steps after `start`. `done`: when the
        devices had finished them, by `time.perf_counter`; None: now.

        Raises:
          TrainingDiverged: `max_bad_steps` in a row were not finite.
        """
        now = time.perf_counter() if done is None else done
        if self._last is not None:  # the first dispatch includes compilation, so it is not timed
            steps, seconds = self._timed
            self._timed = (steps + count, seconds + now - self._last - self._excluded)
        self._last, self._excluded = now, 0.0
        bad = np.flatnonzero(metrics.bad_steps[:count] >= self._max_bad)
        end = start + (int(bad[0]) + 1 if len(bad) else count)  # last step to report
        for step, window in windows(metrics, start, end, self._every):
            self._window.append(window)
            if step % self._every == 0 or step == self._total:
                self._flush(step)
        if len(bad):
            self.event(end, "diverged")
            loss, norm = metrics.loss[bad[0]], metrics.grad_norm[bad[0]]
            raise TrainingDiverged(
                f"step {end}: {metrics.bad_steps[bad[0]]} steps in a row were not finite (loss {loss:g}, gradient norm "
                f"{norm:g}) and were skipped; try a lower optimizer.learning_rate"
            )

    def check_end(self, step: int, bad_steps: int, loss: float) -> None:
        """Checks how a run ended: its last `bad_steps` steps were not finite, and `loss` is the final evaluation's.

        Raises:
          TrainingDiverged: the last tenth of the steps, or the loss, was not finite: what was evaluated is hardly what
            was trained.
        """
        ended_badly = bad_steps >= max(1, step // 10)
        if not ended_badly and math.isfinite(loss):
            return
        self.event(step, "diverged")
        why = f"the last steps were not finite and were skipped ({bad_steps} in a row)"
        why = why if ended_badly else f"the held-out loss is not finite ({loss:g})"
        raise TrainingDiverged(f"step {step}: {why}; try a lower optimizer.learning_rate")

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Leaves the time inside out of the speed, and counts it as spent on `what`, one of `stopwatch.ASIDE`."""
        began = time.perf_counter()
        try:
            with self.stopwatch.measure(what):
                yield
        finally:
            self._excluded += time.perf_counter() - began

    def _flush(self, step: int) -> None:
        steps, seconds = self._timed
        speed = steps * self.tokens_per_step / seconds if seconds > 0 else None
        values = train_fields(jax.tree.map(lambda *parts: np.concatenate(parts), *self._window))
        kind = self._mesh.devices.flat[0].device_kind
        share = None if speed is None else mfu(speed, self._flops, kind, self._mesh.size)
        speeds = {"tokens_per_second": speed, "utilisation": share}
        values |= {name: value for name, value in speeds.items() if value is not None}
        self._window, self._timed = [], (0, 0.0)
        tokens, seconds = step * self.tokens_per_step, time.perf_counter() - self._began
        self.write({"kind": "train", "step": step, "tokens": tokens, **values, "seconds": seconds})
        self._progress.update(step, values["loss"], speed, share)

    def evaluation(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Records an evaluation and shows it."""
        self.write({"kind": "eval", "step": step, "tokens": step * self.tokens_per_step, "split": split, **values})
        self._progress.line(f"step {step} {split}: {describe(values)}")

    def event(self, step: int, event: str, **fields: Any) -> None:
        """Records that something happened."""
        self.write({"kind": "event", "step": step, "event": event, **fields})

    def write(self, record: dict[str, Any]) -> None:
        """Appends any record, with where the time went so far, and sends it to the trackers."""
        if not self._writes:
            return
        record = {**record, "spent": self.stopwatch.spent()}
        records.append(self._path, record)
        if self._trackers is not None:
            self._trackers.log(record)

    def used(self, step: int) -> dict[str, float]:
        """Time and memory used by all starts of this run, which stands at `step`: the fields of `Goodput`, as far as
        its records tell, and of `peak_memory`. All processes must call it."""
        peaks: dict[str, float] = {**peak_memory()}
        if not self._writes:
            return peaks
        now = {"kind": "final", "step": step, "spent": self.stopwatch.spent()}
        try:
            found = goodput([*records.load(self._path), now])
        except RecordError as error:
            self._progress.line(f"note: {error}; the time spent in all is not known")
            return peaks
        return peaks if found is None else peaks | found._asdict()


def windows(metrics: StepMetrics, start: int, end: int, every: int) -> Iterator[tuple[int, StepMetrics]]:
    """(last step, metrics) of each part of the steps from `start` to `end`, which are cut at multiples of `every`."""
    edges = sorted({start, end, *range(start - start % every + every, end, every)})
    for first, last in itertools.pairwise(edges):
        yield last, jax.tree.map(lambda x, a=first - start, b=last - start: x[a:b], metrics)


def train_fields(window: StepMetrics) -> dict[str, Any]:
    """What a train record says of some steps: means over those that were not skipped (nan if all were), the last
    learning rate, and how many were skipped since step 0."""
    good = window.bad_steps == 0
    objective = _mean(window.loss[good])
    return {
        "loss": objective,  # of a model without a metric of that name
        "objective": objective,
        "grad_norm": _mean(window.grad_norm[good]),
        **{name: _mean(sums[good], weights[good]) for name, (sums, weights) in window.sums.items()},
        "learning_rate": float(window.learning_rate[-1]),
        "skipped": int(window.skipped[-1]),
    }


def describe(values: Mapping[str, float]) -> str:
    """One line about an evaluation.

    >>> describe({"loss": 1.5, "loss_stderr": 0.01, "perplexity": 4.48, "accuracy": 0.5, "accuracy_stderr": 0.02})
    'loss 1.5000 ± 0.0100 nats per token, perplexity 4.48, accuracy 50.0 % ± 2.0'

    Of one row the standard errors are not known:

    >>> describe({"loss": 1.5, "loss_stderr": math.nan, "perplexity": 4.48})
    'loss 1.5000 nats per token, perplexity 4.48'
    """

    def error(name: str, form: str, factor: float = 1.0) -> str:
        found = factor * values[f"{name}_stderr"]
        return "" if math.isnan(found) else f" ± {found:{form}}"

    parts = [f"loss {values['loss']:.4f}{error('loss', '.4f')}"]
    if "perplexity" in values:
        parts = [f"{parts[0]} nats per token", f"perplexity {values['perplexity']:.2f}"]
    if "bits_per_byte" in values:
        parts.append(f"{values['bits_per_byte']:.4f}{error('bits_per_byte', '.4f')} bits per byte")
    parts += [
        f"{name.replace('_', ' ')} {100 * values[name]:.1f} %{error(name, '.1f', 100)}"
        for name in sorted(values)
        if name.endswith("accuracy")
    ]
    parts += [f"{name.replace('_', ' ')} {values[name]:.3f}{error(name, '.3f')}" for name in SCORES if name in values]
    return ", ".join(parts)


def _mean(sums: Any, weights: Any = None) -> float:
    """The sum of `sums` over that of `weights` (1 each by default), in float64; nan if the weight is 0."""
    weight = len(sums) if weights is None else np.sum(weights, dtype=np.float64)
    return float(np.sum(sums, dtype=np.float64) / weight) if weight else math.nan
