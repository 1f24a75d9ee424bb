"""Beam search: the most probable continuations, several kept at once."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    """What the loop carries.

    Attributes:
      cache: of the live beams.
      number: () int32, tokens so far of every live beam.
      tokens: [B, W, N] int32, of the live beams.
      log_probs: [B, W], of the live beams; -inf where there is none.
      finished: the best continuations that have ended, in the shapes of `Beams`; the score of none is -inf.
    """

    cache: kept.Cache
    number: Array
    tokens: Array
    log_probs: Array
    finished: Any


def beam_search(
    params: Params,
    prompts: Prompts,
    cfg: ModelConfig,
    *,
    beams: int = 4,
    length_penalty: float = 0.0,
    lengths: Sequence[int] | Array | np.ndarray | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    stop: Sequence[int | Sequence[int]] = (),
    suppress: Sequence[int] | np.ndarray = (),
    sources: Prompts | None = None,
    source_lengths: Sequence[int] | Array | np.ndarray | None = None,
    prefix_lm: bool = False,
) -> Beams:
    """Extends the `beams` best unfinished continuations at every step, and keeps as many of the best finished ones.

    A continuation ends in one of the stop sequences, or at its limit; it counts if it is among the best W of all
    extensions at its step. A row is done when no live beam can do better than the finished ones, whatever follows.
    One beam is greedy choice, and ends where that does; as many beams as there are continuations make the search
    exhaustive.

    Args:
      beams: W; each live beam costs as much as a row of a batch. But keys and values of a source are kept once for all
        of them; and in softmax attention each is multiplied with the new tokens of all, so that no keys have to be
        copied: that is fast for up to about 16.
      length_penalty: 0 ranks by probability, which favours short continuations; about 0.6 to 1 evens that out. It
        counts the new tokens alone (transformers divides by a power of the length instead, with the prompt's).
      params, prompts, cfg, lengths, max_new_tokens, stop, suppress, sources, source_lengths, prefix_lm: as in
        `generate`.

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
        params, prompts, cfg, lengths=lengths, max_new_tokens=max_new_tokens, stop=stop, suppress=suppress,
        sources=sources, source_lengths=source_lengths, prefix_lm=prefix_lm,
    )  # fmt: skip
    out = Beams(*jax.device_get(_search(params, request, float(length_penalty), beams=beams, cfg=cfg, shapes=shapes)))
    return out._replace(tokens=out.tokens[:, :, : request.limits.max()])


@functools.partial(jax.jit, static_argnames=("beams", "cfg", "shapes"))
def _search(params, request: Request, penalty, *, beams: int, cfg: ModelConfig, shapes: Shapes) -> Any:
    rows = len(request.lengths)
    prompts, sizes = (request.tokens, request.lengths), (shapes.length, shapes.cache_dtype)
    read = {"source": request.source, "prefix_lm": shapes.prefix_lm}
    hidden, cache = kept.prefill(params, *prompts, cfg, *sizes, **read)
    params = kept.prepare_decode_params(params, cfg)
    # All beams start as copies of the prompt; only the first counts until they differ.
    none = jnp.full((rows, beams), -jnp.inf)
    tokens = jnp.full((rows, beams, shapes.buffer), -1, jnp.int32)
    state = BeamState(
        cache=kept.for_beams(cache, beams, shapes.buffer, cfg),
        number=jnp.zeros((), jnp.int32),
        tokens=tokens,
        log_probs=none.at[:, 0].set(0.0),
        finished=(tokens, jnp.zeros((rows, beams), jnp.int32), none, none, jnp.zeros((rows, beams), bool)),
    )
    logits = jnp.repeat(kept.logits(params, hidden, cfg.logit_soft_cap), beams, axis=0)
    state = _extend(state, logits, request, penalty, cfg)

    def add(state: BeamState) -> BeamState:
        last = jax.lax.dynamic_index_in_dim(state.tokens, state.number - 1, axis=2, keepdims=False)
        hidden, cache = kept.step(params, jnp.maximum(last, 0).reshape(-1), cfg, state.cache)
        return _extend(
            state._replace(cache=cache), kept.logits(params, hidden, cfg.logit_soft_cap), request, penalty, cfg
        )

    return jax.lax.while_loop(lambda state: jnp.any(state.log_probs > -jnp.inf), add, state).finished


