"""What a suite hands to the benchmark, and the ruler beside its contestants."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

RULER = "large product"


class Suite(NamedTuple):
    """Contestants of one suite.

    Attributes:
      contestants: name -> one run; it returns nothing, and then its seconds are what is measured, or MiB.
      unit: of `work`.
      work: what one run gets done; 0: nothing that could be counted.
      flop: name -> FLOP of one run; RULER among them: rates are also said as a fraction of its rate.
      peak: FLOP/s that the chip's maker states; 0: not known.
    """

    contestants: Mapping[str, Callable[[], float | None]]
    unit: str = ""
    work: float = 0
    flop: Mapping[str, float] = MappingProxyType({})
    peak: float = 0


def ruler(dtype: str, size: int = 2048) -> tuple[Callable[[], None], float]:
    """A product of two square matrices, as XLA does it here, and its FLOP."""
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype))
    product = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))

    def run() -> None:
        jax.block_until_ready(product(x))

    return run, 2.0 * size**3
