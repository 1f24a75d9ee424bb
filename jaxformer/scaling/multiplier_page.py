"""The multipliers of several variants as figures, lines, JSON and one page."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.scaling import plotting, report
from jaxformer.scaling.compare import Multiplier
from jaxformer.scaling.worth import Interval

_CAPTIONS = {
    "forest": "Compute multiplier of each variant at the largest common budget, and its factor per tenfold compute, "
    "with 95% intervals. Right of the line: the variant saves.",
    "frontiers": "Loss at the best size of each budget, with 95% intervals.",
    "multiplier": "Compute multiplier at each budget, with 95% intervals.",
}


def lines(name: str, changes: str, found: Multiplier) -> list[str]:
    """Three lines about a variant."""
    more = f"parameters {found.parameters}" + (f", seconds {found.seconds}" if found.seconds is not None else "")
    return [
        f"{name} ({changes}): {found.verdict}",
        f"  buys {found.flop} times its compute at {found.at:.3g} FLOP, changing by {found.trend} per tenfold compute",
        f"  in {more}; noise of a run {100 * found.noise:.2g} %" + "".join(f"; {note}" for note in found.notes[:1])
        + (f" and {len(found.notes) - 1} more notes on the page" if len(found.notes) > 1 else ""),
    ]  # fmt: skip


def draw(found: Mapping[str, Multiplier]) -> dict[str, Any]:
    """The figures by name, as matplotlib's."""
    with plotting.matplotlib().rc_context(plotting.STYLE):
        return {"forest": _forest(found), "frontiers": _frontiers(found), "multiplier": _multipliers(found)}


def page(
    title: str,
    found: Mapping[str, Multiplier],
    changes: Mapping[str, str],
    tuned: Sequence[Mapping[str, Any]],
    *,
    commands: Sequence[str] = (),
    manifest: Mapping[str, Any] | None = None,
) -> str:
    """The page as text. `tuned`: rows of the rates that were tried and chosen."""
    rows = [
        {"variant": name, "changes": changes[name], "verdict": each.verdict, "multiplier": _cell(each.flop),
         "at (FLOP)": each.at, "per tenfold compute": _cell(each.trend),
         "in seconds": "not measured" if each.seconds is None else _cell(each.seconds),
         "in parameters": _cell(each.parameters)} for name, each in found.items()
    ]  # fmt: skip
    figures = [report.figure_of(key, report.embed(figure), _CAPTIONS[key]) for key, figure in draw(found).items()]
    parts = [f"<h1>{html.escape(title)}</h1>", "<h2>What each variant is worth</h2>", report.table(rows),
             "<p>A multiplier of 1.5: the variant reaches with C FLOP the loss for which the baseline needs 1.5 C."
             " Intervals are of 95 %.</p>", '<h2>Figures</h2><div class="figures">', *figures, "</div>"]  # fmt: skip
    for name, each in found.items():
        budgets = [
            {"C (FLOP)": at.flops, "multiplier": _cell(at.multiplier), "loss of the baseline": _cell(at.loss_b),
             "loss of the variant": _cell(at.loss_v), "best N of the baseline": plotting.count(at.size_b),
             "best N of the variant": plotting.count(at.size_v)} for at in each.budgets
        ]  # fmt: skip
        forms = ", ".join(f"{form} {100 * weight:.0f}%" for form, weight in each.forms.items())
        notes = [{"note": line} for line in (*each.notes, f"forms of the loss surface: {forms}",
                 f"noise of a run: {100 * each.noise:.2g} %")]  # fmt: skip
        parts += [f"<h2>{html.escape(name)}</h2>", report.table(budgets), report.table(notes)]
    parts += ["<h2>What was tuned</h2>", report.table(list(tuned))]
    return report.document(title, parts, commands, manifest)


