"""Mechanisms for long rows: time and temporaries of forward and backward, and how they grow with the row.

`MECHANISMS` is the table: an entry is a name and either a function of (query, key, value, segments) by `of_heads`, or
the kind of a mixer by `of_layer`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxformer.benchmarks.suite import Suite
from jaxformer.errors import ConfigError
from jaxformer.runtime.host_memory import keep_freed_memory

SHORTEST, HEADS, WIDTH, DOCUMENT = 1024, 4, 64, 4096  # tokens of the shortest row; heads, their width; of a document

Loss = tuple[Callable[..., Any], Any]  # a function of one tree of arrays -> a number to differentiate, and the tree


class Mechanism(NamedTuple):
    """One mechanism.

    Attributes:
      prepare: (tokens, dtype) -> a function of one tree of arrays that returns an array, and the tree.
      longest: the longest row that it is measured with; None: all.
    """

    prepare: Callable[[int, str], Loss]
    longest: int | None = None


def of_heads(function: Callable[..., Any], longest: int | None = None) -> Mechanism:
    """`function(query, key, value, segments)`: [B, T, H, K] three times and [B, T] int -> [B, T, H, K]."""

    def prepare(tokens: int, dtype: str) -> Loss:
        import jax

        arrays = [jax.random.normal(key, (1, tokens, HEADS, WIDTH), dtype) for key in jax.random.split(_key(), 3)]
        return lambda arrays: function(*arrays, segments(tokens)), arrays

    return Mechanism(prepare, longest)


def of_layer(attention: Mapping[str, Any], longest: int | None = None, **model: Any) -> Mechanism:
    """The mixer of `model.attention`, a mapping with its `kind`, with its projections: [B, T, D] -> [B, T, D].

    `model`: other fields of the model; it is causal, with model.family=gpt, by default.
    """

    def prepare(tokens: int, dtype: str) -> Loss:
        import jax

        from jaxformer import masks
        from jaxformer.config import ModelConfig
        from jaxformer.functional.layer import Context
        from jaxformer.functional.sublayers import MIXERS
        from jaxformer.specs import init_params

        given = {"width": HEADS * WIDTH, "context_length": tokens, "positions": "none", **model}
        cfg = ModelConfig(attention=dict(attention), **given)  # type: ignore[arg-type]
        mixer = MIXERS[cfg.attention.kind]
        params = init_params(mixer.specs(cfg), jax.random.key(1))
        x = jax.random.normal(_key(), (1, tokens, cfg.width), dtype)
        mask = masks.Mask(causal=cfg.causal, window=cfg.attention.window) & masks.segments(segments(tokens))
        return lambda tree: mixer.apply(tree[0], tree[1], cfg, Context(mask))[0], (params, x)

    return Mechanism(prepare, longest)


def segments(tokens: int) -> Any:
    """[1, T] int: documents of `DOCUMENT` tokens."""
    import jax.numpy as jnp

    return jnp.arange(tokens)[None] // DOCUMENT


def _key() -> Any:
    import jax

    return jax.random.key(0)


def _heads(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "num_heads": HEADS, **fields}


def _pattern(of: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """Causal attention in documents under a pattern of rows of that many tokens."""

    def function(query, key, value, segments):
        from jaxformer import masks, patterns

        return _in_documents(query, key, value, segments, masks.either(of(patterns, query.shape[1])))

    return function


def _in_documents(query, key, value, segments, condition=None):
    from jaxformer import masks
    from jaxformer.functional.attention import attention

    mask = masks.causal() & masks.segments(segments)
    mask = mask if condition is None else mask & condition
    return attention(query, key, value, mask, implementation="chunked")


def _whole_row(query, key, value, segments):
    from jaxformer import masks
    from jaxformer.functional.attention import attention

    return attention(query, key, value, masks.causal(), implementation="chunked")


def _linear(query, key, value, segments):
    from jaxformer import masks
    from jaxformer.functional.linear_attention import linear_attention

    return linear_attention(query, key, value, masks.causal() & masks.segments(segments))


def _performer(query, key, value, segments):
    """With 4 features for each number of a head, the default of `model.attention.kind=performer`."""
    from jaxformer import masks
    from jaxformer.functional.linear_attention import favor_attention, orthogonal_directions

    directions = orthogonal_directions(_key(), 4 * WIDTH, WIDTH)
    return favor_attention(query, key, value, directions, masks.causal() & masks.segments(segments))


def _linformer(query, key, value, segments):
    """Of the whole row, in both directions, to 64 mixtures."""
    import jax

    from jaxformer.functional.linformer import linformer_attention

    mixtures = jax.random.normal(_key(), (2, key.shape[1], 64), key.dtype) * key.shape[1] ** -0.5
    return linformer_attention(query, key, value, *mixtures)


def _square(query, key, value, segments):
    """As `_whole_row`, with all scores at once."""
    from jaxformer import masks
    from jaxformer.functional.attention import attention

    return attention(query, key, value, masks.causal(), implementation="xla")


def _segment_memory(query, key, value, segments):
    """Transformer-XL's layer: rows of 512 tokens and a memory of as many, which no gradient goes through."""
    import jax
    import jax.numpy as jnp

    from jaxformer import masks
    from jaxformer.functional.attention import attention

    length = min(512, query.shape[1])
    query, key, value, segments = (x.reshape(-1, length, *x.shape[2:]) for x in (query, key, value, segments))

    def with_memory(x, fill=0):
        before = jnp.roll(x, 1, axis=0).at[0].set(fill)
        return jnp.concatenate([jax.lax.stop_gradient(before), x], axis=1)

    places = jnp.arange(2 * length)
    mask = masks.Mask(
        causal=True, query_index=places[length:], key_index=places,
        query_segments=segments, key_segments=with_memory(segments, -1),
    )  # fmt: skip
    bias = _relative(query, 2 * length, first=length)
    out = attention(query, with_memory(key), with_memory(value), mask, bias=bias, implementation="chunked")
    return out.reshape(1, -1, *out.shape[2:])


