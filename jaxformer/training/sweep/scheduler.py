"""A sweep: many runs in one process, those of one shape in one compiled program.

Under the warmup-stable-decay schedule, members that differ only in their length share a trunk: the constant part is
trained once, and each member branches off for its own decay. The results equal those of separate runs, because
`batches[step]` and the step's randomness depend on seed and step only.

A finished member is one file, `runs/NAME.jsonl`, written whole: its segment of the trunk, its decay, and the final
record. A killed sweep resumes with the members that have no file, from the trunk's state at the last branch.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer import records
from jaxformer.config import CheckpointConfig, Config
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.runtime.host_memory import settle_heap
from jaxformer.storage.address import place
from jaxformer.training.checkpoint.layout import OLD_DIGITS
from jaxformer.training.checkpoint.manager import Checkpoints
from jaxformer.training.evaluate import (
    SPLIT,
    EvalBatches,
    HeldOut,
    TrainBatches,
    evaluate_sources,
    read_ahead,
    sources_of,
)
from jaxformer.training.interrupt import StopSignal
from jaxformer.training.progress import Progress
from jaxformer.training.state import TrainState, averaged
from jaxformer.training.step import StepMetrics
from jaxformer.training.sweep.kept_rows import KeptRows
from jaxformer.training.sweep.run_files import curve, run_path, set_aside_damaged, settled
from jaxformer.training.sweep.stacked_program import ExecutionPlan, StackedProgram, choose
from jaxformer.training.sweep.trunks import Member, Trunk, branches, gflop_per_step, grouped, shape_of, shapes, trunks
from jaxformer.types import Model


class Sources(NamedTuple):
    """How to build a member's model and data.

    Attributes:
      model: config -> Model; equal for configs of one shape.
      batches: config -> training batches, by seed.
      held_out: config -> validation batches, of a mixture those of each source.
      bytes_per_token: as in `loop.train`.
    """

    model: Callable[[Config], Model]
    batches: Callable[[Config], TrainBatches]
    held_out: Callable[[Config], EvalBatches | Mapping[str, HeldOut]]
    bytes_per_token: float | None = None


class Interrupted(Exception):  # noqa: N818 (what happened, as in KeyboardInterrupt)
    """Stopped by a signal, which the message names."""


def run(
    ask: Callable[[Mapping[str, dict[str, Any]]], Sequence[Member]],
    workdir: str | Path,
    sources: Sources,
    *,
    at_once: int | None = None,
    expected_gflop: float | None = None,
    fingerprint: str = "",
    log: Callable[[str], None] = print,
    bar: bool | None = None,
) -> dict[str, dict[str, Any]]:
    """Trains members until no more are wanted.

    Args:
      ask: final records by name -> all members wanted given these; called again when they have finished. Names are
        unique.
      workdir: exists; the caller has checked that it belongs to this sweep.
      sources: of models and batches.
      at_once: members of one shape that train together; None: whatever a short trial finds fastest.
      expected_gflop: estimate for the whole sweep, for the time left; None: that of the members wanted first.
      fingerprint: of the sweep, stored with each trunk's checkpoints and checked when one is read.
      log: prints a line.
      bar: as in `loop.train`.

    Returns:
      Name -> final record of every member. One that diverged has the status "diverged" and the loss nan.

    Raises:
      Interrupted: SIGTERM or Ctrl-C; call again to resume.
      ConfigError: two members of one name, or more than one process (every process would train the whole sweep).
    """
    if jax.process_count() > 1:
        raise ConfigError("sweep: runs in one process; start one sweep per host, each with some of the members")
    with ExitStack() as stack:
        progress = Progress(round(expected_gflop or 0), log, bar=bar, unit="GFLOP")
        stack.callback(progress.close)
        stop = stack.enter_context(StopSignal(progress.line))
        sweep = _Sweep(place(workdir), sources, progress, stop, at_once, fingerprint)
        stack.callback(sweep.feed.shutdown, wait=True, cancel_futures=True)
        set_aside_damaged(workdir, progress.line, fingerprint)
        while True:
            members, found = settled(ask, workdir, fingerprint)
            if len({member.name for member in members}) < len(members):
                raise ConfigError("sweep: two members have the same name")
            todo = [member for member in members if member.name not in found]
            if not todo:
                return found
            asked = sum(trunk.steps * gflop_per_step(trunk.members[0]) for trunk in trunks(todo))
            progress.expect(round(max(expected_gflop or 0, sweep.done + asked)))
            for of_one_shape in shapes(members):
                unfinished = [t for t in of_one_shape if any(m.name not in found for m in t.members)]
                if unfinished:
                    sweep.train_shape(unfinished)


def how_to_train(
    found: list[Trunk], sources: Sources, at_once: int | None = None
) -> tuple[list[list[Trunk]], ExecutionPlan]:
    """The trunks of one shape in groups that train together, and the programs that do it. Compiles, and tries."""
    config, groups = found[0].members[-1].config, _together(found)
    most, steps = max(map(len, groups)), max(trunk.steps for trunk in found)
    model, batch = sources.model(config), sources.batches(config)[0]
    return groups, choose(model, config, most, steps, batch, at_once=at_once)


def _together(found: list[Trunk]) -> list[list[Trunk]]:
    """Trunks in groups of those that branch, and whose members end, at the same steps."""
    groups = grouped(found, lambda trunk: (trunk.branches, tuple(m.config.train.steps for m in trunk.members)))
    return list(groups.values())


def _about(found: list[Trunk]) -> str:
    model = found[0].members[-1].config.model
    return f"{model.family}, width {model.width}, {model.num_layers} layers"


class _Sweep:
    """The state of one call of `run`."""

    def __init__(
        self,
        workdir: Path,
        sources: Sources,
        progress: Progress,
        stop: StopSignal,
        at_once: int | None,
        fingerprint: str,
    ):
        self.workdir, self.sources, self.progress, self.stop = workdir, sources, progress, stop
        self.at_once, self.fingerprint = at_once, fingerprint
        self.plans: dict[Config, ExecutionPlan] = {}
        self.feed = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.done = 0.0  # GFLOP
        (workdir / "runs").mkdir(exist_ok=True)

    def train_shape(self, found: list[Trunk]) -> None:
        """Trains the trunks of one shape, together those that branch at the same steps."""
        shape = shape_of(found[0].members[-1].config)
        if shape not in self.plans:
            groups, self.plans[shape] = how_to_train(found, self.sources, self.at_once)
            self.progress.line(f"{_about(found)}: {self.plans[shape].why}")
            settle_heap()
        else:
            groups = _together(found)
        for group in groups:
            left = iter(group)
            for program, count in self.plans[shape].split(len(group)):
                self.train_group(program, list(islice(left, count)))

    def train_group(self, program: StackedProgram, group: list[Trunk]) -> None:
        """Trains trunks with equal branches together, and every member that has no file yet."""
        whole = group + group[-1:] * (program.count - len(group))  # the copies that fill the program are discarded
        last = [trunk.members[-1] for trunk in whole]
        runs = [[run_path(self.workdir, member.name) for member in trunk.members] for trunk in group]
        missing = [i for i, mine in enumerate(zip(*runs, strict=True)) if not all(path.exists() for path in mine)]
        step, states = self.restore(program, whole, group[0].branches[missing[0]])
        for i in range(missing[-1] + 1):
            branch = group[0].branches[i]
            if branch < step or (branch == step and i not in missing):
                continue
            began, first = time.perf_counter(), step
            states, segment = self.advance(program, states, last, step, branch)
            step = branch
            if i in missing:
                mine = [trunk.members[i] for trunk in whole]
                ended, decay = self.advance(program, program.copy(states), mine, step, mine[0].config.train.steps)
                seconds = (time.perf_counter() - began) / len(group)
                for index, trunk in enumerate(group):
                    self.finish(program, trunk, i, ended, index, first, [*segment, *decay], seconds)
            if branches(group[0].members[0]):
                self.save(program, group, states, step)

    def advance(
        self, program: StackedProgram, states: TrainState, members: list[Member], step: int, end: int
    ) -> tuple[TrainState, list[StepMetrics]]:
        """The states after update `end`, and the metrics [M, n] of each dispatch up to it. Consumes `states`."""
        configs = [member.config for member in members]
        sources = [self.sources.batches(config) for config in configs]
        size = program.capacity
        dispatches = [range(start, min(start + size, end)) for start in range(step, end, size)]

        def load(steps: range) -> Any:
            return program.place([[source[i] for i in steps] for source in sources])

        out: list[StepMetrics] = []
        for steps, batches in zip(dispatches, read_ahead(self.feed, load, dispatches), strict=True):
            if len(out) > 1 and np.all(out[-2].bad_steps[:, -1] >= program.config.train.max_bad_steps):
                break  # all members have diverged
            if self.stop.requested is not None:
                raise Interrupted(self.stop.requested)
            states, found = program.train(states, configs, batches)
            if out:  # one dispatch behind, so that the device never waits for the host
                out[-1] = self.fetch(out[-1], members)
            out.append(jax.tree.map(lambda x, steps=steps: x[:, : len(steps)], found))
        if out:
            out[-1] = self.fetch(out[-1], members)
        return states, out

    def fetch(self, found: StepMetrics, members: list[Member]) -> StepMetrics:
        """Copies a dispatch's metrics to the host and shows them."""
        found = jax.device_get(found)
        count = len({member.name for member in members})  # without the copies that fill the program
        self.done += count * found.loss.shape[1] * gflop_per_step(members[0])
        self.progress.update(round(self.done), float(found.loss[0, -1]), label=members[0].name)
        return found

    def finish(
        self,
        program: StackedProgram,
        trunk: Trunk,
        i: int,
        ended: TrainState,
        index: int,
        first: int,
        dispatches: Sequence[StepMetrics],
        seconds: float,
    ) -> None:
        """Evaluates member `i` of a trunk, number `index` of its group, and writes its file."""
        member = trunk.members[i]
        path = run_path(self.workdir, member.name)
        if path.exists():
            return
        config, state = member.config, program.member(ended, index)
        tokens = config.train.global_batch_size * config.model.context_length
        diverged, values = int(state.bad_steps) > 0, dict[str, Any]()
        if not diverged:
            held_out = self.sources.held_out(config)
            parts = sources_of(held_out, self.sources.bytes_per_token)
            place, rows = jax.device_put, KeptRows(program.evaluate)
            values |= evaluate_sources(rows, place, averaged(state), parts, state.frozen, sample=True).values
            values |= rows.packed() if len(parts) == 1 else {}
            diverged = not math.isfinite(values["loss"])
        if diverged:
            values |= {"loss": math.nan, "loss_stderr": math.nan}
        final = {
            "kind": "final",
            "step": config.train.steps,
            "tokens": config.train.steps * tokens,
            **values,
            "status": "diverged" if diverged else "finished",
            "skipped": int(state.skipped),
            "split": SPLIT,
            "learning_rate": config.optimizer.learning_rate,
            "seed": config.seed,
            "branched_at": trunk.branches[i],
            "seconds": seconds,
            **member.fields,
            **({"fingerprint": self.fingerprint} if self.fingerprint else {}),
        }
        mine: StepMetrics = jax.tree.map(lambda *xs: np.concatenate([x[index] for x in xs]), *dispatches)
        lines = [*curve(mine, first, config.train.log_every_steps, tokens), final]
        records.write(path, [{**record, "run": member.name, "trunk": trunk.name} for record in lines])
        ending = "diverged" if diverged else f"loss {values['loss']:.4f} ± {values['loss_stderr']:.4f}"
        self.progress.line(f"{member.name}: {ending}")

    def restore(self, program: StackedProgram, group: list[Trunk], before: int) -> tuple[int, TrainState]:
        """The saved states of a group's trunks if all are of one update not after `before`; else initial ones."""
        found = [self.kept(program, trunk) if branches(trunk.members[0]) else None for trunk in group]
        steps = {None if one is None else one[1] for one in found}
        step = steps.pop() if len(steps) == 1 else None
        if step is None or step > before:
            return 0, program.init([trunk.members[0].config for trunk in group])
        return step, program.stack([one[0] for one in found if one is not None])

    def kept(self, program: StackedProgram, trunk: Trunk) -> tuple[TrainState, int] | None:
        """A trunk's newest valid state and its update."""
        try:
            return self.store(trunk).restore(program.abstract_member())
        except CheckpointError as error:
            self.progress.line(f"note: {error}; the trunk starts again from step 0")
            return None

    def save(self, program: StackedProgram, group: list[Trunk], states: TrainState, step: int) -> None:
        """Saves the trunks' states at a branch, and removes those of earlier branches."""
        for index, trunk in enumerate(group):
            store = self.store(trunk)
            if step > max(store.steps(), default=0):
                store.save(step, program.member(states, index))
                store.close()

    def store(self, trunk: Trunk) -> Checkpoints:
        """A trunk's checkpoints, of which only the newest is kept."""
        keep = CheckpointConfig(save_every_minutes=None, keep=1)
        mine = f"{self.fingerprint} {trunk.name}".strip()
        # Earlier versions stored the trunk's name alone.
        also = (trunk.name,) if len(self.fingerprint) == OLD_DIGITS else ()
        return Checkpoints(self.workdir / "trunks" / trunk.name, keep, mine, warn=self.progress.line, also=also)
