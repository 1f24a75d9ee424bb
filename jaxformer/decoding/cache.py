"""What a decoder remembers: a ring of key/value slots for each layer, filled by `prefill`, extended by `step`.

Every row of a batch writes its i-th new token into slot i mod S, whatever the length of its prompt; the prompt lies
before that, ending in slot S - 1. So one step writes one slot in one stretch, ragged prompts leave no padding between
tokens, and a model with a window keeps a ring of window size. Which token a slot holds follows from two counts.
Shapes never change, so neither does the work per token.

>>> from jaxformer.specs import init_params
>>> cfg = ModelConfig(num_layers=1, width=32, context_length=16, vocab_size=64)
>>> params = init_params(gpt.specs(cfg), jax.random.key(0))
>>> fill = jax.jit(prefill, static_argnames=("cfg", "slots"))
>>> hidden, cache = fill(params, jnp.array([[1, 2, 3], [4, 5, 0]]), jnp.array([3, 2]), cfg, slots=8)
>>> hidden, cache = step(params, jnp.argmax(logits(params, hidden), axis=-1), cfg, cache)
>>> cache.layers[0][0].shape, int(cache.steps)
((8, 8, 8), 1)
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer import masks
from jaxformer.config import ModelConfig
from jaxformer.functional.block import LayerCache, unstack
from jaxformer.functional.layers import unembed
from jaxformer.models import gpt
from jaxformer.types import Array, Params


class Cache(NamedTuple):
    """Keys and values of a batch of sequences.

    Attributes:
      layers: (key, value) of each layer, both [B * G, S, K].
      starts: [B] int32, tokens of each row's prompt.
      steps: () int32, tokens each row was given since.
    """

    layers: list[tuple[Array, Array]]
    starts: Array
    steps: Array


def num_slots(cfg: ModelConfig, prompt_length: int, new_tokens: int) -> int:
    """Slots a layer needs for a prompt and some new tokens: all of them, or the window if that is less."""
    needed = prompt_length + new_tokens
    return needed if cfg.attention.window is None else min(cfg.attention.window, needed)


def slot_positions(starts: Array, steps: Array, slots: int) -> Array:
    """Index of the token in each slot once `steps` new tokens are written, [B, S] int32; negative: empty."""
    newest = steps - 1
    return (starts + newest)[:, None] - ((newest - jnp.arange(slots, dtype=jnp.int32)) % slots)[None, :]


def prefill(
    params: Params, tokens: Array, lengths: Array, cfg: ModelConfig, slots: int, dtype: str | None = None
) -> tuple[Array, Cache]:
    """Reads all prompts in one pass.

    Args:
      params: as in `gpt.specs(cfg)`, or from `prepare_decode_params`.
      tokens: [B, T] int, prompts padded on the right with anything.
      lengths: [B] int, tokens of each prompt, 1 to T.
      cfg: the model.
      slots: S, from `num_slots`.
      dtype: of the cache; None: the compute dtype. On CPU float32 is several times faster than bfloat16.

    Returns:
      [B, D], the hidden state of each prompt's last token, and the cache.
    """
    lengths = jnp.asarray(lengths, jnp.int32)
    window = cfg.attention.window
    mask = masks.causal() if window is None else masks.causal() & masks.window(window)
    empty = [LayerCache() for _ in range(cfg.num_layers)]
    x, found = gpt.step(_as_rows(params, tokens), tokens, cfg, empty, mask, jnp.arange(tokens.shape[1]))
    # An empty slot holds a copy of the first token: finite, and never seen.
    source = jnp.maximum(slot_positions(lengths, jnp.zeros((), jnp.int32), slots), 0)
    source = jnp.repeat(source, cfg.attention.kv_heads, axis=0)[:, :, None]
    dtype = cfg.dtype if dtype is None else dtype

    def ring(x: Array) -> Array:
        return jnp.take_along_axis(x, source, axis=1).astype(dtype)

    layers = [(ring(m.key), ring(m.value)) for m in found]
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return last, Cache(layers, lengths, jnp.zeros((), jnp.int32))


def step(params: Params, tokens: Array, cfg: ModelConfig, cache: Cache) -> tuple[Array, Cache]:
    """Gives every row one more token; the same work at every position.

    Without a window a cache of S slots holds S - (prompt length) new tokens; a further one replaces the oldest token.

    Args:
      params: as in `gpt.specs(cfg)`, or from `prepare_decode_params`.
      tokens: [B] int.
      cfg: the model.
      cache: what came before.

    Returns:
      [B, D], the hidden states of these tokens, and the cache with them in it.
    """
    slots = cache.layers[0][0].shape[1]
    index = cache.starts + cache.steps
    # The ring holds what may be seen and no more, so the mask only has to leave out empty slots.
    mask = masks.Mask(query_index=index[:, None], key_index=slot_positions(cache.starts, cache.steps + 1, slots))
    before = [LayerCache(key, value, cache.steps % slots) for key, value in cache.layers]
    x, found = gpt.step(_as_rows(params, tokens), tokens[:, None], cfg, before, mask, index[:, None])
    return x[:, 0], Cache([(m.key, m.value) for m in found], cache.starts, cache.steps + 1)


def logits(params: Params, hidden: Array) -> Array:
    """[B, V] logits, float32 or wider, of the token after `hidden` [B, D]."""
    return unembed(hidden, gpt.output_table(params))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Columns:
    """A matrix stored by columns: `array` [outputs, inputs] for a parameter of `shape`, inputs first."""

    array: Array
    shape: tuple[int, ...] = field(metadata={"static": True})


def prepare_decode_params(params: Params, cfg: ModelConfig, *, by_columns: bool = False) -> Params:
    """The parameters as `step` wants them in a loop: layers apart, matrices in the compute dtype.

    Done once before a loop, which would repeat it for every token. Costs a copy of all blocks.

    Args:
      params: as in `gpt.specs(cfg)`.
      cfg: the model.
      by_columns: store narrow matrices by columns. One bfloat16 row times a matrix stored by rows leaves every fast
        path of XLA on CPU (1.5 against 44 GB/s measured); for more rows it is the other way round.

    Returns:
      A tree that everything in `decoding` for GPT takes in place of `params`, this function too.
    """
    if isinstance(params["blocks"], list):
        return params
    if jnp.dtype(cfg.dtype).itemsize >= 4:
        return {**params, "blocks": unstack(params["blocks"], cfg.num_layers)}

    def stored(name: str, leaf: Array) -> Array | Columns:
        if not name.startswith("w_"):
            return leaf
        leaf = leaf.astype(cfg.dtype)
        inputs = math.prod(leaf.shape[:-1]) if name == "w_out" else leaf.shape[0]
        return Columns(leaf.reshape(inputs, -1).T, leaf.shape) if by_columns else leaf

    blocks = []
    for block in unstack(params["blocks"], cfg.num_layers):
        for group in ("attention", "mlp"):
            block[group] = {name: stored(name, leaf) for name, leaf in block[group].items()}
        blocks.append(block)
    return {**params, "blocks": blocks, "head": {"table": gpt.output_table(params).astype(cfg.dtype)}}


def _as_rows(params: Params, tokens: Array) -> Params:
    """`params` with matrices stored by columns seen by rows again, inside the products that read them.

    Tied to `tokens`, which change in every step: what depends on parameters alone XLA would compute before the loop,
    and that is the matrix stored by rows.
    """
    columns, structure = jax.tree.flatten(params, is_leaf=lambda leaf: isinstance(leaf, Columns))
    arrays = [leaf.array for leaf in columns if isinstance(leaf, Columns)]
    if not arrays:
        return params
    arrays = iter(jax.lax.optimization_barrier((arrays, tokens))[0])
    seen = [next(arrays).T.reshape(leaf.shape) if isinstance(leaf, Columns) else leaf for leaf in columns]
    return jax.tree.unflatten(structure, seen)
