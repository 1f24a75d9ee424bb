"""Flash attention for NVIDIA GPUs, in Pallas by way of Triton: every mask but an array, in linear memory, exactly.

Forward and backward never hold the [T, S] scores, and visit no tile that causality, a window, the prefix, padding,
the documents of a row or patterns (`flash_gpu_patterns`) rule out. Query heads share their keys where they lie. A soft
cap, ALiBi, T5's bias and dropout are computed inside. Any row length and any head up to 256 wide; products are those of
the inputs' dtype (float32: as `jax.default_matmul_precision` says), everything else is float32. It supports `jax.grad`
but not `jax.jvp`.

What a mask hides has no influence, even if it is NaN or infinite, and gets gradients of exactly 0.

Source: Dao 2023, "FlashAttention-2", sections 3.1 and 3.2.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxformer.kernels.attention import flash_gpu_blocks, flash_gpu_patterns, shard_specs
from jaxformer.kernels.attention.block_tables import Group
from jaxformer.kernels.attention.distance_bias import DistanceBias
from jaxformer.kernels.attention.xla import Bias
from jaxformer.kernels.rematerialize import SAME_IN_ALL_LAYERS
from jaxformer.masks import Mask
from jaxformer.parallel import constraints
from jaxformer.types import Array

INTERPRET = False  # True in tests: Pallas's interpreter
WIDEST = 256
HIDDEN = jnp.iinfo(jnp.int32).min  # the segment of keys that no query sees; no document may have it


def unsupported(
    length: int, keys: int, head_width: int, dtype: Any, mask: Mask, *, bias: bool, dropout: bool, soft_cap: bool
) -> str | None:
    """Why the kernels cannot do it exactly; None: they can. Arguments as for `splash.unsupported`; `bias`: one that is
    no `DistanceBias`.

    >>> options = {"bias": False, "dropout": True, "soft_cap": True}
    >>> unsupported(1000, 77, 80, jnp.float32, Mask(causal=True, window=9), **options) is None
    True
    >>> unsupported(1024, 1024, 512, jnp.bfloat16, Mask(), **options)
    'heads 512 wide (at most 256)'
    """
    if jnp.dtype(dtype) not in map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32)):
        return f"{jnp.dtype(dtype).name} (float16, bfloat16 and float32)"
    if head_width > WIDEST:
        return f"heads {head_width} wide (at most {WIDEST})"
    if bias:
        if mask.parts > 1:
            return "a bias and context parallelism"
        return flash_gpu_patterns.unsupported(mask, bias=True) or "a bias that is not of the distance alone"
    if dropout and mask.parts > 1:
        return "dropout and context parallelism"
    if wrong := flash_gpu_patterns.unsupported(mask, bias=False):
        return wrong
    return shard_specs.unsupported_mask(replace(mask, parts=1, patterns=()), ("dense",))


def attend(query: Array, key: Array, value: Array, mask: Mask, bias: Bias | None, **options: Any) -> Array:
    """Attention as `functional.attention.attention` documents it, on the current mesh; check `unsupported` first. With
    context parallelism it is ring attention."""
    if mask.parts == 1:
        return attend_with_log_sum(query, key, value, mask, bias, **options)[0]
    from jaxformer.kernels.attention import flash_gpu_ring, flash_gpu_vjp

    blocks = flash_gpu_vjp.blocks_of(query, key, chip())
    found = settings(query, key, mask, bias, options | {"dropout_rate": 0.0})
    return flash_gpu_ring.attend(found, blocks, query, key, value, _without_padding(mask))


def attend_with_log_sum(
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
) -> tuple[Array, Array]:
    """`attend`, and the log of the sum over keys of exp(score): [B, H, T] float32, -inf for a query without keys. With
    it, attention to other keys can be added afterwards. Both outputs can be differentiated."""
    from jaxformer.kernels.attention import flash_gpu_vjp

    given = {"scale": scale, "soft_cap": soft_cap, "dropout_rate": 0.0 if rng is None else dropout_rate}
    attend = functools.partial(_on_devices, bias=bias, given=given)
    mask, blocks = _without_padding(mask), flash_gpu_vjp.blocks_of(query, key, chip())
    if mask.patterns:
        return flash_gpu_patterns.attend_with_log_sum(attend, blocks, query, key, value, mask, rng)
    return attend(query, key, value, mask, rng, blocks)


def _on_devices(
    query: Array, key: Array, value: Array, mask: Mask, rng: Array | None, blocks: Any, group: Group | None = None,
    *, bias: Bias | None, given: dict[str, Any],
) -> tuple[Array, Array]:  # fmt: skip
    """`attend_with_log_sum` on the current mesh, of a mask without patterns and padding, or of those of a group."""
    from jaxformer.kernels.attention import flash_gpu_vjp

    assert bias is None or isinstance(bias, DistanceBias)
    sizes = constraints.mesh_axes()
    rows = constraints.splits(query.shape[0], constraints.ACTIVATION_RULES["batch_rows"], sizes)
    key, value, heads = shard_specs.head_axes(query, key, value, sizes)
    seed = None if rng is None or given["dropout_rate"] == 0.0 else jax.random.bits(rng, (2,), jnp.uint32)
    slopes = None if bias is None or bias.slopes is None else jnp.asarray(bias.slopes, jnp.float32)[:, None]
    steps = None if bias is None or bias.edges is None else bias.steps().astype(jnp.float32)
    visited = flash_gpu_vjp.visits_of(mask, query.shape[1], key.shape[1], blocks, group)
    visited = checkpoint_name(visited, SAME_IN_ALL_LAYERS)
    options = settings(query, key, mask, bias, given)
    if group is not None:
        options = options._replace(listed=True, patterns=group.inside_blocks(), excluded=group.excluded)
    mask = replace(mask, heads=None)  # the lists know them

    def local(query, key, value, mask, visited, slopes, steps, seed):
        if seed is not None:  # dropout is numbered by row and head of the whole batch
            first = (_first(rows, query.shape[0]), _first(heads, query.shape[2]))
            seed = jnp.concatenate([seed, jnp.stack(first).astype(jnp.uint32)])
        here = options._replace(heads=query.shape[2], groups=key.shape[2])
        return flash_gpu_vjp.flash(here, blocks, query, key, value, mask, visited, slopes, steps, seed)

    run: Any = local
    if sizes:
        array, of_heads = P(rows or None, None, heads or None), P(heads or None)
        of_visits = tuple(
            P(*(axes if axes and size > 1 else None for axes, size in zip((rows, heads), x.shape[:-2], strict=False)))
            for x in visited
        )
        run = jax.shard_map(
            local,
            in_specs=(array, array, array, shard_specs.mask_specs(mask, rows), of_visits, of_heads, of_heads, P()),
            out_specs=(array, P(rows or None, heads or None)),
            check_vma=False,
        )
    return run(query, key, value, mask, visited, slopes, steps, seed)


def decodes(key: Array) -> bool:
    """True if one token's attention to a cache [N, S, K] was measured to be faster by these kernels on this chip."""
    return flash_gpu_blocks.decodes(chip(), key.shape[2], key.dtype, key.shape[1])


