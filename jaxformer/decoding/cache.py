"""The decoder's cache: filled by `prefill`, extended by `step`.

Each sublayer decides what it keeps (`Sublayer.init_cache`); softmax attention keeps a ring of keys and values. Shapes
never change, so every token costs the same work.

>>> from jaxformer.specs import init_params
>>> cfg = ModelConfig(num_layers=1, width=32, context_length=16, vocab_size=64)
>>> params = init_params(gpt.specs(cfg), jax.random.key(0))
>>> fill = jax.jit(prefill, static_argnames=("cfg", "length"))
>>> hidden, cache = fill(params, jnp.array([[1, 2, 3], [4, 5, 0]]), jnp.array([3, 2]), cfg, length=8)
>>> token = jnp.argmax(jax.jit(logits)(params, hidden), axis=-1)
>>> hidden, cache = jax.jit(step, static_argnames="cfg")(params, token, cfg, cache)
>>> cache.layers[0]["attention"].key.shape, int(cache.steps)
((8, 8, 8), 1)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.functional import key_value_cache
from jaxformer.functional.block import block_specs, init_cache, unstack
from jaxformer.functional.layer import DecodeProgress
from jaxformer.functional.layers import unembed
from jaxformer.functional.sublayers import sublayers_of
from jaxformer.kernels.columns import by_columns
from jaxformer.low_rank import is_low_rank, map_weights
from jaxformer.models import gpt
from jaxformer.models.families import family_of
from jaxformer.parallel.constraints import mesh_axes
from jaxformer.parallel.platforms import this_platform
from jaxformer.specs import ParamSpec
from jaxformer.types import Array, Params

Layers = list[dict[str, Any]]  # for each layer, the cache of each sublayer by name


class Cache(NamedTuple):
    """The cache of a batch of sequences.

    Attributes:
      layers: of all layers.
      starts: [B] int32, length of each row's prompt.
      steps: () int32, how many tokens every row has got since then.
      ancestors: of beams, as of `DecodeProgress`.
    """

    layers: Layers
    starts: Array
    steps: Array
    ancestors: Array | None = None


def prefill(
    params: Params,
    tokens: Array,
    lengths: Array,
    cfg: ModelConfig,
    length: int,
    dtype: str | None = None,
    source: tuple[Array, Array] | None = None,
    prefix_lm: bool = False,
) -> tuple[Array, Cache]:
    """Reads all prompts in one pass, and before them all sources.

    Args:
      params: as in `gpt.specs(cfg)`, or from `prepare_decode_params`.
      tokens: [B, T] int, prompts padded on the right with any ids.
      lengths: [B] int, length of each prompt, 1 to T.
      cfg: the model.
      length: most tokens that a sequence will have, including its prompt.
      dtype: of the cache; None: the compute dtype. On CPU float32 is several times faster than bfloat16.
      source: tokens [B, S] int, padded on the right with any ids, and their lengths [B], of families that read a
        source; otherwise None.
      prefix_lm: all tokens of a prompt see each other, as of a model that was trained on data.objective=prefix_lm.

    Returns:
      [B, D], the hidden state of each prompt's last token, and the cache.
    """
    family = family_of(cfg)
    lengths = jnp.asarray(lengths, jnp.int32)
    empty = init_cache(cfg, tokens.shape[0], length, cfg.dtype if dtype is None else dtype)
    positions = jnp.arange(tokens.shape[1])
    read: dict[str, Any] = {}
    if family.encode is not None and source is not None:
        read["source"] = family.encode(params, *source, cfg)
    if prefix_lm:
        read["prefix"] = lengths
    progress = DecodeProgress(lengths)
    x, layers = family.decode(params, tokens, cfg, empty, progress, positions, **read)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return last, Cache(layers, lengths, jnp.zeros((), jnp.int32))


def step(params: Params, tokens: Array, cfg: ModelConfig, cache: Cache) -> tuple[Array, Cache]:
    """Gives every row one more token; the same work at every position.

    Without a window, a cache for sequences of S tokens has room for S - (prompt length) new ones; any further token
    replaces the oldest.

    Args:
      params: as in `gpt.specs(cfg)`, or from `prepare_decode_params`.
      tokens: [B] int; with a source for each of them, or for every W of them (as of beams).
      cfg: the model.
      cache: of the tokens before.

    Returns:
      [B, D], the hidden states of these tokens, and the cache with them added.
    """
    progress = DecodeProgress(cache.starts, cache.steps, cache.ancestors)
    positions = (cache.starts + cache.steps)[:, None]
    x, layers = family_of(cfg).decode(params, tokens[:, None], cfg, cache.layers, progress, positions)
    return x[:, 0], cache._replace(layers=layers, steps=cache.steps + 1)


def for_beams(cache: Cache, beams: int, new_tokens: int, cfg: ModelConfig) -> Cache:
    """The cache of so many beams of each row, all of them alike. `new_tokens`: the most that any will have since its
    prompt, those that it has already included."""
    rows = len(cache.starts)

    def repeated(x: Array) -> Array:
        return jnp.repeat(x.reshape(rows, -1, *x.shape[1:]), beams, axis=0).reshape(-1, *x.shape[1:])

    layers = _changed(cache.layers, cfg, lambda shared: key_value_cache.for_beams(shared, beams), repeated)
    return Cache(layers, jnp.repeat(cache.starts, beams), cache.steps, _own((rows, beams, new_tokens)))


def inherit(cache: Cache, parents: Array, cfg: ModelConfig) -> Cache:
    """The cache where each beam goes on from another one of its row, parents [B, W]; before the next step."""
    assert cache.ancestors is not None
    rows, beams = parents.shape

    def taken(x: Array) -> Array:
        return jnp.take_along_axis(x, parents.reshape(rows, beams, *(1,) * (x.ndim - 2)), axis=1)

    def moved(x: Array) -> Array:
        return taken(x.reshape(rows, beams, -1, *x.shape[1:])).reshape(x.shape)

    own = _own((rows, beams, 1))
    ancestors = jax.lax.dynamic_update_slice_in_dim(taken(cache.ancestors), own, cache.steps, axis=2)
    return cache._replace(layers=_changed(cache.layers, cfg, lambda shared: shared, moved), ancestors=ancestors)


def _own(shape: tuple[int, int, int]) -> Array:
    """Ancestors [B, W, N] of beams that go on from themselves."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _changed(
    layers: Layers, cfg: ModelConfig, of_shared: Callable[[Any], Any], of_others: Callable[[Array], Array]
) -> Layers:
    """The caches of all layers, changed: what beams share, before and after, and all other arrays. What is kept once
    for each source stays as it is."""
    sublayers = sublayers_of(cfg)

    def shared(node: Any) -> bool:
        return isinstance(node, key_value_cache.LayerCache | key_value_cache.SharedCache)

    def changed(name: str, cache: Any) -> Any:
        if name in sublayers and sublayers[name].per_source:
            return cache
        return jax.tree.map(lambda x: of_shared(x) if shared(x) else of_others(x), cache, is_leaf=shared)

    return [{name: changed(name, cache) for name, cache in layer.items()} for layer in layers]


