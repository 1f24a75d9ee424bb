"""Generating text: one pass reads the prompts, then a compiled loop adds a token to each row until all are done."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.decoding import cache as kept
from jaxformer.decoding.request import Prompts, Request, Shapes, ends_in, make_request
from jaxformer.decoding.sampling import Sampling, SamplingParams, choose
from jaxformer.errors import ConfigError
from jaxformer.types import Array, Params


class Generated(NamedTuple):
    """New tokens of each row.

    Attributes:
      tokens: [B, N] int32; -1 after a row's end. A stop sequence that ended a row is part of it.
      lengths: [B] int32, new tokens of each row.
      log_probs: [B, N] float32, nats, of each token under the model itself, however it was chosen; 0 after the end.
      stopped: [B] bool, True if a stop sequence ended the row, False if it reached its limit.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray
    stopped: np.ndarray


class DecodeState(NamedTuple):
    """Everything the loop carries. B rows, N the buffer, m the longest stop sequence."""

    cache: Any  # kept.Cache
    last: Array  # [B] the newest token, not yet in the cache
    tokens: Array  # [B, N]
    log_probs: Array  # [B, N]
    lengths: Array  # [B] new tokens
    stopped: Array  # [B] bool
    done: Array  # [B] bool
    recent: Array | None  # [B, m] the last new tokens, -2 before the first
    seen: Array | None  # [B, V] bool, tokens that occurred; for the repetition penalty


def generate(
    params: Params,
    prompts: Prompts,
    cfg: ModelConfig,
    *,
    lengths: Sequence[int] | Array | np.ndarray | None = None,
    sampling: Sampling | None = None,
    rng: Array | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    stop: Sequence[int | Sequence[int]] = (),
    suppress: Sequence[int] | np.ndarray = (),
    sources: Prompts | None = None,
    source_lengths: Sequence[int] | Array | np.ndarray | None = None,
    prefix_lm: bool = False,
) -> Generated:
    """Continues each prompt; one compiled program from the prompts to the last token.

    With the same key, a row gets the same tokens in a batch as alone. With learned positions a row ends where the
    context does; every other position encoding goes on beyond it.

    Args:
      params: as in `gpt.specs(cfg)`; or from `prepare_decode_params`, so that not every call repeats that work.
      prompts: lists of token ids, one for each row, or [B, P] int padded on the right.
      cfg: the model.
      lengths: [B], tokens of each prompt when they are an array; None: P.
      sampling: how tokens are chosen; None: `Sampling()`.
      rng: one PRNG key (row b uses fold_in(rng, b)) or one for each row [B]; not needed for temperature 0.
      max_new_tokens: a row's limit, or one for each row.
      stop: token ids or sequences of them; a row ends when its new tokens end in one.
      suppress: token ids that are never generated.
      sources: what families that read a source are given, one for each prompt, in either form of the prompts, which are
        then the beginnings of the targets: a start token at least. Each source is read once.
      source_lengths: [B], tokens of each source when they are an array; None: all of it.
      prefix_lm: True for models that were trained on data.objective=prefix_lm: prompts are read from both sides.

    Returns:
      Generated, NumPy arrays; N is max_new_tokens, or less where the context of learned positions ends before.

    Raises:
      ConfigError: a prompt longer than the context of learned positions, empty, or with unknown ids; no key to sample
        with; a model that is no GPT; prefix_lm with a family that is not trained on it.

    >>> from jaxformer.models import gpt
    >>> from jaxformer.specs import init_params
    >>> cfg = ModelConfig(num_layers=1, width=32, context_length=16, vocab_size=64)
    >>> params = init_params(gpt.specs(cfg), jax.random.key(0))
    >>> out = generate(params, [[1, 2, 3], [4]], cfg, rng=jax.random.key(1), max_new_tokens=5)
    >>> out.tokens.shape, out.lengths.tolist()
    ((2, 5), [5, 5])
    """
    sampling = Sampling() if sampling is None else sampling
    request, shapes = make_request(
        params, prompts, cfg, lengths=lengths, max_new_tokens=max_new_tokens, stop=stop, suppress=suppress,
        sources=sources, source_lengths=source_lengths, prefix_lm=prefix_lm,
    )  # fmt: skip
    rngs = _row_rngs(rng, len(request.lengths), sampling)
    out = _generate(params, request, rngs, sampling.traced(), cfg=cfg, shapes=shapes)
    return _part(Generated(*jax.device_get(out)), 0, int(request.limits.max()))


