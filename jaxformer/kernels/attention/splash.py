"""Attention by the TPU kernel that comes with JAX ("splash": block-sparse flash attention in Pallas).

Skips blocks that a causal mask, a window or a pattern hides, and never materialises the [T, S] scores. It supports
fewer options than the other implementations (see `unsupported`) and runs only on TPUs, or slowly in Pallas's
interpreter. It supports `jax.grad` but not `jax.jvp`. Padding is set to 0 first, so that NaN there has no influence.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.kernels.attention import shard_specs, splash_patterns
from jaxformer.kernels.attention.nonfinite import without_padding
from jaxformer.kernels.attention.xla import Bias
from jaxformer.kernels.rematerialize import ATTENTION
from jaxformer.masks import Mask
from jaxformer.parallel import constraints
from jaxformer.patterns import MaskPattern
from jaxformer.types import Array

INTERPRET = False  # True in tests: Pallas's interpreter
LANES = splash_patterns.LANES  # row lengths are multiples of a vector register's lanes
BLOCK = 512  # tokens per block of queries or keys, if that divides the row
_HIDDEN = -1e30  # if the log of the sum is below this, all scores are masked


def unsupported(
    length: int, keys: int, head_width: int, dtype: Any, mask: Mask, *, bias: bool, dropout: bool, soft_cap: bool
) -> str | None:
    """Why the kernel cannot do it exactly; None: it can.

    Args:
      length, keys: T and S.
      head_width: K of queries, keys and values.
      dtype: of all three.
      mask: its description.
      bias, dropout, soft_cap: True if there is one. The kernel supports a soft cap.

    >>> options = {"bias": False, "dropout": False, "soft_cap": False}
    >>> unsupported(1024, 1024, 128, jnp.bfloat16, Mask(causal=True), **options) is None
    True
    >>> unsupported(1000, 1000, 128, jnp.bfloat16, Mask(), **options)
    'rows of 1000 tokens (multiples of 128)'
    """
    if length != keys:
        return "different numbers of queries and keys"
    if length % LANES:
        return f"rows of {length} tokens (multiples of {LANES})"
    if head_width % 64:
        return f"heads {head_width} wide (multiples of 64)"
    if bias or dropout:
        return "a bias" if bias else "dropout"
    if jnp.dtype(dtype) == jnp.float64:
        return "float64"
    if (why := splash_patterns.unsupported(mask)) is not None:
        return why
    fields = "prefix", "prefix_keys", "dense", "query_index", "key_index"
    return shard_specs.unsupported_mask(replace(mask, patterns=()), fields)


def visited(length: int, causal: bool, window: int | None, patterns: tuple[MaskPattern, ...] = ()) -> float:
    """Share of the blocks of scores that the kernel computes.

    >>> visited(2048, True, None), visited(2048, False, None), visited(2048, True, 512)
    (0.625, 1.0, 0.4375)
    """
    size = _block(length, patterns)
    if patterns:
        return splash_patterns.visited(length, size, causal, window, patterns)
    count = length // size
    reach = count if window is None else -(-(window - 1) // size)
    after = 0 if causal else reach
    return sum(min(i, reach) + 1 + min(count - 1 - i, after) for i in range(count)) / count**2


def _block(length: int, patterns: tuple[MaskPattern, ...] = ()) -> int:
    """Tokens per block, for a supported row length."""
    return splash_patterns.tile(max(size for size in (LANES, 2 * LANES, BLOCK) if not length % size), patterns)


def attend(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    bias: Bias | None,
    *,
    scale: float,
    soft_cap: float | None,
    dropout_rate: float,
    rng: Array | None,
) -> Array:
    """Attention as `functional.attention.attention` documents it, on the current mesh; check `unsupported` first."""
    sizes = constraints.mesh_axes()
    rows = constraints.splits(query.shape[0], constraints.ACTIVATION_RULES["batch_rows"], sizes)
    key, value = without_padding(mask, key, value)
    key, value, heads = shard_specs.head_axes(query, key, value, sizes)

    def local(query: Array, key: Array, value: Array, mask: Mask) -> Array:
        return _attend_here(query * scale, key, value, mask, soft_cap)

    # Inside shard_map equal segments are no longer the same array, so None marks that keys have those of the queries.
    same = mask.query_segments is mask.key_segments and mask.keys is None
    if same:
        mask = replace(mask, key_segments=None)
    if not sizes:
        return local(query, key, value, mask)
    return shard_specs.on_devices(local, rows, heads, shard_specs.mask_specs(mask, rows))(query, key, value, mask)


def _attend_here(query: Array, key: Array, value: Array, mask: Mask, soft_cap: float | None) -> Array:
    """One device's attention: [B, T, H, K], with the query already scaled."""
    batch, length, heads, _ = query.shape
    segments, certain = _segments(mask, batch, length)
    arrays = [jnp.moveaxis(x, 2, 1) for x in (query, key, value)]
    kernel = functools.partial(_kernel, length, heads, mask, soft_cap)
    out = jax.vmap(kernel(False))(*arrays, segments)
    if not certain:  # for a query without any key the kernel gives the mean of the masked values
        fixed = jax.lax.stop_gradient(arrays)
        _, (log_sum,) = jax.vmap(kernel(True))(*fixed, segments)
        out = jnp.where((log_sum > _HIDDEN)[..., None], out, 0)
    return jnp.moveaxis(out, 1, 2)


def _segments(mask: Mask, batch: int, length: int):
    """The kernel's segment ids [B, T] of queries and keys, or None; and whether every query is sure to see itself."""
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

    queries, keys = mask.query_segments, mask.key_segments
    if queries is None and mask.keys is None:
        return None, True
    certain = keys is None and mask.keys is None
    queries = jnp.zeros((1, length), jnp.int32) if queries is None else queries.astype(jnp.int32)
    keys = queries if keys is None else keys.astype(jnp.int32)
    if mask.keys is not None:  # masked keys get a segment without queries
        keys = jnp.where(mask.keys, keys, jnp.iinfo(jnp.int32).min)
    shape = (batch, length)
    return SegmentIds(jnp.broadcast_to(queries, shape), jnp.broadcast_to(keys, shape)), certain


def _kernel(length: int, heads: int, mask: Mask, soft_cap: float | None, log_sums: bool):
    """JAX's kernel for one row: query [H, T, K], key and value [G, T, K], segments -> [H, T, K]."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as shapes

    square, causal, window = (length, length), mask.causal, mask.window
    if mask.patterns:
        seen = splash_patterns.lazy_mask(length, causal, window, mask.patterns)
    elif window is not None and window < length:
        seen = shapes.LocalMask(square, (window - 1, 0 if causal else window - 1), offset=0)
    else:
        seen = shapes.CausalMask(square) if causal else shapes.FullMask(square)
    block = _block(length, mask.patterns)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    return kernels.make_splash_mha(
        shapes.MultiHeadMask([seen] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=kernels.BlockSizes(**{f"block_{name}": block for name in names}),
        attn_logits_soft_cap=soft_cap,
        save_residuals=log_sums,
        residual_checkpoint_name=ATTENTION,
        interpret=INTERPRET,
    )