def logits(params: Params, hidden: Array, soft_cap: float | None = None) -> Array:
    """[B, V] logits, float32 or wider, of the token after `hidden` [B, D]; `soft_cap`: model.logit_soft_cap."""
    return unembed(hidden, gpt.output_table(params), soft_cap=soft_cap)


def prepare_decode_params(params: Params, cfg: ModelConfig, *, columns: bool | None = None) -> Params:
    """The parameters in the form that is fastest for `step`: layers apart, matrices in the compute dtype.

    Done once before a loop over tokens, which would otherwise repeat it for every token. Costs a copy of all blocks.

    Args:
      params: as in `gpt.specs(cfg)`.
      cfg: the model.
      columns: store matrices by columns; None: on one CPU, where that is faster.

    Returns:
      A tree that every function here takes in place of `params`, including this one.
    """
    if isinstance(params["blocks"], list):
        return params
    blocks, head = unstack(params["blocks"], cfg.num_blocks), {}
    specs = block_specs(cfg)
    if jnp.dtype(cfg.dtype).itemsize < 4:
        blocks = [map_weights(lambda spec, leaf: _narrow(spec, leaf, cfg), specs, block) for block in blocks]
        head = {"head": {"table": gpt.output_table(params).astype(cfg.dtype)}}
    if columns is None:
        columns = this_platform() == "cpu" and not mesh_axes()
    if columns:
        able = {name: sublayer.low_rank for name, sublayer in sublayers_of(cfg).items()}
        blocks = [_by_columns(block, specs, able) for block in blocks]
    return {**params, "blocks": blocks, **head}


def _narrow(spec: ParamSpec, leaf: Array, cfg: ModelConfig) -> Array:
    return leaf.astype(cfg.dtype) if spec.role == "hidden" else leaf


def _by_columns(block: Params, specs: Params, able: dict[str, tuple[str, ...]]) -> Params:
    """A block where those weights are stored by columns that are multiplied by with `layers.linear` alone."""
    found = dict(block)
    for name in set(able) & set(block):
        weights = {key: block[name][key] for key in able[name] if key in block[name]}
        turned = {key: by_columns(w, specs[name][key].num_inputs) for key, w in weights.items() if not is_low_rank(w)}
        found[name] = {**block[name], **turned}
    return found
