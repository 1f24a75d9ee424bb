"""The figures of `experiments.long_context`, from its records."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.long_context_tasks import EDGES, LENGTHS, MIXERS, VALUES
from jaxformer.scaling import plotting

SLOPES, FAVOR, NEEDLE = "slopes", "favor", "needle"  # parts, and the names of their figures
Records = Sequence[dict[str, Any]]
LEAST = 30  # answers in a bin that is drawn
SMALL = {"font.size": 12.0, "legend.fontsize": 10.0}


def ways(found: Records) -> list[tuple[float, str, str]]:
    """(deviation, kind, directions) of the estimates, in the order of their records."""
    keys = {(each["deviation"], each["kind"], each["directions"]): None for each in found}
    return sorted(keys, key=lambda way: way[0])


def errors(found: Records, *way: Any) -> dict[int, list[float]]:
    """Features -> the error of each draw."""
    mine = [each for each in found if (each["deviation"], each["kind"], each["directions"]) == way]
    return {each["features"]: each["errors"] for each in sorted(mine, key=lambda each: each["features"])}


def mixers(found: Records) -> list[str]:
    """Those that have records, in the order of `MIXERS`."""
    return [name for name in MIXERS if any(each["mixer"] == name for each in found)]


def last_loss(found: Records) -> float:
    """The mean training loss of the last updates, over seeds."""
    return float(np.mean([each["losses"][-1] for each in found]))


def slopes(found: Records) -> Any:
    """Time for each token above, temporaries below, against the tokens of the row; the slowest first in the legend."""
    last = {each["mechanism"]: each for each in sorted(found, key=lambda each: each["tokens"])}
    names = sorted(last, key=lambda name: -np.median(last[name]["seconds"]) / last[name]["tokens"])
    with plotting.matplotlib().rc_context(plotting.STYLE | SMALL):
        figure, (above, below) = plotting.panel(2)
        figure.set_size_inches(8.4, 8.4)
        for i, name in enumerate(names):
            mine = sorted((each for each in found if each["mechanism"] == name), key=lambda each: each["tokens"])
            tokens = [each["tokens"] for each in mine]
            style = plotting.line_style(i, len(names)) | {"marker": plotting.marker(i), "markersize": 4}
            style |= {"linewidth": 2.6 if name.startswith("dense") else 1.2}
            times = [1e6 * np.median(each["seconds"]) / each["tokens"] for each in mine]
            above.plot(tokens, times, label=name, **style)
            below.plot(tokens, [each["mib"] for each in mine], **style)
        above.set_ylabel("µs for each token")
        below.set(xlabel="tokens of the row", ylabel="temporaries, MiB")
        for axes in (above, below):
            _by_length(axes, sorted({each["tokens"] for each in found}))
            axes.set(yscale="log")
            plotting.log_ticks(axes.yaxis)
        figure.legend(loc="outside right upper")
    return figure


def _by_length(axes: Any, tokens: Sequence[int]) -> None:
    axes.set(xscale="log")
    axes.set_xticks(list(tokens), [f"{n // 1024}k" if n >= 1024 else str(n) for n in tokens], minor=False)
    axes.xaxis.set_minor_locator(plotting.matplotlib().ticker.NullLocator())


def favor(found: Records) -> Any:
    """Mean errors against features, a panel for each deviation; a line of slope -1/2 beside."""
    deviations = sorted({each["deviation"] for each in found})
    features = np.array(sorted({each["features"] for each in found}))
    with plotting.matplotlib().rc_context(plotting.STYLE | SMALL):
        figure = plotting.matplotlib().figure.Figure(figsize=(8.4, 4.2), layout="constrained")
        panels = figure.subplots(1, len(deviations), sharey=True, squeeze=False)[0]
        for axes, deviation in zip(panels, deviations, strict=True):
            mine = [way for way in ways(found) if way[0] == deviation]
            for i, way in enumerate(mine):
                of = errors(found, *way)
                means, style = [np.mean(each) for each in of.values()], plotting.line_style(i, len(mine))
                axes.plot(list(of), means, label=", ".join(way[1:]), marker=plotting.marker(i), **style)
            least = min(
                np.mean(errors(found, *way)[m]) * (m / features[-1]) ** 0.5 for way in mine for m in errors(found, *way)
            )
            axes.plot(
                features, 0.8 * least * (features / features[-1]) ** -0.5, color="0.5", linewidth=1, label="slope -1/2"
            )
            axes.set(xscale="log", yscale="log", xlabel="features m", title=f"deviation of q and k: {deviation:g}")
            axes.set_xticks(features[::2], [str(m) for m in features[::2]], minor=False)
            axes.xaxis.set_minor_locator(plotting.matplotlib().ticker.NullLocator())
            plotting.log_ticks(axes.yaxis)
        panels[0].set_ylabel("relative error")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def needle(found: Records) -> Any:
    """Answers that are right against the distance, a panel for each length of the rows: all seeds together."""
    names = mixers(found)
    with plotting.matplotlib().rc_context(plotting.STYLE | SMALL):
        figure = plotting.matplotlib().figure.Figure(figsize=(9.6, 4.6), layout="constrained")
        panels = figure.subplots(1, len(LENGTHS), sharey=True)
        for axes, length in zip(panels, map(str, LENGTHS), strict=True):
            shown: set[int] = set()
            for i, name in enumerate(names):
                mine = [each for each in found if each["mixer"] == name]
                right, tried = (np.sum([each[of][length] for each in mine], axis=0) for of in ("right", "tried"))
                drawn = tried >= LEAST
                edges = np.array(EDGES)[drawn]
                style = plotting.line_style(i, len(names)) | {"marker": plotting.marker(i)}
                axes.plot(edges * 2**0.5, right[drawn] / tried[drawn], label=name, **style)
                shown |= set(edges.tolist())
            axes.axhline(1 / VALUES, color="0.5", linewidth=1, linestyle=":", label="chance")
            axes.set(title=f"rows of {length}", ylim=(-0.02, 1.04))
            _by_length(axes, sorted({*shown, 2 * max(shown, default=1)}))
        panels[0].set_ylabel("answers that are right")
        panels[len(LENGTHS) // 2].set_xlabel("tokens between needle and question")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


FIGURES = {SLOPES: slopes, FAVOR: favor, NEEDLE: needle}
