"""The page of `experiments.rate_transfer`, from its records: where the best learning rate lies at each size."""

import math

import numpy as np

from experiments.rate_transfer_optima import (
    FACTORS,
    LABELS,
    SWEEPS,
    Records,
    base,
    best,
    drift,
    kinds,
    losses,
    sizes,
)  # fmt: skip
from jaxformer.scaling import plotting


def figure(found: Records) -> bytes:
    """Loss against the factor: a column for each of the two parametrisations, widths above depths."""
    package = plotting.matplotlib()
    with package.rc_context(plotting.STYLE):
        drawn = package.figure.Figure(figsize=(8.4, 7.2), layout="constrained")
        panels = drawn.subplots(2, 2, sharex=True, sharey="row")
        for row, sweep in zip(panels, SWEEPS, strict=True):
            every = sorted({size for kind in ("standard", "mup") for size in sizes(found, kind, sweep)})
            for axes, kind in zip(row, ("standard", "mup"), strict=True):
                for size in sizes(found, kind, sweep):
                    table = losses(found, kind, *size)
                    y = np.where(np.isfinite(table).all(0), table.mean(0), np.nan)
                    name = f"width {size[0]}" if sweep == "width" else f"{size[1]} layers"
                    i = every.index(size)
                    style = plotting.line_style(i, len(every))
                    axes.plot(FACTORS, y, label=name, marker=plotting.marker(i), **style)
                    low = int(np.nanargmin(y))
                    axes.plot(FACTORS[low], y[low], marker="o", markersize=12, fillstyle="none", color=style["color"])
                axes.set(xscale="log", title=f"{LABELS[kind]}, by {'width' if sweep == 'width' else 'depth'}")
                axes.set_xticks(FACTORS, [f"{factor:g}" for factor in FACTORS])
                axes.xaxis.set_minor_locator(package.ticker.NullLocator())
            row[0].set_ylabel("held-out nats per token")
            if row[0].lines:
                row[0].legend(loc="best")
        for axes in panels[-1]:
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
    if abs(of.grid) > 1:
        told = "more than one step"
    else:
        told = "or further, for a best factor is at the edge of the grid" if of.edge else "within one step"
    steps = "1 step" if abs(of.grid) == 1 else f"{abs(of.grid)} steps"
    side = "" if of.grid == 0 else " down" if of.grid < 0 else " up"
    return (
        f"- {LABELS[kind]}, {name} {first} to {last}: the best factor moves by at most {steps} of the grid"
        f"{side}, {told}; the parabolas' minima by {of.steps:+.2f}. With the base's best factor {name} {last} ends "
        f"{of.cost.text('.3f')} nats above its own best."
    )


def claim(found: Records) -> list[str]:
    """Sentences for all of them."""
    lines = [said(found, kind, sweep) for kind in kinds(found) for sweep in SWEEPS]
    both = [size for sweep in SWEEPS for size in sizes(found, "mup", sweep) if best(found, "standard", *size)]
    less = []
    for size in dict.fromkeys(both):
        one, other = best(found, "mup", *size), best(found, "standard", *size)
        assert one is not None and other is not None
        less.append(f"{one.loss.value - other.loss.value:+.3f} at width {size[0]} and {size[1]} layers")
    beside = f"- Loss of muP less that of the standard one, each at its best factor: {', '.join(less)}."
    return [*(line for line in lines if line is not None), *([beside] if less else [])]


def page(found: Records, planned: int = 0) -> str:
    """The page, in Markdown; `planned`: runs that there are to be."""
    width, layers = base(found)
    one = next(each for each in found if each["factor"] == 1)
    seeds = [of.seeds for kind in ("standard", "mup") for sweep in SWEEPS for size in sizes(found, kind, sweep)
             if (of := best(found, kind, *size)) is not None]  # fmt: skip
    hours, few, many = sum(each["seconds"] for each in found) / 3600, min(seeds, default=0), max(seeds, default=0)
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
        *([f"{len(found)} of {planned} runs have ended; the command below goes on with the others.", ""]
          if len(found) < planned else []),
        *table(found),
        "",
        f"Means over {few if few == many else f'{few} to {many}'} seed{'s' * (many != 1)}, with 95 % intervals "
        "(Student's) where there are two or more. *Tied*: the interval of the difference to the best, seed by seed, "
        "has 0. The minimum is that of a parabola through the three points around the best of each seed.",
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
