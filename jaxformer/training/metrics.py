"""From sums to reported numbers: means with standard errors, bits per byte, MFU.

>>> bits_per_byte(nats_per_token=math.log(2), tokens=100, bytes_=400)
0.25
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

# Dense bfloat16 peak of one device, FLOP/s, from the vendors' data sheets. Prefixes of `device.device_kind`, longest
# first: "TPU v5 lite" is v5e, "TPU v5" v5p. No MFU is reported for other devices.
PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    ("TPU v6 lite", 918e12),
    ("TPU v6e", 918e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5p", 459e12),
    ("TPU v5", 459e12),
    ("TPU v4", 275e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA H100", 989e12),
    ("NVIDIA A100", 312e12),
)


class WeightedMean(NamedTuple):
    """A mean over a sample of rows.

    Attributes:
      mean: sum / weight.
      stderr: its standard error, rows being the sampling unit; nan for fewer than two rows.
      weight: total weight (the number of tokens, if each counts once).
      rows: number of rows with any weight.
    """

    mean: float
    stderr: float
    weight: float
    rows: int


def estimate(sums: Any, weights: Any) -> WeightedMean:
    """The ratio estimator sum(l) / sum(w) over rows, and its standard error.

    Tokens of one row are correlated, so rows are the sampling unit: the variance is
    n / (n - 1) * sum((l - mean * w)**2) / sum(w)**2 (linearisation; Cochran 1977, section 6.3).

    Args:
      sums: [R], l, each row's sum.
      weights: [R], w, each row's weight; rows of weight 0 are padding and do not count.

    >>> estimate([1.0, 3.0], [1.0, 1.0])
    WeightedMean(mean=2.0, stderr=1.0, weight=2.0, rows=2)
    """
    sums, weights = np.asarray(sums, np.float64).ravel(), np.asarray(weights, np.float64).ravel()
    sums, weights = sums[weights > 0], weights[weights > 0]
    total, n = float(weights.sum()), len(weights)
    if n == 0:
        return WeightedMean(math.nan, math.nan, 0.0, 0)
    mean = float(sums.sum()) / total
    if n == 1:
        return WeightedMean(mean, math.nan, total, 1)
    squares = float(np.square(sums - mean * weights).sum())
    return WeightedMean(mean, math.sqrt(n / (n - 1) * squares) / total, total, n)


def collect(batches: Iterable[Mapping[str, tuple[Any, Any]]]) -> dict[str, WeightedMean]:
    """The estimates of an evaluation, from the per-row Sums of its batches."""
    rows: dict[str, list[tuple[Any, Any]]] = {}
    for sums in batches:
        for name, pair in sums.items():
            rows.setdefault(name, []).append(pair)
    return {
        name: estimate(np.concatenate([np.ravel(s) for s, _ in pairs]), np.concatenate([np.ravel(w) for _, w in pairs]))
        for name, pairs in rows.items()
    }


def evaluation(estimates: Mapping[str, WeightedMean], bytes_per_token: float | None = None) -> dict[str, float]:
    """An evaluation as one flat dict.

    Args:
      estimates: by name; "loss" is required, in nats per token.
      bytes_per_token: bytes of text in the split / tokens predicted in it; None: no bits per byte.

    Returns:
      Every name and name_stderr; perplexity; bits_per_byte and its stderr; `weight` (tokens) and `rows` of "loss".
    """
    out: dict[str, float] = {}
    for name, e in estimates.items():
        out |= {name: e.mean, f"{name}_stderr": e.stderr}
    loss = estimates["loss"]
    out |= {"perplexity": perplexity(loss.mean), "weight": loss.weight, "rows": loss.rows}
    if bytes_per_token is not None:
        out["bits_per_byte"] = bits_per_byte(loss.mean, 1, bytes_per_token)
        out["bits_per_byte_stderr"] = bits_per_byte(loss.stderr, 1, bytes_per_token)
    return out


def perplexity(nats_per_token: float) -> float:
    """exp of the loss; inf if that overflows."""
    return math.exp(nats_per_token) if nats_per_token < 700 else math.inf


def bits_per_byte(nats_per_token: float, tokens: float, bytes_: float) -> float:
    """Bits per byte of text, if `tokens` predicted tokens encode `bytes_` bytes."""
    return nats_per_token * tokens / bytes_ / math.log(2)


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of one device; None if unknown (any CPU).

    >>> peak_flops("TPU v5 lite"), peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
    (197000000000000.0, 989000000000000.0, None)
    """
    return next((peak for name, peak in PEAK_FLOPS if device_kind.lower().startswith(name.lower())), None)


def utilisation(
    tokens_per_second: float, flops_per_token: float | None, device_kind: str, devices: int
) -> float | None:
    """MFU: the model's FLOP/s as a share of the devices' peak; None if either is unknown."""
    peak = peak_flops(device_kind)
    return None if peak is None or flops_per_token is None else tokens_per_second * flops_per_token / (peak * devices)
