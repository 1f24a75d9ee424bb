"""The training loop. It only schedules; steps, checkpoints and records are made elsewhere.

Updates are dispatched in chunks. Where chunks end depends on the configuration and the step alone (`next_boundary`),
and evaluations, saves and stops happen only there. So a run that was killed at any moment and started again executes
the same dispatches as one that was not, and ends bit for bit the same.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.config import Config
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.runtime import coordination
from jaxformer.runtime.host_memory import settle_heap
from jaxformer.specs import count_non_embedding, count_params
from jaxformer.training import metrics
from jaxformer.training.checkpoint.manager import Checkpoints
from jaxformer.training.chunks import next_boundary
from jaxformer.training.evaluate import (
    SPLIT,
    EvalBatches,
    TrainBatches,
    evaluate,
    evaluations_before,
    read_ahead,
    stops_early,
)
from jaxformer.training.interrupt import StopSignal
from jaxformer.training.optim import make_optimizer
from jaxformer.training.progress import Progress
from jaxformer.training.reporter import Reporter
from jaxformer.training.state import TrainState, averaged
from jaxformer.training.step import CompiledSteps, StepMetrics, compile_ahead, compile_steps
from jaxformer.types import Batch, Model


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
      status: "finished", "stopped_early" (no better evaluation for long enough) or "interrupted" (a signal).
      step: updates made in all.
      state: the last one, on the devices.
      evaluation: of the whole held-out split, see `metrics.evaluation`; None if interrupted.
      seconds: that this process trained and evaluated.
    """

    status: Literal["finished", "stopped_early", "interrupted"]
    step: int
    state: TrainState
    evaluation: dict[str, float] | None
    seconds: float


