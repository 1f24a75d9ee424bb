"""The circular schedule of a pipeline: every stage has R parts of the layers, and micro-batches go round R times.

Part c of the R S parts belongs to stage c mod S. Micro-batches come in groups of S, and the first stage takes the next
group when it has given all of its parts to the last one: what leaves the last stage is back at the first one in the
very tick in which that has work for it. So of R M + S - 1 ticks R M are useful, each a part of a stage's work, and only
the idle share shrinks. With R = 1 this is GPipe.

Parameters keep the order of the layers, of which stage s holds the s-th run, so that checkpoints and other meshes know
nothing of the schedule. `exchange` sends the parts to where they are needed, once an update, and its derivative sends
their gradients back.

Source: Narayanan et al. 2021, section 2.2 (the interleaved schedule).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.types import Array


class Schedule(NamedTuple):
    """Who does what in which tick.

    Attributes:
      stages: S.
      micro_batches: M, a multiple of S.
      repeats: R, how often a micro-batch goes round.
    """

    stages: int
    micro_batches: int
    repeats: int = 1

    @property
    def ticks(self) -> int:
        """How often every stage runs a part of its layers: R M + S - 1.

        >>> Schedule(stages=4, micro_batches=8).ticks, Schedule(4, 8, repeats=2).ticks
        (11, 19)
        """
        return self.repeats * self.micro_batches + self.stages - 1

    @property
    def useful(self) -> float:
        """The share of the ticks in which a stage has something to do."""
        return self.repeats * self.micro_batches / self.ticks

    def work(self, stage: Array, time: Array) -> tuple[Array, Array, Array]:
        """(micro-batch, which of the stage's parts, whether there is any) of a stage in a tick; () each."""
        at = jnp.clip(time - stage, 0, self.repeats * self.micro_batches - 1)
        group, rest = jnp.divmod(at, self.repeats * self.stages)
        return group * self.stages + rest % self.stages, rest // self.stages, at == time - stage

    def taken(self, time: Array) -> tuple[Array, Array]:
        """(number of the micro-batch that the first stage took last, whether that is in this tick)."""
        group, rest = jnp.divmod(time, self.repeats * self.stages)
        return group * self.stages + jnp.minimum(rest, self.stages - 1), rest < self.stages


def moves(stages: int, repeats: int) -> list[list[tuple[int, int, int]]]:
    """R permutations that bring the parts to their stages: for each, and each stage, (which of its parts it sends, to
    which stage, where that one puts it). Every stage sends and gets one part in each of them.

    >>> moves(2, 2)
    [[(0, 0, 0), (1, 1, 1)], [(1, 1, 0), (0, 0, 1)]]
    """
    # Part c is the sender's c mod R and goes to c mod S. Colours by c alone would give a receiver the same one again
    # after lcm(R, S) parts, so there they are shifted by one.
    colour = [(c + c // math.lcm(repeats, stages)) % repeats for c in range(stages * repeats)]
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(repeats)]
    for c, of in enumerate(colour):
        found[of].append((c % repeats, c % stages, c // stages))
    return found


def exchange(x: Array, stages: int, repeats: int, axis: str) -> Array:
    """This stage's run of the layers [L / S, ...] -> its parts [R, L / (R S), ...], in the order of the rounds.

    Inside shard_map over `axis`. Sends the least that can be sent: each part once, if it is another stage's.
    """
    stage = jax.lax.axis_index(axis)
    x = x.reshape(repeats, -1, *x.shape[1:])
    out = jnp.zeros_like(x)
    for each in moves(stages, repeats):
        sent = jax.lax.dynamic_index_in_dim(x, jnp.array([part for part, _, _ in each])[stage], keepdims=False)
        got = jax.lax.ppermute(sent, axis, [(source, to) for source, (_, to, _) in enumerate(each)])
        places = {to: place for _, to, place in each}
        out = jax.lax.dynamic_update_index_in_dim(out, got, jnp.array([places[s] for s in range(stages)])[stage], 0)
    return out
