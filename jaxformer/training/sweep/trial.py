"""How long a sweep takes on this machine, learned from a few updates and a few held-out batches of each shape."""

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from jaxformer.config import Config
from jaxformer.training.evaluate import EvalBatches, HeldOut, TrainBatches, evaluate_sources, read_ahead, sources_of
from jaxformer.training.state import averaged
from jaxformer.training.sweep.scheduler import Sources, how_to_train
from jaxformer.training.sweep.stacked_program import StackedProgram
from jaxformer.training.sweep.trunks import Member, Trunk, shapes

DISPATCH_SECONDS = 1.0  # about as long is a measured dispatch, unless its program holds fewer updates
DISPATCHES, BATCHES = 3, 8  # measured of each program, and held-out batches of each source


class SweepSeconds(NamedTuple):
    """Seconds that a sweep takes.

    Attributes:
      compiling: of the programs of all shapes.
      updates: of all trunks and decays.
      evaluations: of every member on its held-out rows.
    """

    compiling: float
    updates: float
    evaluations: float


class _First:
    """The first batches of a sequence."""

    def __init__(self, batches: EvalBatches, count: int):
        self._batches, self._count = batches, min(count, len(batches))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def estimate(members: Sequence[Member], sources: Sources, *, at_once: int | None = None) -> SweepSeconds:
    """How long `scheduler.run` would take for these members, with the same arguments.

    Compiles what a run of them compiles first, makes a few updates of each shape and evaluates it on a few batches;
    nothing is written. The medians stand for all updates and batches to come.
    """
    found = []
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as feed:
        for of_one_shape in shapes(members):
            found.append(_of_shape(of_one_shape, sources, at_once, feed))
    return (
        SweepSeconds(*(sum(seconds) for seconds in zip(*found, strict=True))) if found else SweepSeconds(0.0, 0.0, 0.0)
    )


def _of_shape(found: list[Trunk], sources: Sources, at_once: int | None, feed: Executor) -> SweepSeconds:
    """Of the trunks of one shape."""
    config = found[0].members[-1].config
    began = time.perf_counter()
    groups, plan = how_to_train(found, sources, at_once)
    compiling, updates = time.perf_counter() - began, 0.0
    source = sources.batches(config)
    speeds: dict[int, float] = {}
    for group in groups:
        for program, _ in plan.split(len(group)):
            if id(program) not in speeds:
                speeds[id(program)] = update_seconds(program, config, source, feed)
            updates += group[0].steps * speeds[id(program)]
    each = evaluation_seconds(plan.programs[-1], config, sources)
    return SweepSeconds(compiling, updates, each * sum(len(trunk.members) for trunk in found))


def update_seconds(program: StackedProgram, config: Config, source: TrainBatches, feed: Executor) -> float:
    """Seconds of one update of all members of a program, batches read and placed ahead as a sweep does."""
    configs = [config] * program.count
    members = program.init(configs)

    def load(steps: range) -> Any:
        return program.place([[source[i] for i in steps]] * program.count)

    def dispatches(sizes: list[int]) -> list[float]:
        nonlocal members
        times = []
        chunks = [range(size) for size in sizes]
        began = time.perf_counter()
        for steps, chunk in zip(chunks, read_ahead(feed, load, chunks), strict=True):
            members, metrics = program.train(members, configs, chunk)
            jax.block_until_ready((members, metrics))
            times.append((time.perf_counter() - began) / len(steps))
            began = time.perf_counter()
        return times

    about = dispatches([1, 1])[-1]  # the first one warms up
    size = max(1, min(program.capacity, round(DISPATCH_SECONDS / about)))
    return statistics.median(dispatches([size] * (DISPATCHES + 1))[1:])  # the first one waits for its batches


def evaluation_seconds(program: StackedProgram, config: Config, sources: Sources) -> float:
    """Seconds of the evaluation of one member after its last update."""
    parts = sources_of(sources.held_out(config), sources.bytes_per_token)
    state = program.member(program.init([config] * program.count), 0)
    read = {name: part.batches if part.sample is None else part.sample for name, part in parts.items()}

    def seconds(count: int) -> float:
        few = {name: HeldOut(_First(each, count), parts[name].share) for name, each in read.items()}
        began = time.perf_counter()
        evaluate_sources(program.evaluate, jax.device_put, averaged(state), few, state.frozen)
        return time.perf_counter() - began

    seconds(1)  # compiles
    count = sum(min(BATCHES, len(each)) for each in read.values())
    return seconds(BATCHES) / count * sum(map(len, read.values()))
