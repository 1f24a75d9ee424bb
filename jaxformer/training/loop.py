"""The training loop. It only schedules; steps, checkpoints and records are made elsewhere.

Updates are dispatched in chunks. Where chunks end depends on the configuration and the step alone (`next_boundary`),
and evaluations, saves and stops happen only there. So a run that was killed at any moment and started again executes
the same dispatches as one that was not, and ends bit for bit the same.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.config import Config
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.runtime import coordination
from jaxformer.runtime.host_memory import settle_heap
from jaxformer.storage.address import place
from jaxformer.tracking.tracker import local_folder
from jaxformer.tracking.trackers import Trackers
from jaxformer.training.checkpoint.manager import Checkpoints
from jaxformer.training.chunks import next_boundary
from jaxformer.training.evaluate import (
    SPLIT,
    EvalBatches,
    Evaluation,
    HeldOut,
    TrainBatches,
    criterion,
    evaluate_sources,
    evaluations_before,
    read_ahead,
    sources_of,
    stops_early,
)
from jaxformer.training.interrupt import StopSignal
from jaxformer.training.optim import make_optimizer
from jaxformer.training.outcome import Result, final_record
from jaxformer.training.progress import Progress
from jaxformer.training.reporter import Reporter
from jaxformer.training.state import TrainState, averaged
from jaxformer.training.step import CompiledSteps, StepMetrics, compile_ahead, compile_steps
from jaxformer.training.step_trace import StepTrace
from jaxformer.training.stopwatch import Stopwatch
from jaxformer.types import Batch, Model


def train(
    model: Model,
    batches: TrainBatches,
    eval_batches: EvalBatches | Mapping[str, HeldOut],
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
    since: float | None = None,
    log: Callable[[str], None] = print,
    bar: bool | None = None,
) -> Result:
    """Trains `model` to `config.train.steps`, going on from the newest valid checkpoint in `workdir` if there is one.

    Writes `workdir`/records.jsonl and `workdir`/checkpoints/; the caller has made sure that the directory belongs to
    this configuration.

    Args:
      model: specs, init, loss, weights; its metrics hold "loss", nats per token.
      batches: training batches; batches[step] are this host's rows, see `parallel.mesh.host_rows`.
      eval_batches: the held-out split, in batches of train.global_batch_size rows; of a mixture that of each source.
      config: train, optimizer, checkpoint, seed and tracking are read here.
      workdir: exists.
      mesh: of `parallel.mesh.make_mesh`.
      flops_per_token: forward and backward, for the MFU and the final record.
      bytes_per_token: bytes of the held-out split / tokens predicted in it, where that is one; None: no bits per byte.
      final_fields: for the final record; they replace the loop's of the same name.
      fingerprint: of the run, kept in every checkpoint and compared when one is read; "" compares nothing.
      also_of_this_run: other accepted fingerprints of its checkpoints.
      resume_command: printed when a signal ends the run.
      initial: changes the state of step 0, as to start from other weights; not called where a checkpoint is there.
      since: when this start of the run began, by `time.perf_counter`; None: now.
      log: prints a line.
      bar: a progress bar (True), plain lines (False), or a bar where stderr is a terminal (None).

    Raises:
      TrainingDiverged: train.max_bad_steps in a row were not finite, or the last step or the final loss is not.
      CheckpointError: none is valid, or one cannot be written.
      ConfigError: the batch or a parameter does not divide over the mesh, or the held-out split is empty.
    """
    workdir = place(workdir)
    sources = sources_of(eval_batches, bytes_per_token)
    if not all(len(each.batches) for each in sources.values()):
        raise ConfigError("config.data: the held-out split holds no row; it needs at least one")
    began = time.perf_counter()
    stopwatch = Stopwatch(since)
    stopwatch.add("startup", 0.0 if since is None else began - since)
    with ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        progress = Progress(config.train.steps, log, show=jax.process_index() == 0, bar=bar)
        stack.callback(progress.close)
        stop = stack.enter_context(StopSignal(progress.line))
        steps = compile_steps(model, make_optimizer(config.optimizer, config.train.steps, model.specs), mesh, config)
        checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint, fingerprint, also=also_of_this_run)
        checkpoints.start()
        newest = max(checkpoints.steps(), default=0)
        open_trackers = functools.partial(Trackers, config, workdir, newest, fingerprint, progress.line)
        with stopwatch.measure("startup"):
            trackers = coordination.raise_together(open_trackers, "its trackers")
        stack.callback(trackers.close)
        batch, held_out = batches[0], next(iter(sources.values())).batches[0]
        helper = stack.enter_context(ThreadPoolExecutor(1))
        # In parallel with the initialization, whose compilation takes seconds too.
        finished = checkpoints.steps()[-1:] == [config.train.steps]
        programs = None if finished else helper.submit(compile_ahead, steps, mesh, batch, held_out)
        with stopwatch.measure("checkpoint"):
            restored = checkpoints.restore(steps.abstract_state)
        compiling = time.perf_counter()
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
        stopwatch.add("compilation", time.perf_counter() - compiling)
        reporter = Reporter(
            workdir / "records.jsonl",
            every=config.train.log_every_steps,
            total=config.train.steps,
            tokens_per_step=config.train.global_batch_size * batch.tokens.shape[-1],
            max_bad_steps=config.train.max_bad_steps,
            progress=progress,
            mesh=mesh,
            flops_per_token=flops_per_token,
            trackers=trackers,
            stopwatch=stopwatch,
        )
        watchdog = stack.enter_context(coordination.Watchdog(config.distributed.stall_timeout_seconds))
        trace = StepTrace(config.train.profile_steps, local_folder(workdir) / "profile", progress.line)
        stack.callback(trace.close)
        run = _Run(config, steps, batches, sources, checkpoints, reporter, stop, watchdog, trace)
        stack.callback(run.feed.shutdown, wait=True, cancel_futures=True)
        if restored is not None:
            progress.line(f"going on from step {step}")
        path, first = workdir / "records.jsonl", jax.process_index() == 0  # others may not see its repairs yet
        losses = list(evaluations_before(path, step, fingerprint, config.tune.metric).items()) if first else []
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
        values, of_each = run.evaluate(step, state, final=True)
        with reporter.aside("checkpoint"):
            checkpoints.wait()
        reporter.check_end(step, int(state.bad_steps), values["loss"])
        if status == "stopped_early":
            reporter.event(step, "stopped_early")
            progress.line(f"stopped at step {step}: no better evaluation in {config.train.early_stop_evals}")
        final = final_record(
            status, step, values,
            tokens=step * reporter.tokens_per_step, specs=model.specs, flops_per_token=flops_per_token,
        )  # fmt: skip
        used = reporter.used(step)
        reporter.write(final | used | dict(final_fields or {}))
        return Result(status, step, state, values, time.perf_counter() - began, used, of_each)


class _Run:
    """The moving parts of one call of `train`."""

    def __init__(
        self,
        config: Config,
        steps: CompiledSteps,
        batches: TrainBatches,
        held_out: Mapping[str, HeldOut],
        checkpoints: Checkpoints,
        reporter: Reporter,
        stop: StopSignal,
        watchdog: coordination.Watchdog,
        trace: StepTrace,
    ):
        self.config, self.steps, self.batches, self.held_out = config, steps, batches, held_out
        self.checkpoints, self.reporter, self.stop = checkpoints, reporter, stop
        self.watchdog, self.trace = watchdog, trace
        self.feed = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.pending: tuple[int, int, StepMetrics, float | None] | None = None

    def go(self, step: int, state: TrainState, losses: dict[int, float]) -> tuple[Any, int, TrainState]:
        """Runs to the end, an early stop or a signal; the state is then being saved."""
        cfg = self.config.train
        if 0 < step < cfg.steps and step % cfg.eval_every_steps == 0 and step not in losses:
            # A signal came between its chunk and its evaluation.
            losses[step] = criterion(self.evaluate(step, state).values, self.config.tune.metric)
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
            chunk, number = self.next(chunks)
            count = int(number)
            state, new = self.trace(self.steps.train, step, count, state, chunk, number)
            done = time.perf_counter() if self.returned_done(new) else None
            self.report()  # of the chunk before, while this one runs
            self.pending = (step, count, new, done)
            step += count
            stopping, clock = self.asked(step, saved)
            if stopping:
                status = "interrupted"
                break
            if step % cfg.eval_every_steps == 0 and step < cfg.steps:
                losses[step] = criterion(self.evaluate(step, state).values, self.config.tune.metric)
            every = self.config.checkpoint.save_every_steps
            if step < cfg.steps and (clock or (every is not None and step % every == 0)):
                self.report()
                with self.reporter.aside("checkpoint"):
                    self.checkpoints.save(step, state)
                saved = time.monotonic()
        self.report()
        if step:
            with self.reporter.aside("checkpoint"):
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

    def next(self, chunks: Iterator[tuple[Batch, np.int32]]) -> tuple[Batch, np.int32]:
        """The next chunk. Waiting for it counts as such if the devices had finished the one before when it came."""
        began = time.perf_counter()
        found = next(chunks)
        if self.pending is None or self.pending[2].loss.is_ready():  # type: ignore[attr-defined]
            self.reporter.stopwatch.add("data", time.perf_counter() - began)
        return found

    def returned_done(self, new: StepMetrics) -> bool:
        """Whether the call returned when its updates were done, as on GPUs, whose host leads the loop over them, and so
        did the one before. The end of one that did not is seen late, and the next would have no length."""
        return (self.pending is None or self.pending[3] is not None) and new.loss.is_ready()  # type: ignore

    def report(self) -> None:
        """Waits for the newest chunk and reports its metrics."""
        if self.pending is not None:
            start, count, found, done = self.pending
            self.pending = None
            self.reporter.add(start, count, jax.device_get(found), done)
            self.watchdog.alive()

    def evaluate(self, step: int, state: TrainState, final: bool = False) -> Evaluation:
        """Evaluates the (averaged) weights on what is held out: at the end on all of it, before on its sample."""
        self.report()

        def place(batch: Batch) -> Batch:
            self.watchdog.alive()
            return self.steps.device_put_batch(batch)

        with self.reporter.aside("evaluation"):
            found = evaluate_sources(
                self.steps.evaluate, place, averaged(state), self.held_out, state.frozen, not final
            )
        for name, values in found.sources.items():
            self.reporter.evaluation(step, f"{SPLIT}/{name}", values)
        self.reporter.evaluation(step, SPLIT, found.values)  # the last, so that the others are there where it is
        return found

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
