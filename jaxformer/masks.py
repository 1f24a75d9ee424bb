"""Attention masks as descriptions instead of arrays.

A ``Mask`` is a small pytree of conditions that must all hold ("and"). Every attention implementation reads the
description, so memory-saving ones never need the [T, S] array; only the reference implementation expands it.

>>> mask = causal() & segments(jnp.array([[1, 1, 2]]))
>>> expand(mask, 3, 3)[0, 0].astype(int).tolist()
[[1, 0, 0], [1, 1, 0], [0, 0, 1]]
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.patterns import GlobalTokens, Marked, MaskPattern, union
from jaxformer.types import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """Conditions under which query t may attend to key s; those that are None or False do not apply.

    `causal`, `window`, `prefix` and `prefix_keys` compare positions in the sequence ("index"): 0, 1, 2, ... unless
    `query_index` or `key_index` is given (as for a decoding cache). A key with a negative index is an empty slot and
    always masked.

    Attributes:
      causal: key index <= query index.
      window: |query index - key index| < window.
      prefix: [B] int; key index <= query index, or key index < prefix (prefix language model).
      prefix_keys: [B, S] bool; key index <= query index, or the key is True here (the prefixes of packed documents).
      keys: [B, S] bool; False for keys that are always masked (padding).
      query_segments, key_segments: [B, T], [B, S] int; a query attends to keys of its own segment.
      query_index, key_index: [T] or [B, T], [S] or [B, S] int.
      dense: bool, broadcastable to [B, H, T, S].
      patterns: one of them allows the pair; none: they hide nothing. See `either`.
      global_queries, global_keys: [B, T], [B, S] bool, global tokens, where `patterns.Marked` is among the patterns.
      heads: [H] int, the numbers of the heads for patterns that differ between heads; None: 0, 1, 2, ...
      parts: number of sequence shards of a self-attention with context parallelism
        (`parallel.context.SequenceSharding`): its arrays are then [parts * B, T / parts, ...], while the fields here
        still describe whole rows, in the order of the shards.
    """

    causal: bool = field(default=False, metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})
    prefix: Array | None = None
    keys: Array | None = None
    query_segments: Array | None = None
    key_segments: Array | None = None
    query_index: Array | None = None
    key_index: Array | None = None
    dense: Array | None = None
    prefix_keys: Array | None = None
    parts: int = field(default=1, metadata={"static": True})
    patterns: tuple[MaskPattern, ...] = field(default=(), metadata={"static": True})
    global_queries: Array | None = None
    global_keys: Array | None = None
    heads: Array | None = None
    __array_ufunc__ = None  # so that `array & mask` comes here

    def __post_init__(self) -> None:
        """Raises ValueError: a window that is no integer of at least 1."""
        if self.window is not None and not (isinstance(self.window, int | np.integer) and self.window >= 1):
            raise ValueError(f"window: size {self.window}; accepted: an integer of at least 1")

    @property
    def hides(self) -> bool:
        """True if there is any condition; otherwise every query attends to every key."""
        arrays = (
            self.prefix, self.prefix_keys, self.keys, self.query_segments, self.key_segments, self.key_index, self.dense
        )  # fmt: skip
        return self.causal or self.window is not None or bool(self.patterns) or any(x is not None for x in arrays)

    def __and__(self, other: "Mask") -> "Mask":
        """Both masks' conditions.

        Raises:
          ValueError: if both have a prefix, segments, an index or patterns; express one of them with `dense`.
          TypeError: `other` is no mask.
        """
        if not isinstance(other, Mask):
            raise TypeError(f"Mask &: {type(other).__name__} is no Mask; accepted: an array of bool inside dense()")
        windows = [w for w in (self.window, other.window) if w is not None]
        both: dict[str, Any] = {}
        single = (
            "prefix", "prefix_keys", "query_segments", "key_segments", "query_index", "key_index", "global_queries",
            "global_keys", "heads",
        )  # fmt: skip
        if self.patterns and other.patterns:
            raise ValueError("Mask &: both sides have patterns; expand one of them and pass it to dense()")
        for name in ("keys", "dense", *single):
            a, b = getattr(self, name), getattr(other, name)
            if a is None or b is None:
                both[name] = b if a is None else a
            elif name in ("keys", "dense"):
                both[name] = _and(a, b)
            else:
                raise ValueError(f"Mask &: both sides have {name}; expand one of them and pass it to dense()")
        return Mask(
            causal=self.causal or other.causal,
            window=min(windows, default=None),
            parts=max(self.parts, other.parts),
            patterns=self.patterns or other.patterns,
            **both,
        )

    __rand__ = __and__

    def __or__(self, other: Any) -> "Mask":
        """Raises TypeError: conditions are joined by "and" only."""
        raise TypeError("Mask |: masks combine with & only; accepted: dense(array | array), see expand()")

    __ror__ = __or__

    def __bool__(self) -> bool:
        """Raises TypeError: `a and b` would be b alone."""
        raise TypeError("Mask: has no truth value; masks combine with & (`and` would drop one of them)")


def causal() -> Mask:
    """A query attends to the keys up to its own index."""
    return Mask(causal=True)


def window(size: int) -> Mask:
    """A query attends to the keys fewer than `size` away, itself included; with `causal()` these are the last `size`.

    Raises:
      ValueError: `size` is no integer of at least 1.
    """
    return Mask(window=size)


def prefix(of: Array) -> Mask:
    """Causal, except that every query attends to the keys of a prefix as well; not to be combined with `causal()`.

    Args:
      of: [B] int, every query of row b attends to its first `of[b]` keys; or [B, S] bool, to the keys that are True,
        which with `segments` are the prefix of each document in the row.

    Raises:
      ValueError: another number of axes.

    Source: Raffel et al. 2020, section 3.2.1 (prefix LM).
    """
    found = jnp.asarray(of)
    if found.ndim == 2 and found.dtype == bool:
        return Mask(prefix_keys=found)
    if found.ndim != 1:
        raise ValueError(
            f"prefix: lengths has shape {found.shape}; accepted: [B], one for each row, or [B, S] bool, True for the "
            "keys of a prefix"
        )
    return Mask(prefix=found)


def padding(keys: Array) -> Mask:
    """Masks the keys that are False. `keys`: [B, S] bool, or 0 and 1; not lengths.

    Raises:
      TypeError: `keys` are floats.
      ValueError: another number of axes.
    """
    allowed = _allowed("padding", keys)
    if allowed.ndim != 2:
        raise ValueError(
            f"padding: keys has shape {allowed.shape}; accepted: [B, S] bool (of lengths [B]: jnp.arange(S)[None] < "
            "lengths[:, None])"
        )
    return Mask(keys=allowed)


def segments(query_segments: Array, key_segments: Array | None = None) -> Mask:
    """A query attends to the keys of its own segment: documents packed into one row do not see each other.

    Args:
      query_segments: [B, T] int.
      key_segments: [B, S] int; None for self-attention.
    """
    queries = jnp.asarray(query_segments)
    return Mask(query_segments=queries, key_segments=queries if key_segments is None else jnp.asarray(key_segments))


def dense(allowed: Array) -> Mask:
    """Any mask as an array. `allowed`: bool, broadcastable to [B, H, T, S], True where attending is allowed.

    Raises:
      TypeError: `allowed` has floats, like a mask that is added to scores: pass that as `bias` of `attention`.
    """
    return Mask(dense=_allowed("dense", allowed))


def either(*patterns: MaskPattern | GlobalTokens | tuple[MaskPattern, ...]) -> Mask:
    """A query attends to the keys that one of the patterns lets it meet; see `jaxformer.patterns`.

    Raises:
      ValueError: there is no pattern, or several arrays of global tokens.
      TypeError: something else than a pattern.

    >>> from jaxformer.patterns import local, strided
    >>> mask = causal() & either(strided(2))
    >>> expand(mask, 5, 5)[0, 4].astype(int).tolist()
    [1, 0, 1, 1, 1]
    """
    flat: list[Any] = [each for of in patterns for each in (of if type(of) is tuple else (of,))]
    marked = [each for each in flat if isinstance(each, GlobalTokens)]
    others = dict.fromkeys(each for each in flat if not isinstance(each, GlobalTokens))
    for each in others:
        if not isinstance(each, MaskPattern):
            raise TypeError(f"either: {type(each).__name__} is no pattern; accepted: local(...), strided(...), ...")
    if not flat or len(marked) > 1:
        raise ValueError(f"either: {len(flat)} patterns, {len(marked)} arrays of global tokens; accepted: 1 or more, 1")
    of = marked[0] if marked else GlobalTokens(None, False, False)  # type: ignore[arg-type]
    return Mask(
        patterns=(*others, *(Marked() for _ in marked)),
        global_queries=of.marked if of.see else None,
        global_keys=of.marked if of.seen else None,
    )


def expand(mask: Mask | None, queries: int, keys: int) -> Array | None:
    """The mask as one bool array broadcastable to [B, H, T, S], or None if everything is allowed.

    Args:
      mask: the description.
      queries, keys: T and S.
    """
    if mask is None:
        return None
    q = jnp.arange(queries) if mask.query_index is None else mask.query_index
    k = jnp.arange(keys) if mask.key_index is None else mask.key_index
    q, k = q[..., None, :, None], k[..., None, None, :]  # [(B,) 1, T, 1] and [(B,) 1, 1, S]
    if max(q.ndim, k.ndim) == 4:
        q, k = (x if x.ndim == 4 else x[None] for x in (q, k))
    parts = []
    if mask.prefix_keys is not None:
        q4, k4 = (x if x.ndim == 4 else x[None] for x in (q, k))
        parts.append((k4 <= q4) | mask.prefix_keys[:, None, None, :])
    if mask.causal:
        parts.append(k <= q)
    if mask.window is not None:
        parts.append((q - k < mask.window) & (k - q < mask.window))
    if mask.patterns:
        parts.append(union(mask.patterns, q, k, mask.heads, mask.global_queries, mask.global_keys))
    if mask.prefix is not None:
        # The index may be [T] only; add a batch axis so that it broadcasts with the prefix's [B, 1, 1, 1].
        q4, k4 = (x if x.ndim == 4 else x[None] for x in (q, k))
        parts.append((k4 <= q4) | (k4 < mask.prefix[:, None, None, None]))
    if mask.key_index is not None:
        parts.append(jnp.broadcast_to(k >= 0, (*k.shape[:-2], queries, keys)))
    if mask.keys is not None:
        parts.append(mask.keys[:, None, None, :])
    if mask.query_segments is not None and mask.key_segments is not None:
        parts.append(mask.query_segments[:, None, :, None] == mask.key_segments[:, None, None, :])
    if mask.dense is not None:
        parts.append(mask.dense)
    return functools.reduce(_and, parts) if parts else None


def _allowed(name: str, array: Array) -> Array:
    """An array as bool. Refuses floats: for an additive mask of 0 and -inf, bool would mean the opposite."""
    found = jnp.asarray(array)
    if jnp.issubdtype(found.dtype, jnp.inexact):
        raise TypeError(
            f"{name}: has dtype {found.dtype}; accepted: bool, True where attending is allowed (a mask of 0 and -inf, "
            "to be added to scores, is a bias of `attention`)"
        )
    return found.astype(bool)


def _and(a: Array, b: Array) -> Array:
    """a & b, with leading axes of size 1 for the lower rank, because implicit rank promotion may be an error."""
    rank = max(a.ndim, b.ndim)
    a, b = (x.reshape((1,) * (rank - x.ndim) + x.shape) for x in (a, b))
    return a & b


def crop(mask: Mask, queries: int, keys: int, query_slice: slice, key_slice: slice) -> Mask:
    """The mask of a block of queries and a block of keys (static slices) in attention over [T, S] = [queries, keys]."""

    def cut(x, part, axis):
        if x is None or x.shape[axis] == 1:
            return x
        index = [slice(None)] * x.ndim
        index[axis] = part
        return x[tuple(index)]

    indexed = mask.causal or mask.window is not None or mask.prefix is not None or mask.prefix_keys is not None
    indexed = indexed or bool(mask.patterns)
    q = jnp.arange(queries) if mask.query_index is None and indexed else mask.query_index
    k = jnp.arange(keys) if mask.key_index is None and indexed else mask.key_index
    allowed = mask.dense
    if allowed is not None:
        allowed = cut(allowed, key_slice, -1)
        allowed = cut(allowed, query_slice, -2) if allowed.ndim > 1 else allowed
    return replace(
        mask,
        keys=cut(mask.keys, key_slice, -1),
        prefix_keys=cut(mask.prefix_keys, key_slice, -1),
        global_queries=cut(mask.global_queries, query_slice, -1),
        global_keys=cut(mask.global_keys, key_slice, -1),
        query_segments=cut(mask.query_segments, query_slice, -1),
        key_segments=cut(mask.key_segments, key_slice, -1),
        query_index=cut(q, query_slice, -1),
        key_index=cut(k, key_slice, -1),
        dense=allowed,
    )