def _extend(state: BeamState, logits: Array, request: Request, penalty, cfg: ModelConfig) -> BeamState:
    """One token more: the best extensions of the live beams of each row are finished, or go on living."""
    rows, beams, _ = state.tokens.shape
    vocab, length = logits.shape[-1], state.number + 1
    nats = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    nats = jnp.where(request.allowed[None, :], nats, -jnp.inf).reshape(rows, beams, vocab)
    # Each live beam has an extension for each stop sequence at most: so many candidates leave `beams` that go on.
    wanted = beams * (1 + (0 if request.stop is None else len(request.stop)))
    whole = (state.log_probs[:, :, None] + nats).reshape(rows, beams * vocab)
    log_probs, best = jax.lax.top_k(whole, min(wanted, beams * vocab))
    parent, token = best // vocab, (best % vocab).astype(jnp.int32)
    tokens = jax.lax.dynamic_update_slice_in_dim(_taken(state.tokens, parent), token[:, :, None], state.number, axis=2)
    stopped = _stops(tokens, state.number, request)
    ends = stopped | (length >= request.limits)[:, None]
    counts = ends & (jnp.arange(best.shape[1]) < beams)[None, :]
    scores = _score(jnp.where(counts, log_probs, -jnp.inf), length, penalty)
    finished = _best(state.finished, (tokens, jnp.full_like(best, length), log_probs, scores, stopped), beams)

    # A live beam's probability can only fall, and its penalty is least at the limit.
    live = jnp.where(ends, -jnp.inf, log_probs)
    worst = finished[3][:, -1]
    hopeless = _score(jnp.max(live, axis=1), request.limits, penalty) <= worst
    done = (hopeless | (beams == 1)) & (worst > -jnp.inf)
    live, chosen = jax.lax.top_k(jnp.where(done[:, None], -jnp.inf, live), beams)
    parent = jnp.take_along_axis(parent, chosen, axis=1)
    return BeamState(
        cache=kept.inherit(state.cache, parent, cfg),
        number=length,
        tokens=_taken(tokens, chosen),
        log_probs=live,
        finished=finished,
    )


def _taken(x: Array, places: Array) -> Array:
    """[B, W, ...] at `places` [B, n] of its second axis: [B, n, ...]."""
    return jnp.take_along_axis(x, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)


def _best(finished: tuple[Array, ...], more: tuple[Array, ...], beams: int) -> tuple[Array, ...]:
    """The `beams` finished continuations of highest score, best first; both in the order of `Beams`."""
    tokens, lengths, log_probs, scores, stopped = (
        jnp.concatenate(pair, axis=1) for pair in zip(finished, more, strict=True)
    )
    scores, places = jax.lax.top_k(scores, beams)
    exist = scores > -jnp.inf
    return (
        jnp.where(exist[:, :, None], _taken(tokens, places), -1),
        jnp.where(exist, _taken(lengths, places), 0).astype(jnp.int32),
        jnp.where(exist, _taken(log_probs, places), -jnp.inf),
        scores,
        exist & _taken(stopped, places),
    )


def _score(log_probs: Array, lengths: Array, penalty) -> Array:
    return log_probs / ((5.0 + lengths.astype(jnp.float32)) / 6.0) ** penalty


def _stops(tokens: Array, index: Array, request: Request) -> Array:
    """[B, n] bool: True if the tokens up to `index` end in a stop sequence."""
    if request.stop is None:
        return jnp.zeros(tokens.shape[:2], bool)
    longest = request.stop.shape[1]
    padded = jnp.pad(tokens, ((0, 0), (0, 0), (longest - 1, 0)), constant_values=-2)
    return ends_in(jax.lax.dynamic_slice_in_dim(padded, index, longest, axis=2), request.stop)
