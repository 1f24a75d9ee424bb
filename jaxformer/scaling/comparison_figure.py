"""A sweep's comparison as a figure: final loss against the first field that is swept, a line for each other value."""

import math
from collections.abc import Sequence
from typing import Any

from jaxformer.scaling import plotting
from jaxformer.scaling.comparison import SEED, Row
from jaxformer.scaling.comparison_table import short, value_text

FAR = 8  # values that differ by this factor are on a logarithmic axis
APART = 5.0  # points between lines at the same value


def figure(rows: Sequence[Row]) -> Any:
    """The figure of `rows`, of which some run has finished.

    Small dots are runs, the others their means, bars standard errors: over seeds, or of the evaluation where there is
    one run. A run that diverged is a cross at the top. Values are on a logarithmic axis where they differ by a large
    factor, with 0 at its left end.
    """
    with plotting.matplotlib().rc_context(plotting.STYLE):
        return _figure(rows)


def _figure(rows: Sequence[Row]) -> Any:
    drawn, axes = plotting.panel()
    alone = not rows[0].values  # seeds, and nothing else
    if alone:
        rows = [row._replace(values={SEED: seed}, losses={seed: loss}, loss=loss, stderr=math.nan)
                for row in rows for seed, loss in row.losses.items()]  # fmt: skip
    fields = list(rows[0].values)
    across = next((f for f in fields if all(_is_number(row.values[f]) for row in rows)), fields[0])
    values = list({value_text(row.values[across]): row.values[across] for row in rows}.values())
    numbers = all(map(_is_number, values))
    values = sorted(values) if numbers else values
    place = {value_text(v): float(v) if numbers else float(i) for i, v in enumerate(values)}
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: place[value_text(row.values[across])]):
        rest = ", ".join(f"{short(f)} {value_text(v)}" for f, v in row.values.items() if f != across)
        lines.setdefault(rest, []).append(row)
    _axis(axes, list(place.values()), [value_text(v) for v in values], numbers)
    finite = [loss for row in rows for loss in row.losses.values() if math.isfinite(loss)]
    top = max(finite) + 0.12 * ((max(finite) - min(finite)) or 0.1)
    crosses: list[Any] = []
    corners: list[tuple[float, float]] = []
    for i, (label, mine) in enumerate(lines.items()):
        style = plotting.line_style(i, len(lines))
        if alone or not numbers:  # nothing lies between two of them
            style["linestyle"] = ""
        aside = (i - (len(lines) - 1) / 2) * APART / 72  # so that bars do not hide each other
        shift = plotting.matplotlib().transforms.ScaledTranslation(aside, 0, drawn.dpi_scale_trans)
        style["transform"] = axes.transData + shift
        known = [row for row in mine if row.losses]
        at = [place[value_text(row.values[across])] for row in known]
        bars = [row.stderr if math.isfinite(row.stderr) else 0.0 for row in known]
        axes.errorbar(at, [row.loss for row in known], yerr=None if alone else bars, marker=plotting.marker(i),
                      markersize=5, capsize=3, label=label or None, **style)  # fmt: skip
        for x, row, bar in zip(at, known, bars, strict=True):
            corners += [(x, y) for y in (row.loss - bar, row.loss + bar, *row.losses.values())]
        dots = {"color": style["color"], "transform": style["transform"]}
        for row, x in zip(known, at, strict=True):
            if len(row.losses) > 1:
                axes.plot([x] * len(row.losses), list(row.losses.values()), ".", alpha=0.45, **dots)
        bad = [place[value_text(row.values[across])] for row in mine
               if any(end.status == "diverged" for end in row.others)]  # fmt: skip
        crosses += axes.plot(bad, [top] * len(bad), "x", markersize=8, **dots) if bad else []
        corners += [(x, top) for x in bad]
    axes.update_datalim([corner for corner in corners if math.isfinite(corner[1])])  # shifted lines do not count
    axes.margins(x=0.08)
    if crosses:
        crosses[0].set_label("diverged")
    axes.set(xlabel=across, ylabel="final validation loss, nats per token")
    axes.set_title(_title(rows, alone))
    if crosses or len(lines) > 1:
        for text in axes.legend(loc="upper left", bbox_to_anchor=(1.04, 1.0)).get_texts():
            text.set_parse_math(False)
    return drawn


def _title(rows: Sequence[Row], alone: bool) -> str:
    counts = {len(row.losses) for row in rows if row.losses}
    if alone:
        return "one run for each seed"
    if max(counts) == 1:
        return "one run each; bars: standard error of the evaluation alone"
    seeds = str(max(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f"mean over {seeds} seeds; bars: standard error"


def _axis(axes: Any, places: list[float], texts: list[str], numbers: bool) -> None:
    """The scale of the horizontal axis, with a tick at each value."""
    positive = [place for place in places if place > 0]
    far = numbers and len(positive) > 1 and max(positive) >= FAR * min(positive)
    if far and len(positive) == len(places):
        axes.set_xscale("log")
    elif far and min(places) == 0:
        axes.set_xscale("symlog", linthresh=min(positive), linscale=0.5)
    if len(places) <= 12:
        axes.set_xticks(places, texts)
        axes.xaxis.set_minor_locator(plotting.matplotlib().ticker.NullLocator())
    if not numbers:
        axes.set_xlim(-0.5, len(places) - 0.5)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