def _funnel(query, key, value, segments):
    """The layer that pools, of the second of Funnel's blocks: half as many queries as keys, in both directions."""
    from jaxformer.functional.attention import attention

    pooled = (query[:, 0::2] + query[:, 1::2]) / 2
    bias = _relative(pooled, key.shape[1], stride=2)
    return attention(pooled, key, value, bias=bias, implementation="chunked")


def _relative(query, keys, **places):
    """The term of distances of Transformer-XL and Funnel, whose keys are random here."""
    import jax

    from jaxformer.functional.relative_terms import Places, distances, relative_terms

    at = Places(**places)
    count = len(distances(query.shape[1], keys, at))
    position_keys = jax.random.normal(_key(), (count, HEADS, WIDTH), query.dtype)
    return relative_terms(query, position_keys, keys, scale=WIDTH**-0.5, query_places=at)


MECHANISMS: dict[str, Mechanism] = {
    "dense": of_heads(_whole_row, longest=16384),
    "dense in documents": of_heads(_in_documents),
    "dense by xla": of_heads(_square, longest=8192),
    "window": of_layer(_heads("softmax", window=512)),
    "transformer-xl": of_heads(_segment_memory),
    "funnel": of_heads(_funnel, longest=16384),
    "gru": of_layer({"kind": "gru"}),
    "lstm": of_layer({"kind": "lstm"}),
    "lsh": of_layer({"kind": "lsh", "num_heads": HEADS, "rounds": 2, "chunk": 64}),
    "linear": of_heads(_linear),
    "performer": of_heads(_performer),
    "linformer": of_heads(_linformer),
    "longformer": of_layer(_heads("longformer", attention_window=512)),
    "bigbird": of_layer(_heads("bigbird", block=64), family="bert"),
    "dilated": of_layer(_heads("dilated", size=128, step=4)),
    "strided": of_heads(_pattern(lambda patterns, tokens: patterns.strided(math.isqrt(tokens)))),
    "fixed": of_heads(_pattern(lambda patterns, tokens: patterns.fixed(math.isqrt(tokens), 8))),
}  # fmt: skip


def lengths(longest: int, shortest: int = SHORTEST) -> list[int]:
    """Rows from `shortest` tokens on, each twice as long as the one before; one row, if the longest is no longer.

    >>> lengths(4096), lengths(512), lengths(4096, 4096)
    ([1024, 2048, 4096], [512], [4096])
    """
    return [shortest << n for n in range((longest // shortest).bit_length())] or [longest]


def contestants(options: Any) -> Suite:
    """Time, and temporaries in MiB, of each mechanism at each length; `options.mechanisms` names some of them.

    Raises:
      ConfigError: there is no mechanism of that name.
    """
    import jax
    import jax.numpy as jnp

    keep_freed_memory()
    names = list(MECHANISMS) if options.mechanisms is None else options.mechanisms.split(",")
    for name in names:
        if name not in MECHANISMS:
            raise ConfigError(f"--mechanisms: {name!r} is not one of {', '.join(MECHANISMS)}")
    found: dict[str, Callable[[], float | None]] = {}
    for name in names:
        prepare, longest = MECHANISMS[name]
        for tokens in lengths(options.tokens, options.shortest):
            if longest is not None and tokens > longest:
                continue
            function, arrays = prepare(tokens, options.dtype)

            def loss(arrays, function=function):
                return jnp.sum(function(arrays).astype(jnp.float32))

            compiled = jax.jit(jax.grad(loss)).lower(arrays).compile()

            def run(compiled=compiled, arrays=arrays) -> None:
                jax.block_until_ready(compiled(arrays))

            def temporaries(compiled=compiled) -> float:
                return compiled.memory_analysis().temp_size_in_bytes / 2**20

            found[f"{name}, {tokens} tokens"] = run
            found[f"{name}, {tokens} tokens, temporaries"] = temporaries
    return Suite(found, summary=slopes)


def slopes(measured: Mapping[str, tuple[str, Sequence[float]]]) -> Iterator[str]:
    """For each mechanism the slope of log time and of log temporaries by log tokens: 1 is linear, 2 quadratic.

    >>> two = {"a, 1024 tokens": ("s", [1.0]), "a, 2048 tokens": ("s", [2.0])}
    >>> list(slopes(two | {"a, 1024 tokens, temporaries": ("MiB", [1.0])}))
    ['a: time grows as tokens^1.00']
    """
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for title, (unit, values) in measured.items():
        name, size, *_ = title.split(", ")
        point = math.log(int(size.split()[0])), math.log(max(float(np.median(values)), 1e-9))
        curves.setdefault(name, {}).setdefault(unit, []).append(point)
    words = {"s": "time", "MiB": "temporaries"}
    for name, by_unit in curves.items():
        found = [
            f"{words[unit]} grows as tokens^{_slope(points):.2f}" for unit, points in by_unit.items() if len(points) > 1
        ]
        if found:
            yield f"{name}: {', '.join(found)}"


def _slope(points: Sequence[tuple[float, float]]) -> float:
    x, y = np.transpose(points)
    return float(np.polyfit(x, y, 1)[0])
