"""Reversible residuals: a stack whose backward pass computes its activations again from its outputs.

There are two streams. Each sublayer reads one and adds to the other:

    y1 = x1 + attention(norm(x2)),   y2 = x2 + feed_forward(norm(y1))

So x2 = y2 - feed_forward(norm(y1)) and x1 = y1 - attention(norm(x2)): the inputs of a layer follow from its outputs,
and nothing but the last ones is kept, however many layers there are. The price is one more forward pass. Both streams
are float32 whatever the compute dtype, because what is subtracted again has to be what was added.

Source: Gomez et al. 2017, section 3; Kitaev et al. 2020, section 3.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import Execution, ModelConfig
from jaxformer.functional.layer import Context, gather_sequence, norm, norm_specs, shard_residual
from jaxformer.functional.layers import dropout
from jaxformer.functional.sublayers import sublayers_of
from jaxformer.kernels import derivatives
from jaxformer.parallel.constraints import constrain_params
from jaxformer.types import Array, Params

Terms = dict[str, Array]
Streams = tuple[Array, Array]  # what the next sublayer adds to, and what it reads


class Static(NamedTuple):
    """What the derivative does not touch.

    Attributes:
      cfg: of the stack.
      dtype: that sublayers compute in.
      execution: how it is computed.
      scanned: layers by `lax.scan`, or one by one.
      structure: of the context, without its cache.
      fixed: the leaves of the context that are no arrays, by their number.
    """

    cfg: ModelConfig
    dtype: Any
    execution: Execution
    scanned: bool
    structure: Any
    fixed: tuple[tuple[int, Any], ...]


def run(params: Any, x: Array, cfg: ModelConfig, context: Context, scanned: bool) -> tuple[Array, Any, Terms]:
    """All layers, from both streams equal to `x` to the mean of both.

    Args:
      params: every leaf with a leading [L], if scanned; otherwise a list of the layers' parameters.
      x: [B, T, D].
      cfg: the model's config.
      context: what the sublayers look at; its cache is a list with the cache of each layer, or None.
      scanned: layers by `lax.scan`, or one by one.

    Returns:
      [B, T, D] in the dtype of x, the cache of each layer (None if none was given), and terms of the objective.
    """
    streams = enter(x)
    if context.cache is None:
        streams, terms = reversible_streams(params, streams, cfg, context, x.dtype, scanned)
        return leave(streams, x.dtype), None, terms
    caches = []
    for number, (layer_params, cache) in enumerate(zip(params, context.cache, strict=True)):
        streams, cache, _ = layer(layer_params, streams, cfg, _of_layer(context, number, cache), x.dtype)
        caches.append(cache)
    return leave(streams, x.dtype), caches, {}


def enter(x: Array) -> Streams:
    """Both streams at the first layer, float32 or wider."""
    return (x.astype(jnp.promote_types(x.dtype, jnp.float32)),) * 2


def leave(streams: Streams, dtype: Any) -> Array:
    """What the streams become after the last layer: their mean."""
    return ((streams[0] + streams[1]) / 2).astype(dtype)


def layer(
    params: Params, streams: Streams, cfg: ModelConfig, context: Context, dtype: Any
) -> tuple[Streams, dict[str, Any] | None, Terms]:
    """One layer, without a derivative of its own. Arguments and results as of `block.block`, but for the streams,
    [B, T, D] each, and the dtype that sublayers compute in."""
    caches, terms = {}, Terms()
    for number, name in enumerate(sublayers_of(cfg)):
        cache = None if context.cache is None else context.cache[name]
        inner = context._replace(cache=cache)
        added, caches[name], more = _branch(number, name, _own(params, name), streams[1], cfg, inner, dtype)
        streams = streams[1], streams[0] + added
        terms = _add(terms, more)
    return streams, None if context.cache is None else caches, terms


def _own(params: Params, name: str) -> Params:
    """The parameters of one sublayer of a layer."""
    return {each: params[each] for each in (name, f"{name}_norm")}


def _add(terms: Terms, more: Terms) -> Terms:
    return terms | {name: value + terms.get(name, 0) for name, value in more.items()}


def _of_layer(context: Context, number: Any, cache: Any = None) -> Context:
    rng = None if context.rng is None else jax.random.fold_in(context.rng, number)
    return context._replace(rng=rng, cache=cache)


def _branch(
    number: int, name: str, params: Params, stream: Array, cfg: ModelConfig, context: Context, dtype: Any
) -> tuple[Array, Any, Terms]:
    """What a sublayer adds to the other stream, in its dtype: norm, the sublayer, dropout."""
    rngs = [None, None] if context.rng is None else list(jax.random.split(jax.random.fold_in(context.rng, number)))
    sublayer = sublayers_of(cfg)[name]
    params = constrain_params(params, {name: sublayer.specs(cfg), f"{name}_norm": norm_specs(cfg)})
    read = gather_sequence(norm(params[f"{name}_norm"], stream, cfg).astype(dtype))
    out, cache, terms = sublayer.apply(params[name], read, cfg, context._replace(rng=rngs[0]))
    return shard_residual(dropout(out, cfg.dropout, rngs[1]).astype(stream.dtype)), cache, terms


def reversible_streams(
    params: Any, streams: Streams, cfg: ModelConfig, context: Context, dtype: Any, scanned: bool
) -> tuple[Streams, Terms]:
    """Both streams after all layers, and terms; its backward pass keeps the streams alone. Arguments as of `run`."""
    leaves, structure = jax.tree.flatten(context._replace(cache=None, execution=None))
    arrays = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)}
    fixed = tuple((number, leaf) for number, leaf in enumerate(leaves) if number not in arrays)
    of = Static(cfg, dtype, context.execution, scanned, structure, fixed)
    return _streams(of, params, streams, arrays)


def _context(of: Static, arrays: dict[int, Array], number: Any) -> Context:
    """The context of a layer, from its arrays."""
    leaves = [leaf for _, leaf in sorted((arrays | dict(of.fixed)).items())]
    context = jax.tree.unflatten(of.structure, leaves)
    return _of_layer(context._replace(execution=of.execution), number)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _streams(of: Static, params: Any, streams: Streams, arrays: dict[int, Array]) -> tuple[Streams, Terms]:
    return _plain(of, params, streams, arrays)


def _plain(of: Static, params: Any, streams: Streams, arrays: dict[int, Array]) -> tuple[Streams, Terms]:
    """The same function, to be differentiated as it stands."""

    def forward(streams: Streams, part: tuple[Any, Params]) -> tuple[Streams, Terms]:
        number, layer_params = part
        streams, _, terms = layer(layer_params, streams, of.cfg, _context(of, arrays, number), of.dtype)
        return streams, terms

    streams, terms = _over_layers(of, forward, streams, params)
    return streams, jax.tree.map(lambda each: jnp.sum(each, axis=0), terms)


def _over_layers(of: Static, step: Callable, carry: Any, params: Any, *, backwards: bool = False) -> tuple[Any, Any]:
    """(carry, what each layer returned, stacked or in a list as `params` are) after a step for each layer."""
    if of.scanned:
        return jax.lax.scan(step, carry, (jnp.arange(of.cfg.num_layers), params), reverse=backwards)
    step, found = jax.jit(step), {}  # traced and lowered once; XLA inlines the calls
    for number in reversed(range(len(params))) if backwards else range(len(params)):
        carry, found[number] = step(carry, (number, params[number]))
    listed = [found[number] for number in range(len(params))]
    return carry, listed if backwards else jax.tree.map(lambda *each: jnp.stack(each), *listed)


def _forward(of: Static, params: Any, streams: Streams, arrays: dict[int, Array]) -> Any:
    streams, terms = _plain(of, params, streams, arrays)
    return (streams, terms), (params, arrays, streams)


def _backward(of: Static, saved: Any, gradients: Any) -> Any:
    """Layer by layer from the last: what it added is computed again, subtracted, and differentiated on the way."""
    params, arrays, streams = saved
    d_streams, d_terms = gradients
    moving = {number: x for number, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def undo(carry: Any, part: tuple[Any, Params]) -> tuple[Any, Params]:
        streams, d_streams, d_moving = carry
        d_params: Params = {}
        for branch, own in _undoing(of, part):
            (read, new), (d_first, d_new) = streams, d_streams
            (added, terms), pull = jax.vjp(lambda *given: branch(arrays, *given), own, read, moving)  # noqa: B023
            d_own, d_read, more = pull((d_new, {term: d_terms[term] for term in terms}))
            d_params |= d_own
            d_moving = jax.tree.map(jnp.add, d_moving, more)
            streams, d_streams = (new - added, read), (d_new, d_first + d_read)
        return (streams, d_streams, d_moving), d_params

    carry = streams, d_streams, jax.tree.map(jnp.zeros_like, moving)
    (_, d_streams, d_moving), d_params = _over_layers(of, undo, carry, params, backwards=True)
    d_params = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(d_params))
    return d_params, d_streams, {number: d_moving.get(number) for number in arrays}


def _undoing(of: Static, part: tuple[Any, Params]) -> Any:
    """(what it computes, its parameters) of each sublayer of a layer, the last one first."""
    number, params = part

    def branch(place: int, name: str, arrays: dict[int, Array], own: Params, read: Array, moving: dict[int, Array]):
        added, _, terms = _branch(place, name, own, read, of.cfg, _context(of, arrays | moving, number), of.dtype)
        return added, terms

    for place, name in reversed(list(enumerate(sublayers_of(of.cfg)))):
        yield functools.partial(branch, place, name), _own(params, name)


def _tangent(of: Static, saved: Any, changes: Any) -> Any:
    """Forward mode, by differentiating `_plain` at the inputs that the outputs tell."""
    params, arrays, streams = saved

    def undo(streams: Streams, part: tuple[Any, Params]) -> tuple[Streams, None]:
        for branch, own in _undoing(of, part):
            read, new = streams
            streams = new - branch(arrays, own, read, {})[0], read
        return streams, None

    streams, _ = _over_layers(of, undo, streams, params, backwards=True)
    moving = {number: x for number, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    d_params, d_streams, d_arrays = changes
    d_moving = {number: d_arrays[number] for number in moving}
    of_floats = lambda params, streams, moving: _plain(of, params, streams, arrays | moving)  # noqa: E731
    return jax.jvp(of_floats, (params, streams, moving), (d_params, d_streams, d_moving))[1]


derivatives.define(_streams, _forward, _tangent, _backward, loops=True)
