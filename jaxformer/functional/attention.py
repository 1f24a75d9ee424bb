"""attention(): the one front door. Describes the arguments, checks them, and picks an implementation."""

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

LOG = logging.getLogger(__name__)  # tells what "auto" is; `--log` of the programs shows it


class Kernel(NamedTuple):
    """A kernel of one platform, which refuses what it would not do exactly.

    Attributes:
      module: with its `attend` and `refusal`.
      platform: as `choose` takes it.
      what: the platform in words.
      least: tokens of a row from which "auto" takes it.
    """

    module: Any
    platform: str
    what: str
    least: int


KERNELS = {
    "splash": Kernel(splash, "tpu", "a TPU", 1024),
    "cudnn": Kernel(cudnn, "cuda", "an NVIDIA GPU of compute capability 8 or more", 512),
}
# name -> implementation; takes (query, key, value, mask, bias, **options) and honours all of them, or refuses.
EVERYWHERE: dict[str, Callable[..., Any]] = {"xla": xla.attend, "chunked": chunked.attend}
IMPLEMENTATIONS = EVERYWHERE | {name: kernel.module.attend for name, kernel in KERNELS.items()}
ANY = ", ".join(("auto", *EVERYWHERE))  # what does everything on every platform


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

    What the mask hides has no influence, whatever stands there. With "xla" and "chunked" a key, value or bias that is
    NaN, infinite or huge changes no bit of the outputs and of the gradients by query of those queries that may not see
    it; where no query may (padding, empty slots), of no output and no gradient, and its own gradients are exactly 0.
    What is seen shows: a NaN, or a value beyond `nonfinite.largest` (2^62 for float32 and bfloat16), makes the
    output of every query that may see it NaN. Not promised: a query that is not finite itself, or sees what is not, may
    make the gradients by all keys and values of its row NaN, also by those it does not see, even if its own output is
    not used; `jnp.nan_to_num` of such rows helps. "splash" and "cudnn" promise this for padding and empty slots alone.

    Derivatives of both modes and of higher order go through "xla" and "chunked" (`jax.jvp`, `jax.hessian`, ...; the
    loops of "chunked" can be differentiated once backwards: a second derivative is forward over reverse, as
    `jax.hessian` does). "splash" and "cudnn" have `jax.grad` alone; for more say implementation="xla".

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
      implementation: "auto" (see `choose`; what it was is logged), or a name in `IMPLEMENTATIONS`. Where a mesh is in
        use, "chunked" runs on each device's own rows and heads; where its `context` axis cuts the rows (`mask.parts`
        > 1: all arrays are then [parts * B, T / parts, ...]) keys and values go round (`kernels.ring`); "xla" brings
        them together. "splash" (TPUs) and "cudnn" (NVIDIA GPUs, 16-bit floats) refuse what they would not do
        exactly: `refusal` in `kernels.splash` and `kernels.cudnn`.
      return_weights: also return the weights after softmax and dropout, [B, H, T, S] float32 (of whole rows).

    Returns:
      [B, T, H, K'], in the dtype of `value`; with `return_weights` a pair of it and the weights. The softmax is
      computed in float32 (float64 for float64 inputs).

    Raises:
      ValueError: shapes that disagree, H not a multiple of G, a soft cap or dropout rate out of range, an unknown
        implementation, or one that cannot do all of this.
      TypeError: a mask that is neither a `Mask` nor an array of bool.

    Source: Vaswani et al. 2017, section 3.2.1; grouped heads, Ainslie et al. 2023; soft cap, Gemma 2 report 2024.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attention(x, x, x, masks.causal()).shape
    (1, 3, 2, 4)
    """
    if mask is not None and not isinstance(mask, masks.Mask):
        if getattr(mask, "dtype", None) != jnp.bool_:
            found = f"has dtype {mask.dtype}" if hasattr(mask, "dtype") else f"is a {type(mask).__name__}"
            raise TypeError(f"attention: mask {found}; accepted: an array of bool, or a Mask such as causal()")
        mask = masks.dense(mask)
    _check(query, key, value, mask, bias, soft_cap, dropout_rate)
    number = 1 if mask is None else mask.parts
    if implementation == "auto":
        refusals = {n: _refusal(n, query, key, value, mask, bias, soft_cap, dropout_rate, rng) for n in KERNELS}
        able = [name for name, why in refusals.items() if why is None]
        implementation = choose(query.shape[1], key.shape[1], number, able=able)
        _tell(implementation, query, key, number, refusals)
    if return_weights:
        implementation = "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention: implementation {implementation!r}; accepted: auto, {', '.join(sorted(IMPLEMENTATIONS))}"
        )
    if implementation in KERNELS:
        why = _refusal(implementation, query, key, value, mask, bias, soft_cap, dropout_rate, rng)
        if why is not None:
            raise ValueError(f"attention: implementation {implementation!r} cannot do {why}; accepted there: {ANY}")
    axes = constraints.mesh_axes()
    attend = IMPLEMENTATIONS[implementation]
    if implementation == "chunked" and axes and number in (1, constraints.context_parts()):
        attend = ring.attend
    elif number > 1:
        attend = functools.partial(_together, attend)
    extra = {"return_weights": True} if return_weights else {}
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
        **extra,
    )


def _together(attend: Callable[..., Any], query: Array, key: Array, value: Array, mask: masks.Mask, *rest, **options):
    """Attention over whole rows for arrays that are folded: the parts of each row are brought together."""
    fold = context.SequenceSharding(mask.parts)
    query, key, value = (fold.unshard(x) for x in (query, key, value))
    out = attend(query, key, value, replace(mask, parts=1), *rest, **options)
    if options.get("return_weights"):
        return fold.shard(out[0]), out[1]
    return fold.shard(out)


def choose(queries: int, keys: int, number: int = 1, platform: str | None = None, able: Collection[str] = ()) -> str:
    """What "auto" stands for.

    All of them honour everything that is asked of them, so only speed and memory decide. On CPU (two Zen 5 cores),
    forward and backward, "chunked" takes 1.05 to 1.2 of the time of "xla" for one row of 1024 to 4096 causal tokens, up
    to 1.35 for eight, but linear memory. A platform's own kernel, whose scores never leave the chip, comes first; not
    measured here.

    Args:
      queries, keys: T and S.
      number: into how many parts rows are cut; more than one: "chunked".
      platform: that the program is for, "cpu", "cuda" or "tpu"; None: where it is traced.
      able: names of the platforms' kernels that can do it exactly.
    """
    platform = platform or _platform()
    for name, kernel in KERNELS.items():
        if name in able and kernel.platform == platform and queries >= kernel.least:
            return name
    limit = 2048 if platform == "cpu" else 8192
    return "chunked" if number > 1 or queries * keys >= limit * limit else "xla"


def _tell(chosen: str, query: Array, key: Array, number: int, refusals: dict[str, str | None]) -> None:
    """Logs what "auto" is, and why not the platform's own kernel."""
    if not LOG.isEnabledFor(logging.INFO):
        return
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
    """What a platform's kernel needs that is not here; None: nothing.

    >>> unavailable("chunked") is None, unavailable("splash")
    (True, 'a TPU')
    """
    kernel = KERNELS.get(name)
    return None if kernel is None or kernel.platform == _platform() else kernel.what


def _platform() -> str:
    """Of the first device; "cuda" only for GPUs that cuDNN's flash attention knows (compute capability 8 and above)."""
    platform = jax.default_backend()
    capability = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")[0]
    return "cuda" if platform == "gpu" and capability.isdigit() and int(capability) >= 8 else platform


def _refusal(name: str, query, key, value, mask, bias, soft_cap, dropout_rate, rng) -> str | None:
    """Why a platform's kernel cannot do this exactly; None: it can."""
    if value.shape[3] != key.shape[3]:
        return "values of another width than keys"
    if not query.dtype == key.dtype == value.dtype:
        return "arrays of different dtypes"
    dropout = rng is not None and dropout_rate > 0
    options = {"bias": bias is not None, "dropout": dropout, "soft_cap": soft_cap is not None}
    return KERNELS[name].module.unsupported(query.shape[1], key.shape[1], query.shape[3], query.dtype, mask, **options)


def _check(query, key, value, mask, bias, soft_cap, dropout_rate) -> None:
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            raise ValueError(f"attention: {name} has shape {array.shape}; accepted: 4 axes [B, T, H, K]")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"attention: key {key.shape} and value {value.shape} differ in batch, length or heads")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"attention: query {query.shape} and key {key.shape} differ in batch or head width")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"attention: {query.shape[2]} query heads are not a multiple of {key.shape[2]} key heads")
    number = 1 if mask is None else mask.parts
    if number > 1 and (query.shape[0] % number or query.shape[1] != key.shape[1]):
        raise ValueError(f"attention: query {query.shape} and key {key.shape} are not rows in {number} equal parts")
    scores = (query.shape[0] // number, query.shape[2], number * query.shape[1], number * key.shape[1])
    if mask is not None:
        masks.check_shapes(mask, *scores)
    if bias is not None and not callable(bias):
        pairs = zip(bias.shape[::-1], scores[::-1], strict=False)
        if bias.ndim > 4 or any(size not in (1, full) for size, full in pairs):
            raise ValueError(f"attention: bias has shape {bias.shape}; accepted: what broadcasts to {scores}")
    if soft_cap is not None and not soft_cap > 0.0:
        raise ValueError(f"attention: soft_cap {soft_cap}; accepted: None, or a number above 0")
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"attention: dropout_rate {dropout_rate}; accepted: 0 <= rate < 1")
