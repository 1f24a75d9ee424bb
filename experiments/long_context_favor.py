"""How far Performer's attention is from the softmax attention that it estimates, by number of features.

Both in float64, so that nothing but the features counts. Source: Choromanski et al. 2021, section 4.2.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.functional.attention import attention
from jaxformer.functional.linear_attention import favor_attention, orthogonal_directions
from jaxformer.types import Array

FEATURES = tuple(2**power for power in range(4, 11))
DRAWS, TOKENS, HEADS, WIDTH = 20, 256, 4, 64
DEVIATIONS = (0.25, 0.5)  # of the numbers in queries and keys: |x|^2 / sqrt(WIDTH) is 0.5 and 2


class Estimate(NamedTuple):
    """One way to estimate.

    Attributes:
      kind: of the features, see `favor_features`.
      directions: orthogonal or independent.
      deviation: standard deviation of the numbers in queries and keys.
      features: m, of a head.
    """

    kind: str
    directions: str
    deviation: float
    features: int


def estimates() -> Iterator[Estimate]:
    """All of them."""
    ways = ("positive", "hyperbolic"), ("orthogonal", "independent"), DEVIATIONS, FEATURES
    yield from itertools.starmap(Estimate, itertools.product(*ways))


def errors(estimate: Estimate, draws: int = DRAWS, tokens: int = TOKENS) -> list[float]:
    """The relative error of each draw, |estimate - exact| / |exact|; queries, keys, values and directions are new in
    each, and queries, keys and values the same for every estimate."""

    def one(number: Array) -> Array:
        rng = jax.random.split(jax.random.fold_in(jax.random.key(0), number), 4)
        query, key, value = (jax.random.normal(each, (1, tokens, HEADS, WIDTH), jnp.float64) for each in rng[:3])
        query, key = estimate.deviation * query, estimate.deviation * key
        count = estimate.features // (2 if estimate.kind == "hyperbolic" else 1)
        drawn = jax.random.fold_in(rng[3], estimate.features)
        if estimate.directions == "orthogonal":
            w = orthogonal_directions(drawn, count, WIDTH).astype(jnp.float64)
        else:
            w = jax.random.normal(drawn, (count, WIDTH), jnp.float64)
        exact = attention(query, key, value, implementation="xla")
        found = favor_attention(query, key, value, w, kind=estimate.kind)  # type: ignore[arg-type]
        return jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)

    with jax.enable_x64(True):
        return [float(each) for each in jax.jit(lambda: jax.lax.map(one, jnp.arange(draws)))()]


def measure(estimate: Estimate) -> dict[str, Any]:
    """The record of an estimate."""
    return {**estimate._asdict(), "errors": [round(each, 6) for each in errors(estimate)]}
