"""Filling in masked tokens, with a BERT or a funnel."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.decoding.request import Prompts, check_task, round_up, rows_of, token_ids
from jaxformer.errors import ConfigError
from jaxformer.functional.layers import unembed
from jaxformer.models import gpt
from jaxformer.models.families import family_of
from jaxformer.types import Params


class Filled(NamedTuple):
    """Candidates for M masked positions, in reading order.

    Attributes:
      rows, positions: [M] int32, where each mask is.
      tokens: [M, k] int32, most probable first.
      probabilities: [M, k] float32, among the tokens that were not suppressed.
    """

    rows: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    probabilities: np.ndarray


def fill_mask(
    params: Params,
    tokens: Prompts,
    cfg: ModelConfig,
    mask_id: int,
    *,
    top_k: int = 5,
    lengths: Sequence[int] | np.ndarray | None = None,
    token_types: np.ndarray | None = None,
    suppress: Sequence[int] | np.ndarray = (),
) -> Filled:
    """The most probable tokens for each mask, all masks predicted at once and each by itself.

    Args:
      params: as in the `specs(cfg)` of the family.
      tokens: lists of token ids, one for each row, or [B, T] int padded on the right.
      cfg: the model.
      mask_id: the id of the masks.
      top_k: k, candidates for each mask.
      lengths: [B], tokens of each row when `tokens` is an array; None: T.
      token_types: [B, T] int, sentence A or B, T the longest row; None: all 0.
      suppress: token ids that are never proposed.

    Returns:
      Filled, NumPy arrays.

    Raises:
      ConfigError: no mask; a row longer than the context of learned positions; a model that restores no masks.

    >>> from jaxformer.specs import init_params
    >>> cfg = ModelConfig(family="bert", num_layers=1, width=32, context_length=16, vocab_size=64)
    >>> params = init_params(family_of(cfg).specs(cfg), jax.random.key(0))
    >>> out = fill_mask(params, [[1, 9, 3], [9]], cfg, mask_id=9)
    >>> out.rows.tolist(), out.positions.tolist(), out.tokens.shape
    ([0, 1], [1, 0], (2, 5))
    """
    vocab_size = check_task("fill_mask", cfg)
    if not 1 <= top_k <= vocab_size:
        raise ConfigError(f"top_k: {top_k}; accepted: 1 to {vocab_size}")
    ids, counts = rows_of("text", tokens, lengths, cfg)
    meant = np.arange(ids.shape[1])[None, :] < counts[:, None]
    rows, positions = np.nonzero((ids == mask_id) & meant)
    if len(rows) == 0:
        raise ConfigError(f"tokens: no mask (id {mask_id}); accepted: at least one")
    allowed = ~np.isin(np.arange(vocab_size), token_ids("suppress", suppress, vocab_size))
    if allowed.sum() < top_k:
        raise ConfigError(f"top_k: {top_k}; accepted: at most {allowed.sum()}, the tokens that are not suppressed")
    if token_types is not None:
        types = np.asarray(token_types)[:, : counts.max()]
        token_types = np.pad(types, ((0, 0), (0, ids.shape[1] - types.shape[1])))
    # The number of masks is padded too, because every new shape is a compilation.
    room = round_up(len(rows))
    where = [np.pad(x, (0, room - len(x))).astype(np.int32) for x in (rows, positions)]
    found = jax.device_get(_fill(params, ids, meant, token_types, *where, allowed, cfg=cfg, top_k=top_k))
    return Filled(*(x[: len(rows)] for x in (*where, *found)))


@functools.partial(jax.jit, static_argnames=("cfg", "top_k"))
def _fill(params, ids, meant, token_types, rows, positions, allowed, *, cfg: ModelConfig, top_k: int):
    states = family_of(cfg).masked_states
    assert states is not None
    x_MD = states(params, ids, cfg, rows, positions, segments=meant.astype(jnp.int32), token_types=token_types)
    logits_MV = unembed(x_MD, gpt.output_table(params), params["head"]["bias"])
    probabilities = jax.nn.softmax(jnp.where(allowed[None, :], logits_MV, -jnp.inf), axis=-1)
    best, tokens = jax.lax.top_k(probabilities, top_k)
    return tokens, best