def train(
    model: Model,
    batches: TrainBatches,
    eval_batches: EvalBatches,
    config: Config,
    *,
    workdir: str | Path,
    mesh: Mesh,
    flops_per_token: float | None = None,
    bytes_per_token: float | None = None,
    final_fields: Mapping[str, Any] | None = None,
    fingerprint: str = "",
    also_of_this_run: Sequence[str] = (),
    resume_command: str | None = None,
    initial: Callable[[TrainState], TrainState] | None = None,
    log: Callable[[str], None] = print,
    bar: bool | None = None,
) -> Result:
    """Trains `model` to `config.train.steps`, going on from the newest valid checkpoint in `workdir` if there is one.

    Writes `workdir`/records.jsonl and `workdir`/checkpoints/; the caller has made sure that the directory belongs to
    this configuration.

    Args:
      model: specs, init, loss, weights; its metrics hold "loss", nats per token.
      batches: training batches; batches[step] are this host's rows, see `parallel.mesh.host_rows`.
      eval_batches: the held-out split, in batches of train.global_batch_size rows.
      config: train, optimizer, checkpoint, seed and tensorboard are read here.
      workdir: exists.
      mesh: of `parallel.mesh.make_mesh`.
      flops_per_token: forward and backward, for the MFU and the final record.
      bytes_per_token: bytes of the held-out split / tokens predicted in it; None: no bits per byte.
      final_fields: for the final record; they replace the loop's of the same name.
      fingerprint: of the run, kept in every checkpoint and compared when one is read; "" compares nothing.
      also_of_this_run: other accepted fingerprints of its checkpoints.
      resume_command: printed when a signal ends the run.
      initial: changes the state of step 0, as to start from other weights; not called where a checkpoint is there.
      log: prints a line.
      bar: a progress bar (True), plain lines (False), or a bar where stderr is a terminal (None).

    Raises:
      TrainingDiverged: train.max_bad_steps in a row were not finite, or the last step or the final loss is not.
      CheckpointError: none is valid, or one cannot be written.
      ConfigError: the batch or a parameter does not divide over the mesh, or the held-out split is empty.
    """
    workdir = Path(workdir)
    if len(eval_batches) == 0:
        raise ConfigError("config.data: the held-out split holds no row; it needs at least one")
    began = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        progress = Progress(config.train.steps, log, show=jax.process_index() == 0, bar=bar)
        stack.callback(progress.close)
        stop = stack.enter_context(StopSignal(progress.line))
        steps = compile_steps(model, make_optimizer(config.optimizer, config.train.steps, model.specs), mesh, config)
        checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint, fingerprint, also=also_of_this_run)
        checkpoints.start()
        batch, held_out = batches[0], eval_batches[0]
        helper = stack.enter_context(ThreadPoolExecutor(1))
        # In parallel with the initialization, whose compilation takes seconds too.
        finished = checkpoints.steps()[-1:] == [config.train.steps]
        programs = None if finished else helper.submit(compile_ahead, steps, mesh, batch, held_out)
        restored = checkpoints.restore(steps.abstract_state)
        state, step = (steps.init(), 0) if restored is None else restored
        if restored is None and initial is not None:
            state = initial(state)
        if int(state.step) != step:
            raise CheckpointError(
                f"checkpoint {checkpoints.directory / str(step)} holds the state of step {state.step}"
            )
        if programs is not None:
            steps = programs.result()
            jax.block_until_ready(state)
            settle_heap()
        reporter = Reporter(
            workdir / "records.jsonl",
            every=config.train.log_every_steps,
            total=config.train.steps,
            tokens_per_step=config.train.global_batch_size * batch.tokens.shape[-1],
            max_bad_steps=config.train.max_bad_steps,
            progress=progress,
            mesh=mesh,
            flops_per_token=flops_per_token,
            tensorboard=str(workdir / "tensorboard") if config.tensorboard else None,
        )
        stack.callback(reporter.close)
        watchdog = stack.enter_context(coordination.Watchdog(config.distributed.stall_timeout_seconds))
        run = _Run(config, steps, batches, eval_batches, checkpoints, reporter, stop, watchdog, bytes_per_token)
        stack.callback(run.feed.shutdown, wait=True, cancel_futures=True)
        if restored is not None:
            progress.line(f"going on from step {step}")
        path, first = workdir / "records.jsonl", jax.process_index() == 0  # others may not see its repairs yet
        losses = list(evaluations_before(path, step, fingerprint).items()) if first else []
        event = "started" if restored is None else "resumed"
        reporter.event(step, event, **({"fingerprint": fingerprint} if fingerprint else {}))
        try:
            status, step, state = run.go(step, state, dict(coordination.broadcast_from_0(losses, "the records")))
        except BaseException:
            # A save that has begun is worth finishing, and its failure must not hide this one.
            with suppress(Exception):
                checkpoints.close(failed=True)
            raise
        stack.callback(checkpoints.close)
        if status == "interrupted":
            reporter.event(step, "interrupted")
            hint = f"; go on with: {resume_command}" if resume_command else ""
            checkpoints.wait()
            saved = "saved" if step else "nothing to save"
            progress.line(f"stopped at step {step} by {stop.requested or 'another process'}, {saved}{hint}")
            return Result(status, step, state, None, time.perf_counter() - began)
        values = run.evaluate(step, state, final=True)
        checkpoints.wait()
        reporter.check_end(step, int(state.bad_steps), values["loss"])
        if status == "stopped_early":
            reporter.event(step, "stopped_early")
            progress.line(f"stopped at step {step}: no better evaluation in {config.train.early_stop_evals}")
        tokens = step * reporter.tokens_per_step
        final = {
            "kind": "final",
            "step": step,
            "tokens": tokens,
            **values,
            "params": count_params(model.specs),
            "params_non_embedding": count_non_embedding(model.specs),
            "flops": None if flops_per_token is None else flops_per_token * tokens,
            "status": status,
            "split": SPLIT,
        }
        reporter.write(final | dict(final_fields or {}))
        return Result(status, step, state, values, time.perf_counter() - began)


