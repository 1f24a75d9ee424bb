"""Position encodings: sinusoidal, learned, rotary (with its scalings), ALiBi, T5 buckets.

Where each of them enters a model says `functional.position_encodings`; CONTRIBUTING.md, how to add one.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np

from jaxformer.kernels.constants import constant
from jaxformer.types import Array

LLAMA3_TURNS = (1.0, 4.0)  # over the original length: fewer are stretched, more are left


def sinusoidal(positions: Array, width: int, base: float = 10_000.0) -> Array:
    """Sine in the even and cosine in the odd entries, wavelengths from 2 pi to base * 2 pi.

    Args:
      positions: [...] int or float.
      width: D, even.
      base: ratio of the longest to the shortest wavelength.

    Returns:
      [..., D] float32.

    Raises:
      ValueError: odd `width`.

    Source: Vaswani et al. 2017, section 3.5.

    >>> sinusoidal(jnp.array([0]), 4).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """
    if width % 2:
        raise ValueError(f"sinusoidal: width {width} is odd")
    frequencies = jnp.asarray(base ** (-np.arange(0, width, 2) / width), jnp.float32)
    angles = jnp.multiply.outer(jnp.asarray(positions, jnp.float32), frequencies)
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*angles.shape[:-1], width)


def learned(table: Array, positions: Array) -> Array:
    """Rows of a learned table. `table`: [P, D]; `positions`: [...] int, below P. Returns [..., D].

    Source: Gehring et al. 2017, section 3.1.
    """
    return jnp.asarray(table)[positions]


def rotary_frequencies(
    head_width: int,
    base: float = 10_000.0,
    scaling: str = "none",
    factor: float = 1.0,
    original_length: int = 2048,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> tuple[np.ndarray, float]:
    """Angle per position of each pair of a head, for a context `factor` times longer than the trained one.

    Args:
      head_width: K, even.
      base: ratio of the longest to the shortest wavelength.
      scaling: "none"; "linear" (positions divided by factor); "ntk" (base enlarged, so that the longest wavelength
        grows by factor and the shortest stays); "yarn" (wavelengths with fewer than beta_slow turns in
        original_length are stretched by factor, those with more than beta_fast turns are left, a ramp between);
        "llama3" (the same with 1 and 4 turns, a ramp linear in the turns, and no factor for queries and keys).
      factor: context length over the length trained on.
      original_length: length trained on, in tokens (yarn and llama3 only).
      beta_fast, beta_slow: ends of yarn's ramp, in turns over the original length.

    Returns:
      A pair: [K / 2] float64 angles per position, in radians, for `rotary_angles`; and the factor for queries and keys
      (1 except for yarn), `scale` of `rotary`.

    Raises:
      ValueError: odd width or unknown scaling.

    Source: Su et al. 2021, section 3.4; Chen et al. 2023 (linear); Peng et al. 2023, sections 3.1-3.4 (NTK, YaRN);
      Grattafiori et al. 2024, the released code (llama3).

    >>> frequencies, scale = rotary_frequencies(4)
    >>> frequencies.tolist(), scale
    ([1.0, 0.01], 1.0)
    """
    if head_width % 2:
        raise ValueError(f"rotary_frequencies: head_width {head_width} is odd")
    exponents = np.arange(0, head_width, 2) / head_width
    if scaling == "none":
        return base**-exponents, 1.0
    if scaling == "linear":
        return base**-exponents / factor, 1.0
    if scaling == "ntk":
        stretched = base * factor ** (head_width / max(head_width - 2, 1))
        return stretched**-exponents, 1.0
    if scaling == "yarn":
        plain = base**-exponents

        def pair_with(turns: float) -> float:  # the pair that makes so many turns over the original length
            return head_width * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair_with(beta_fast)), 0)
        high = min(math.ceil(pair_with(beta_slow)), head_width - 1)
        ramp = np.clip((np.arange(head_width // 2) - low) / max(high - low, 1e-3), 0, 1)
        attention_scale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return plain / factor * ramp + plain * (1 - ramp), attention_scale
    if scaling == "llama3":
        plain = base**-exponents
        slow, fast = LLAMA3_TURNS
        ramp = np.clip((original_length * plain / (2 * math.pi) - slow) / (fast - slow), 0, 1)
        return plain / factor * (1 - ramp) + plain * ramp, 1.0
    raise ValueError(f"rotary_frequencies: scaling {scaling!r}; accepted: none, linear, ntk, yarn, llama3")


def rotary_angles(positions: Array, frequencies: np.ndarray) -> tuple[Array, Array]:
    """Cosine and sine for `rotary`. `positions`: [..., T]; `frequencies`: [K / 2]. Returns two [..., T, K / 2]."""
    dtype = jnp.promote_types(positions.dtype, jnp.float32) if positions.dtype.kind == "f" else jnp.float32
    if jnp.result_type(float) == jnp.float64:
        dtype = jnp.float64
    angles = jnp.multiply.outer(positions.astype(dtype), jnp.asarray(frequencies, dtype))
    return jnp.cos(angles), jnp.sin(angles)


def rotary(x: Array, cos: Array, sin: Array, scale: float = 1.0) -> Array:
    """Rotates each pair (x[i], x[i + K/2]) by its angle, so that query . key depends on the distance only.

    The pairing is by halves (GPT-NeoX, Llama); pairing neighbours, as the paper draws it, is the same up to one
    fixed permutation of the head's entries.

    Args:
      x: [B, T, H, K], queries or keys.
      cos, sin: [T, K / 2] or [B, T, K / 2], from `rotary_angles`. With fewer angles only the first entries are turned.
      scale: multiplies the result (yarn's attention factor).

    Returns:
      [B, T, H, K], in the dtype of `x`; the rotation is computed in float32 or wider.

    Source: Su et al. 2021, section 3.4.2.

    >>> cos, sin = rotary_angles(jnp.arange(3), rotary_frequencies(4)[0])
    >>> rotary(jnp.ones((1, 3, 1, 4)), cos, sin)[0, 0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    turned = 2 * cos.shape[-1]
    if turned < x.shape[-1]:
        return jnp.concatenate([rotary(x[..., :turned], cos, sin, scale), x[..., turned:]], axis=-1)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    first, second = jnp.split(wide, 2, axis=-1)
    cos, sin = (jnp.expand_dims(c, -2) if c.ndim == 3 else c[None, :, None, :] for c in (cos, sin))
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return (out if scale == 1.0 else out * scale).astype(x.dtype)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Slope of each head: 2 ** (-8 i / H) for H a power of two; otherwise the next lower power's, then every
    second one of the next higher power's. Returns [H] float64.

    Source: Press et al. 2022, section 3 and its footnote on other head counts.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    extra = 2.0 ** (-4.0 * np.arange(1, 2 * (num_heads - power), 2) / power)
    return np.concatenate([slopes, extra])


def alibi(query_index: Array, key_index: Array, num_heads: int) -> Array:
    """Bias -slope * |query - key|. `query_index`: [..., T]; `key_index`: [..., S]. Returns [..., H, T, S] float32.

    Joins `attention` as bias=lambda q, k: alibi(q, k, num_heads), of which "chunked" never makes the whole array.

    Source: Press et al. 2022, section 3; for bidirectional models the distance is symmetric.

    >>> alibi(jnp.arange(2), jnp.arange(2), 8)[0, 1].tolist()
    [-0.5, -0.0]
    """
    distance = jnp.abs(query_index[..., :, None] - key_index[..., None, :]).astype(jnp.float32)
    slopes = jnp.asarray(alibi_slopes(num_heads), jnp.float32)
    slopes = slopes.reshape((1,) * (distance.ndim - 2) + (num_heads, 1, 1))
    return -slopes * distance[..., None, :, :]


def t5_buckets(relative: Array, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128) -> Array:
    """Bucket of each key position minus query position: exact when near, logarithmic up to `max_distance`, one
    for all beyond.

    Args:
      relative: int, key index - query index.
      bidirectional: half of the buckets for keys after the query; otherwise those all fall into bucket 0.
      num_buckets: buckets in all.
      max_distance: distance from which on all share the last bucket.

    Returns:
      int32 in [0, num_buckets), the shape of `relative`.

    Source: Raffel et al. 2020, section 2.1, and the released T5 code.
    """
    if bidirectional:
        num_buckets //= 2
        offset = jnp.where(relative > 0, num_buckets, 0)
        distance = jnp.abs(relative)
    else:
        offset = jnp.zeros_like(relative)
        distance = jnp.maximum(-relative, 0)
    exact = num_buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (num_buckets - exact)).astype(jnp.int32)
    return (offset + jnp.where(distance < exact, distance, jnp.minimum(far, num_buckets - 1))).astype(jnp.int32)


@functools.cache
def t5_steps(
    bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`t5_buckets` as a step function: the first distance of each step but the first, and the bucket of each step.

    >>> t5_steps(False, 4, 8)
    ((-3, -1, 0), (3, 2, 1, 0))
    """
    relative = np.arange(-max_distance - 1, max_distance + 2)
    buckets = constant(lambda: t5_buckets(jnp.asarray(relative), bidirectional, num_buckets, max_distance))
    starts = np.flatnonzero(np.diff(buckets)) + 1
    return tuple(relative[starts].tolist()), tuple(buckets[[0, *starts]].tolist())


def t5_bias(table: Array, query_index: Array, key_index: Array, bidirectional: bool, max_distance: int = 128) -> Array:
    """Learned bias per head and bucket. `table`: [buckets, H]; indices [..., T], [..., S]. Returns [..., H, T, S].

    Source: Raffel et al. 2020, section 2.1.
    """
    relative = key_index[..., None, :] - query_index[..., :, None]
    return jnp.moveaxis(table[t5_buckets(relative, bidirectional, table.shape[0], max_distance)], -1, -3)