def settings(query: Array, key: Array, mask: Mask, bias: DistanceBias | None, options: dict[str, Any]) -> Any:
    """`FlashOptions` of arrays with all heads; `options`: scale, soft_cap and dropout_rate among them."""
    from jaxformer.kernels.attention.flash_gpu_scores import FlashOptions

    return FlashOptions(
        **{name: options[name] for name in ("scale", "soft_cap", "dropout_rate")}, causal=mask.causal,
        window=mask.window, hides=mask.hides, edges=None if bias is None else bias.edges, all_heads=query.shape[2],
        queries=query.shape[1], keys=key.shape[1], heads=query.shape[2], groups=key.shape[2], width=query.shape[3],
        interpret=INTERPRET,
    )  # fmt: skip


def _first(axes: tuple[str, ...], here: int) -> Array:
    """The number of the first of this device's rows or heads, of which it has `here`."""
    return jax.lax.axis_index(axes) * here if axes else jnp.zeros((), jnp.int32)


def _without_padding(mask: Mask) -> Mask:
    """The mask with masked keys as keys of a segment that no query has."""
    if mask.keys is None:
        return mask
    queries = jnp.zeros((1, 1), jnp.int32) if mask.query_segments is None else mask.query_segments
    keys = jnp.zeros_like(mask.keys, jnp.int32) if mask.key_segments is None else mask.key_segments
    shape = jnp.broadcast_shapes(keys.shape, mask.keys.shape)
    keys = jnp.where(jnp.broadcast_to(mask.keys, shape), jnp.broadcast_to(keys, shape), HIDDEN)
    return replace(mask, keys=None, query_segments=queries, key_segments=keys)


def chip() -> str:
    """What JAX calls the devices that the program is for: those of the mesh in use, or this process's."""
    found = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(jax.devices()[0] if found is None else found, "device_kind", "")
