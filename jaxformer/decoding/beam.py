"""Beam search: the most probable continuations, several kept at once."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig
from jaxformer.decoding import cache as kept
from jaxformer.decoding.request import Prompts, Request, Shapes, ends_in, make_request
from jaxformer.errors import ConfigError
from jaxformer.types import Array, Params


class Beams(NamedTuple):
    """The best continuations of each prompt, best first.

    Where fewer than W exist (almost all tokens are suppressed), the places after them have length 0, tokens -1 and
    log_probs and scores -inf.

    Attributes:
      tokens: [B, W, N] int32; -1 after the end. A stop sequence that ended a continuation is part of it.
      lengths: [B, W] int32.
      log_probs: [B, W] float32, nats, of the whole continuation under the model.
      scores: [B, W] float32, what they are ranked by: log_probs / ((5 + length) / 6) ** length_penalty.
      stopped: [B, W] bool, True if a stop sequence ended it.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray
    scores: np.ndarray
    stopped: np.ndarray


class BeamState(NamedTuple):
    """What the loop carries, in the shapes of `Beams`; `cache` has B * W rows."""

    cache: kept.Cache
    number: Array  # () tokens so far
    tokens: Array
    lengths: Array
    log_probs: Array
    stopped: Array


def beam_search(
    params: Params,
    prompts: Prompts,
    cfg: ModelConfig,
    *,
    beams: int = 4,
    length_penalty: float = 0.0,
    lengths: Sequence[int] | Array | np.ndarray | None = None,
    max_new_tokens: int = 128,
    stop: Sequence[int | Sequence[int]] = (),
    suppress: Sequence[int] | np.ndarray = (),
) -> Beams:
    """Keeps the `beams` best continuations at every step; a finished one stays until better ones replace it.

    One beam is greedy choice; as many beams as there are continuations make the search exhaustive.

    Args:
      beams: W; each kept continuation costs as much as a row of a batch.
      length_penalty: 0 ranks by probability, which favours short continuations; about 0.6 to 1 evens that out.
      params, prompts, cfg, lengths, max_new_tokens, stop, suppress: as in `generate`.

    Returns:
      Beams, NumPy arrays; N as in `generate`.

    Raises:
      ConfigError: as `generate`.

    Source: Wu et al. 2016, section 7 (length normalisation; no coverage penalty).

    >>> from jaxformer.models import gpt
    >>> from jaxformer.specs import init_params
    >>> cfg = ModelConfig(num_layers=1, width=32, context_length=16, vocab_size=64)
    >>> params = init_params(gpt.specs(cfg), jax.random.key(0))
    >>> beam_search(params, [[1, 2, 3]], cfg, beams=2, max_new_tokens=5).tokens.shape
    (1, 2, 5)
    """
    if beams < 1:
        raise ConfigError(f"beams: {beams}; accepted: at least 1")
    if not 0 <= length_penalty < float("inf"):
        raise ConfigError(f"length_penalty: {length_penalty}; accepted: a finite number, at least 0")
    request, shapes = make_request(
        params, prompts, cfg, lengths=lengths, max_new_tokens=max_new_tokens, stop=stop, suppress=suppress
    )
    shapes = shapes._replace(by_columns=shapes.by_columns and beams == 1)
    out = Beams(*jax.device_get(_search(params, request, float(length_penalty), beams=beams, cfg=cfg, shapes=shapes)))
    exist = ~np.isneginf(out.log_probs)
    return out._replace(
        tokens=np.where(exist[:, :, None], out.tokens[:, :, : request.limits.max()], -1),
        lengths=np.where(exist, out.lengths, 0),
        stopped=out.stopped & exist,
    )


