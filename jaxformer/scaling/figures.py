"""Figures of a fit: the result of `fit.fit_table` drawn with the table's losses."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer.scaling import plotting
from jaxformer.scaling.fit import CALLED, KAPLANS
from jaxformer.scaling.table import Table


def draw(table: Table, result: Mapping[str, Any]) -> dict[str, Any]:
    """All figures that a result of `fit.fit_table` allows: name -> matplotlib Figure.

    "loss_compute", "isoflop", "optimum", "residuals", "holdout" and "profile" for a table with N and D;
    "power_law_N" (or D, C) for a table with one variable.
    """
    out = {}
    with plotting.matplotlib().rc_context(plotting.STYLE):
        if "parametric" in result:
            out["loss_compute"] = loss_compute(table, result)
            if "skipped" not in result["isoflop"]:
                out["isoflop"] = isoflop_curves(table, result["isoflop"])
            out["optimum"] = optimum_lines(table, result)
            out["residuals"] = residual_panels(table, result)
            if "skipped" not in result["holdout"]:
                out["holdout"] = predicted_measured(result["holdout"])
            out["profile"] = floor_profile(result)
        elif len(table.known) == 1:
            name = table.known[0]
            out[f"power_law_{name}"] = power_law(table, name, result["power_laws"][f"L({name})"])
    return out


def loss_compute(table: Table, result: Mapping[str, Any]) -> Any:
    """Loss against compute, coloured by size, with the fitted law at its optimal size and its 95 % band."""
    figure, axes = plotting.panel()
    log_n = np.log10(table.n)
    shades = axes.scatter(
        table.c, table.loss, c=log_n, cmap="cividis", s=22, edgecolors="0.25", linewidths=0.4, zorder=3
    )
    curve = result["optimal"]["curve"]
    axes.fill_between(curve["C"], curve["loss_low"], curve["loss_high"], color="0.8", linewidth=0, zorder=1)
    name = f"{CALLED[result['optimal']['law']]} at its best N, 95% band"
    _inside_and_beyond(axes, curve, "loss", table, name, "extrapolated")
    floor = result[result["fits_best"]]["E"]
    if floor["value"] is not None:
        axes.axhline(floor["value"], color="black", linestyle="--", linewidth=1, label=f"E = {floor['value']:.3f}")
    if (flagged := _flagged(table, result)).any():
        axes.plot(table.c[flagged], table.loss[flagged], "o", markersize=11, markerfacecolor="none",
                  markeredgecolor="black", zorder=5, label="likely outlier")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel=plotting.UNITS["C"], ylabel="loss (nats per token)",
             title="Loss against compute")  # fmt: skip
    plotting.loss_ticks(axes.yaxis)
    plotting.log_ticks(axes.xaxis, plotting.flop)
    figure.legend(loc="outside lower center", ncols=2)
    plotting.size_bar(figure, axes, shades, log_n, "N")
    return figure


def isoflop_curves(table: Table, iso: Mapping[str, Any]) -> Any:
    """Loss against size at each budget, with the fitted curve, its minimum and the minimum's 95 % interval."""
    figure, axes = plotting.panel()
    row_of = {int(row): i for i, row in enumerate(table.rows)}
    for i, budget in enumerate(iso["budgets"]):
        index = [row_of[row] for row in budget["rows"]]
        style = plotting.line_style(i, len(iso["budgets"]))
        x = np.linspace(np.log(table.n[index]).min(), np.log(table.n[index]).max(), 120)
        y = np.exp(np.polynomial.polynomial.polyval(x - budget["centre"], budget["log_loss"]))
        axes.plot(np.exp(x), y, linewidth=1.3, **style)
        axes.plot(table.n[index], table.loss[index], plotting.marker(i), color=style["color"], markersize=5,
                  markeredgecolor="0.25", markeredgewidth=0.4, label=f"{budget['C']:.2g} FLOP")  # fmt: skip
        axes.plot(budget["N_ci95"], [budget["loss"]] * 2, color="black", linewidth=2.2, solid_capstyle="butt", zorder=4)
        axes.plot(budget["N"], budget["loss"], "*", color="black", markersize=10, zorder=5)
    axes.plot([], [], "*-", color="black", markersize=10, linewidth=2.2, label="minimum,\n95% interval")
    axes.set(xscale="log", xlabel=plotting.UNITS["N"], ylabel="loss (nats per token)", title="Iso-FLOP curves")
    plotting.log_ticks(axes.xaxis)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title="budget C")
    return figure


