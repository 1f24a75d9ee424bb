"""The decoder of Bahdanau's and Luong's models: a recurrent cell whose state is compared with the states of a source.

See `aligned_recurrent` for what the models are.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import ModelConfig
from jaxformer.functional import alignment
from jaxformer.functional.layer import Context
from jaxformer.functional.layers import linear
from jaxformer.functional.recurrent import GRU_CELL, LSTM_CELL, LstmState, document_starts
from jaxformer.types import Array, Params


class AlignedSource(NamedTuple):
    """What a decoder reads of sources.

    Attributes:
      states: [B, S, D], of the encoder.
      compared: [B, S, A], U h of additive scores; of others the states.
      allowed: [B, T, S] bool, which of them a target token sees; [B, 1, S] where that is the same for all.
    """

    states: Array
    compared: Array
    allowed: Array


class AlignedCache(NamedTuple):
    """What decoding keeps of a row: the cell's state [B, D] (`cell` of an LSTM alone), the last output [B, D], and of
    its source the states [B, S, D], what scores compare [B, S, A] and which are no padding [B, S] bool."""

    hidden: Array
    cell: Array
    feed: Array
    states: Array
    compared: Array
    there: Array


class _Carry(NamedTuple):
    hidden: Array
    cell: Array
    feed: Array


def decode(
    params: Params, x: Array, cfg: ModelConfig, context: Context
) -> tuple[Array, AlignedCache | None, Array | None]:
    """What a decoder's layer makes of targets, the cache in decoding, and the weights that it gave to the sources.

    Args:
      params: as in `specs(cfg)`.
      x: [B, T, D].
      cfg: the decoder.
      context: with `source` [B, S, D] and its mask, or a cache of earlier tokens.

    Returns:
      [B, T, D]; AlignedCache or None; [B, T, S], None without a score.

    Raises:
      ValueError: there is no source.
    """
    progress: Any = context.progress
    cache, mask, source_mask = context.cache, context.mask, context.source_mask
    goes_on = progress is not None and progress.steps is not None
    segments = None if mask is None else mask.query_segments
    if goes_on:
        source = AlignedSource(cache.states, cache.compared, cache.there[:, None])
        first = _Carry(cache.hidden, cache.cell, cache.feed)
        places = (progress.starts + progress.steps)[:, None]
        starts = jnp.zeros(x.shape[:2], bool)
        begin = jax.tree.map(lambda a: jnp.broadcast_to(a[:, None], (*x.shape[:2], a.shape[-1])), first)
    else:
        if context.source is None:
            raise ValueError("alignment: the Context has no source; accepted: an encoder's states [B, S, D]")
        source = _source(params, context.source, source_mask, x.shape[1], cfg)
        starts = document_starts(segments, x.shape[:2])
        begin = _begin(params, source, cfg, x)
        first = jax.tree.map(lambda a: a[:, 0], begin)
        places = _places(starts)
    carries, contexts, befores, weights = _run(params, x, cfg, source, first, begin, starts, places)
    if cfg.attention.decoder == "bahdanau":
        seen: Any = linear(befores, params["w_out_state"]) + linear(x, params["w_out_token"])
        out = alignment.maxout(seen + linear(contexts, params["w_out_context"], params["b_out"]))
    else:
        out = carries.feed
    if progress is None:
        return out, None, weights
    last = jnp.zeros(x.shape[0], jnp.int32) if goes_on else progress.starts - 1
    kept = jax.tree.map(lambda a: jnp.take_along_axis(a, last[:, None, None], axis=1)[:, 0], carries)
    if goes_on:
        return out, cache._replace(**kept._asdict()), weights
    there = source.allowed[:, 0]
    sizes = {"states": source.states, "compared": source.compared, "there": there}
    padded = {name: _padded(a, cfg) for name, a in sizes.items()}
    return out, AlignedCache(**kept._asdict(), **padded), weights


def _padded(x: Array, cfg: ModelConfig) -> Array:
    """[B, S, ...] with as many source tokens as the cache has room for."""
    assert cfg.encoder is not None
    missing = max(0, cfg.encoder.source_length - x.shape[1])
    return jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])


def _source(params: Params, states: Array, mask: Any, targets: int, cfg: ModelConfig) -> AlignedSource:
    allowed = jnp.ones((states.shape[0], 1, states.shape[1]), bool)
    if mask is not None and mask.query_segments is not None:
        allowed = mask.query_segments[:, :, None] == mask.key_segments[:, None, :]
    if mask is not None and mask.keys is not None:
        allowed = allowed & mask.keys[:, None, :]
    compared = linear(states, params["w_source"]) if "w_source" in params else states
    return AlignedSource(states, compared, allowed)


def _ends(source: AlignedSource) -> tuple[Array, Array]:
    """[B, T or 1] int, the first and the last source token that each target token sees."""
    count = source.allowed.shape[-1]
    return jnp.argmax(source.allowed, axis=-1), count - 1 - jnp.argmax(source.allowed[..., ::-1], axis=-1)


def _begin(params: Params, source: AlignedSource, cfg: ModelConfig, x: Array) -> _Carry:
    """The state that a target would begin with at each token, [B, T, D]; zeros where there is no source."""
    half, (rows, length, width) = cfg.width // 2, x.shape
    first, _ = _ends(source)
    backward = jnp.take_along_axis(source.states[..., half:], first[..., None], axis=1)
    there = jnp.any(source.allowed, axis=-1)[..., None]
    hidden = jnp.where(there, jnp.tanh(linear(backward, params["w_start"], params["b_start"])), 0)
    hidden = jnp.broadcast_to(hidden, (rows, length, width))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cell = jnp.zeros((rows, length, width if cfg.attention.cell == "lstm" else 1), wide)
    return _Carry(hidden, cell, jnp.zeros_like(x))


def _places(starts: Array) -> Array:
    """[B, T] int, the place of each token in its document."""
    index = jnp.arange(starts.shape[1])[None, :]
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def _summary(source: AlignedSource, half: int) -> Array:
    """[B, T or 1, D], the last forward and the last backward state of the source that each target token sees."""
    first, last = _ends(source)
    forward = jnp.take_along_axis(source.states[..., :half], last[..., None], axis=1)
    backward = jnp.take_along_axis(source.states[..., half:], first[..., None], axis=1)
    there = jnp.any(source.allowed, axis=-1)[..., None]
    return jnp.where(there, jnp.concatenate([forward, backward], axis=-1), 0)


def _run(
    params: Params,
    x: Array,
    cfg: ModelConfig,
    source: AlignedSource,
    first: _Carry,
    begin: _Carry,
    starts: Array,
    places: Array,
) -> tuple[_Carry, Array, Array, Array | None]:
    """The loop over target tokens: states after each, what each read of its source, states before, weights."""
    kind, half = cfg.attention, cfg.width // 2
    length = x.shape[1]
    cell = LSTM_CELL if kind.cell == "lstm" else GRU_CELL
    bias_input, bias_hidden = (params["bias"], params["bias_hidden"]) if kind.cell == "gru" else (None, params["bias"])
    inputs = linear(x, params["w_input"], bias_input)
    allowed = jnp.broadcast_to(source.allowed, (x.shape[0], length, source.allowed.shape[-1]))
    summary = jnp.broadcast_to(_summary(source, half), x.shape) if kind.score == "none" else x[..., :0]
    # Places of the source's tokens in their own source, as each target sees them.
    begins, ends = (jnp.broadcast_to(each, x.shape[:2]) for each in _ends(source))
    dtype = x.dtype
    narrow: dict[str, Any] = {name: w.astype(dtype) for name, w in params.items()}

    def read(state: Array, now: Any) -> tuple[Array, Array]:
        """(context [B, D], weights [B, S]) of a state [B, D]."""
        if kind.score == "none":
            return now["summary"], jnp.zeros((x.shape[0], 0), dtype)
        target = state[:, None]
        if kind.score in ("additive", "concat"):
            scores = alignment.additive_scores_of(target @ narrow["w_target"], source.compared, narrow["v"])
        elif kind.score == "general":
            scores = alignment.general_scores(target, source.compared, narrow["w_score"])
        else:
            scores = alignment.dot_scores(target, source.compared)
        seen, factors = now["allowed"][:, None], None
        if kind.local != "none":
            index = jnp.arange(seen.shape[-1])[None, :] - now["begins"][:, None]
            lengths = (now["ends"] - now["begins"] + 1)[:, None].astype(jnp.float32)
            centres = now["places"][:, None].astype(jnp.float32)
            if kind.local == "predicted":
                centres = alignment.predicted_positions(target, narrow["w_place"], narrow["v_place"], lengths)
            inside, factors = alignment.local_windows(
                centres, index, kind.local_width, gaussian=kind.local == "predicted"
            )
            seen = seen & inside
        weights = alignment.align(scores, seen, factors)
        return alignment.context(weights, source.states)[:, 0].astype(dtype), weights[:, 0]

    def step(carry: _Carry, now: Any) -> tuple[_Carry, Any]:
        start = now["start"][:, None]
        carry = jax.tree.map(lambda new, old: jnp.where(start, new, old), now["begin"], carry)
        before = carry.hidden
        gates = now["input"]
        found = weights = None
        if kind.decoder == "bahdanau":
            found, weights = read(before, now)
            gates = gates + found @ narrow["w_fed"]
        elif kind.input_feeding:
            gates = gates + carry.feed @ narrow["w_fed"]
        gates = cell.join(gates, before @ narrow["w_hidden"] + bias_hidden.astype(dtype)[None])
        active = cell.activate(gates)
        if kind.cell == "lstm":
            hidden, memory = cell.update(LstmState(before, carry.cell), active)
        else:
            (hidden,), memory = cell.update((before,), active), carry.cell
        if kind.decoder == "luong":
            found, weights = read(hidden, now)
            feed = jnp.tanh(jnp.concatenate([found, hidden], axis=-1) @ narrow["w_out"])
        else:
            feed = carry.feed
        carry = _Carry(hidden, memory, feed)
        return carry, (carry, found, before, weights)

    nows = {
        "input": inputs, "allowed": allowed, "start": starts, "begin": begin, "summary": summary, "places": places,
        "begins": begins, "ends": ends,
    }  # fmt: skip
    nows = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), nows)
    _, found = jax.lax.scan(step, first, nows)
    carries, contexts, befores, weights = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), found)
    return carries, contexts, befores, None if kind.score == "none" else weights