class _Run:
    """The moving parts of one call of `train`."""

    def __init__(
        self,
        config: Config,
        steps: CompiledSteps,
        batches: TrainBatches,
        eval_batches: EvalBatches,
        checkpoints: Checkpoints,
        reporter: Reporter,
        stop: StopSignal,
        watchdog: coordination.Watchdog,
        bytes_per_token: float | None,
    ):
        self.config, self.steps, self.batches, self.eval_batches = config, steps, batches, eval_batches
        self.checkpoints, self.reporter, self.stop = checkpoints, reporter, stop
        self.watchdog, self.bytes_per_token = watchdog, bytes_per_token
        self.feed = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.pending: tuple[int, int, StepMetrics] | None = None

    def go(self, step: int, state: TrainState, losses: dict[int, float]) -> tuple[Any, int, TrainState]:
        """Runs to the end, an early stop or a signal; the state is then being saved."""
        cfg = self.config.train
        if 0 < step < cfg.steps and step % cfg.eval_every_steps == 0 and step not in losses:
            losses[step] = self.evaluate(step, state)["loss"]  # a signal came between its chunk and its evaluation
        saved = time.monotonic()
        stopping, _ = self.asked(step, saved)  # a signal may have come while XLA compiled
        status, chunks = "finished", self.chunks(step)
        while step < cfg.steps:
            if stops_early(list(losses.values()), cfg.early_stop_evals):
                status = "stopped_early"
                break
            if stopping or (self.stop.requested is not None and jax.process_count() == 1):
                status = "interrupted"
                break
            chunk, number = next(chunks)
            count = int(number)
            state, new = self.steps.train(state, chunk, number)
            self.report()  # of the chunk before, while this one runs
            self.pending = (step, count, new)
            step += count
            stopping, clock = self.asked(step, saved)
            if stopping:
                status = "interrupted"
                break
            if step % cfg.eval_every_steps == 0 and step < cfg.steps:
                losses[step] = self.evaluate(step, state)["loss"]
            every = self.config.checkpoint.save_every_steps
            if step < cfg.steps and (clock or (every is not None and step % every == 0)):
                self.report()
                began = time.monotonic()
                self.checkpoints.save(step, state)
                saved = time.monotonic()
                self.reporter.exclude(saved - began)
        self.report()
        if step:
            self.checkpoints.save(step, state)
        return status, step, state

    def chunks(self, step: int) -> Iterator[tuple[Batch, np.int32]]:
        """The chunks after `step`, each brought to the devices while the one before is used."""

        def ends(end: int) -> Iterator[int]:
            yield end
            while end < self.config.train.steps:
                yield (end := next_boundary(end, self.config))

        def place(interval: tuple[int, int]) -> tuple[Batch, np.int32]:
            return self.steps.place_chunk([self.batches[i] for i in range(*interval)])

        return read_ahead(self.feed, place, pairwise(ends(step)))

    def report(self) -> None:
        """Waits for the newest chunk and reports its metrics."""
        if self.pending is not None:
            start, count, found = self.pending
            self.pending = None
            self.reporter.add(start, count, jax.device_get(found))
            self.watchdog.alive()

    def evaluate(self, step: int, state: TrainState, final: bool = False) -> dict[str, float]:
        """Evaluates the (averaged) weights on the held-out split, all of it or as much as is configured."""
        self.report()
        began = time.monotonic()
        rows, count = self.config.train.eval_rows, None
        if rows is not None and not final:
            count = -(-rows // self.config.train.global_batch_size)

        def place(batch: Batch) -> Batch:
            self.watchdog.alive()
            return self.steps.device_put_batch(batch)

        found = evaluate(self.steps.evaluate, place, averaged(state), self.eval_batches, count, state.frozen)
        values = metrics.evaluation(found, self.bytes_per_token)
        self.reporter.evaluation(step, SPLIT, values)
        self.reporter.exclude(time.monotonic() - began)
        return values

    def asked(self, step: int, saved: float) -> tuple[bool, bool]:
        """Whether to stop (a signal came) and whether to save (it is time); the same answer in every process."""
        minutes = self.config.checkpoint.save_every_minutes
        flags = np.array([
            self.stop.requested is not None,
            minutes is not None and time.monotonic() - saved >= 60 * minutes,
        ])  # fmt: skip
        if jax.process_count() > 1:  # at every boundary: a machine that is preempted has only seconds left
            from jax.experimental import multihost_utils

            flags = multihost_utils.process_allgather(flags).any(axis=0)
        return bool(flags[0]), bool(flags[1])
