"""What a sweep compiles: one train step for several members of one shape, with their hyperparameters as arrays.

Members of one shape differ only in the seed and in `optim.TracedHyperparameters`; `shape_of` tells which do. A member
alone on a device runs the plain step; several on one device run it under `vmap`. Devices do not communicate. On CPU
every core is a device (`program.a_device_for_each_core`): two members on one core each finish sooner than one after
the other on both cores.
"""

import functools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxformer.config import Config
from jaxformer.runtime.host_memory import one_at_a_time
from jaxformer.training import state as states
from jaxformer.training.chunks import longest_chunk
from jaxformer.training.eval_step import eval_step
from jaxformer.training.optim import TracedHyperparameters, make_optimizer, make_schedule
from jaxformer.training.state import TrainState
from jaxformer.training.step import train_steps
from jaxformer.types import Batch, Model

MEMORY_SHARE = 0.7  # of the free memory, for the members that train at once
TRIAL_SHARE = 0.1  # compiling for a trial may take this share of the training time
COMPILE_SECONDS = 10.0  # least estimate of a compilation: the plain step may have come from a cache


class StackedProgram:
    """The compiled functions of one shape for `count` members at once. Arrays of members have a leading axis [M].

    Attributes:
      count: M.
      each: members per device.
      capacity: most updates in one dispatch.
      compiled: the train step.
      compile_seconds: what compiling it took.
      bytes_per_member: device memory to train one: state, temporaries and batches.
      evaluate: (params, batch) -> Sums, `step.eval_step` of one member.
      copy: a tree of arrays -> a copy on the device.
    """

    def __init__(self, model: Model, config: Config, count: int, batch: Batch):
        """Compiles the train step.

        Args:
          model: of this shape.
          config: of any of the members.
          count: members at once; rounded up so that every device in use has the same number.
          batch: any batch, for its shapes.
        """
        self.each = -(-count // len(jax.devices()))
        used = jax.devices()[: -(-count // self.each)]
        self.model, self.config, self.count = model, config, self.each * len(used)
        self._ema = config.optimizer.ema_decay is not None
        self.capacity = longest_chunk(config)
        self._mesh = jax.make_mesh((len(used),), ("members",), axis_types=(AxisType.Auto,), devices=used)
        one = jax.sharding.SingleDeviceSharding(used[0])
        self._sharded = NamedSharding(self._mesh, P("members")) if len(used) > 1 else one
        self._replicated = NamedSharding(self._mesh, P()) if len(used) > 1 else one
        self._init = jax.jit(
            self._mapped(lambda seed: states.fresh_state(model, self._optimizer(None), seed, ema=self._ema), (0,)),
            out_shardings=self._sharded,
            compiler_options=states.init_options(jax.devices()[0]),
        )
        self.evaluate = jax.jit(functools.partial(eval_step, model=model))
        self.copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        train = jax.jit(self._mapped(self._advance, (0, 0, 0, None)), donate_argnums=0, out_shardings=self._sharded)
        arguments = (
            jax.tree.map(lambda x: self._leaf((self.count, *x.shape), x.dtype), self.abstract_member()),
            jax.tree.map(lambda x: self._leaf(x.shape, x.dtype), self._numbers([config] * self.count)),
            jax.tree.map(lambda x: self._leaf((self.count, self.capacity, *np.shape(x)), np.asarray(x).dtype), batch),
            jax.ShapeDtypeStruct((), np.int32, sharding=self._replicated),
        )
        began = time.perf_counter()
        self.compiled = train.lower(*arguments).compile()
        self.compile_seconds = time.perf_counter() - began
        self.bytes_per_member = _bytes(self.compiled, arguments) / self.each
        self._train = one_at_a_time(self.compiled)

    def init(self, configs: Sequence[Config]) -> TrainState:
        """The states [M] of step 0, each from its config's seed."""
        return self._init(self._place(np.asarray([config.seed for config in configs], np.int32)))

    def place(self, batches: Sequence[Sequence[Batch]]) -> tuple[Batch, Any]:
        """The next batches of each member, at most `capacity`, on the devices; and their count."""
        count = len(batches[0])
        padded = [list(mine) + [mine[-1]] * (self.capacity - count) for mine in batches]
        chunk = jax.tree.map(
            lambda *xs: np.stack(xs).reshape(self.count, self.capacity, *np.shape(xs[0])),
            *[batch for mine in padded for batch in mine],
        )
        return self._place(chunk), jax.device_put(np.int32(count), self._replicated)

    def train(self, members: TrainState, configs: Sequence[Config], chunk: tuple[Batch, Any]) -> tuple[TrainState, Any]:
        """The states after the chunk and the metrics [M, K] of its steps; `members` is consumed."""
        return self._train(members, self._place(self._numbers(configs)), *chunk)

    def member(self, members: TrainState, index: int) -> TrainState:
        """The state of one member, on the first device."""
        return jax.device_put(jax.tree.map(lambda x: x[index], members), jax.devices()[0])

    def stack(self, single: Sequence[TrainState]) -> TrainState:
        """The inverse of `member`."""
        return self._place(jax.tree.map(lambda *xs: jnp.stack(xs), *single))

    def abstract_member(self) -> TrainState:
        """Shapes of one state on the first device, to restore into."""
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = states.state_shapes(self.model, self._optimizer(None), ema=self._ema)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), shapes)

    def _optimizer(self, hyperparameters: TracedHyperparameters | None) -> Any:
        if hyperparameters is None:  # only for shapes, which do not depend on the values
            hyperparameters = TracedHyperparameters(*np.ones(len(TracedHyperparameters._fields), np.float32))
        return make_optimizer(self.config.optimizer, self.config.train.steps, self.model.specs, hyperparameters)

    def _advance(
        self, state: TrainState, hyperparameters: TracedHyperparameters, batches: Batch, count: Any
    ) -> tuple[TrainState, Any]:
        cfg = self.config
        return train_steps(
            state,
            batches,
            count,
            model=self.model,
            optimizer=self._optimizer(hyperparameters),
            schedule=make_schedule(cfg.optimizer, cfg.train.steps, hyperparameters),
            micro_batches=cfg.execution.gradient_accumulation_steps,
            noise_scale=cfg.train.noise_scale,
            clip_norm=cfg.optimizer.clip_norm,
            ema_decay=cfg.optimizer.ema_decay,
            max_bad_steps=cfg.train.max_bad_steps,
        )

    def _mapped(self, function: Any, axes: tuple[int | None, ...]) -> Any:
        """Maps `function` over M members: under vmap where a device has several."""

        def single(*args: Any) -> Any:
            mine = [x if axis is None else jax.tree.map(lambda y: y[0], x) for x, axis in zip(args, axes, strict=True)]
            return jax.tree.map(lambda x: x[None], function(*mine))

        local = jax.vmap(function, axes) if self.each > 1 else single
        if self._mesh.size == 1:
            return local
        specs = tuple(P() if axis is None else P("members") for axis in axes)
        return jax.shard_map(local, mesh=self._mesh, in_specs=specs, out_specs=P("members"), check_vma=False)

    def _numbers(self, configs: Sequence[Config]) -> TracedHyperparameters:
        hyperparameters = [TracedHyperparameters.of(config.optimizer, config.train.steps) for config in configs]
        return TracedHyperparameters(*(np.asarray(column, np.float32) for column in zip(*hyperparameters, strict=True)))

    def _leaf(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharded)

    def _place(self, tree: Any) -> Any:
        return jax.device_put(tree, self._sharded)


class ExecutionPlan(NamedTuple):
    """How the members of a shape train.

    Attributes:
      programs: for fewer and fewer members, the last for one; each takes less time per member than the next.
      why: the line that explains the choice.
    """

    programs: list[StackedProgram]
    why: str

    def split(self, members: int) -> Iterator[tuple[StackedProgram, int]]:
        """The programs to run one after another, and how many of the members each trains: none is half empty."""
        while members:
            program = next((p for p in self.programs if 2 * min(members, p.count) > p.count), self.programs[-1])
            yield program, min(members, program.count)
            members -= min(members, program.count)


def choose(
    model: Model, config: Config, members: int, steps: int, batch: Batch, *, at_once: int | None = None
) -> ExecutionPlan:
    """How `members` of one shape, of `steps` updates each, train fastest on this machine, by a short trial.

    Compiles and times the plain step; then, with several devices, one member on each; then all members at once (as many
    as fit in memory). A trial whose compilation would take more than TRIAL_SHARE of the training time is left out.

    Args:
      model, config: of the shape.
      members: how many there are.
      steps: of the longest of them.
      batch: any of its batches.
      at_once: train this many at once, without a trial; None: try.
    """
    if at_once is not None:
        count = min(at_once, members)
        return ExecutionPlan([StackedProgram(model, config, count, batch)], f"{count} at once, as asked")
    one = StackedProgram(model, config, 1, batch)
    if members == 1:
        return ExecutionPlan([one], "one member")
    best = _step_seconds(one, batch)
    programs, why = [one], [f"a step of a member takes {1e3 * best:.3g} ms in turns"]
    pools = 1 if jax.devices()[0].platform == "cpu" else len(jax.devices())  # of memory
    fitting = max(1, int(MEMORY_SHARE * free_memory() * pools / one.bytes_per_member))
    for most in sorted({min(fitting, len(jax.devices())), fitting}):
        count = _balanced(members, min(members, most))
        if count <= programs[0].count:
            continue
        if max(one.compile_seconds, COMPILE_SECONDS) > TRIAL_SHARE * best * members * steps:
            why.append(f"compiling for {count} at once would cost more than it can save")
            break
        tried = StackedProgram(model, config, count, batch)
        seconds = _step_seconds(tried, batch) / count  # copies that fill the program do not count
        why.append(f"{1e3 * seconds:.3g} ms with {count} at once, {tried.each} on a device")
        if seconds < best:
            best, programs = seconds, [tried, *programs]
    if fitting == 1:
        why.append(f"memory for one at a time ({one.bytes_per_member / 1e9:.2g} GB each)")
    return ExecutionPlan(programs, f"{programs[0].count} at once: {', '.join(why)}")


def _balanced(members: int, most: int) -> int:
    """The group size that splits `members` into as few and as even groups of at most `most` as possible.

    >>> _balanced(10, 8), _balanced(8, 8), _balanced(5, 1)
    (5, 8, 1)
    """
    return -(-members // -(-members // most))


def _step_seconds(program: StackedProgram, batch: Batch) -> float:
    """Seconds of one update of all its members: the least of three dispatches after a warm-up."""
    configs = [program.config] * program.count
    members = program.init(configs)
    chunk = program.place([[batch] * 2] * program.count)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        members, metrics = program.train(members, configs, chunk)
        jax.block_until_ready((members, metrics))
        times.append((time.perf_counter() - began) / 2)
    return min(times[1:])


def free_memory() -> float:
    """Free bytes of the first device (of the machine, for CPUs)."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _bytes(compiled: Any, arguments: Any) -> float:
    """Bytes a device needs to run a compiled program."""
    analysis = compiled.memory_analysis()
    if analysis is None:  # unknown on this backend: assume four times the arguments
        return 4.0 * states.state_bytes(arguments)
    return float(analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + analysis.output_size_in_bytes)
