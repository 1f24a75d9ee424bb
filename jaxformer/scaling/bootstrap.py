"""Bootstrap weights, percentile intervals, and whether the data determine a number at all.

Each replicate gives every row (or cluster of rows) a random weight and refits; the 2.5th and 97.5th percentiles of a
quantity over the replicates are its interval (slightly wider for small tables, see `tails`). The weights:

    weights   independent, inverse Gaussian, mean and variance one (Mason & Newton 1992): every row keeps some weight.
              The default.
    rows      multinomial counts: the classical resampling of rows, as in Besiroglu et al. 2024.

They agree on large tables. On small ones, resampling rows drops a third of the design in each replicate and gives
intervals that are too wide; these weights do not. Unlike resampling residuals, they do not assume equal noise.

>>> resampled = weights(4, 2, seed=0)
>>> resampled.shape, resampled.sum(1).round(6).tolist()
((2, 4), [4.0, 4.0])
>>> wide = quantity(0.3, np.geomspace(0.1, 2.0, 100), max_ratio=3.0)
>>> wide["value"], wide["why"]
(None, 'the 95% interval, 0.108 to 1.86, is wider than a factor of 3')
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxformer.errors import ConfigError

Floats = np.ndarray

RESAMPLING = ("weights", "rows")
_APART = 0.25  # of the accepted width: two modes that are closer count as one


def special() -> Any:
    """scipy.special. Raises ConfigError if scipy is not installed."""
    try:
        from scipy import special
    except ImportError:
        raise ConfigError("fits need scipy: pip install 'jaxformer[scaling]'") from None
    return special


def weights(
    rows: int, replicates: int, *, seed: int, clusters: Sequence[str] | None = None, resampling: str = "weights"
) -> Floats:
    """[R, I] bootstrap weights; without clusters, each replicate's weights sum to the number of rows; `resampling` is
    one of RESAMPLING.

    Raises:
      ConfigError: fewer than 3 clusters.
    """
    labels, which = np.unique(list(clusters) if clusters is not None else np.arange(rows), return_inverse=True)
    if len(labels) < 3:
        raise ConfigError(f"clusters: {len(labels)} different labels; a bootstrap over clusters needs at least 3")
    rng, count = np.random.default_rng(seed), len(labels)
    if resampling == "weights":
        drawn = rng.wald(1.0, 1.0, size=(replicates, count))
        drawn /= drawn.mean(1, keepdims=True)
    else:
        drawn = rng.multinomial(count, np.full(count, 1 / count), size=replicates).astype(np.float64)
    return drawn[:, which]


def tails(rows: int, params: int, clusters: Sequence[str] | None = None) -> tuple[float, float]:
    """Percentile levels for a 95 % interval, corrected for the noise being estimated from few rows.

    They are the normal distribution's levels at the 2.5 % points of Student's t with rows - params degrees of freedom
    (Hesterberg 2015, section 3.5): 1.6 and 98.4 % with 20 rows and 5 parameters, 2.4 and 97.6 % with 100 rows.

    >>> [round(100 * level, 2) for level in tails(20, 5)]
    [1.65, 98.35]
    """
    count = rows if clusters is None else len(set(clusters))
    functions = special()
    low = float(functions.ndtr(functions.stdtrit(max(count - params, 1), 0.025)))
    return low, 1.0 - low


def quantity(
    value: float,
    replicates: Floats,
    *,
    levels: tuple[float, float] = (0.025, 0.975),
    max_ratio: float | None = None,
    max_width: float | None = None,
    at_bound: Floats | None = None,
    bound: str = "its bound",
    doubt: str | None = None,
) -> dict[str, Any]:
    """A number with its interval, or the reason why the data do not determine it.

    Args:
      value: the point estimate.
      replicates: [R]; with more than 5 % not finite, the number is not determined.
      levels: percentile levels of the interval, see `tails`.
      max_ratio: for positive numbers: with a larger ratio of the interval's ends, the number is not determined.
      max_width: the same for the interval's width.
      at_bound: [R] bool, replicates in which the parameter reached a bound of the search.
      bound: name of that bound.
      doubt: a reason found elsewhere (a flat profile).

    Returns:
      {"value", "ci95": [low, high], "stderr"}; stderr is half the width of the central 68 % of the replicates, which is
      robust to a few outliers. If the data do not determine the number, "value" is None, "why" is a clause with the
      reason, and "estimate" is where the fit stopped (not a measurement; for drawing the curve).
    """
    finite = np.isfinite(replicates)
    kept = replicates[finite]
    if not len(kept) or not np.isfinite(value):
        return {"value": None, "ci95": [None, None], "stderr": None, "why": "it could not be computed"}
    low, high = (float(v) for v in np.quantile(kept, levels))
    middle = np.quantile(kept, [0.1587, 0.8413])
    out = {"value": float(value), "ci95": [low, high], "stderr": float(middle[1] - middle[0]) / 2}
    interval = f"the 95% interval, {low:.3g} to {high:.3g},"
    why = None
    if finite.mean() < 0.95:
        why = f"{100 - 100 * finite.mean():.0f}% of the bootstrap replicates have none"
    elif at_bound is not None and at_bound.mean() > 0.05:
        why = f"{100 * at_bound.mean():.0f}% of the bootstrap replicates end at {bound}"
    elif max_ratio is not None and (low <= 0 or high > max_ratio * low):
        why = f"{interval} is wider than a factor of {max_ratio:g}"
    elif max_width is not None and high - low > max_width:
        why = f"{interval} is wider than {max_width:g}"
    elif doubt is not None:
        why = doubt
    elif peaks := two_peaks(np.log(kept) if max_ratio is not None else kept,
                            _APART * (np.log(max_ratio) if max_ratio is not None else max_width or 0.0)):  # fmt: skip
        first, second = np.exp(peaks) if max_ratio is not None else peaks
        why = f"the bootstrap replicates fall into two groups, around {first:.3g} and {second:.3g}"
    if why is not None:
        out |= {"value": None, "why": why, "estimate": float(value)}
    return out


def two_peaks(sample: Floats, apart: float = 0.0) -> tuple[float, float] | None:
    """The two modes of a sample if the density between them drops below half the lower one, with a tenth of the sample
    on each side; None otherwise, or if they are closer than `apart`.

    >>> rng = np.random.default_rng(0)
    >>> two_peaks(rng.normal(size=1000)) is None
    True
    >>> [round(p) for p in two_peaks(np.concatenate([rng.normal(size=700), rng.normal(9.0, 1.0, 300)]))]
    [0, 9]
    """
    low, high = np.quantile(sample, [0.005, 0.995])
    if len(sample) < 100 or high - low <= 1e-6 * max(abs(low), abs(high)):
        return None
    inside = sample[(sample >= low) & (sample <= high)]
    counts, edges = np.histogram(inside, bins=64, range=(low, high))
    width = edges[1] - edges[0]
    near = np.median(np.abs(inside - np.median(inside))) * 1.4826 or inside.std()
    bandwidth = 1.06 * min(inside.std(), max(near, 0.25 * inside.std())) * len(inside) ** -0.2 / width
    kernel = np.exp(-0.5 * (np.arange(-64, 65) / max(bandwidth, 1.5)) ** 2)
    density = np.convolve(counts, kernel)[64 : 64 + len(counts)]
    centres = 0.5 * (edges[1:] + edges[:-1])
    padded = np.concatenate([[-1.0], density, [-1.0]])
    modes = np.flatnonzero((padded[1:-1] > padded[:-2]) & (padded[1:-1] >= padded[2:]))
    found = []
    for i, j in itertools.combinations(modes, 2):
        valley, lower = i + int(density[i : j + 1].argmin()), min(density[i], density[j])
        if density[valley] < 0.5 * lower and 0.1 < counts[: valley + 1].sum() / counts.sum() < 0.9:
            found.append((lower, float(centres[i]), float(centres[j])))
    peaks = max(found, key=lambda each: each[0])[1:] if found else None
    return None if peaks is None or peaks[1] - peaks[0] < apart else peaks
