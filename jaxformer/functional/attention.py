"""attention(): checks the arguments and picks an implementation. All attention over whole rows goes through it.
combine(): attention to parts of the keys put together."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import jax.numpy as jnp

from jaxformer import masks
from jaxformer.functional.attention_checks import check_arguments, check_log_sum, score_shape
from jaxformer.functional.attention_choice import ANY, EVERYWHERE, KERNELS, choose_for, unsupported, with_window
from jaxformer.kernels.attention import block_sparse, flash_gpu, per_device, ring, xla
from jaxformer.parallel import constraints, context
from jaxformer.types import Array

# name -> implementation: a function of (query, key, value, mask, bias, **options) that supports every option.
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    **{name: module.attend for name, module in EVERYWHERE.items()},
    **{name: kernel.module.attend for name, kernel in KERNELS.items()},
}


@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: masks.Mask | Array | None = None,
    *,
    bias: xla.Bias | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    implementation: str = "auto",
    return_weights: Literal[False] = False,
) -> Array: ...


@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: masks.Mask | Array | None = None,
    *,
    bias: xla.Bias | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    implementation: str = "auto",
    return_weights: Literal[True],
) -> tuple[Array, Array]: ...


@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: masks.Mask | Array | None = None,
    *,
    bias: xla.Bias | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    implementation: str = "auto",
    return_log_sum: Literal[True],
) -> tuple[Array, Array]: ...


def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: masks.Mask | Array | None = None,
    *,
    bias: xla.Bias | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    implementation: str = "auto",
    return_weights: bool = False,
    return_log_sum: bool = False,
) -> Array | tuple[Array, Array]:
    """Scaled dot-product attention: multi-head, grouped-query, multi-query and cross.

    What the mask hides has no influence, even if it is NaN, infinite or huge. With "xla" and "chunked", such a key,
    value or bias changes no bit of the output, or of the gradient by query, of any query that may not see it. If no
    query may see it (padding, empty slots), it changes no output and no gradient, and its own gradients are exactly 0.
    Every query that may see a NaN, or a value beyond `nonfinite.largest` (2^62 for float32 and bfloat16), gets a NaN
    output. Not promised: a query that is not finite, or sees something that is not, may make the gradients by all keys
    and values of its row NaN, even of those it does not see and even if its own output is not used; apply
    `jnp.nan_to_num` to such rows first. "flash_gpu" promises the same, except that a finite value beyond `largest` is
    used as it is. "splash" and "cudnn" promise this for padding and empty slots only.

    "xla" and "chunked" can be differentiated in both modes and repeatedly (`jax.jvp`, `jax.hessian`, ...); the loops of
    "chunked" only once in reverse mode, so second derivatives are forward over reverse, as in `jax.hessian`. "splash",
    "cudnn" and "flash_gpu" support only `jax.grad`; use implementation="xla" for more.

    Args:
      query: [B, T, H, K].
      key: [B, S, G, K]; H is a multiple of G (G = H multi-head, 1 < G < H grouped, G = 1 multi-query).
      value: [B, S, G, K'].
      mask: a `Mask`, or bool broadcastable to [B, H, T, S], True where attending is allowed. A query that may see
        no key at all gets zeros. None: every key.
      bias: added to the scores before the mask: an array broadcastable to [B, H, T, S], or a function of
        (query index [T], key index [S]) that returns one; on several devices its arrays must be those of a
        `jax.tree_util.Partial`.
      scale: multiplies query . key; None: K ** -0.5.
      soft_cap: scores become soft_cap * tanh(scores / soft_cap); None: no cap.
      dropout_rate: share of the attention weights dropped; needs `rng` to act.
      rng: PRNG key of the dropout; None: no dropout.
      implementation: "auto" (see `choose`; the choice is logged), or a name in `IMPLEMENTATIONS`. On a mesh, "chunked"
        runs on each device's own rows and heads. With context parallelism (`mask.parts` > 1: all arrays are then
        [parts * B, T / parts, ...]) "chunked" and "flash_gpu" become ring attention, the others gather whole rows.
        "splash" (TPUs), "cudnn" (NVIDIA GPUs, 16-bit floats) and "flash_gpu" (NVIDIA GPUs) refuse what they cannot do
        exactly: see their `unsupported`.
      return_weights: also return the weights after softmax and dropout, [B, H, T, S] float32 (of whole rows); only
        "xla" does, and "auto" is then "xla".
      return_log_sum: also return the log of the sum over keys of exp(score), [B, H, T] float32 (float64 for float64
        inputs), -inf for a query without keys; both can be differentiated. `combine` puts parts of the keys together
        with it. "splash" and "cudnn" do not have it, and rows must be whole (`mask.parts` 1).

    Returns:
      [B, T, H, K'], in the dtype of `value`; with `return_weights` a pair of it and the weights, with `return_log_sum`
      of it and the log-sums. The softmax is computed in float32 (float64 for float64 inputs).

    Raises:
      ValueError: shapes that disagree, H not a multiple of G, a soft cap or dropout rate out of range, an unknown
        implementation, or one that cannot do all of this.
      TypeError: a mask that is neither a `Mask` nor an array of bool; a query, key or value that is no float.

    Source: Vaswani et al. 2017, section 3.2.1; grouped heads, Ainslie et al. 2023; soft cap, Gemma 2 report 2024.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attention(x, x, x, masks.causal()).shape
    (1, 3, 2, 4)
    """
    mask = masks.Mask() if mask is None else mask
    if not isinstance(mask, masks.Mask):
        if getattr(mask, "dtype", None) != jnp.bool_:
            found = f"has dtype {mask.dtype}" if hasattr(mask, "dtype") else f"is a {type(mask).__name__}"
            raise TypeError(f"attention: mask {found}; accepted: an array of bool, or a Mask such as causal()")
        mask = masks.dense(mask)
    check_arguments(query, key, value, mask, bias, soft_cap, dropout_rate)
    if implementation not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(
            f"attention: implementation {implementation!r}; accepted: auto, {', '.join(sorted(IMPLEMENTATIONS))}"
        )
    if return_weights and implementation not in ("auto", "xla"):
        raise ValueError(f"attention: implementation {implementation!r} returns no weights; accepted there: auto, xla")
    if return_log_sum:
        check_log_sum(implementation, mask, return_weights)
    given = query, key, value, mask, bias, soft_cap, dropout_rate, rng
    if implementation == "auto":
        implementation = choose_for(*given, return_weights=return_weights, return_log_sum=return_log_sum)
    if implementation in KERNELS:
        why = unsupported(implementation, *given)
        if why is not None:
            raise ValueError(f"attention: implementation {implementation!r} cannot do {why}; accepted there: {ANY}")
        mask = with_window(mask)
    if 0 in (*query.shape, *key.shape, *value.shape):  # no query, or none that sees a key
        out = jnp.zeros((*query.shape[:3], value.shape[3]), value.dtype)
        weights = jnp.zeros(score_shape(query, key, mask), jnp.promote_types(query.dtype, jnp.float32))
        if return_log_sum:
            return out, jnp.full(weights.shape[:3], -jnp.inf, weights.dtype)
        return (out, weights) if return_weights else out
    attend = IMPLEMENTATIONS[implementation]
    if return_log_sum:
        attend = _log_sum_of(implementation)
    elif implementation == "chunked" and mask.patterns and constraints.mesh_axes() and mask.parts == 1:
        attend = functools.partial(per_device.attend, attend)
    elif implementation == "chunked" and constraints.mesh_axes() and mask.parts in (1, constraints.context_parts()):
        attend = ring.attend
    elif mask.parts > 1 and not (_rings(implementation) and mask.parts == constraints.context_parts()):
        attend = functools.partial(_gather_then_attend, attend)
    return attend(
        query,
        key,
        value,
        mask,
        bias,
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        soft_cap=soft_cap,
        dropout_rate=dropout_rate,
        rng=rng,
        **({"return_weights": True} if return_weights else {}),
    )


def combine(outs: Sequence[Array], log_sums: Sequence[Array]) -> tuple[Array, Array]:
    """Attention to several sets of keys as attention to all of them; the sets must not overlap.

    Args:
      outs: of each set [B, T, H, K'], from `attention(..., return_log_sum=True)`.
      log_sums: of each set [B, H, T].

    Returns:
      The same two for all keys: [B, T, H, K'] in the dtype of `outs`, zeros for a query without keys, and [B, H, T].

    Source: Milakov and Gimelshein 2018, section 3.1 (the softmax of parts); Dao 2023, section 3.1.

    >>> import jax
    >>> x = jnp.arange(8.0).reshape(1, 4, 1, 2)
    >>> @jax.jit
    ... def of_parts(x):
    ...     parts = [attention(x, x[:, i : i + 2], x[:, i : i + 2], return_log_sum=True) for i in (0, 2)]
    ...     return *combine(*zip(*parts)), attention(x, x, x)
    >>> out, log_sum, wanted = of_parts(x)
    >>> bool(jnp.allclose(out, wanted)), log_sum.shape
    (True, (1, 1, 4))
    """
    return block_sparse.combine(outs, log_sums)


def _log_sum_of(implementation: str) -> Callable[..., tuple[Array, Array]]:
    """An implementation that returns the log-sums too."""
    if implementation == "flash_gpu":
        return flash_gpu.attend_with_log_sum
    attend = functools.partial(IMPLEMENTATIONS[implementation], return_log_sum=True)
    if implementation == "chunked" and constraints.mesh_axes():
        return functools.partial(per_device.attend, IMPLEMENTATIONS[implementation], return_log_sum=True)
    return attend


def _rings(implementation: str) -> bool:
    return implementation in KERNELS and KERNELS[implementation].rings


def _gather_then_attend(attend: Callable[..., Any], query, key, value, mask: masks.Mask, *rest, **options):
    """Attention over whole rows under context parallelism: the shards of each row are gathered first."""
    sharding = context.SequenceSharding(mask.parts)
    query, key, value = (sharding.unshard(x) for x in (query, key, value))
    out = attend(query, key, value, replace(mask, parts=1), *rest, **options)
    return (sharding.shard(out[0]), out[1]) if options.get("return_weights") else sharding.shard(out)
