"""From logits to the next token: repetition penalty, temperature, top-k, top-p, min-p, in this order.

The filters are plain functions of arrays and numbers. None of them sorts: the thresholds of top-k and top-p are found
bit by bit, in 32 passes for any k, p and vocabulary, and k and p may be traced.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.errors import ConfigError
from jaxformer.types import Array


class SamplingParams(NamedTuple):
    """The settings of a `Sampling` that have an effect; they may be traced. None: off; no temperature: greedy."""

    temperature: float | Array | None
    top_k: int | Array | None
    top_p: float | Array | None
    min_p: float | Array | None
    repetition_penalty: float | Array | None


# Field of `Sampling` -> the numbers it accepts, as a test and in words.
_ACCEPTED: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x == 0 or 1e-6 <= x < math.inf, "0 (greedy), or 1e-6 up"),
    "top_k": (lambda x: 1 <= x < 2**31 and x == int(x), "a whole number, at least 1"),
    "top_p": (lambda x: 0 < x <= 1, "above 0, up to 1"),
    "min_p": (lambda x: 0 <= x <= 1, "0 to 1"),
    "repetition_penalty": (lambda x: 0 < x < math.inf, "a finite number above 0"),
}


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the model's distribution; the default is the distribution itself.

    Attributes:
      temperature: divides the logits; 0 takes the most probable token.
      top_k: only the k most probable tokens (ties with the k-th stay); None: all.
      top_p: only as many of the most probable tokens as it takes for their probabilities, after top_k, to reach p
        (ties stay); None: all.
      min_p: only tokens at least min_p times as probable as the most probable one; None: all.
      repetition_penalty: 1 for none; see `penalize_repetition`.

    Raises:
      ConfigError: a value out of range.

    >>> Sampling(top_p=1.5)
    Traceback (most recent call last):
    ...
    jaxformer.errors.ConfigError: sampling.top_p: 1.5; accepted: above 0, up to 1
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        for name, (accepts, accepted) in _ACCEPTED.items():
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            off = value is None and getattr(Sampling, name) is None  # the default says whether None is accepted
            if not (off or (number and accepts(value))):
                raise ConfigError(f"sampling.{name}: {value}; accepted: {accepted}")

    def traced(self) -> SamplingParams:
        """The settings that have an effect; for greedy choice, without those that cannot change the best token."""
        penalty = None if self.repetition_penalty == 1 else float(self.repetition_penalty)
        if self.temperature == 0:
            return SamplingParams(None, None, None, None, penalty)
        top_k = None if self.top_k is None else int(self.top_k)
        return SamplingParams(float(self.temperature), top_k, self.top_p, self.min_p, penalty)


def penalize_repetition(logits: Array, seen: Array, penalty: float | Array) -> Array:
    """Logits of tokens that occurred before are divided by the penalty if positive, and multiplied if negative.

    Args:
      logits: [..., V].
      seen: [..., V] bool, True for tokens of the prompt and of the text so far.
      penalty: above 1 makes repetition less likely.

    Source: Keskar et al. 2019, section 4.1. There every logit is divided, which raises a negative one; multiplying
    those is what the implementations in use do.

    >>> penalize_repetition(jnp.array([2.0, -2.0, 2.0]), jnp.array([True, True, False]), 2.0).tolist()
    [1.0, -4.0, 2.0]
    """
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Array, k: int | Array) -> Array:
    """-inf for all but the `k` largest logits [..., V]; those that equal the k-th stay too.

    Source: Fan et al. 2018, section 5.4.

    >>> keep_top_k(jnp.array([1.0, 3.0, 2.0]), 2).tolist()
    [-inf, 3.0, 2.0]
    """
    keys = _ordered(logits)
    threshold = _largest(lambda t: jnp.sum(keys >= t, axis=-1, keepdims=True) >= k, keys)
    return jnp.where(keys >= threshold, logits, -jnp.inf)


def keep_top_p(logits: Array, p: float | Array) -> Array:
    """-inf for all but the most probable tokens of `logits` [..., V], as many as it takes to reach probability `p`;
    those as probable as the last of them stay too.

    Source: Holtzman et al. 2020, section 3.1 (nucleus sampling).

    >>> keep_top_p(jnp.log(jnp.array([0.25, 0.5, 0.25, 0.0])), 0.5).tolist()[0]
    -inf
    """
    keys, probabilities = _ordered(logits), jax.nn.softmax(logits, axis=-1)

    def enough(threshold):
        return jnp.sum(jnp.where(keys >= threshold, probabilities, 0.0), axis=-1, keepdims=True) >= p

    return jnp.where(keys >= _largest(enough, keys), logits, -jnp.inf)


def keep_min_p(logits: Array, p: float | Array) -> Array:
    """-inf for tokens of `logits` [..., V] less than `p` times as probable as the most probable one.

    Source: Nguyen et al. 2024, section 3.

    >>> keep_min_p(jnp.log(jnp.array([0.5, 0.3, 0.2])), 0.5).tolist()[2]
    -inf
    """
    return jnp.where(logits >= jnp.max(logits, axis=-1, keepdims=True) + jnp.log(p), logits, -jnp.inf)


def _ordered(x: Array) -> Array:
    """uint32 numbers in the order of the float32 numbers `x`."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32) + 0.0, jnp.int32)  # + 0.0: -0 becomes 0
    return jax.lax.bitcast_convert_type(jnp.where(bits < 0, ~bits, bits | jnp.int32(-(2**31))), jnp.uint32)


def _largest(enough: Callable[[Array], Array], keys: Array) -> Array:
    """The largest uint32 threshold [..., 1] for which `enough` is True, and at most the largest key."""

    def add_bit(i, threshold):
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(candidate), candidate, threshold)

    found = jax.lax.fori_loop(0, 32, add_bit, jnp.zeros((*keys.shape[:-1], 1), jnp.uint32))
    return jnp.minimum(found, jnp.max(keys, axis=-1, keepdims=True))  # at least one token stays, however small p is


def filtered(logits: Array, seen: Array | None, sampling: SamplingParams) -> Array:
    """The logits that are sampled from. `logits`: [B, V]; `seen`: [B, V] bool, needed for a repetition penalty."""
    logits = logits.astype(jnp.float32)
    if sampling.repetition_penalty is not None:
        assert seen is not None
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.temperature is not None:
        logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature
    filters = (keep_top_k, sampling.top_k), (keep_top_p, sampling.top_p), (keep_min_p, sampling.min_p)
    for keep, setting in filters:
        if setting is not None:
            logits = keep(logits, setting)
    return logits


def choose(logits: Array, seen: Array | None, sampling: SamplingParams, rngs: Array | None) -> Array:
    """The next token of each row, [B] int32. Arguments as in `filtered`; `rngs`: [B] PRNG keys, None if greedy."""
    logits = filtered(logits, seen, sampling)
    if sampling.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    assert rngs is not None
    return jax.vmap(jax.random.categorical)(rngs, logits).astype(jnp.int32)
