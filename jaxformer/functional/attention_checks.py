"""What attention() refuses, in one line, before anything is computed."""

import jax
import jax.numpy as jnp

from jaxformer import masks
from jaxformer.functional.attention_choice import EVERYWHERE, KERNELS
from jaxformer.kernels.attention import xla
from jaxformer.patterns import RandomBlocks
from jaxformer.types import Array


def check_arguments(
    query: Array,
    key: Array,
    value: Array,
    mask: masks.Mask,
    bias: xla.Bias | None,
    soft_cap: float | None,
    dropout_rate: float,
) -> None:
    """Raises ValueError or TypeError: shapes that disagree, arrays of other dtypes, numbers out of range."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            raise ValueError(f"attention: {name} has shape {array.shape}; accepted: 4 axes [B, T, H, K]")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"attention: {name} has dtype {array.dtype}; accepted: floats (float32, bfloat16, ...)")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"attention: key {key.shape} and value {value.shape} differ in batch, length or heads")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"attention: query {query.shape} and key {key.shape} differ in batch or head width")
    if query.shape[3] == 0:
        raise ValueError(f"attention: query {query.shape} and key {key.shape} have heads of width 0; accepted: 1 up")
    if query.shape[2] % key.shape[2] if key.shape[2] else query.shape[2]:
        raise ValueError(f"attention: {query.shape[2]} query heads are not a multiple of {key.shape[2]} key heads")
    parts = mask.parts
    if parts > 1 and (query.shape[0] % parts or (mask.window is not None and query.shape[1] != key.shape[1])):
        raise ValueError(f"attention: query {query.shape} and key {key.shape} are not rows in {parts} equal parts")
    scores = score_shape(query, key, mask)
    check_shapes(mask, *scores)
    if bias is not None:
        found = jax.eval_shape(lambda: bias(*map(jnp.arange, scores[2:]))) if callable(bias) else bias
        pairs = zip(found.shape[::-1], scores[::-1], strict=False)
        if found.ndim > 4 or any(size not in (1, full) for size, full in pairs):
            of = "bias, a function, returns" if callable(bias) else "bias has"
            raise ValueError(f"attention: {of} shape {found.shape}; accepted: what broadcasts to {scores}")
    if mask.patterns and parts > 1:
        raise ValueError(
            f"attention: a mask of patterns over rows in {parts} parts, of which a ring of devices would visit all; "
            "accepted: whole rows"
        )
    for pattern in mask.patterns:
        if isinstance(pattern, RandomBlocks) and mask.heads is None and len(pattern.table) not in (1, scores[1]):
            raise ValueError(
                f"attention: random blocks of {len(pattern.table)} heads for {scores[1]}; accepted: one table, or one "
                "for each"
            )
    if soft_cap is not None and not soft_cap > 0.0:
        raise ValueError(f"attention: soft_cap {soft_cap}; accepted: None, or a number above 0")
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"attention: dropout_rate {dropout_rate}; accepted: 0 <= rate < 1")


def check_shapes(mask: masks.Mask, batch: int, heads: int, queries: int, keys: int) -> None:
    """Checks that the mask fits scores of [B, H, T, S]; an axis of size 1 broadcasts.

    Raises:
      ValueError: a field has another shape, or only one of the two segments is given.
    """
    shapes = {  # field -> the fewest axes, and the shape that it broadcasts to
        "prefix": (1, (batch,)),
        "keys": (2, (batch, keys)),
        "prefix_keys": (2, (batch, keys)),
        "query_segments": (2, (batch, queries)),
        "key_segments": (2, (batch, keys)),
        "query_index": (1, (batch, queries)),
        "key_index": (1, (batch, keys)),
        "dense": (0, (batch, heads, queries, keys)),
        "global_queries": (2, (batch, queries)),
        "global_keys": (2, (batch, keys)),
        "heads": (1, (heads,)),
    }
    for name, (rank, accepted) in shapes.items():
        x = getattr(mask, name)
        if x is None:
            continue
        pairs = zip(x.shape[::-1], accepted[::-1], strict=False)
        if not rank <= x.ndim <= len(accepted) or any(size not in (1, full) for size, full in pairs):
            raise ValueError(f"Mask: {name} has shape {x.shape}; accepted: what broadcasts to {accepted}")
    if (mask.query_segments is None) != (mask.key_segments is None):
        raise ValueError("Mask: query_segments and key_segments come together; one of them is None")


def score_shape(query: Array, key: Array, mask: masks.Mask) -> tuple[int, int, int, int]:
    """[B, H, T, S], of whole rows."""
    parts = mask.parts
    return query.shape[0] // parts, query.shape[2], parts * query.shape[1], parts * key.shape[1]


def check_log_sum(implementation: str, mask: masks.Mask, return_weights: bool) -> None:
    """Raises ValueError: an implementation, or other results, that cannot go with log-sums."""
    able = ("auto", *EVERYWHERE, *(name for name, kernel in KERNELS.items() if kernel.log_sums))
    if implementation not in able:
        raise ValueError(
            f"attention: implementation {implementation!r} returns no log-sums; accepted there: {', '.join(able)}"
        )
    if return_weights:
        raise ValueError("attention: return_weights and return_log_sum; accepted: one of them")
    if mask.parts > 1:
        raise ValueError(f"attention: return_log_sum of rows in {mask.parts} parts; accepted: whole rows")
