"""Pipeline parallelism: layers over the devices of the `stage` axis, through which micro-batches pass one by one.

One scan of M + S - 1 ticks. In each, every stage runs its layers on one micro-batch and hands it to the next stage;
differentiating the scan gives the backward schedule. In the first and last S - 1 ticks some stages have nothing to do
and compute what nobody reads: of the ticks, the share M / (M + S - 1) is useful. With `execution.pipeline_repeats` the
schedule is `circular`'s.

Each stage keeps M / S micro-batches. What stage 0 takes out of its own, the stage after it replaces by one of its own,
and so on; the last stage puts its output there. So inputs come to the first stage and outputs go back to where their
inputs were, and no device holds the whole batch.

Source: Huang et al. 2019 (GPipe), section 2.3.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxformer.parallel.circular import Schedule, exchange
from jaxformer.parallel.constraints import constrain, mesh_axes
from jaxformer.parallel.context import SequenceSharding
from jaxformer.parallel.data_axis import DATA, axes_alone, data_shards
from jaxformer.types import Array

STAGE = "stage"  # the mesh axis


def stages() -> int:
    """The number of stages of the mesh in use; 1: there is no pipeline."""
    return mesh_axes().get(STAGE, 1)


@dataclass(frozen=True)
class MicroBatches:
    """How the rows of a batch lie in a pipeline: one group of micro-batches on each stage.

    Micro-batch m has the rows m, m + M, m + 2 M, ... of the batch, as in gradient accumulation, and is kept by stage
    m // (M / S). Stands where a `context.SequenceSharding` does, for rows that are whole.

    Attributes:
      stages: S.
      count: M, a multiple of S.
      repeats: R, how often a micro-batch goes through the stages.
    """

    stages: int
    count: int
    repeats: int = 1

    @property
    def parts(self) -> int:
        """Shards of each row: 1."""
        return 1

    @property
    def order(self) -> None:
        """Of the tokens of a row: as they are."""

    @property
    def each(self) -> int:
        """Micro-batches that a stage keeps."""
        return self.count // self.stages

    def arrange(self, x: Any) -> Any:
        """[B, ...] with the rows of stage 0 first, and on each stage row by row of its micro-batches. None stays None.

        >>> MicroBatches(stages=2, count=4).arrange(jnp.arange(8)).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
        """
        if x is None:
            return None
        x = jnp.swapaxes(x.reshape(-1, self.stages, self.each, *x.shape[1:]), 0, 1)
        return constrain(x.reshape(-1, *x.shape[3:]), "rows", *[None] * (x.ndim - 3))

    def shard(self, x: Any) -> Any:
        """As `arrange`."""
        return self.arrange(x)

    def unshard(self, x: Array) -> Array:
        """The inverse of `arrange`."""
        x = jnp.swapaxes(x.reshape(self.stages, -1, self.each, *x.shape[1:]), 0, 1)
        return constrain(x.reshape(-1, *x.shape[3:]), "batch_rows", *[None] * (x.ndim - 3))

    def sum_shards(self, x: Array) -> Array:
        """Numbers of the rows [B], in the order of the batch."""
        return self.unshard(x)

    def first_tokens(self, x: Array) -> Array:
        """[B, 1, D], the first token of each row of [B, T, D], in the order of the batch."""
        return self.unshard(x[:, :1])

    def map(self, function: Callable[..., Array], x: Array, *each: Array) -> Array:
        """function(micro-batch [B / M, ...], *numbers of it) of each micro-batch of [B, ...], in the order here.

        Args:
          function: returns an array of the shape of its first argument.
          x: [B, ...], in the order of `arrange`.
          *each: arrays [M, ...], an entry for each micro-batch.
        """
        parts = jnp.swapaxes(x.reshape(self.stages, -1, self.each, *x.shape[1:]), 1, 2)
        numbers = (a.reshape(self.stages, self.each, *a.shape[1:]) for a in each)
        out = jnp.swapaxes(jax.vmap(jax.vmap(function))(parts, *numbers), 1, 2)
        return constrain(out.reshape(x.shape), "rows", *[None] * (x.ndim - 1))


RowSharding = SequenceSharding | MicroBatches  # how a model's rows lie on the mesh in use


def micro_batches(rows: int, count: int, repeats: int = 1) -> MicroBatches:
    """How `rows` rows lie in `count` micro-batches on the stages of the mesh in use, through which they go `repeats`
    times.

    Raises:
      ValueError: they do not divide.
    """
    if count % stages() or rows % count:
        raise ValueError(
            f"{rows} rows in {count} micro-batches on {stages()} stages; accepted: micro-batches, as many as "
            "execution.gradient_accumulation_steps says, that the stages divide and that divide the rows"
        )
    return MicroBatches(stages(), count, repeats)


def run(
    apply: Callable[[Any, Any, Any, Array, Array], tuple[Array, Any]],
    params: Any,
    common: Any,
    rows: dict[str, Array],
    lie: MicroBatches,
    own_data: bool = False,
) -> tuple[Array, Any]:
    """All micro-batches through all stages.

    Args:
      apply: (a stage's part of `params`, `common`, rows of a micro-batch, its number, the round) -> (rows["x"] after
        the part's layers, terms: a tree of scalars, sums over rows). Under the mesh without its stage axis. With one
        round, the part is the stage's; with R, it has all R of them, [R, L / (R S), ...].
      params: a tree of arrays [L, ...], L a multiple of R S; stage s has the s-th part of each.
      common: a tree of arrays that every stage reads.
      rows: arrays [B, ...] in the order of `lie.arrange`; "x" is what changes, the others go along with it.
      lie: how they lie.
      own_data: the data axis is not in `apply`'s mesh either, see `data_axis`: each group has its own rows, and what it
        adds up of the gradients is summed over the groups once, not in every tick.

    Returns:
      rows["x"] after the last stage, and the sum of the terms over stages and micro-batches.
    """
    schedule = Schedule(lie.stages, lie.count, lie.repeats)
    stages, each, circular = lie.stages, lie.each, lie.repeats > 1
    apart = (STAGE, DATA) if own_data and data_shards() > 1 else (STAGE,)
    ahead = [(i, i + 1) for i in range(stages - 1)] + ([(stages - 1, 0)] if circular else [])
    back = [(i + 1, i) for i in range(stages - 1)]

    def sent(tree: Any, along: list[tuple[int, int]]) -> Any:
        return jax.tree.map(functools.partial(jax.lax.ppermute, axis_name=STAGE, perm=along), tree)

    def local(number: Array, params: Any, common: Any, rows: dict[str, Array]) -> tuple[Array, Any]:
        stage, last = number[0], stages - 1
        kept = {name: _by_microbatch(x, each) for name, x in rows.items()}
        if circular:
            params = jax.tree.map(lambda x: exchange(x, stages, lie.repeats, STAGE), params)

        def tick(carry: tuple[Any, Any], time: Array) -> tuple[tuple[Any, Any], Any]:
            kept, arrived = carry
            took, now = schedule.taken(time) if circular else (time, True)
            slot = took % each
            taken = {name: jax.lax.dynamic_index_in_dim(x, slot, keepdims=False) for name, x in kept.items()}
            of, part, there = schedule.work(stage, time)
            mine = jax.tree.map(lambda a, b: jnp.where((stage == 0) & now, a, b), taken, arrived)
            out, terms = apply(params, common, mine, of, part)
            terms = jax.tree.map(lambda x: jnp.where(there, x, 0), terms)
            left = mine | {"x": out}
            put = (stage == last) & (part == lie.repeats - 1)
            # Where nothing is taken, nothing moves, and the slot of the last one taken waits for its output.
            moved = jax.lax.cond(now, lambda x: sent(x, back), lambda x: x, taken) if circular else sent(taken, back)
            moved = jax.tree.map(lambda a, b: jnp.where(put, a, b), left, moved)
            kept = {n: jax.lax.dynamic_update_index_in_dim(x, moved[n], slot, 0) for n, x in kept.items()}
            return (kept, sent(left, ahead)), terms

        # Before its first micro-batch arrives, a stage computes with one of its own: zeros might give no finite number.
        first = {name: x[0] for name, x in kept.items()}
        (kept, _), terms = jax.lax.scan(tick, (kept, first), jnp.arange(schedule.ticks))
        # The output of micro-batch m was put where the input of m + S - 1 was taken, S - 1 slots further on.
        out = jnp.roll(kept["x"], -last, axis=0)
        out = constrain(jnp.swapaxes(out, 0, 1).reshape(rows["x"].shape), "rows", *[None] * (rows["x"].ndim - 1))
        return out, jax.tree.map(lambda x: jnp.sum(x, axis=0)[None], terms)

    out, terms = jax.shard_map(
        local,
        in_specs=(P(STAGE), P(STAGE), P(), P(apart)),
        out_specs=(P(apart), P(apart)),
        axis_names=axes_alone(*apart),
        check_vma=False,
    )(jnp.arange(stages), params, common, rows)
    return out, jax.tree.map(lambda x: jnp.sum(x, axis=0), terms)


def _by_microbatch(x: Array, each: int) -> Array:
    """A stage's rows [N, ...] -> [each, N / each, ...]."""
    x = jnp.swapaxes(x.reshape(-1, each, *x.shape[1:]), 0, 1)
    return constrain(x, None, "rows", *[None] * (x.ndim - 2))