def stream(
    params: Params,
    prompts: Prompts,
    cfg: ModelConfig,
    *,
    lengths: Sequence[int] | Array | np.ndarray | None = None,
    sampling: Sampling | None = None,
    rng: Array | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    stop: Sequence[int | Sequence[int]] = (),
    suppress: Sequence[int] | np.ndarray = (),
    sources: Prompts | None = None,
    source_lengths: Sequence[int] | Array | np.ndarray | None = None,
    prefix_lm: bool = False,
    block: int = 8,
) -> Iterator[Generated]:
    """The same tokens as `generate`, in blocks as they are computed.

    Args:
      block: tokens computed in one call of the compiled program; the first block is one token.

    Yields:
      Generated, the tokens of one block: N is at most `block`, `lengths` count the tokens in this block.

    Raises:
      ConfigError: as `generate`, before the first block.
    """
    if block < 1:
        raise ConfigError(f"block: {block}; accepted: at least 1")
    sampling = Sampling() if sampling is None else sampling
    request, shapes = make_request(
        params, prompts, cfg, lengths=lengths, max_new_tokens=max_new_tokens, stop=stop, suppress=suppress,
        sources=sources, source_lengths=source_lengths, prefix_lm=prefix_lm,
    )  # fmt: skip
    rngs = _row_rngs(rng, len(request.lengths), sampling)
    return _blocks(params, request, rngs, sampling.traced(), cfg, shapes, block, int(request.limits.max()))


def _blocks(params, request, rngs, sampling, cfg, shapes, block, limit) -> Iterator[Generated]:
    params, state = _start_jit(params, request, rngs, sampling, cfg=cfg, shapes=shapes)
    given = 0
    while True:
        now = Generated(*jax.device_get(_results(state)))
        newest = int(now.lengths.max())
        yield _part(now, given, newest)
        given = newest
        if np.all(now.stopped | (now.lengths >= request.limits)):
            return
        rest, until = state._replace(cache=None), min(given + block, limit)
        state = _next_block(params, state.cache, rest, request, rngs, sampling, until, cfg=cfg)


def _part(out: Generated, first: int, last: int) -> Generated:
    """The columns `first` to `last` of a result."""
    return Generated(
        out.tokens[:, first:last],
        np.clip(out.lengths - first, 0, last - first).astype(np.int32),
        out.log_probs[:, first:last],
        out.stopped,
    )


def _row_rngs(rng: Array | None, rows: int, sampling: Sampling) -> Array | None:
    """One key for each row; None for greedy choice."""
    if sampling.temperature == 0:
        return None
    if rng is None:
        raise ConfigError(f"rng: None; sampling at temperature {sampling.temperature} needs a key (0 does not)")
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = jax.random.wrap_key_data(rng)
    if rng.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(rows))
    if rng.shape != (rows,):
        raise ConfigError(f"rng: keys of shape {rng.shape}; accepted: one key, or one for each of {rows} rows")
    return rng


def _results(state: DecodeState) -> tuple[Array, Array, Array, Array]:
    """The fields of `Generated`."""
    return state.tokens, state.lengths, state.log_probs, state.stopped


@functools.partial(jax.jit, static_argnames=("cfg", "shapes"))
def _generate(
    params, request: Request, rngs, sampling: SamplingParams, *, cfg, shapes: Shapes
) -> tuple[Array, Array, Array, Array]:
    params, state = _start(params, request, rngs, sampling, cfg, shapes)
    return _results(_advance(params, state, request, rngs, sampling, shapes.buffer, cfg))


