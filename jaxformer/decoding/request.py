"""Requests to a decoder, checked on the host and padded to few static shapes.

Every new shape is a compilation, so prompts, new tokens and stop sequences are padded to one of few sizes; their actual
lengths are traced.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig, encoder_of
from jaxformer.errors import ConfigError
from jaxformer.functional.position_encodings import encoding_of
from jaxformer.models.families import families_for, family_of, tasks_of
from jaxformer.types import Array, Params

Prompts = Array | np.ndarray | Sequence[Sequence[int]]


class Request(NamedTuple):
    """Arrays of a checked request.

    Attributes:
      tokens: [B, P] int32, prompts padded on the right.
      lengths: [B] int32, tokens of each prompt.
      limits: [B] int32, new tokens each row may have.
      allowed: [V] bool, tokens that may be generated.
      stop: [n, m] int32, stop sequences padded on the left with -1; None if there are none.
      source: ([B, S] int32 padded on the right, [B] int32 lengths); None for families that read none.
    """

    tokens: Any  # NumPy on the host, jax arrays inside the compiled program
    lengths: Any
    limits: Any
    allowed: Any
    stop: Any
    source: Any = None


class Shapes(NamedTuple):
    """The static side of a request.

    Attributes:
      length: tokens of a sequence at most, as in `cache.prefill`.
      buffer: N, new tokens at most.
      cache_dtype: as in `cache.prefill`.
      prefix_lm: as in `cache.prefill`.
    """

    length: int
    buffer: int
    cache_dtype: str
    prefix_lm: bool = False


def make_request(
    params: Params,
    prompts: Prompts,
    cfg: ModelConfig,
    *,
    lengths: Sequence[int] | Array | np.ndarray | None,
    max_new_tokens: int | Sequence[int],
    stop: Sequence[int | Sequence[int]],
    suppress: Sequence[int] | np.ndarray,
    sources: Prompts | None = None,
    source_lengths: Sequence[int] | Array | np.ndarray | None = None,
    prefix_lm: bool = False,
) -> tuple[Request, Shapes]:
    """Checks everything that can be wrong with a request; arguments as in `generate`.

    Raises:
      ConfigError: something is wrong.
    """
    vocab_size = check_task("generate", cfg)
    if prefix_lm and "prefix_lm" not in (known := family_of(cfg).traits.objectives):
        raise ConfigError(
            f"prefix_lm: True; model.family={cfg.family} is trained on {', '.join(known)}, not on prefix_lm; accepted: "
            "False"
        )
    most = np.asarray(max_new_tokens)
    if most.size == 0 or most.min() < 1:
        raise ConfigError(f"max_new_tokens: {max_new_tokens}; accepted: at least 1")
    tokens, counts = rows_of("prompt", prompts, lengths, cfg)
    source = _sources(sources, source_lengths, len(counts), cfg)
    if most.shape not in ((), counts.shape):
        raise ConfigError(f"max_new_tokens: {most.size} numbers; accepted: one, or one for each of {len(counts)} rows")
    limits = np.broadcast_to(most, counts.shape).astype(np.int32)
    if not encoding_of(cfg).extends:
        limits = np.minimum(limits, cfg.context_length - counts + 1).astype(np.int32)
    buffer = round_up(int(limits.max()))
    allowed = ~np.isin(np.arange(vocab_size), token_ids("suppress", suppress, vocab_size))
    if not allowed.any():
        raise ConfigError("suppress: all tokens; accepted: at least one token left to generate")
    narrow_on_cpu = cfg.dtype == "bfloat16" and _platform(params) == "cpu"
    shapes = Shapes(
        length=tokens.shape[1] + buffer,
        buffer=buffer,
        cache_dtype="float32" if narrow_on_cpu else cfg.dtype,
        prefix_lm=prefix_lm,
    )
    return Request(tokens, counts, limits, allowed, _stop_table(stop, vocab_size), source), shapes


def _sources(sources: Any, lengths: Any, rows: int, cfg: ModelConfig) -> tuple[np.ndarray, np.ndarray] | None:
    """Sources as `rows_of` gives prompts; None: the family reads none.

    Raises:
      ConfigError: as `rows_of`; sources that nobody reads, or none where they are read.
    """
    if family_of(cfg).encode is None:
        if sources is not None:
            raise ConfigError(f"sources: given; model.family={cfg.family} reads none; accepted: None")
        return None
    if sources is None:
        raise ConfigError(f"sources: None; model.family={cfg.family} reads a source; accepted: one for each prompt")
    read = rows_of("source", sources, lengths, encoder_of(cfg), "sources", "model.encoder.source_length")
    if len(read[1]) != rows:
        raise ConfigError(f"sources: {len(read[1])}; accepted: one for each of {rows} prompts")
    return read


def check_task(task: str, cfg: ModelConfig) -> int:
    """Refuses a task, "generate" or "fill_mask", that a model cannot do. Returns the vocabulary size.

    Raises:
      ConfigError: the model's family or one of its layers cannot do it, or the vocabulary size is not set.
    """
    what = {"generate": "generating text", "fill_mask": "filling in masks"}[task]
    if cfg.family not in (able := families_for(task)):
        raise ConfigError(f"config.model.family: {cfg.family}; {what} needs {' or '.join(able)}")
    if task == "generate" and cfg.attention.cannot_decode:
        raise ConfigError(cfg.attention.cannot_decode)
    if cfg.head is not None and task not in tasks_of(cfg):
        raise ConfigError(
            f"config.model.head: that of {cfg.head.task}; {what} needs the family's own head; accepted: a model that "
            "learned no task"
        )
    if task not in tasks_of(cfg):
        raise ConfigError(
            f"config.model.attention.kind: {cfg.attention.kind} has no cache for decoding; generating text needs one: "
            "give its Sublayer init_cache"
        )
    if cfg.vocab_size is None:
        raise ConfigError(f"config.model.vocab_size: None; {what} needs the tokenizer's size")
    return cfg.vocab_size


def rows_of(
    name: str, prompts: Any, lengths: Any, cfg: ModelConfig, names: str = "prompts", field: str = "model.context_length"
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as [B, P] int32, padded to one of few lengths P, and their own lengths [B] int32.

    Args:
      name: of a row, in errors.
      prompts, lengths: as in `generate`.
      cfg: of the model that reads them.
      names: of the argument, in errors.
      field: of the config, which limits their length.

    Raises:
      ConfigError: arguments that disagree, unknown ids, or a row (called `name`) beyond the context of learned
        positions.
    """
    if hasattr(prompts, "ndim"):
        tokens = np.asarray(prompts)
        if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
            raise ConfigError(f"{names}: {tokens.dtype} of shape {tokens.shape}; accepted: integers [rows, tokens]")
        counts = np.full(len(tokens), tokens.shape[1]) if lengths is None else np.asarray(lengths)
        if counts.shape != tokens.shape[:1] or (counts > tokens.shape[1]).any():
            raise ConfigError(f"lengths: {counts.tolist()}; accepted: one for each of {len(tokens)} rows, at most "
                              f"{tokens.shape[1]}")  # fmt: skip
    else:
        if lengths is not None:
            raise ConfigError(f"lengths: given beside a list of {names}; accepted: None, or {names} as one array")
        counts = np.array([len(row) for row in prompts], int)
        tokens = np.zeros((len(counts), counts.max(initial=0)), int)
        for row, ids in zip(tokens, prompts, strict=True):
            row[: len(ids)] = ids
    if len(counts) == 0:
        raise ConfigError(f"{names}: none; accepted: at least one")
    if counts.min() < 1:
        raise ConfigError(f"{names}: row {counts.argmin()} is empty; accepted: at least one token (a document's first)")
    meant = np.arange(tokens.shape[1])[None, :] < counts[:, None]
    token_ids(names, tokens[meant], cfg.vocab_size)
    longest = int(counts.max())
    padded = round_up(longest)
    if not encoding_of(cfg).extends:
        padded = min(padded, cfg.context_length)
        if longest > cfg.context_length:
            raise ConfigError(
                f"{name}: {longest} tokens are more than config.{field} {cfg.context_length}, which "
                f"{cfg.positions.kind} positions cannot extend; accepted: at most {cfg.context_length}"
            )
    tokens = np.pad(np.where(meant, tokens, 0)[:, :longest], ((0, 0), (0, padded - longest)))
    return tokens.astype(np.int32), counts.astype(np.int32)


