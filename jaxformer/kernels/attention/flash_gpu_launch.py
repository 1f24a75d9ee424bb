"""How the kernels of `flash_gpu` are started: their arrays, what of each a program sees, and its walk over tiles."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxformer.kernels.attention.flash_gpu_blocks import FlashBlock, padded_width
from jaxformer.kernels.attention.flash_gpu_scores import ALONE, LOG2_E, MASKED, OPEN, PATTERNED, FlashOptions
from jaxformer.types import Array


class FlashInputs(NamedTuple):
    """Arrays of one device's attention.

    Attributes:
      query: [B, T, H, K].
      key, value: [B, S, G, K].
      others: those that only some calls have, by name: query_index [B or 1, T], key_index [B or 1, S], query_segments,
        key_segments, prefix_keys, global_queries, global_keys (alike), prefix [B]: int32; slopes [H], steps [H, N]:
        float32; edges [N - 1, filled up to a power of two]: int32; seed [4] uint32: two of dropout's, and the numbers
        of the first row and head.
    """

    query: Array
    key: Array
    value: Array
    others: dict[str, Array]


class FlashNormalizer(NamedTuple):
    """What turns each query's scores into weights: exp2((score - top) - log_total), [B, H, T] float32, by base 2.

    Two numbers, as in `online_softmax.Normalizer`: their sum would round `log_total` away where the scores are large.
    A query without keys has (0, inf), and so weights of 0.
    """

    top: Array
    log_total: Array

    def log_sum(self) -> Array:
        """Natural log of the sum over keys of exp(score), -inf for a query without keys."""
        return jnp.where(self.log_total == jnp.inf, -jnp.inf, (self.top + self.log_total) / LOG2_E)


class FlashSpecs:
    """What of each array a program (block, row * heads + head) sees; of the heads, `shared` after each other."""

    def __init__(self, o: FlashOptions, heads: int, shared: int = 1):
        self.o, self.heads, self.shared = o, heads, shared

    def _at(self, n: Any) -> tuple[Any, Any]:
        return jax.lax.div(n, np.int32(self.heads)), jax.lax.rem(n, np.int32(self.heads))

    def queries(self) -> pl.BlockSpec:
        """[B, T, H, K]."""
        width = padded_width(self.o.width)
        return pl.BlockSpec(
            (None, self.o.queries, self.shared, width), lambda i, n: (self._at(n)[0], 0, self._at(n)[1], 0)
        )

    def keys(self) -> pl.BlockSpec:
        """[B, S, G, K]: the group of a head."""
        width, per_group = padded_width(self.o.width), np.int32(self.heads // self.o.groups)
        return pl.BlockSpec(
            (None, self.o.keys, 1, width),
            lambda i, n: (self._at(n)[0], 0, jax.lax.div(self._at(n)[1], per_group), 0),
        )

    def numbers(self) -> pl.BlockSpec:
        """[B, H, T]."""
        return pl.BlockSpec((None, self.shared, self.o.queries), lambda i, n: (*self._at(n), 0))

    def visits(self, visits: Array) -> pl.BlockSpec:
        """[B or 1, blocks, 4], or lists, [B or 1, H or 1, blocks, 3 + tiles]."""
        if visits.ndim == 3:
            return self._rows(visits)
        by_row, by_head = (size > 1 for size in visits.shape[:2])
        return pl.BlockSpec(
            (None, self.shared if by_head else 1, *visits.shape[2:]),
            lambda i, n: (self._at(n)[0] if by_row else 0, self._at(n)[1] if by_head else 0, 0, 0),
        )

    def _rows(self, x: Array) -> pl.BlockSpec:
        """[B or 1, ...]."""
        rest = (0,) * (x.ndim - 1)
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, n: (self._at(n)[0] if x.shape[0] > 1 else 0, *rest))

    def others(self, others: dict[str, Array]) -> dict[str, pl.BlockSpec]:
        """As `FlashInputs.others`."""
        return {name: self._other(name, x) for name, x in others.items()}

    def _other(self, name: str, x: Array) -> pl.BlockSpec:
        if name in ("edges", "seed"):
            return pl.BlockSpec(x.shape, lambda i, n: (0,))
        if name == "prefix":
            return pl.BlockSpec((1,), lambda i, n: (self._at(n)[0] if x.shape[0] > 1 else 0,))
        if name == "slopes":
            return pl.BlockSpec((self.shared, 1), lambda i, n: (self._at(n)[1], 0))
        if name == "steps":
            return pl.BlockSpec((self.shared, x.shape[1]), lambda i, n: (self._at(n)[1], 0))
        return self._rows(x)


def walk(
    o: FlashOptions, block: FlashBlock, visits: Any, at: Array, visit: Callable, carry: Any, member: Any = ALONE
) -> Any:
    """carry = visit(masked, tile, carry) for all tiles of the run, or of the list of the head `member`, that `visits`
    names for block `at`."""
    if o.listed:
        member = member if visits.shape[0] > 1 else ALONE
        low = np.int32(0)
        for masked in (OPEN, MASKED, PATTERNED):
            high = visits[member, at, masked]

            def visit_listed(n: Array, carry: Any, masked: int = masked) -> Any:
                return visit(masked, visits[member, at, n + 3], carry)

            carry = jax.lax.fori_loop(low, high, visit_listed, carry)
            low = high
        return carry
    first, end, first_open, end_open = (visits[at, n] for n in range(4))
    if not o.hides and o.keys % block.keys == 0:
        return jax.lax.fori_loop(first, end, functools.partial(visit, OPEN), carry)
    for masked, low, high in ((MASKED, first, first_open), (OPEN, first_open, end_open), (MASKED, end_open, end)):
        carry = jax.lax.fori_loop(low, high, functools.partial(visit, masked), carry)
    return carry


def place(o: FlashOptions, heads: int, *, reverse: bool = True) -> tuple[Array, Array, Array]:
    """This program's block, row and head. Causal blocks with the most keys start first, so that none is left alone."""
    i, n = pl.program_id(0), pl.program_id(1)
    i = pl.num_programs(0) - 1 - i if reverse and o.causal else i
    return i, jax.lax.div(n, np.int32(heads)), jax.lax.rem(n, np.int32(heads))


def launch(o: FlashOptions, block: FlashBlock, name: str) -> dict[str, Any]:
    """What `pallas_call` is told of a kernel beside its arrays."""
    return {
        "name": name,
        "interpret": o.interpret,
        "compiler_params": triton.CompilerParams(num_warps=block.warps, num_stages=block.stages),
    }