@functools.partial(jax.jit, static_argnames=("beams", "cfg", "shapes"))
def _search(params, request: Request, penalty, *, beams: int, cfg: ModelConfig, shapes: Shapes) -> tuple[Array, ...]:
    rows = len(request.lengths)
    hidden, cache = kept.prefill(params, request.tokens, request.lengths, cfg, shapes.length, shapes.cache_dtype)
    params = kept.prepare_decode_params(params, cfg, by_columns=shapes.by_columns)
    # All beams start as copies of the prompt; only the first counts until they differ.
    layers = jax.tree.map(
        lambda x: jnp.repeat(x.reshape(rows, -1, *x.shape[1:]), beams, axis=0).reshape(-1, *x.shape[1:]), cache.layers
    )
    state = BeamState(
        cache=kept.Cache(layers, jnp.repeat(cache.starts, beams), cache.steps),
        number=jnp.zeros((), jnp.int32),
        tokens=jnp.full((rows, beams, shapes.buffer), -1, jnp.int32),
        lengths=jnp.zeros((rows, beams), jnp.int32),
        log_probs=jnp.broadcast_to(jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf), (rows, beams)),
        stopped=jnp.zeros((rows, beams), bool),
    )
    logits = jnp.repeat(kept.logits(params, hidden), beams, axis=0)
    state = _extend(state, logits, request, penalty)

    def add(state: BeamState) -> BeamState:
        last = jax.lax.dynamic_index_in_dim(state.tokens, state.number - 1, axis=2, keepdims=False)
        hidden, cache = kept.step(params, jnp.maximum(last, 0).reshape(-1), cfg, state.cache)
        return _extend(state._replace(cache=cache), kept.logits(params, hidden), request, penalty)

    state = jax.lax.while_loop(lambda state: ~jnp.all(_done(state, request)), add, state)
    scores = _score(state.log_probs, state.lengths, penalty)
    return state.tokens, state.lengths, state.log_probs, scores, state.stopped  # the fields of Beams


def _extend(state: BeamState, logits: Array, request: Request, penalty) -> BeamState:
    """Replaces the beams of each row by the best among its finished beams and all one-token extensions of the rest."""
    rows, beams, _ = state.tokens.shape
    vocab = logits.shape[-1]
    done = _done(state, request)
    nats = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    nats = jnp.where(request.allowed[None, :], nats, -jnp.inf).reshape(rows, beams, vocab)
    # The only candidate of a finished beam is itself, as token 0 with log-probability 0.
    stay = jnp.where(jnp.arange(vocab) == 0, 0.0, -jnp.inf)[None, None, :]
    log_probs = state.log_probs[:, :, None] + jnp.where(done[:, :, None], stay, nats)
    lengths = state.lengths + ~done
    scores = _score(log_probs, lengths[:, :, None], penalty).reshape(rows, beams * vocab)
    _, best = jax.lax.top_k(scores, beams)
    parent, token = best // vocab, (best % vocab).astype(jnp.int32)

    def inherit(x: Array) -> Array:
        return jnp.take_along_axis(x, parent.reshape(rows, beams, *(1,) * (x.ndim - 2)), axis=1)

    was_done = inherit(done)
    column = jnp.where(was_done, -1, token)[:, :, None]
    tokens = jax.lax.dynamic_update_slice_in_dim(inherit(state.tokens), column, state.number, axis=2)
    stopped = inherit(state.stopped) | (~was_done & _stops(tokens, state.number, request))
    layers = jax.tree.map(
        lambda x: inherit(x.reshape(rows, beams, -1, *x.shape[1:])).reshape(x.shape), state.cache.layers
    )
    return BeamState(
        cache=state.cache._replace(layers=layers),
        number=state.number + 1,
        tokens=tokens,
        lengths=inherit(lengths),
        log_probs=jnp.take_along_axis(log_probs.reshape(rows, -1), best, axis=1),
        stopped=stopped,
    )


def _score(log_probs: Array, lengths: Array, penalty) -> Array:
    return log_probs / ((5.0 + lengths.astype(jnp.float32)) / 6.0) ** penalty


def _done(state: BeamState, request: Request) -> Array:
    """[B, W] bool: stopped or at the limit. All beams of a row that are not stopped have the same length."""
    return state.stopped | (state.lengths >= request.limits[:, None])


def _stops(tokens: Array, index: Array, request: Request) -> Array:
    """[B, W] bool: True if the tokens up to `index` end in a stop sequence."""
    if request.stop is None:
        return jnp.zeros(tokens.shape[:2], bool)
    longest = request.stop.shape[1]
    padded = jnp.pad(tokens, ((0, 0), (0, 0), (longest - 1, 0)), constant_values=-2)
    return ends_in(jax.lax.dynamic_slice_in_dim(padded, index, longest, axis=2), request.stop)