def token_ids(name: str, ids: Any, vocab_size: int) -> np.ndarray:
    """Token ids as [N] int. Raises ConfigError: `name` has one outside the vocabulary."""
    ids = np.asarray(ids, int).reshape(-1)
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if len(bad):
        raise ConfigError(f"{name}: token {bad[0]}; accepted: 0 to {vocab_size - 1}")
    return ids


def _stop_table(stop: Sequence[int | Sequence[int]], vocab_size: int) -> np.ndarray | None:
    """[n, m] int32, stop sequences padded on the left with -1 to few sizes."""
    sequences = [token_ids("stop", sequence, vocab_size) for sequence in stop]
    if not sequences:
        return None
    if min(map(len, sequences)) < 1:
        raise ConfigError("stop: an empty sequence; accepted: at least one token")
    longest = max(map(len, sequences))
    table = np.full((len(sequences), longest if longest == 1 else -(-longest // 8) * 8), -1, np.int32)
    for row, sequence in zip(table, sequences, strict=True):
        row[-len(sequence) :] = sequence
    return table


def ends_in(recent: Array, stop: Array) -> Array:
    """[...] bool: True if the `recent` tokens, [..., m] int, end in one of the `stop` sequences of a request."""
    stop = jnp.reshape(stop, (1,) * (recent.ndim - 1) + stop.shape)
    return jnp.any(jnp.all((stop == recent[..., None, :]) | (stop == -1), axis=-1), axis=-1)


def round_up(size: int) -> int:
    """The next of 16, 32, 64, 128, 256, 384, ..."""
    return -(-size // 128) * 128 if size > 64 else max(16, 1 << (size - 1).bit_length())


def _platform(params: Params) -> str:
    leaf = jax.tree.leaves(params)[0]
    return next(iter(leaf.devices())).platform if isinstance(leaf, jax.Array) else jax.default_backend()