def optimum_lines(table: Table, result: Mapping[str, Any]) -> Any:
    """Compute-optimal N and D against C, from all three approaches."""
    figure, panels = plotting.panel(2)
    curve = result["optimal"]["curve"]
    for axes, key in zip(panels, ("N", "D"), strict=True):
        text = _growth(result["optimal"]["a" if key == "N" else "b"])
        axes.fill_between(curve["C"], curve[f"{key}_low"], curve[f"{key}_high"], color="0.8", linewidth=0)
        name = CALLED[result["optimal"]["law"]]
        _inside_and_beyond(axes, curve, key, table, f"3 {name}: {text}", "its extrapolation")
        styles = (("envelope", "1 envelope", "s", "--", 0.15), ("isoflop", "2 iso-FLOP", "o", "-.", 0.75))
        for part, name, marker, dash, shade in styles:
            if "skipped" in (found := result[part]):
                continue
            c = np.array([budget["C"] for budget in found["budgets"]])
            y = np.array([budget[key] for budget in found["budgets"]])
            slope = found["a" if key == "N" else "b"]
            axes.plot(c, y, marker, color=plotting.shade(shade), markeredgecolor="black", markersize=5, zorder=4,
                      markeredgewidth=0.6, label=f"{name}: {_growth(slope)}")  # fmt: skip
            if (exponent := _point(slope)) is not None:
                line = np.exp(np.log(y).mean() + exponent * (np.log(c) - np.log(c).mean()))
                axes.plot(c, line, linestyle=dash, color=plotting.shade(shade), linewidth=1.2)
            if key == "N" and part == "isoflop":
                low, high = np.array([budget["N_ci95"] for budget in found["budgets"]]).T
                axes.vlines(c, low, high, color="0.2", linewidth=1.0, zorder=3)
        axes.set(xscale="log", yscale="log", xlabel=plotting.UNITS["C"], ylabel=f"optimal {plotting.UNITS[key]}")
        plotting.log_ticks(axes.xaxis, plotting.flop)
        plotting.log_ticks(axes.yaxis)
        axes.legend(loc="upper left")
    figure.suptitle("Compute-optimal size and tokens")
    return figure


def residual_panels(table: Table, result: Mapping[str, Any]) -> Any:
    """Residuals in percent of the loss, over N and over D; likely outliers are labelled with their row."""
    figure, panels = plotting.panel(2)
    percent = 100 * np.expm1(np.array(result["residuals"]["log"]))
    spread = 100 * result["residuals"]["scale"]
    flagged = _flagged(table, result)
    for axes, key in zip(panels, ("N", "D"), strict=True):
        x = table.column(key)
        axes.axhspan(-2 * spread, 2 * spread, color="0.92", linewidth=0, label="± 2 robust standard deviations")
        axes.axhline(0, color="black", linewidth=1)
        axes.plot(x[~flagged], percent[~flagged], "o", color=plotting.shade(0.3), markersize=4, alpha=0.8)
        if flagged.any():
            axes.plot(x[flagged], percent[flagged], "X", color="black", markersize=7, label="likely outlier (row)")
            for i in np.flatnonzero(flagged)[np.argsort(-np.abs(percent[flagged]))[:12]]:
                axes.annotate(str(table.rows[i]), (x[i], percent[i]), xytext=(5, 4), textcoords="offset points",
                              fontsize=8)  # fmt: skip
        axes.set(xscale="log", xlabel=plotting.UNITS[key], ylabel="measured minus fitted loss (%)")
        plotting.log_ticks(axes.xaxis)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"Residuals of {CALLED[result['optimal']['law']]}")
    return figure


