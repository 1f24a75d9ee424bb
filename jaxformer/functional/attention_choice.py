"""Which implementation "auto" stands for, and the table of the kernels that only some platforms have."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxformer.kernels.attention import chunked, cudnn, flash_gpu, splash, xla
from jaxformer.kernels.attention.distance_bias import DistanceBias
from jaxformer.masks import Mask
from jaxformer.parallel import constraints
from jaxformer.parallel.platforms import GPU, this_platform
from jaxformer.patterns import Local
from jaxformer.types import Array

LOG = logging.getLogger(__name__)  # says what "auto" chose; `--log` of the programs shows it


class Kernel(NamedTuple):
    """A kernel that one platform has, and that refuses what it cannot do exactly.

    Attributes:
      module: with its `attend` and `unsupported`.
      platform: as `choose` takes it.
      what: the platform in words.
      least: "auto" takes it for rows of at least so many tokens.
      distance_bias: True if it can do a `DistanceBias`, and no other.
      rings: True if it does context parallelism by ring attention.
      log_sums: True if it can return the log of the sum of exp(score).
      extra: (query, key, mask) -> bytes of arrays over [T, S] that it needs, of all devices.
    """

    module: Any
    platform: str
    what: str
    least: int
    distance_bias: bool = False
    rings: bool = False
    log_sums: bool = False
    extra: Callable[[Array, Array, Mask], int] = lambda query, key, mask: 0


KERNELS = {
    "splash": Kernel(splash, "tpu", "a TPU", 1024),
    "cudnn": Kernel(cudnn, "cuda", GPU, 512, extra=cudnn.extra),
    "flash_gpu": Kernel(flash_gpu, "cuda", GPU, 512, distance_bias=True, rings=True, log_sums=True),
}
QUADRATIC = 64 * 2**20  # on GPUs "auto" takes nothing that needs more bytes over [T, S] on a device
SPARSE = 512  # on CPU "auto" takes "chunked" for masks of patterns over rows of at least so many tokens
EVERYWHERE = {"xla": xla, "chunked": chunked}  # what supports everything on every platform
ANY = ", ".join(("auto", *EVERYWHERE))


def choose(
    queries: int,
    keys: int,
    number: int = 1,
    platform: str | None = None,
    able: Sequence[str] = (),
    scores: int = 0,
    sparse: bool = False,
) -> str:
    """The implementation that "auto" stands for.

    All of them compute the same, so only speed and memory decide: the platform's own kernels come first, because their
    scores never leave the chip; then "xla" for short rows and "chunked" for long ones, which on CPU is up to a third
    slower but needs only linear memory (`experiments/LOG.md`).

    Args:
      queries, keys: T and S.
      number: shards of each row under context parallelism; more than one: "chunked", if no kernel can.
      platform: that the program is for, "cpu", "cuda" or "tpu"; None: where it is traced.
      able: names of the platforms' kernels that can do it exactly, the best first.
      scores: bytes of all scores on one device; on GPUs "xla" is taken only up to `QUADRATIC`.
      sparse: the mask has patterns, of which "chunked" visits only the blocks that hold a pair.
    """
    platform = platform or this_platform()
    many = platform == "cuda" and scores > QUADRATIC
    for name in able:
        if KERNELS[name].platform == platform and (queries >= KERNELS[name].least or many):
            return name
    limit = (SPARSE if sparse else 2048) if platform == "cpu" else 8192
    return "chunked" if number > 1 or many or queries * keys >= limit * limit else "xla"


def choose_for(
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    bias: Any,
    *options: Any,
    return_weights: bool = False,
    return_log_sum: bool = False,
) -> str:
    """`choose` for arguments of `attention` (`options`: soft cap, dropout rate and its key), and logs it."""
    refusals = {name: unsupported(name, query, key, value, mask, bias, *options) for name in KERNELS}
    refusals = dict.fromkeys(KERNELS, "returned weights") if return_weights else refusals
    if return_log_sum:
        refusals |= {name: "log-sums" for name, kernel in KERNELS.items() if not kernel.log_sums}
    here = [name for name, kernel in KERNELS.items() if kernel.platform == this_platform()]
    extra = {name: _on_a_device(query, KERNELS[name].extra(query, key, mask)) for name in here}
    able = [name for name in here if refusals[name] is None and extra[name] <= QUADRATIC]
    able = sorted(able, key=lambda name: extra[name] > 0)  # those that need nothing over [T, S] first
    scores = _on_a_device(query, 4 * query.size // max(query.shape[3], 1) * key.shape[1])
    sizes = query.shape[1], key.shape[1], mask.parts
    chosen = "xla" if return_weights else choose(*sizes, able=able, scores=scores, sparse=bool(mask.patterns))
    _log_choice(chosen, query, key, mask.parts, refusals, extra)
    return chosen


def with_window(mask: Mask) -> Mask:
    """A mask whose only pattern is `patterns.local`, as one with a window, which the platforms' kernels have."""
    if len(mask.patterns) != 1 or not isinstance(mask.patterns[0], Local):
        return mask
    size = mask.patterns[0].size
    return replace(mask, patterns=(), window=size if mask.window is None else min(size, mask.window))


