"""attention(): checks the arguments and picks an implementation. All attention over whole rows goes through it."""

import functools
import logging
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer import masks
from jaxformer.kernels.attention import chunked, cudnn, ring, splash, xla
from jaxformer.parallel import constraints, context
from jaxformer.types import Array

LOG = logging.getLogger(__name__)  # says what "auto" chose; `--log` of the programs shows it


class Kernel(NamedTuple):
    """A kernel that one platform has, and that refuses what it cannot do exactly.

    Attributes:
      module: with its `attend` and `unsupported`.
      platform: as `choose` takes it.
      what: the platform in words.
      least: "auto" takes it for rows of at least so many tokens.
    """

    module: Any
    platform: str
    what: str
    least: int


KERNELS = {
    "splash": Kernel(splash, "tpu", "a TPU", 1024),
    "cudnn": Kernel(cudnn, "cuda", "an NVIDIA GPU of compute capability 8 or more", 512),
}
# name -> implementation: a function of (query, key, value, mask, bias, **options) that supports every option.
EVERYWHERE: dict[str, Callable[..., Any]] = {"xla": xla.attend, "chunked": chunked.attend}
IMPLEMENTATIONS = EVERYWHERE | {name: kernel.module.attend for name, kernel in KERNELS.items()}
ANY = ", ".join(("auto", *EVERYWHERE))  # what supports everything on every platform


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
) -> Array | tuple[Array, Array]:
    """Scaled dot-product attention: multi-head, grouped-query, multi-query and cross.

    What the mask hides has no influence, even if it is NaN, infinite or huge. With "xla" and "chunked", such a key,
    value or bias changes no bit of the output, or of the gradient by query, of any query that may not see it. If no
    query may see it (padding, empty slots), it changes no output and no gradient, and its own gradients are exactly 0.
    Every query that may see a NaN, or a value beyond `nonfinite.largest` (2^62 for float32 and bfloat16), gets a NaN
    output. Not promised: a query that is not finite, or sees something that is not, may make the gradients by all keys
    and values of its row NaN, even of those it does not see and even if its own output is not used; apply
    `jnp.nan_to_num` to such rows first. "splash" and "cudnn" promise this for padding and empty slots only.

    "xla" and "chunked" can be differentiated in both modes and repeatedly (`jax.jvp`, `jax.hessian`, ...); the loops of
    "chunked" only once in reverse mode, so second derivatives are forward over reverse, as in `jax.hessian`. "splash"
    and "cudnn" support only `jax.grad`; use implementation="xla" for more.

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
        [parts * B, T / parts, ...]) "chunked" becomes ring attention, and "xla" gathers the whole rows. "splash" (TPUs)
        and "cudnn" (NVIDIA GPUs, 16-bit floats) refuse what they cannot do exactly: see their `unsupported`.
      return_weights: also return the weights after softmax and dropout, [B, H, T, S] float32 (of whole rows); only
        "xla" does, and "auto" is then "xla".

    Returns:
      [B, T, H, K'], in the dtype of `value`; with `return_weights` a pair of it and the weights. The softmax is
      computed in float32 (float64 for float64 inputs).

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
    _check(query, key, value, mask, bias, soft_cap, dropout_rate)
    if implementation not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(
            f"attention: implementation {implementation!r}; accepted: auto, {', '.join(sorted(IMPLEMENTATIONS))}"
        )
    if return_weights and implementation not in ("auto", "xla"):
        raise ValueError(f"attention: implementation {implementation!r} returns no weights; accepted there: auto, xla")
    if implementation == "auto":
        refusals = {n: _unsupported(n, query, key, value, mask, bias, soft_cap, dropout_rate, rng) for n in KERNELS}
        refusals = dict.fromkeys(KERNELS, "returned weights") if return_weights else refusals
        able = [name for name, why in refusals.items() if why is None]
        implementation = "xla" if return_weights else choose(query.shape[1], key.shape[1], mask.parts, able=able)
        _log_choice(implementation, query, key, mask.parts, refusals)
    if implementation in KERNELS:
        why = _unsupported(implementation, query, key, value, mask, bias, soft_cap, dropout_rate, rng)
        if why is not None:
            raise ValueError(f"attention: implementation {implementation!r} cannot do {why}; accepted there: {ANY}")
    if 0 in (*query.shape, *key.shape, *value.shape):  # no query, or none that sees a key
        out = jnp.zeros((*query.shape[:3], value.shape[3]), value.dtype)
        weights = jnp.zeros(_score_shape(query, key, mask), jnp.promote_types(query.dtype, jnp.float32))
        return (out, weights) if return_weights else out
    attend = IMPLEMENTATIONS[implementation]
    if implementation == "chunked" and constraints.mesh_axes() and mask.parts in (1, constraints.context_parts()):
        attend = ring.attend
    elif mask.parts > 1:
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


def _gather_then_attend(attend: Callable[..., Any], query, key, value, mask: masks.Mask, *rest, **options):
    """Attention over whole rows under context parallelism: the shards of each row are gathered first."""
    sharding = context.SequenceSharding(mask.parts)
    query, key, value = (sharding.unshard(x) for x in (query, key, value))
    out = attend(query, key, value, replace(mask, parts=1), *rest, **options)
    return (sharding.shard(out[0]), out[1]) if options.get("return_weights") else sharding.shard(out)


def choose(queries: int, keys: int, number: int = 1, platform: str | None = None, able: Collection[str] = ()) -> str:
    """The implementation that "auto" stands for.

    All of them compute the same, so only speed and memory decide: the platform's own kernel comes first, because its
    scores never leave the chip; then "xla" for short rows and "chunked" for long ones, which on CPU is up to a third
    slower but needs only linear memory (`experiments/LOG.md`).

    Args:
      queries, keys: T and S.
      number: shards of each row under context parallelism; more than one: "chunked".
      platform: that the program is for, "cpu", "cuda" or "tpu"; None: where it is traced.
      able: names of the platforms' kernels that can do it exactly.
    """
    platform = platform or _platform()
    for name, kernel in KERNELS.items():
        if name in able and kernel.platform == platform and queries >= kernel.least:
            return name
    limit = 2048 if platform == "cpu" else 8192
    return "chunked" if number > 1 or queries * keys >= limit * limit else "xla"


def _log_choice(chosen: str, query: Array, key: Array, number: int, refusals: dict[str, str | None]) -> None:
    """Logs what "auto" chose, and why not the platform's own kernel."""
    platform, (_, queries, heads, width) = _platform(), query.shape
    cut = f", rows in {number} parts" if number > 1 else ""
    why = [
        f"{name} {f'cannot do {no}' if (no := refusals[name]) else f'is taken from {kernel.least} queries on'}"
        for name, kernel in KERNELS.items()
        if kernel.platform == platform and name != chosen
    ]
    asked = f"{queries} queries x {key.shape[1]} keys, {heads} heads of {width}, {query.dtype}{cut}, on {platform}"
    LOG.info("; ".join([f"attention: auto is {chosen} for {asked}", *why]))


