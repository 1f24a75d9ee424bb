"""What GPT and BERT share below the first block: token, position and type embeddings, and score biases.

`functional.positions` says how to add a position encoding.
"""

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax.tree_util import Partial

from jaxformer import masks
from jaxformer.config import T5, Alibi, Learned, ModelConfig, Sinusoidal
from jaxformer.functional import positions as pos
from jaxformer.functional.embedding_lookup import look_up
from jaxformer.kernels.attention.xla import Bias
from jaxformer.parallel import context
from jaxformer.parallel.constraints import constrain
from jaxformer.specs import ParamSpec, normal
from jaxformer.types import Array, Params

T5_BUCKETS = 32


def vocab(cfg: ModelConfig) -> int:
    """The vocabulary size.

    Raises:
      ValueError: the config leaves it open; it has to be set from the data's tokenizer first.
    """
    if cfg.vocab_size is None:
        raise ValueError("ModelConfig.vocab_size is None; set it, or let the tokenizer set it")
    return cfg.vocab_size


def specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Parameters of the embedding: `tokens`, and `positions`, `types`, `t5` where the config has them."""
    tree = {"tokens": _table(cfg, vocab(cfg), "vocab")}
    if isinstance(cfg.positions, Learned):
        tree["positions"] = _table(cfg, cfg.context_length, "positions")
    if isinstance(cfg.positions, T5):
        shape = (T5_BUCKETS, cfg.attention.num_heads)
        tree["t5"] = ParamSpec(shape, ("positions", "heads"), normal(cfg.width**-0.5), "input")
    if cfg.token_types:
        tree["types"] = _table(cfg, cfg.token_types, "types")
    return tree


def _table(cfg: ModelConfig, size: int, axis: str, role: str = "input") -> ParamSpec:
    """A table [size, D]; normal(0.02) for "gpt2", else normal(D ** -0.5), so that tied logits start at unit size."""
    scale = 0.02 if cfg.initializer == "gpt2" else 1 / math.sqrt(cfg.width)
    return ParamSpec((size, cfg.width), (axis, "embed"), normal(scale), role)


def output_table_spec(cfg: ModelConfig) -> ParamSpec:
    """The [V, D] table that turns hidden states into logits, if it is not the embedding's."""
    return _table(cfg, vocab(cfg), "vocab", "output")


def embed(
    params: Params,
    tokens: Array,
    positions: Array,
    cfg: ModelConfig,
    types: Array | None = None,
) -> Array:
    """Sum of the token, position and type embeddings.

    Args:
      params: as in `specs(cfg)`.
      tokens: [B, T] int.
      positions: [T] or [B, T] int.
      cfg: the model.
      types: [B, T] int; None: all of type 0, where the config has types.

    Returns:
      [B, T, D] in the compute dtype.
    """
    x = look_up(tokens, params["tokens"], "vocab")
    if isinstance(cfg.positions, Learned):
        x = x + _learned(params["positions"], positions, x)
    elif isinstance(cfg.positions, Sinusoidal):
        # Vaswani et al. 2017, section 3.4: the token embeddings are scaled up so that positions do not dominate.
        x = x * math.sqrt(cfg.width) + jnp.broadcast_to(pos.sinusoidal(positions, cfg.width), x.shape)
    if cfg.token_types:
        x = x + look_up(jnp.zeros_like(tokens) if types is None else types, params["types"], "types")
    # Every device looks up its part of the width for the rows of its group; then rows are sharded instead of the width.
    x = constrain(x.astype(cfg.dtype), "looked_up_rows", None, "looked_up_width")
    return constrain(x, "rows", None, None)


def _learned(table: Array, positions: Array, x: Array) -> Array:
    """The learned position embeddings for `x`, [B, T, D], sharded like it."""
    if positions.ndim == 2:
        return look_up(positions, table, "positions")
    of_a_row = constrain(pos.learned(table, positions), None, "looked_up_width")
    return constrain(jnp.broadcast_to(of_a_row, x.shape), "looked_up_rows", None, "looked_up_width")


def shard_rows(
    tokens: Array, positions: Array | None, segments: Array | None, cfg: ModelConfig
) -> tuple[context.SequenceSharding, masks.Mask, Array, Array]:
    """Rows sharded over the context axis of the mesh in use, and the mask.

    Args:
      tokens: [B, T] int.
      positions, segments: [B, T] int, or None.
      cfg: the model.

    Returns:
      How rows are sharded; the mask (causality and window of the config, segments); tokens and positions, sharded
      (positions are [T] if they were None and rows are whole).

    Raises:
      ValueError: no positions are given, and rows are longer than the learned table.
    """
    # With a window, shards in the plain order have about equal work, and the ring can stop early.
    length, longest = tokens.shape[1], cfg.context_length
    cut = context.sequence_sharding(length, zigzag=cfg.causal and cfg.attention.window is None)
    index = None if cut.order is None else jnp.asarray(cut.order)
    mask = masks.Mask(
        causal=cfg.causal, window=cfg.attention.window, query_index=index, key_index=index, parts=cut.parts
    )
    if segments is not None:
        mask = mask & masks.segments(cut.arrange(segments))
    if positions is None:
        if isinstance(cfg.positions, Learned) and length > longest:
            raise ValueError(f"{length} tokens are more than the {longest} positions of model.context_length")
        positions = jnp.arange(length)
        positions = positions if cut.parts == 1 else jnp.broadcast_to(positions, tokens.shape)
    return cut, mask, cut.shard(tokens), cut.shard(positions)


def score_bias(params: Params, cfg: ModelConfig, mask: masks.Mask) -> Bias | None:
    """The score bias of ALiBi or T5 positions as a function of (query place, key place), or None.

    `mask` has the tokens' indices in the row if sharding has changed their order.
    """
    if isinstance(cfg.positions, Alibi):
        bias = Partial(functools.partial(pos.alibi, num_heads=cfg.attention.num_heads))
    elif isinstance(cfg.positions, T5):
        bias = Partial(functools.partial(pos.t5_bias, bidirectional=not cfg.causal), params["t5"])
    else:
        return None
    if mask.key_index is None:
        return bias
    return Partial(_at_places, bias, mask.query_index, mask.key_index)


def _at_places(
    bias: Callable[..., Array], query_index: Array, key_index: Array, query_place: Array, key_place: Array
) -> Array:
    """The bias of tokens whose index in the row is not their place. Places beyond the end, in padding, get any bias."""
    return bias(jnp.take(query_index, query_place, mode="clip"), jnp.take(key_index, key_place, mode="clip"))
