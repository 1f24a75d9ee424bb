"""The page of `experiments.rate_transfer`, from its records: where the best learning rate lies at each size."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.transfer_runs import Mean, over_seeds
from jaxformer.scaling import plotting

FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0)
LABELS = {
    "standard": "standard", "mup": "muP",
    "mup_tables": "muP, rate of tables / m", "mup_decay": "muP, decay not multiplied",
}  # fmt: skip
SWEEPS = {"width": "layers", "layers": "width"}  # what grows, and what stays at the base's
Records = Sequence[Mapping[str, Any]]


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


def vertex(x: Sequence[float], y: Sequence[float]) -> float:
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
    less = [over_seeds(mine[:, j] - mine[:, i]) if np.isfinite(mine[:, j]).all() else None for j in range(len(FACTORS))]
    tied = tuple(f for j, f in enumerate(FACTORS) if j != i and (d := less[j]) is not None and d.low <= 0)
    x = np.log2(FACTORS)
    return Best(
        FACTORS[i], tied, i in (0, len(FACTORS) - 1), over_seeds([vertex(x, y) for y in mine]), over_seeds(mine[:, i]),
        len(mine),
    )  # fmt: skip


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
    """How far the best factor of the largest size is from the base's.

    Attributes:
      size: the largest that has ended.
      steps: of the grid, by `position`; of all sizes that whose distance is the largest.
      edge: a best factor lies at the edge of the grid, so the distance may be larger.
      cost: nats lost at `size` by training it with the base's best factor, a mean over seeds.
    """

    size: tuple[int, int]
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
    steps = max((position(each) - position(first) for each in rest), key=abs)
    table = losses(found, kind, *mine[-1])
    cost = table[:, FACTORS.index(first.factor)] - table[:, FACTORS.index(rest[-1].factor)]
    return Drift(mine[-1], steps, any(each.edge for each in (first, *rest)), over_seeds(cost))


def figure(found: Records) -> bytes:
    """Loss against the factor: a column for each of the two parametrisations, widths above depths."""
    package = plotting.matplotlib()
    with package.rc_context(plotting.STYLE):
        drawn = package.figure.Figure(figsize=(8.4, 7.2), layout="constrained")
        every = drawn.subplots(2, 2, sharex=True, sharey="row")
        for row, sweep in zip(every, SWEEPS, strict=True):
            for axes, kind in zip(row, ("standard", "mup"), strict=True):
                mine = sizes(found, kind, sweep)
                for i, size in enumerate(mine):
                    table = losses(found, kind, *size)
                    y = np.where(np.isfinite(table).all(0), table.mean(0), np.nan)
                    name = f"width {size[0]}" if sweep == "width" else f"{size[1]} layers"
                    style = plotting.line_style(i, len(mine))
                    axes.plot(FACTORS, y, label=name, marker=plotting.marker(i), **style)
                    low = int(np.nanargmin(y))
                    axes.plot(FACTORS[low], y[low], marker="o", markersize=12, fillstyle="none", color=style["color"])
                axes.set(xscale="log", title=f"{LABELS[kind]}, by {'width' if sweep == 'width' else 'depth'}")
                axes.set_xticks(FACTORS, [f"{factor:g}" for factor in FACTORS])
                axes.xaxis.set_minor_locator(package.ticker.NullLocator())
            row[0].set_ylabel("held-out nats per token")
            if row[0].lines:
                row[0].legend(loc="best")
        for axes in every[-1]:
            axes.set_xlabel("learning rate / that of the base")
        return plotting.encoded(drawn, "svg", bbox_inches="tight")


def table(found: Records) -> list[str]:
    """The best factor of each size, in Markdown."""
    rows = [["parametrisation", "width", "layers", "seeds", "best factor", "tied with", "log2 at the minimum", "loss"]]
    rows.append(["---"] * len(rows[0]))
    for kind in kinds(found):
        for size in dict.fromkeys(size for sweep in SWEEPS for size in sizes(found, kind, sweep)):
            of = best(found, kind, *size)
            if of is None:  # a variant at the base, where it is muP
                continue
            tied = "not known" if of.seeds < 2 else ", ".join(f"{factor:g}" for factor in of.tied) or "none"
            parabola = "at the edge" if math.isnan(of.log2.value) else of.log2.text("+.2f")
            rows.append([
                LABELS[kind], f"{size[0]}", f"{size[1]}", f"{of.seeds}", f"{of.factor:g}", tied, parabola,
                of.loss.text(),
            ])  # fmt: skip
    return [f"| {' | '.join(row)} |" for row in rows]


def said(found: Records, kind: str, sweep: str) -> str | None:
    """A sentence on a parametrisation and what grows."""
    of = drift(found, kind, sweep)
    if of is None:
        return None
    i = list(SWEEPS).index(sweep)
    name, first, last = "width" if sweep == "width" else "depth", base(found)[i], of.size[i]
    moved = f"{abs(of.steps):.1f} grid steps {'below' if of.steps < 0 else 'above'}"
    if abs(of.steps) > 1:
        told = "more than one step"
    else:
        told = "or further, for a best factor is at the edge of the grid" if of.edge else "within one step"
    return (
        f"- {LABELS[kind]}, {name} {first} to {last}: where it is furthest, the best rate is {moved} the base's: "
        f"{told}. With the base's best factor {name} {last} ends {of.cost.text('.3f')} nats above its own best."
    )


def claim(found: Records) -> list[str]:
    """Sentences for all of them."""
    lines = [said(found, kind, sweep) for kind in kinds(found) for sweep in SWEEPS]
    return [line for line in lines if line is not None]


def page(found: Records) -> str:
    """The page, in Markdown."""
    width, layers = base(found)
    one = next(each for each in found if each["factor"] == 1)
    seeds = [of.seeds for kind in ("standard", "mup") for sweep in SWEEPS for size in sizes(found, kind, sweep)
             if (of := best(found, kind, *size)) is not None]  # fmt: skip
    hours = sum(each["seconds"] for each in found) / 3600
    return "\n".join([
        "# transfer: does the best learning rate of a small model stay the best of a larger one?",
        "",
        "Claim to be tested, after Yang et al. (2022) and Dey et al. (2025): under muP the best learning rate does not "
        "depend on width and depth, where without it wider models need smaller ones.",
        "",
        "![held-out loss against the learning rate, for each width and each depth](transfer.svg)",
        "",
        "The rate is a factor times that of the base, a grid whose steps are factors of 2; circles mark the best.",
        "",
        *claim(found),
        "",
        *table(found),
        "",
        f"Means over {min(seeds, default=0)} to {max(seeds, default=0)} seeds, with 95 % intervals (Student's) where "
        "there are two or more. *Tied*: the interval of the difference to the best, seed by seed, has 0. The minimum "
        "is that of a parabola through the three points around the best of each seed.",
        "",
        "## How",
        "",
        "    python -m experiments.rate_transfer --out=experiments/results/transfer",
        "    python -m experiments.rate_transfer --out=experiments/results/transfer --stage=report",
        "",
        f"GPTs with heads of width 32, RMSNorm and rotary positions, on the source text of Python's standard library, "
        f"in one byte-level BPE of 512 tokens. Each run is {one['step']} updates of {one['tokens'] // one['step']:,} "
        f"tokens: AdamW, warm-up over an eighth and then a cosine to a tenth, weight decay 0.1. Factor 1 is "
        f"{one['learning_rate']:g}, about the best of the base, which has width {width} and {layers} layers. Losses "
        "are on 512 held-out rows, the same for all; runs of one seed see the same rows of text. "
        f"{len(found)} runs took {hours:.1f} hours on one shared core.",
        "",
        f"What it does not show: longer training, where the best rates are lower; other batch sizes, update rules and "
        f"texts; widths beyond {max(each['width'] for each in found)}. At the base both parametrisations have the same "
        "rates, but the standard one also divides initial values that write into the residual stream by "
        "√(2 layers).",
        "",
    ])  # fmt: skip