def as_json(found: Mapping[str, Multiplier]) -> dict[str, Any]:
    """All numbers, for `report.write_json`."""
    return {name: {**each._asdict(), **{key: _cell(getattr(each, key)) for key in ("flop", "trend", "parameters")},
                   "seconds": None if each.seconds is None else _cell(each.seconds),
                   "budgets": [{key: _cell(value) if isinstance(value, Interval) else value
                                for key, value in at._asdict().items()} for at in each.budgets]}
            for name, each in found.items()}  # fmt: skip


def tuned_rates(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each size of each ladder: the rates tried, and those of its runs in the fit."""
    out = []
    for name, found in records.items():
        finals = [record for record in found if record["kind"] == "final"]
        for width in sorted({record["width"] for record in finals}):
            mine = [record for record in finals if record["width"] == width]
            rates = sorted({record["learning_rate"] for record in mine})
            used = sorted({record["learning_rate"] for record in mine if record["role"] == "ladder"})
            out.append({"ladder": name, "width": width, "parameters": plotting.count(mine[0]["params"]),
                        "rates tried": ", ".join(f"{rate:g}" for rate in rates),
                        "rates used": ", ".join(f"{rate:g}" for rate in used),
                        "seeds": len({record["seed"] for record in mine if record["role"] == "ladder"})})  # fmt: skip
    return out


def _cell(of: Interval) -> dict[str, Any]:
    if not of.known:
        return {"value": None, "ci95": [None, None], "why": "the runs do not determine it"}
    return {"value": of.value, "ci95": [of.low, of.high]}


def _forest(found: Mapping[str, Multiplier]) -> Any:
    figure, axes = plotting.panel(2)
    shown = (axes[0], "flop", "compute multiplier"), (axes[1], "trend", "factor per tenfold compute")
    for panel, key, label in shown:
        for i, each in enumerate(found.values()):
            of = getattr(each, key)
            if of.known:
                panel.errorbar(of.value, i, xerr=[[of.value - of.low], [of.high - of.value]], fmt="o", color="black",
                               capsize=3)  # fmt: skip
        panel.axvline(1.0, color="0.5", linewidth=1)
        panel.set_yticks(range(len(found)), list(found))
        panel.set(xscale="log", xlabel=label, ylim=(len(found) - 0.5, -0.5))
        plotting.log_ticks(panel.xaxis, "{:.3g}".format)
    return figure


def _frontiers(found: Mapping[str, Multiplier]) -> Any:
    figure, axes = plotting.panel()
    first = next(iter(found.values()))
    curves = {"baseline": [(at.flops, at.loss_b) for at in first.budgets]}
    curves |= {name: [(at.flops, at.loss_v) for at in each.budgets] for name, each in found.items()}
    _curves(axes, curves)
    axes.set(yscale="log", xlabel=plotting.UNITS["C"], ylabel="loss at the best size (nats per token)")
    plotting.loss_ticks(axes.yaxis)
    return figure


def _multipliers(found: Mapping[str, Multiplier]) -> Any:
    figure, axes = plotting.panel()
    _curves(axes, {name: [(at.flops, at.multiplier) for at in each.budgets] for name, each in found.items()})
    axes.axhline(1.0, color="0.5", linewidth=1)
    axes.set(yscale="log", xlabel=plotting.UNITS["C"], ylabel="compute multiplier")
    plotting.log_ticks(axes.yaxis, "{:.3g}".format)
    return figure


def _curves(axes: Any, curves: Mapping[str, Sequence[tuple[float, Interval]]]) -> None:
    for i, (name, points) in enumerate(curves.items()):
        known = [(c, of) for c, of in points if of.known]
        shift = 1 + 0.02 * (i - (len(curves) - 1) / 2)  # so that bars do not hide each other
        axes.errorbar(
            [c * shift for c, _ in known], [of.value for _, of in known],
            yerr=[[of.value - of.low for _, of in known], [of.high - of.value for _, of in known]],
            marker=plotting.marker(i), markersize=5, capsize=3, label=name, **plotting.line_style(i, len(curves)),
        )  # fmt: skip
    axes.set_xscale("log")
    plotting.log_ticks(axes.xaxis, plotting.flop)
    for text in axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5)).get_texts():
        text.set_parse_math(False)
