"""Where the best learning rate of each size lies, from the records of `experiments.rate_transfer`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.transfer_runs import Mean, over_seeds

FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0)
LABELS = {
    "standard": "standard", "mup": "muP",
    "mup_tables": "muP, rate of tables / m", "mup_decay": "muP, decay not multiplied",
}  # fmt: skip
SWEEPS = {"width": "layers", "layers": "width"}  # what grows, and what stays at the base's
Records = Sequence[Mapping[str, Any]]
Floats = Sequence[float] | np.ndarray


class Best(NamedTuple):
    """Where the loss of one size is lowest.

    Attributes:
      factor: of those tried, by the mean loss over seeds.
      tied: others whose loss seeds cannot tell from it: the 95 % interval of the paired difference has 0.
      edge: it is the smallest or the largest that was tried.
      log2: of the factor at the minimum of a parabola; a mean over seeds, nan if at an edge.
      loss: at `factor`.
      seeds: that have all factors.
    """

    factor: float
    tied: tuple[float, ...]
    edge: bool
    log2: Mean
    loss: Mean
    seeds: int


def vertex(x: Floats, y: Floats) -> float:
    """Where the parabola through the lowest of some points and its two neighbours is lowest.

    Args:
      x: ascending, evenly spaced.
      y: values, perhaps infinite.

    Returns:
      nan if the lowest point is the first or the last; the lowest point itself if a neighbour is infinite.

    >>> vertex([-2, -1, 0, 1], [4.0, 1.0, 0.0, 1.0])
    0.0
    >>> round(vertex([-2, -1, 0, 1], [(x - 0.3) ** 2 for x in (-2, -1, 0, 1)]), 6)
    0.3
    >>> vertex([0, 1, 2], [1.0, 2.0, 3.0])
    nan
    """
    i = int(np.argmin(y))
    if not 0 < i < len(y) - 1:
        return math.nan
    below, above = y[i - 1] - y[i], y[i + 1] - y[i]
    if not (np.isfinite(below) and np.isfinite(above)) or below + above == 0:
        return float(x[i])
    return float(x[i] + (x[i + 1] - x[i]) * 0.5 * (below - above) / (below + above))


def losses(found: Records, kind: str, width: int, layers: int) -> np.ndarray:
    """[seeds, factors] of the seeds that have all factors; a run that diverged is infinite."""
    by: dict[int, dict[float, float]] = {}
    for each in found:
        if (each["kind"], each["width"], each["layers"]) == (kind, width, layers):
            value = each["loss"] if each["status"] == "finished" else math.inf
            by.setdefault(each["seed"], {})[each["factor"]] = value
    whole = [[mine[factor] for factor in FACTORS] for _, mine in sorted(by.items()) if set(FACTORS) <= set(mine)]
    return np.array(whole).reshape(-1, len(FACTORS))


def best(found: Records, kind: str, width: int, layers: int) -> Best | None:
    """Where the loss of a size is lowest; None: no seed has all factors yet."""
    mine = losses(found, kind, width, layers)
    if not len(mine):
        return None
    i = int(np.argmin(mine.mean(0)))
    tied = []
    for j, factor in enumerate(FACTORS):
        if j != i and np.isfinite(mine[:, j]).all() and over_seeds(list(mine[:, j] - mine[:, i])).low <= 0:
            tied.append(factor)
    log2 = over_seeds([vertex(np.log2(FACTORS), y) for y in mine])
    return Best(FACTORS[i], tuple(tied), i in (0, len(FACTORS) - 1), log2, over_seeds(list(mine[:, i])), len(mine))


def base(found: Records) -> tuple[int, int]:
    """(width, layers) of the smallest model."""
    return min(each["width"] for each in found), min(each["layers"] for each in found)


def sizes(found: Records, kind: str, sweep: str) -> list[tuple[int, int]]:
    """(width, layers) of a sweep that have a best factor, the base first where it has one.

    The variants of muP are muP at the base, whose runs stand for theirs.
    """
    width, layers = base(found)
    stays = {"width": layers, "layers": width}[sweep]
    mine = {(each["width"], each["layers"]) for each in found if each[SWEEPS[sweep]] == stays}
    return [size for size in sorted(mine) if best(found, kind_at(found, kind, size), *size) is not None]


def kind_at(found: Records, kind: str, size: tuple[int, int]) -> str:
    """The kind whose runs stand for one at a size."""
    return "mup" if kind.startswith("mup") and size == base(found) else kind


def kinds(found: Records) -> list[str]:
    """The parametrisations that have a best factor at some size besides the base."""
    return [kind for kind in LABELS if any(len(sizes(found, kind, sweep)) > 1 for sweep in SWEEPS)]


def position(of: Best) -> float:
    """log2 of the best factor: the parabola's where every seed has one, else that of the grid."""
    return math.log2(of.factor) if math.isnan(of.log2.value) else of.log2.value


class Drift(NamedTuple):
    """How far the best factors of larger sizes are from the base's.

    Attributes:
      size: the largest that has ended.
      grid: steps of the grid between the best factors, of the size whose distance is the largest.
      steps: the same by `position`.
      edge: a best factor lies at the edge of the grid, so the distance may be larger.
      cost: nats lost at `size` by training it with the base's best factor, a mean over seeds.
    """

    size: tuple[int, int]
    grid: int
    steps: float
    edge: bool
    cost: Mean


def drift(found: Records, kind: str, sweep: str) -> Drift | None:
    """None: fewer than two sizes have ended."""
    mine = sizes(found, kind, sweep)
    if len(mine) < 2:
        return None
    every = [best(found, kind_at(found, kind, size), *size) for size in mine]
    assert all(every)
    first, *rest = [each for each in every if each is not None]
    grid = max((FACTORS.index(each.factor) - FACTORS.index(first.factor) for each in rest), key=abs)
    steps = max((position(each) - position(first) for each in rest), key=abs)
    table = losses(found, kind, *mine[-1])
    cost = table[:, FACTORS.index(first.factor)] - table[:, FACTORS.index(rest[-1].factor)]
    return Drift(mine[-1], grid, steps, any(each.edge for each in (first, *rest)), over_seeds(list(cost)))