def unavailable(name: str) -> str | None:
    """The platform that a kernel needs, if this process does not run on it; otherwise None.

    >>> unavailable("chunked") is None, unavailable("splash")
    (True, 'a TPU')
    """
    kernel = KERNELS.get(name)
    return None if kernel is None or kernel.platform == _platform() else kernel.what


def _platform() -> str:
    """Of the first device; "cuda" only for GPUs that cuDNN's flash attention supports (compute capability >= 8)."""
    platform = jax.default_backend()
    capability = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")[0]
    return "cuda" if platform == "gpu" and capability.isdigit() and int(capability) >= 8 else platform


def _unsupported(name: str, query, key, value, mask, bias, soft_cap, dropout_rate, rng) -> str | None:
    """Why a platform's kernel cannot do this exactly; None: it can."""
    if value.shape[3] != key.shape[3]:
        return "values of another width than keys"
    if not query.dtype == key.dtype == value.dtype:
        return "arrays of different dtypes"
    return KERNELS[name].module.unsupported(
        query.shape[1],
        key.shape[1],
        query.shape[3],
        query.dtype,
        mask,
        bias=bias is not None,
        dropout=rng is not None and dropout_rate > 0,
        soft_cap=soft_cap is not None,
    )


def _score_shape(query: Array, key: Array, mask: masks.Mask) -> tuple[int, int, int, int]:
    """[B, H, T, S], of whole rows."""
    parts = mask.parts
    return query.shape[0] // parts, query.shape[2], parts * query.shape[1], parts * key.shape[1]


def _check(query, key, value, mask, bias, soft_cap, dropout_rate) -> None:
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
    if parts > 1 and (query.shape[0] % parts or query.shape[1] != key.shape[1]):
        raise ValueError(f"attention: query {query.shape} and key {key.shape} are not rows in {parts} equal parts")
    scores = _score_shape(query, key, mask)
    masks.check_shapes(mask, *scores)
    if bias is not None:
        found = jax.eval_shape(lambda: bias(*map(jnp.arange, scores[2:]))) if callable(bias) else bias
        pairs = zip(found.shape[::-1], scores[::-1], strict=False)
        if found.ndim > 4 or any(size not in (1, full) for size, full in pairs):
            of = "bias, a function, returns" if callable(bias) else "bias has"
            raise ValueError(f"attention: {of} shape {found.shape}; accepted: what broadcasts to {scores}")
    if soft_cap is not None and not soft_cap > 0.0:
        raise ValueError(f"attention: soft_cap {soft_cap}; accepted: None, or a number above 0")
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"attention: dropout_rate {dropout_rate}; accepted: 0 <= rate < 1")
