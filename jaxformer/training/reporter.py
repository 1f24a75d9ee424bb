"""What a run tells: one record per logging window and evaluation, the progress display, TensorBoard."""

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer import records
from jaxformer.errors import RecordError, TrainingDiverged
from jaxformer.storage import files
from jaxformer.training.metrics import utilisation
from jaxformer.training.progress import Progress, TensorBoard
from jaxformer.training.step import StepMetrics


class Reporter:
    """Turns metrics fetched from the devices into records; on processes other than 0 writes nothing.

    A train record is about the steps since the one before it that this process made: `loss` is the sum over their
    tokens / their weight (so it compares with the evaluation's), `objective` what was minimised, `seconds` the time
    since this process began to train. Steps that were skipped count in `skipped` alone.

    Args:
      path: of the records.
      every: steps between two train records.
      total: steps of the run.
      max_bad_steps: so many in a row that are not finite end the run.
      progress: the display.
      mesh: whose devices train.
      flops_per_token: of the model, forward and backward; None: no utilisation.
      tensorboard: directory, or None.
    """

    def __init__(
        self,
        path: Path,
        *,
        every: int,
        total: int,
        max_bad_steps: int,
        progress: Progress,
        mesh: Mesh,
        flops_per_token: float | None = None,
        tensorboard: str | None = None,
    ):
        self._path, self._every, self._total, self._max_bad = path, every, total, max_bad_steps
        self._progress, self._mesh, self._flops = progress, mesh, flops_per_token
        self._writes = jax.process_index() == 0
        if self._writes:
            drop_cut_line(path)
            if said := records.set_aside(path):
                progress.line(f"note: {said}")
        self._board = TensorBoard(tensorboard) if tensorboard is not None and self._writes else None
        self._began = time.perf_counter()
        self._window: list[StepMetrics] = []
        self._heard: float | None = None  # when the last metrics came
        self._excluded = 0.0  # seconds since then in which something other than training ran
        self._timed = (0, 0.0)  # steps and seconds since the last train record
        self.tokens_per_step = 0

    def add(self, start: int, count: int, metrics: StepMetrics) -> None:
        """Takes in the metrics (numpy, leading axis over steps) of the `count` steps after `start`.

        Raises:
          TrainingDiverged: `max_bad_steps` in a row were not finite.
        """
        now = time.perf_counter()
        if self._heard is not None:  # the first dispatch has compiled and says nothing about speed
            steps, seconds = self._timed
            self._timed = (steps + count, seconds + now - self._heard - self._excluded)
        self._heard, self._excluded = now, 0.0
        bad = np.flatnonzero(metrics.bad_steps[:count] >= self._max_bad)
        end = start + (int(bad[0]) + 1 if len(bad) else count)  # of what is told
        told = start
        while told < end:
            step = min(self._total, told - told % self._every + self._every)
            self._window.append(_part(metrics, told - start, min(step, end) - start))
            if step <= end:
                self._flush(step)
                self._timed = (0, 0.0)
            told = min(step, end)
        if len(bad):
            self.event(end, "diverged")
            loss, norm = metrics.loss[bad[0]], metrics.grad_norm[bad[0]]
            raise TrainingDiverged(
                f"step {end}: {metrics.bad_steps[bad[0]]} steps in a row were not finite (loss {loss:g}, gradient norm "
                f"{norm:g}) and were skipped; try a lower optimizer.learning_rate"
            )

    def exclude(self, seconds: float) -> None:
        """So long something other than training ran; it does not count in the speed."""
        self._excluded += seconds

    def _flush(self, step: int) -> None:
        steps, seconds = self._timed
        speed = steps * self.tokens_per_step / seconds if seconds > 0 else None
        window: StepMetrics = jax.tree.map(lambda *parts: np.concatenate(parts), *self._window)
        good = window.bad_steps == 0
        values: dict[str, Any] = {"loss": math.nan, "objective": math.nan, "grad_norm": math.nan}
        if good.any():
            values["objective"] = values["loss"] = _mean(window.loss[good])
            values["grad_norm"] = _mean(window.grad_norm[good])
            for name, (sums, weights) in window.sums.items():
                values[name] = _mean(sums[good], weights[good])
        values |= {"learning_rate": float(window.learning_rate[-1]), "skipped": int(window.skipped[-1])}
        used = None
        if speed is not None:
            values["tokens_per_second"] = speed
            used = utilisation(speed, self._flops, self._mesh.devices.flat[0].device_kind, self._mesh.size)
            if used is not None:
                values["utilisation"] = used
        self._window = []
        tokens, seconds = step * self.tokens_per_step, time.perf_counter() - self._began
        self.write({"kind": "train", "step": step, "tokens": tokens, **values, "seconds": seconds})
        self._progress.update(step, values["loss"], speed, used)

    def evaluation(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Records an evaluation and shows it."""
        self.write(
            {"kind": "eval", "step": step, "tokens": step * self.tokens_per_step, "split": split, **values},
        )
        self._progress.line(f"step {step} {split}: {describe(values)}")

    def event(self, step: int, event: str, **fields: Any) -> None:
        """Records that something happened."""
        self.write({"kind": "event", "step": step, "event": event, **fields})

    def write(self, record: dict[str, Any]) -> None:
        """Appends any record, and draws its numbers."""
        if not self._writes:
            return
        records.append(self._path, record)
        if self._board is not None and record["kind"] in ("train", "eval"):
            prefix = record.get("split", "train")
            self._board.write(record["step"], prefix, {k: v for k, v in record.items() if k != "step"})

    def close(self) -> None:
        """Flushes what is written in the background."""
        if self._board is not None:
            self._board.close()


def drop_cut_line(path: Path) -> None:
    """Takes away a last line that a killed process left unfinished, before anything is appended to it.

    Raises:
      RecordError: it is a link, a pipe or a folder, or cannot be written.
    """
    if not os.path.lexists(path):
        return
    try:
        with files.open_to_append(path, sole=True) as file:
            file.seek(0)
            text = file.read()
            if text and not text.endswith(b"\n"):
                file.truncate(text.rfind(b"\n") + 1)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror})") from None


def describe(values: Mapping[str, float]) -> str:
    """An evaluation in a few words.

    >>> describe({"loss": 1.5, "loss_stderr": 0.01, "perplexity": 4.48, "accuracy": 0.5, "accuracy_stderr": 0.02})
    'loss 1.5000 ± 0.0100 nats per token, perplexity 4.48, accuracy 50.0 % ± 2.0'
    """
    parts = [f"loss {values['loss']:.4f} ± {values['loss_stderr']:.4f} nats per token"]
    parts.append(f"perplexity {values['perplexity']:.2f}")
    if "bits_per_byte" in values:
        parts.append(f"{values['bits_per_byte']:.4f} ± {values['bits_per_byte_stderr']:.4f} bits per byte")
    for name in sorted(values):
        if name.endswith("accuracy"):
            parts.append(f"{name.replace('_', ' ')} {100 * values[name]:.1f} % ± {100 * values[name + '_stderr']:.1f}")
    return ", ".join(parts)


def _part(metrics: StepMetrics, start: int, end: int) -> StepMetrics:
    return jax.tree.map(lambda x: x[start:end], metrics)


def _mean(sums: Any, weights: Any = None) -> float:
    """Sum over sum, in float64."""
    weight = len(sums) if weights is None else np.sum(weights, dtype=np.float64)
    return float(np.sum(sums, dtype=np.float64) / weight) if weight else math.nan
