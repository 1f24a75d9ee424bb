"""From sums to reported numbers: means with standard errors, bits per byte, MFU.

>>> evaluation({"loss": WeightedMean(math.log(2), 0.1, 100.0, 4)}, bytes_per_token=4)["bits_per_byte"]
0.25
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxformer.runtime.hardware import chip_of


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
    mean = float(sums.sum()) / total if n else math.nan
    squares = float(np.square(sums - mean * weights).sum())
    return WeightedMean(mean, math.sqrt(n / (n - 1) * squares) / total if n > 1 else math.nan, total, n)


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


def combined(parts: Mapping[str, Mapping[str, WeightedMean]], shares: Mapping[str, float]) -> dict[str, WeightedMean]:
    """The means over several samples, independent of each other, by their shares, which add up to 1.

    >>> one, other = WeightedMean(2.0, 0.3, 10.0, 2), WeightedMean(4.0, 0.4, 90.0, 9)
    >>> combined({"a": {"loss": one}, "b": {"loss": other}}, {"a": 0.5, "b": 0.5})["loss"]
    WeightedMean(mean=3.0, stderr=0.25, weight=100.0, rows=11)
    """
    if len(parts) == 1:
        return dict(*parts.values())
    names = [name for name in next(iter(parts.values())) if all(name in part for part in parts.values())]
    return {
        name: WeightedMean(
            sum(share * parts[part][name].mean for part, share in shares.items()),
            math.hypot(*(share * parts[part][name].stderr for part, share in shares.items())),
            sum(parts[part][name].weight for part in shares),
            sum(parts[part][name].rows for part in shares),
        )
        for name in names
    }


def evaluation(
    estimates: Mapping[str, WeightedMean], bytes_per_token: float | None = None, *, code: bool = True
) -> dict[str, float]:
    """An evaluation as one flat dict.

    Args:
      estimates: by name; "loss" is required, in nats per token.
      bytes_per_token: bytes of text in the split / tokens predicted in it; None: no bits per byte.
      code: the loss is that of predicted tokens, of which the perplexity means something.

    Returns:
      Every name and name_stderr; perplexity; bits_per_byte and its stderr; `weight` (tokens) and `rows` of "loss".
    """
    out: dict[str, float] = {}
    for name, e in estimates.items():
        out |= {name: e.mean, f"{name}_stderr": e.stderr}
    mean, stderr, weight, rows = estimates["loss"]
    perplexity = math.inf if mean > 700 else math.exp(mean)  # exp of more overflows; nan stays nan
    out |= {"perplexity": perplexity} if code else {}
    out |= {"weight": weight, "rows": rows}
    if bytes_per_token is not None:
        bits, their_stderr = (nats / bytes_per_token / math.log(2) for nats in (mean, stderr))
        out |= {"bits_per_byte": bits, "bits_per_byte_stderr": their_stderr}
    return out


def mfu(tokens_per_second: float, flops_per_token: float | None, device_kind: str, devices: int) -> float | None:
    """The model's FLOP/s as a share of the devices' bfloat16 peak; None if either is unknown (any CPU)."""
    chip = chip_of(device_kind)
    if flops_per_token is None or chip is None or chip.flops is None:
        return None
    return tokens_per_second * flops_per_token / (chip.flops * devices)
