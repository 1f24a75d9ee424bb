"""Every kind of mask and bias as (what attention() is given, what the reference is given), and combinations of them."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import numpy_reference as reference

from jaxformer import masks
from jaxformer.functional import positions
from jaxformer.kernels.attention import xla

BATCH, HEADS, WIDTH = 2, 4, 4
SHORT, LONG = 9, xla.QUERY_BLOCK + 13  # one side and the other of the blocked causal path


@functools.cache
def mask_cases(length):
    """name -> (mask, bool array [B or 1, H or 1, T, S] of the reference)."""
    segments = np.stack([np.arange(length) * 3 // length, np.arange(length) >= 2])
    padding = np.stack([np.arange(length) >= 2, np.arange(length) < length - 3])
    prefix = np.array([length // 2, 0])
    array = np.random.default_rng(length).random((BATCH, HEADS, length, length)) < 0.5
    array[0, 1, 3] = False  # a query that sees nothing
    window = 5 if length < 100 else 60
    named = {
        "none": (None, {}),
        "causal": (masks.causal(), {"causal": True}),
        "causal_window": (masks.causal() & masks.window(window), {"causal": True, "window": window}),
        "causal_segments": (
            masks.causal() & masks.segments(jnp.array(segments)), {"causal": True, "segments": segments},
        ),
        "causal_window_segments_padding": (
            masks.causal() & masks.window(window) & masks.segments(jnp.array(segments)) & masks.padding(padding),
            {"causal": True, "window": window, "segments": segments, "padding": padding},
        ),
        "window_segments": (
            masks.window(window) & masks.segments(jnp.array(segments)), {"window": window, "segments": segments},
        ),
        "prefix": (masks.prefix(jnp.array(prefix)), {"prefix": prefix}),
        "prefix_padding": (
            masks.prefix(jnp.array(prefix)) & masks.padding(padding), {"prefix": prefix, "padding": padding},
        ),
        "causal_padding": (masks.causal() & masks.padding(padding), {"causal": True, "padding": padding}),
    }  # fmt: skip
    cases = {name: (mask, reference.allowed(length, length, **rules)) for name, (mask, rules) in named.items()}
    keys = np.random.default_rng(length + 2).random((BATCH, length)) < 0.3
    seen = reference.allowed(length, length, causal=True) | keys[:, None, None, :]
    own = reference.allowed(length, length, segments=segments)
    cases["prefix_segments"] = (masks.prefix(jnp.array(keys)) & masks.segments(jnp.array(segments)), seen & own)
    causal = reference.allowed(length, length, causal=True)
    cases["array"] = (jnp.array(array), array)
    cases["causal_array"] = (masks.causal() & masks.dense(array[:, :1]), causal & array[:, :1])
    return cases


@functools.cache
def bias_cases(length):
    """name -> (bias, float64 array of the reference)."""
    rng = np.random.default_rng(length + 1)
    array, row = rng.normal(size=(HEADS, length, length)), rng.normal(size=(BATCH, 1, 1, length))
    table = rng.normal(size=(8, HEADS))
    buckets = [[reference.t5_bucket(s - t, True, 8, 20) for s in range(length)] for t in range(length)]
    return {
        "none": (None, None),
        "array": (array, array),
        "row": (row, row),
        "alibi": (lambda q, k: positions.alibi(q, k, HEADS), reference.alibi(length, length, HEADS)),
        "t5": (
            lambda q, k: positions.t5_bias(jnp.array(table), q, k, bidirectional=True, max_distance=20),
            np.moveaxis(table[np.array(buckets)], -1, 0),
        ),
    }


AXES = {
    "mask": [
        "none", "causal", "causal_window", "causal_segments", "causal_window_segments_padding", "window_segments",
        "prefix", "prefix_padding", "causal_padding", "array", "causal_array",
    ],
    "bias": ["none", "array", "row", "alibi", "t5"],
    "groups": [HEADS, 2, 1],
    "soft_cap": [None, 1.5],
    "dropout": [0.0, 0.4],
}  # fmt: skip


def pairwise(axes=AXES, strength=2):
    """Combinations in which every pair (or so many) of options of different axes occurs."""
    product, bits = list(itertools.product(*axes.values())), {}
    parts = [  # of each combination, as the bits of a number
        sum(1 << bits.setdefault(part, len(bits)) for part in itertools.combinations(enumerate(case), strength))
        for case in product
    ]
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        number = max(range(len(product)), key=lambda n: (parts[n] & missing).bit_count())
        chosen.append(product[number])
        missing &= ~parts[number]
    return chosen


def inputs(length, groups, dtype, seed=0):
    """query [B, T, H, K], key [B, S, G, K], value [B, S, G, K]."""
    rng = np.random.default_rng(seed)
    shapes = [(BATCH, length, HEADS, WIDTH)] + [(BATCH, length, groups, WIDTH)] * 2
    return [jnp.array(rng.normal(size=shape), dtype) for shape in shapes]
