"""Pipeline parallelism: layers over the devices of the `stage` axis, through which micro-batches pass one by one.

One scan of M + S - 1 ticks. In each, every stage runs its layers on one micro-batch and hands it to the next stage;
differentiating the scan gives the backward schedule. In the first and last S - 1 ticks some stages have nothing to do
and compute what nobody reads: of the ticks, the share M / (M + S - 1) is useful.

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

from jaxformer.parallel.constraints import constrain, mesh_axes
from jaxformer.parallel.context import SequenceSharding
from jaxformer.types import Array

STAGE = "stage"  # the mesh axis


def stages() -> int:
    """The number of stages of the mesh in use; 1: there is no pipeline."""
    return mesh_axes().get(STAGE, 1)


def num_ticks(stages: int, micro_batches: int) -> int:
    """How often every stage runs its layers, M + S - 1 times; M of them are useful.

    >>> num_ticks(4, 8)
    11
    """
    return micro_batches + stages - 1


@dataclass(frozen=True)
class MicroBatches:
    """How the rows of a batch lie in a pipeline: one group of micro-batches on each stage.

    Micro-batch m has the rows m, m + M, m + 2 M, ... of the batch, as in gradient accumulation, and is kept by stage
    m // (M / S). Stands where a `context.SequenceSharding` does, for rows that are whole.

    Attributes:
      stages: S.
      count: M, a multiple of S.
    """

    stages: int
    count: int

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


def micro_batches(rows: int, count: int) -> MicroBatches:
    """How `rows` rows lie in `count` micro-batches on the stages of the mesh in use.

    Raises:
      ValueError: they do not divide.
    """
    if count % stages() or rows % count:
        raise ValueError(
            f"{rows} rows in {count} micro-batches on {stages()} stages; accepted: micro-batches, as many as "
            "execution.gradient_accumulation_steps says, that the stages divide and that divide the rows"
        )
    return MicroBatches(stages(), count)


def run(
    apply: Callable[[Any, Any, Any, Array], tuple[Array, Any]],
    params: Any,
    common: Any,
    rows: dict[str, Array],
    lie: MicroBatches,
) -> tuple[Array, Any]:
    """All micro-batches through all stages.

    Args:
      apply: (a stage's part of `params`, `common`, rows of a micro-batch, its number) -> (rows["x"] after the stage's
        layers, terms: a tree of scalars). Under the mesh without its stage axis.
      params: a tree of arrays [L, ...], L a multiple of S; stage s has the s-th part of each.
      common: a tree of arrays that every stage reads.
      rows: arrays [B, ...] in the order of `lie.arrange`; "x" is what changes, the others go along with it.
      lie: how they lie.

    Returns:
      rows["x"] after the last stage, and the sum of the terms over stages and micro-batches.
    """
    count, stages, each = lie.count, lie.stages, lie.each
    ahead = [(i, i + 1) for i in range(stages - 1)]
    back = [(i + 1, i) for i in range(stages - 1)]

    def local(number: Array, params: Any, common: Any, rows: dict[str, Array]) -> tuple[Array, Any]:
        stage = number[0]
        kept = {name: _by_microbatch(x, each) for name, x in rows.items()}

        def tick(carry: tuple[Any, Any], time: Array) -> tuple[tuple[Any, Any], Any]:
            kept, arrived = carry
            slot = time % each
            taken = {name: jax.lax.dynamic_index_in_dim(x, slot, keepdims=False) for name, x in kept.items()}
            mine = jax.tree.map(lambda a, b: jnp.where(stage == 0, a, b), taken, arrived)
            of = time - stage  # the micro-batch that is here now, where there is one
            out, terms = apply(params, common, mine, jnp.clip(of, 0, count - 1))
            there = (of >= 0) & (of < count)
            terms = jax.tree.map(lambda x: jnp.where(there, x, 0), terms)
            left = mine | {"x": out}
            moved = jax.tree.map(functools.partial(jax.lax.ppermute, axis_name=STAGE, perm=back), taken)
            put = jax.tree.map(lambda a, b: jnp.where(stage == stages - 1, a, b), left, moved)
            kept = {n: jax.lax.dynamic_update_index_in_dim(x, put[n], slot, 0) for n, x in kept.items()}
            arrived = jax.tree.map(functools.partial(jax.lax.ppermute, axis_name=STAGE, perm=ahead), left)
            return (kept, arrived), terms

        # Before its first micro-batch arrives, a stage computes with one of its own: zeros might give no finite number.
        first = {name: x[0] for name, x in kept.items()}
        (kept, _), terms = jax.lax.scan(tick, (kept, first), jnp.arange(num_ticks(stages, count)))
        # The output of micro-batch m was put, S - 1 ticks after its input was taken, that many slots further on.
        out = jnp.roll(kept["x"], -(stages - 1), axis=0)
        out = constrain(jnp.swapaxes(out, 0, 1).reshape(rows["x"].shape), "rows", *[None] * (rows["x"].ndim - 1))
        return out, jax.tree.map(lambda x: jnp.sum(x, axis=0)[None], terms)

    of_stages = P(STAGE)
    out, terms = jax.shard_map(
        local,
        in_specs=(of_stages, of_stages, P(), of_stages),
        out_specs=(of_stages, of_stages),
        axis_names={STAGE},
        check_vma=False,
    )(jnp.arange(stages), params, common, rows)
    return out, jax.tree.map(lambda x: jnp.sum(x, axis=0), terms)


def _by_microbatch(x: Array, each: int) -> Array:
    """A stage's rows [N, ...] -> [each, N / each, ...]."""
    x = jnp.swapaxes(x.reshape(-1, each, *x.shape[1:]), 0, 1)
    return constrain(x, None, "rows", *[None] * (x.ndim - 2))
