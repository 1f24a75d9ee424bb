"""Attention by cuDNN's flash attention, through `jax.nn.dot_product_attention`: NVIDIA GPUs, 16-bit floats.

Never materialises the scores, and skips the keys after a causal query. The kernel has no document masks, and its
windows could see the future (jax pull request 39576): so every condition except causality is passed as an array of
allowed pairs, [B, 1, T, S], which it reads block by block. `unsupported` lists what it cannot do exactly. It supports
`jax.grad` but not `jax.jvp`. Padding is set to 0 first, so that NaN there has no influence.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxformer.kernels.attention import shard_specs
from jaxformer.kernels.attention.nonfinite import without_padding
from jaxformer.kernels.attention.xla import Bias
from jaxformer.masks import Mask, expand
from jaxformer.parallel import constraints
from jaxformer.types import Array

BACKEND: Any = "cudnn"  # "xla" in tests: JAX's own implementation of the same arguments
DTYPES = (jnp.float16, jnp.bfloat16)


def unsupported(
    length: int, keys: int, head_width: int, dtype: Any, mask: Mask, *, bias: bool, dropout: bool, soft_cap: bool
) -> str | None:
    """Why the kernel cannot do it exactly; None: it can. Arguments as for `splash.unsupported`.

    >>> options = {"bias": False, "dropout": False, "soft_cap": False}
    >>> unsupported(1024, 1024, 64, jnp.bfloat16, Mask(causal=True), **options) is None
    True
    >>> unsupported(1024, 1024, 64, jnp.float32, Mask(), **options)
    'float32 (float16 and bfloat16)'
    """
    if jnp.dtype(dtype) not in [jnp.dtype(x) for x in DTYPES]:
        return f"{jnp.dtype(dtype).name} (float16 and bfloat16)"
    if head_width % 8 or head_width > 128:
        return f"heads {head_width} wide (multiples of 8 up to 128)"
    if bias or dropout or soft_cap:
        return "a bias" if bias else "dropout" if dropout else "a soft cap"
    if mask.hides and (length % 2 or keys % 2):
        return "a mask over an odd number of tokens"
    return shard_specs.unsupported_mask(mask, ())


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
    inside = _causal_inside(query, key, mask)
    pairs, seen = _pairs(mask, inside, query.shape[1], key.shape[1])
    sizes = constraints.mesh_axes()
    key, value = without_padding(mask, key, value)
    key, value, heads = shard_specs.head_axes(query, key, value, sizes)

    def local(query: Array, key: Array, value: Array, pairs: Array | None) -> Array:
        return jax.nn.dot_product_attention(
            query, key, value, mask=pairs, scale=scale, is_causal=inside, implementation=BACKEND
        )

    run = local
    if sizes:
        rows, some = constraints.splits(query.shape[0], constraints.ACTIVATION_RULES["batch_rows"], sizes), None
        if pairs is not None:
            some = P(rows or None if len(pairs) > 1 else None, heads or None if pairs.shape[1] > 1 else None)
        run = shard_specs.on_devices(local, rows, heads, some)
    out = run(query, key, value, pairs)
    return out if seen is None else jnp.where(jnp.moveaxis(seen, 1, 2)[..., None], out, 0)


def extra(query: Array, key: Array, mask: Mask) -> int:
    """Bytes of the array of allowed pairs; 0 where there is nothing but causality. `query`, `key`: as for `attend`."""
    if mask.parts > 1:
        return 0
    inside, sizes = _causal_inside(query, key, mask), (query.shape[1], key.shape[1])
    pairs = jax.eval_shape(lambda mask: _pairs(mask, inside, *sizes)[0], mask)
    return 0 if pairs is None else pairs.size


def _causal_inside(query: Array, key: Array, mask: Mask) -> bool:
    """Whether the kernel applies causality itself: it numbers positions from the first key, like masks without
    indices."""
    return mask.causal and mask.query_index is None and mask.key_index is None and query.shape[1] == key.shape[1]


def _pairs(mask: Mask, inside: bool, queries: int, keys: int) -> tuple[Array | None, Array | None]:
    """Which pairs [B or 1, H or 1, T, S] are allowed, without causality if the kernel applies it itself (`inside`); and
    which queries [B or 1, H or 1, T] have any key, None if all do: for a query without keys the kernel gives a mean."""
    pairs = expand(replace(mask, causal=mask.causal and not inside), queries, keys)
    if pairs is None:
        return None, None
    pairs = jnp.broadcast_to(pairs, (*(1,) * (4 - pairs.ndim), *pairs.shape[:-2], queries, keys))
    fields = (mask.keys, mask.dense, mask.query_index, mask.key_index)
    if all(x is None for x in fields) and mask.key_segments is mask.query_segments and queries == keys:
        return pairs, None  # every query sees itself
    allowed = pairs & jnp.tri(queries, dtype=bool)[None, None] if inside else pairs
    return pairs, allowed.any(axis=-1)