def predicted_measured(holdout: Mapping[str, Any]) -> Any:
    """Predicted losses of the largest budgets against the measured ones."""
    figure, axes = plotting.panel()
    rows = holdout["rows"]
    measured = np.array([row["measured"] for row in rows])
    predicted = np.array([row["predicted"] for row in rows])
    low, high = np.array([row["ci95"] for row in rows]).T
    joined = {
        key: np.array([row["predicted"] for row in holdout[key]["rows"]])
        for key in KAPLANS if "rows" in holdout.get(key, {})
    }  # fmt: skip
    others = np.concatenate([*joined.values(), []])
    ends = np.array([min([measured.min(), low.min(), *others]), max([measured.max(), high.max(), *others])])
    ends = ends + np.array([-0.05, 0.05]) * max(np.ptp(ends), 0.01 * ends[0])
    axes.fill_between(ends, 0.99 * ends, 1.01 * ends, color="0.9", linewidth=0, label="within 1%")
    axes.plot(ends, ends, color="black", linewidth=1, label="predicted = measured")
    bars = [np.maximum(predicted - low, 0), np.maximum(high - predicted, 0)]
    axes.errorbar(measured, predicted, bars, fmt="o", color=plotting.shade(0.3), markersize=5, ecolor="0.3",
                  elinewidth=1, capsize=2,
                  label=f"by {CALLED['parametric']}, 95% interval: {_off(holdout)}")  # fmt: skip
    for (key, points), shape in zip(joined.items(), "s^", strict=False):
        name = f"by {CALLED[key]}: {_off(holdout[key])}"
        axes.plot(measured, points, shape, color="black", markerfacecolor="none", markersize=6, label=name)
    axes.set(xlabel="measured loss (nats per token)", ylabel="predicted loss (nats per token)", xlim=ends, ylim=ends,
             title=f"Runs above {holdout['fitted_up_to']:.2g} FLOP, predicted from those below")  # fmt: skip
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def floor_profile(result: Mapping[str, Any]) -> Any:
    """Profile likelihood of E by each law with E, with the threshold of its 95 % interval."""
    laws = [(f"by {name}", result[key]) for key, name in CALLED.items() if "profile" in result.get(key, {})]
    figure, panels = plotting.panel(len(laws))
    for axes, (name, law) in zip(np.atleast_1d(panels), laws, strict=True):
        profile = law["profile"]
        floors, statistic, cut = np.array(profile["E"]), np.sqrt(profile["statistic"]), np.sqrt(profile["cut"])
        axes.plot(floors, statistic, "o-", color="black", markersize=3)
        axes.axhline(cut, color="0.3", linestyle="--", linewidth=1, label="threshold of the 95% interval")
        low, high = profile["ci95"]
        axes.axvspan(low, high, color="0.9", linewidth=0, label=f"{low:.3f} to {high:.3f}")
        axes.set(ylim=(0, 5 * cut), xlabel="irreducible loss E (nats per token)",
                 ylabel="root of the likelihood-ratio statistic", title=name)  # fmt: skip
        near = statistic < 5 * cut
        if near.sum() > 1:
            margin = 0.15 * np.ptp(floors[near])
            axes.set_xlim(max(floors[near].min() - margin, 0), floors[near].max() + margin)
        axes.legend(loc="best")
    figure.suptitle("How well these data know E")
    return figure


def power_law(table: Table, name: str, fitted: Mapping[str, Any]) -> Any:
    """Loss against one variable, with the fitted power laws with and without E."""
    figure, axes = plotting.panel()
    x = table.column(name)
    axes.plot(x, table.loss, "o", color=plotting.shade(0.3), markersize=5, label="measured")
    grid = np.geomspace(x.min(), x.max(), 120)
    for key, dash in (("with_floor", "-"), ("without_floor", "--")):
        law = fitted[key]
        values = {k: _point(law[k]) for k in ("E", "A", "alpha") if k in law}
        if not values or None in values.values():  # skipped, or a parameter could not be computed
            continue
        y = values.get("E", 0.0) + values["A"] * grid ** -values["alpha"]
        formula = rf"$E + A/{name}^\alpha$" if "E" in law else rf"$A/{name}^\alpha$"
        axes.plot(grid, y, linestyle=dash, color="black", label=f"{formula}, exponent {_short(law['alpha'])}")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel=plotting.UNITS[name],
        ylabel="loss (nats per token)",
        title=f"Loss against {name}",
    )
    plotting.loss_ticks(axes.yaxis)
    axes.legend(loc="upper right")
    return figure


def _inside_and_beyond(axes: Any, curve: Mapping[str, Any], key: str, table: Table, inside: str, beyond: str) -> None:
    """A line over C, solid up to the largest budget of the table and dotted beyond."""
    c, y = np.array(curve["C"]), np.array(curve[key])
    known = c <= table.c.max() * 1.0001
    axes.plot(c[known], y[known], color="black", zorder=4, label=inside)
    if not known.all():
        first = max(int(np.flatnonzero(~known)[0]) - 1, 0)
        axes.plot(c[first:], y[first:], color="black", linestyle=":", zorder=4, label=beyond)


def _flagged(table: Table, result: Mapping[str, Any]) -> np.ndarray:
    """[I] bool, True for likely outliers."""
    return np.isin(table.rows, [outlier["row"] for outlier in result["outliers"]])


def _off(held: Mapping[str, Any]) -> str:
    return f"off by {100 * held['mean_abs_error']:.2f}%"


def _point(quantity: Mapping[str, Any]) -> Any:
    """The value, or where the fit stopped if the data do not determine it; None if there is neither."""
    return quantity["value"] if quantity["value"] is not None else quantity.get("estimate")


def _growth(exponent: Mapping[str, Any]) -> str:
    return f"{'exponent' if exponent['value'] is None else '$C$ to the'} {_short(exponent)}"


def _short(quantity: Mapping[str, Any]) -> str:
    if quantity["value"] is None:
        return "not determined"
    low, high = quantity["ci95"]
    return f"{quantity['value']:.3f} [{low:.3f}, {high:.3f}]"