def _start(params, request: Request, rngs, sampling: SamplingParams, cfg, shapes: Shapes) -> tuple[Params, DecodeState]:
    """Reads the prompts and chooses the first token."""
    rows, vocab = len(request.lengths), len(request.allowed)
    prompts, sizes = (request.tokens, request.lengths), (shapes.length, shapes.cache_dtype)
    read = {"source": request.source, "prefix_lm": shapes.prefix_lm}
    hidden, cache = kept.prefill(params, *prompts, cfg, *sizes, **read)
    params = kept.prepare_decode_params(params, cfg)
    seen = None
    if sampling.repetition_penalty is not None:
        meant = jnp.arange(request.tokens.shape[1])[None, :] < request.lengths[:, None]
        column = jnp.where(meant, request.tokens, vocab)
        seen = jnp.zeros((rows, vocab), bool).at[jnp.arange(rows)[:, None], column].set(True, mode="drop")
    state = DecodeState(
        cache=cache,
        last=jnp.zeros(rows, jnp.int32),
        tokens=jnp.full((rows, shapes.buffer), -1, jnp.int32),
        log_probs=jnp.zeros((rows, shapes.buffer), jnp.float32),
        lengths=jnp.zeros(rows, jnp.int32),
        stopped=jnp.zeros(rows, bool),
        done=jnp.zeros(rows, bool),
        recent=None if request.stop is None else jnp.full((rows, request.stop.shape[1]), -2, jnp.int32),
        seen=seen,
    )
    return params, _emit(state, kept.logits(params, hidden, cfg.logit_soft_cap), request, rngs, sampling)


def _advance(params, state: DecodeState, request: Request, rngs, sampling: SamplingParams, until, cfg) -> DecodeState:
    """Adds tokens until there are `until` of them or every row is done."""

    def add(state: DecodeState) -> DecodeState:
        hidden, cache = kept.step(params, state.last, cfg, state.cache)
        return _emit(
            state._replace(cache=cache), kept.logits(params, hidden, cfg.logit_soft_cap), request, rngs, sampling
        )

    return jax.lax.while_loop(lambda state: (state.cache.steps + 1 < until) & ~jnp.all(state.done), add, state)


_start_jit = jax.jit(_start, static_argnames=("cfg", "shapes"))


@functools.partial(jax.jit, static_argnames=("cfg",), donate_argnames=("cache",))
def _next_block(
    params, cache: kept.Cache, rest: DecodeState, request: Request, rngs, sampling: SamplingParams, until, *, cfg
) -> DecodeState:
    """`_advance` that reuses the cache's memory, but not that of the small rest, which the host may still read."""
    return _advance(params, rest._replace(cache=cache), request, rngs, sampling, until, cfg)


def _emit(
    state: DecodeState, logits: Array, request: Request, rngs: Array | None, sampling: SamplingParams
) -> DecodeState:
    """Chooses the next token of each row from `logits` [B, V] and stores it."""
    number = state.cache.steps  # of this token, from 0
    rows = jnp.arange(logits.shape[0])
    # A row's random bits depend only on its key and the number of the token, not on blocks or other rows.
    draws = None if rngs is None else jax.vmap(jax.random.fold_in, (0, None))(rngs, number)
    token = choose(jnp.where(request.allowed[None, :], logits, -jnp.inf), state.seen, sampling, draws)
    log_prob = logits[rows, token] - jax.nn.logsumexp(logits, axis=-1)
    written = jnp.where(state.done, -1, token)
    lengths = state.lengths + ~state.done
    stopped, recent = state.stopped, state.recent
    if recent is not None:
        recent = jnp.concatenate([recent[:, 1:], written[:, None]], axis=1)
        stopped = stopped | (~state.done & ends_in(recent, request.stop))
    return DecodeState(
        cache=state.cache,
        last=token,
        tokens=_put(state.tokens, written, number),
        log_probs=_put(state.log_probs, jnp.where(state.done, 0.0, log_prob).astype(jnp.float32), number),
        lengths=lengths,
        stopped=stopped,
        done=stopped | (lengths >= request.limits),
        recent=recent,
        seen=None if state.seen is None else state.seen.at[rows, token].set(True),
    )


def _put(array_BN: Array, column_B: Array, number: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array_BN, column_B[:, None], number, axis=1)