def _on_a_device(query: Array, size: int) -> int:
    """Of bytes that are shared out as the scores are, those of one device."""
    sizes = constraints.mesh_axes()
    shape, axes = (query.shape[0], query.shape[2]), ("batch_rows", "heads")
    found = [constraints.splits(n, constraints.ACTIVATION_RULES[a], sizes) for n, a in zip(shape, axes, strict=True)]
    return size // math.prod(sizes[axis] for names in found for axis in names)


def _log_choice(
    chosen: str, query: Array, key: Array, number: int, refusals: dict[str, str | None], extra: dict[str, int]
) -> None:
    """Logs what "auto" chose, and why not the platform's own kernels, whose bytes are `extra`."""
    platform, (_, queries, heads, width) = this_platform(), query.shape
    cut = f", rows in {number} parts" if number > 1 else ""

    def why_not(name: str) -> str:
        if refusals[name]:
            return f"cannot do {refusals[name]}"
        if extra[name]:
            return f"would keep {extra[name] / 2**20:.0f} MiB of allowed pairs"
        return f"is taken from {KERNELS[name].least} queries on"

    before = list(extra)[: list(extra).index(chosen)] if chosen in extra else extra  # those that would have come first
    why = [f"{name} {why_not(name)}" for name in before]
    asked = f"{queries} queries x {key.shape[1]} keys, {heads} heads of {width}, {query.dtype}{cut}, on {platform}"
    LOG.info("; ".join([f"attention: auto is {chosen} for {asked}", *why]))


def unavailable(name: str, platform: str | None = None) -> str | None:
    """The platform that a kernel needs, if `platform`, None: that of this process, is another; otherwise None.

    >>> unavailable("chunked") is None, unavailable("splash")
    (True, 'a TPU')
    """
    kernel = KERNELS.get(name)
    return None if kernel is None or kernel.platform == (platform or this_platform()) else kernel.what


def takes_distances(name: str, mask: Mask) -> bool:
    """Whether a platform's kernel can do a bias of the distance with this mask, whose tokens then stay in order."""
    in_order = all(pattern.steps == (1, 1) for pattern in mask.patterns)
    return KERNELS[name].distance_bias and mask.parts == 1 and in_order


def unsupported(
    name: str,
    query: Array,
    key: Array,
    value: Array,
    mask: Mask,
    bias: Any,
    soft_cap: Any,
    dropout_rate: float,
    rng: Any,
) -> str | None:
    """Why a platform's kernel cannot do this exactly; None: it can."""
    mask = with_window(mask)
    if value.shape[3] != key.shape[3]:
        return "values of another width than keys"
    if not query.dtype == key.dtype == value.dtype:
        return "arrays of different dtypes"
    inside = isinstance(bias, DistanceBias) and takes_distances(name, mask)
    return KERNELS[name].module.unsupported(
        query.shape[1],
        key.shape[1],
        query.shape[3],
        query.dtype,
        mask,
        bias=bias is not None and not inside,
        dropout=rng is not None and dropout_rate > 0,
        soft_cap=soft_cap is not None,
    )
