"""The page of the coordinate check, from its records: slopes of changes against width and depth, and their figure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.scaling import plotting

COLUMNS = (("width", "logits"), ("width", "first"), ("width", "last"), ("layers", "logits"), ("layers", "last"))
NAMES = {"standard": "standard", "mup": "muP"}
SERIES = [(kind, name) for kind in NAMES for name in ("logits", "last")]


def curve(
    found: Sequence[Mapping[str, Any]], optimizer: str, kind: str, name: str, sweep: str, step: int = -1
) -> list[tuple[int, float]]:
    """(size, change up to the update with this index) of an output at each width or number of layers, the other being
    the smallest: the geometric mean over seeds."""
    other = "layers" if sweep == "width" else "width"
    base = min(each[other] for each in found)
    mine = [each for each in found if (each["optimizer"], each["kind"], each[other]) == (optimizer, kind, base)]
    sizes = sorted({each[sweep] for each in mine})
    logs = {size: [math.log(each["changes"][name][step]) for each in mine if each[sweep] == size] for size in sizes}
    return [(size, math.exp(sum(values) / len(values))) for size, values in logs.items()]


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Of the logarithm of the change over that of the size, by least squares; nan of fewer than two sizes.

    >>> round(slope([(64, 0.1), (256, 0.4)]), 3)
    1.0
    """
    if len(points) < 2:
        return math.nan
    x, y = np.log(np.array(points, float)).T
    return float(np.polyfit(x, y, 1)[0])


def figure(found: Sequence[Mapping[str, Any]], optimizer: str = "adamw") -> Any:
    """Changes after the last update against width and depth."""
    package = plotting.matplotlib()
    with package.rc_context(plotting.STYLE):
        drawn = package.figure.Figure(figsize=(8.4, 3.6), layout="constrained")
        for axes, sweep in zip(drawn.subplots(1, 2, sharey=True), ("width", "layers"), strict=True):
            for i, (kind, name) in enumerate(SERIES):
                label = f"{NAMES[kind]}, {'logits' if name == 'logits' else 'last layer'}"
                of = curve(found, optimizer, kind, name, sweep)
                axes.plot(*zip(*of, strict=True), label=label, marker=plotting.marker(i), **plotting.line_style(i, 4))
            axes.set(xscale="log", yscale="log", xlabel=sweep)
            axes.set_xticks(sorted({size for size, _ in of}), minor=False)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_locator(package.ticker.NullLocator())
        drawn.axes[0].set_ylabel("mean |change|")
        drawn.axes[0].legend(loc="upper left")
    return drawn


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """The page, in Markdown."""
    rows = []
    for optimizer in dict.fromkeys(each["optimizer"] for each in found):
        for kind, name in NAMES.items():
            curves = [curve(found, optimizer, kind, output, sweep) for sweep, output in COLUMNS]
            most = [f"{of[-1][0] if of else 'none'}" for of in (curves[0], curves[-1])]
            slopes = ["" if math.isnan(each) else f"{each:+.2f}" for each in map(slope, curves)]
            rows.append(f"| {' | '.join([optimizer, name, *slopes[:3], most[0], *slopes[3:], most[1]])} |")
    updates = len(found[0]["changes"]["logits"])
    seeds, width, layers = (
        1 + max(each["seed"] for each in found),
        *(min(e[n] for e in found) for n in ("width", "layers")),
    )
    return "\n".join([
        "# coordinates: do outputs move alike at every width and depth?",
        "",
        "    python -m experiments.coordinates --out=experiments/results/coordinates",
        "",
        f"A GPT is updated {updates} times on one batch. How far its logits and the residual stream after its first "
        f"and last layer have moved, as a power of the width (at {layers} layers) or of the number of layers (at width "
        f"{width}): 0 is what muP promises. The sizes start at {width} and {layers}, which is the base, and double up "
        f"to the one given; {seeds} seeds.",
        "",
        "![mean change of logits and of the last layer's output against width and depth, with AdamW](coordinates.svg)",
        "",
        "| optimizer | parametrisation | logits, by width | first layer | last layer | up to width | logits, by depth "
        "| last layer | up to layers |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
    ])  # fmt: skip
