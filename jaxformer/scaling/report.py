"""A self-contained HTML page about one or more fits: figures, tables with intervals, commands, manifest.

The page embeds its figures (SVG), needs no network and no scripts, and adapts to the screen width. Its input is dicts.

>>> quantity = {"value": 0.3478, "ci95": [0.31, 0.39], "stderr": 0.02}
>>> interval(quantity), interval({"value": None, "why": "its profile is flat down to zero", "ci95": [0, 1]})
('0.3478 [0.31, 0.39]', 'not determined: its profile is flat down to zero')
>>> html = page("A ladder", {"all parameters": {"parametric": {"alpha": quantity, "law": "L"}, "warnings": []}}, {})
>>> html.count("<html"), "0.3478" in html
(1, True)
"""

import base64
import html
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformer.scaling import plotting, verdict
from jaxformer.scaling.fit import CALLED, KAPLANS, LAWS
from jaxformer.storage import credentials, files
from jaxformer.storage.address import place

_CAPTIONS = {
    "loss_compute": "Loss of every run against its compute, coloured by size; the line is the law at its best size.",
    "isoflop": "Runs of equal compute, the curve through them, and its minimum with a 95% interval "
    "(approach 2 of Hoffmann et al. 2022).",
    "optimum": "Compute-optimal size and tokens at each budget: by the law that fits best (3), the envelope (1) and "
    "iso-FLOP curves (2). Bars are 95% intervals of the curves' minima.",
    "residuals": "Residuals of the law that fits best, in percent of the loss.",
    "holdout": "The largest budgets, left out of the fit and predicted from the smaller ones.",
    "profile": "The likelihood-ratio statistic with E fixed at each value and everything else refitted.",
    "learning_rate": "Final loss against peak learning rate at each size.",
    "training": "Loss while training.",
}
_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; color: #1a1a1a; background: #fff;
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid #ccc; }
p, ul { max-width: 44rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; margin: .4rem 0; }
th, td { text-align: left; padding: .28rem .9rem .28rem 0; border-bottom: 1px solid #e2e2e2; vertical-align: top; }
th { font-weight: 600; }
td.number { white-space: nowrap; }
.law { white-space: nowrap; }
li .law, td[data-label=finding] .law, td[data-label^=not] .law { white-space: normal; }
td[data-label=finding] { font-weight: 600; } td[data-label=value], td[data-label^="95"] { white-space: nowrap; }
td.why { color: #444; font-style: italic; }
.caption { color: #444; font-size: .92rem; margin: .8rem 0 .2rem; }
.figures { display: grid; gap: 1.4rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
figure { margin: 0; } figure img { width: 100%; height: auto; display: block; }
figcaption { font-size: .9rem; color: #444; }
pre { background: #f4f4f4; padding: .6rem .8rem; overflow-x: auto; font-size: .85rem; white-space: pre-wrap;
      overflow-wrap: anywhere; }
@media (max-width: 45rem) {
  .law { white-space: normal; }
  body { padding: .7rem; font-size: 15px; }
  table.wide, table.wide tbody, table.wide tr { display: block; }
  table.wide tr.head { display: none; }
  table.wide tr { border-bottom: 1px solid #999; padding: .35rem 0; }
  table.wide td { display: flex; gap: .7rem; border: 0; padding: .05rem 0; white-space: normal; }
  table.wide td:empty { display: none; }
  table.wide td::before { content: attr(data-label); flex: 0 0 8.5rem; color: #444; font-style: normal; }
  table.wide td[data-label=finding]::before { content: none; }
}
"""


def page(
    title: str,
    fits: Mapping[str, Mapping[str, Any]],
    figures: Mapping[str, str],
    *,
    found: Sequence[Mapping[str, Any]] = (),
    lacking: Sequence[str] = (),
    notes: Sequence[str] = (),
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    commands: Sequence[str] = (),
    manifest: Mapping[str, Any] | None = None,
) -> str:
    """The page as text.

    Args:
      title: heading.
      fits: how N and C are counted ("all parameters, 6ND") -> result of `fit.fit_table`. The first is shown in full, of
        the others only the exponents.
      figures: name -> SVG text (see `embed`) or a `data:` URL; shown in this order.
      found, lacking: the findings, a row each, and what would determine those that are not determined.
      notes: paragraphs on what was done and what it does not show.
      tables: heading -> rows, dicts with the same keys; a cell that is a dict with "ci95" is a number with an interval.
      commands: exact command lines.
      manifest: versions, devices, data, seeds; printed as JSON. Credentials are masked in both.
    """
    name, first = next(iter(fits.items()))
    parts = [f"<h1>{html.escape(title)}</h1>"]
    if found:
        parts += ["<h2>Findings</h2>", table(found, f"N and C counted as: {name}")]
    if lacking:
        parts += ["<h2>What would determine the rest</h2>", "<ul>", *(f"<li>{_law(line)}</li>" for line in lacking)]
        parts.append("</ul>")
    parts += [f"<p>{html.escape(note)}</p>" for note in notes]
    if figures:
        shown = [figure_of(key, picture, _CAPTIONS.get(key, key)) for key, picture in figures.items()]
        parts += ["<h2>Figures</h2>", '<div class="figures">', *shown, "</div>"]
    parts += _fit_tables(name, first)
    if len(fits) > 1:
        exponents = [{"counting": key, **_exponents(fit)} for key, fit in fits.items()]
        parts += ["<h2>Exponents under each way of counting</h2>", table(exponents)]
    for heading, rows in (tables or {}).items():
        parts += [f"<h2>{html.escape(heading)}</h2>", table(rows)]
    if warnings := dict.fromkeys(line for fit in fits.values() for line in fit.get("warnings", [])):
        parts += ["<h2>Notes of the fit</h2><ul>", *(f"<li>{html.escape(line)}</li>" for line in warnings), "</ul>"]
    return document(title, parts, commands, manifest)


def document(
    title: str, parts: Sequence[str], commands: Sequence[str] = (), manifest: Mapping[str, Any] | None = None
) -> str:
    """A page of HTML parts, ending in exact command lines and a manifest, as text."""
    parts = list(parts)
    if commands:
        parts += ["<h2>Commands</h2>", f"<pre>{html.escape(chr(10).join(map(credentials.mask_text, commands)))}</pre>"]
    if manifest:
        text = json.dumps(credentials.mask_manifest(manifest), indent=1, default=str, ensure_ascii=False)
        parts += ["<h2>Manifest</h2>", f"<pre>{html.escape(text)}</pre>"]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def write(path: str | os.PathLike, text: str) -> Path:
    """Writes a page atomically; returns its path. Characters that UTF-8 cannot encode (surrogates) are escaped."""
    path = place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, text.encode(errors="backslashreplace"))
    return path


def write_json(path: str | os.PathLike, value: Any) -> Path:
    """Writes a value as JSON, atomically; NaN and infinity, which JSON lacks, become null."""
    return write(path, json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def embed(figure: Any) -> str:
    """A matplotlib figure as SVG text, for `page`."""
    with plotting.matplotlib().rc_context(plotting.STYLE):
        return plotting.encoded(figure, "svg", bbox_inches="tight").decode()


def interval(quantity: Mapping[str, Any], number: Callable[[float], str] = "{:.4g}".format) -> str:
    """A number with its 95 % interval as text, or why it is not determined."""
    if quantity["value"] is None:
        return f"not determined: {quantity['why']}"
    low, high = quantity["ci95"]
    return f"{number(quantity['value'])} [{number(low)}, {number(high)}]"


def table(rows: Sequence[Mapping[str, Any]], caption: str | None = None) -> str:
    """An HTML table of dicts, with the keys of the first as header; wide ones become lists on narrow screens."""
    title = f'<p class="caption">{_set(caption)}</p>' if caption else ""
    if not rows:
        return f"{title}<p>none</p>"
    header = "".join(f"<th>{html.escape(str(key))}</th>" for key in rows[0])
    body = "".join("<tr>" + "".join(_cell(key, row.get(key)) for key in rows[0]) + "</tr>" for row in rows)
    kind = ' class="wide"' if len(rows[0]) > 2 else ""
    return f'{title}<div class="scroll"><table{kind}><tr class="head">{header}</tr>{body}</table></div>'


def _cell(key: str, value: Any) -> str:
    """One cell; numbers in columns N and D are written as 48.1M, 34.6B."""
    text, kind = "" if value is None else str(value), ""
    number = plotting.count if key in ("N", "D") else "{:.4g}".format
    if isinstance(value, Mapping) and "ci95" in value:
        text, kind = interval(value, number), "number" if value["value"] is not None else "why"
    elif isinstance(value, float):
        text, kind = number(value), "number"
    shown = _law(text) if text and key in ("parameter", "finding", "not determined because") else _set(text)
    return f'<td class="{kind}" data-label="{html.escape(key, quote=True)}">{shown}</td>'


def _set(text: str) -> str:
    return _law(text) if text.startswith("L = ") else html.escape(text)


def _law(text: str) -> str:
    """A law's formula or a parameter's name as HTML, with superscripts, subscripts and Greek letters.

    >>> _law("L = A / N^alpha + [B]^alpha_D")
    '<span class="law">L = A / N<sup>&alpha;</sup> + [B]<sup>&alpha;<sub>D</sub></sup></span>'
    """
    text = re.sub(r"\^(?:\((.*?)\)|(\w+))", lambda m: f"<sup>{m[1] or m[2]}</sup>", html.escape(text))
    text = re.sub(r"(alpha|beta|N|D)_(\w)", r"\1<sub>\2</sub>", text)
    text = re.sub(r"\b(alpha|beta)\b", r"&\1;", text)
    return f'<span class="law">{text}</span>'


def figure_of(name: str, picture: str, caption: str) -> str:
    """A figure as HTML, its picture SVG text (see `embed`) or a `data:` URL."""
    if not picture.startswith("data:"):
        picture = "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()
    text = html.escape(caption, quote=True)
    return (
        f'<figure id="{html.escape(name)}"><img src="{picture}" alt="{text}"><figcaption>{text}</figcaption></figure>'
    )


def _fit_tables(name: str, fit: Mapping[str, Any]) -> list[str]:
    out = []
    ranking = fit.get("ranking") or [{"law": key, "beaten": False} for key in CALLED if "law" in fit.get(key, {})]
    if ranking and "aicc" in ranking[0]:
        few = verdict.too_few(ranking[0]["count"])
        rows = [
            {"law": fit[row["law"]]["law"], "residuals, root mean square": f"{100 * row['rms']:.3g}%",
             "AICc": f"{verdict.higher(row['behind'])} higher" if row["behind"] else "lowest",
             "verdict": "beaten clearly" if row["beaten"] else "not distinguishable" if row["behind"] else "fits best"}
            for row in ranking
        ]  # fmt: skip
        rows = [{**row, "AICc": "", "verdict": "too few runs to compare"} for row in rows] if few else rows
        out += ["<h2>Which law fits best</h2>", table(rows, f"N and C counted as: {name}")]
        out += [f"<p><strong>{html.escape(line[0].upper() + line[1:])}.</strong></p>" for line in verdict.warnings(fit)]
    for row in ranking:
        law, key = fit[row["law"]], row["law"]
        out.append(f"<h2>{html.escape(CALLED[key][0].upper() + CALLED[key][1:])}: {_law(law['law'])}</h2>")
        if row["beaten"]:
            best = html.escape(CALLED[ranking[0]["law"]])
            out.append(f"<p>Clearly beaten by {best}: these data reject this law.</p>")
        rows = [{"parameter": each, "value [95% interval]": law[each]} for each in LAWS[key].names if each in law]
        out.append(table(rows, "Kaplan et al. 2020, equation 1.5" if key == "kaplan" else None))
        if "profile" in law:
            ends = "{:.4g} to {:.4g}".format(*law["profile"]["ci95"])
            out.append(f"<p>E by profile likelihood: {ends} nats per token.</p>")
    if "optimal" in fit:
        rows = [
            {"C (FLOP)": row["C"], "of the largest run": f"{row['extrapolation']:g} x", "N": row["N"], "D": row["D"],
             "tokens/parameter": row["D/N"], "loss": row["loss"]} for row in fit["optimal"]["budgets"]
        ]  # fmt: skip
        out += ["<h2>Compute-optimal size and tokens</h2>", table(rows, f"by {CALLED[fit['optimal']['law']]}")]
        out += _isoflop(fit["isoflop"])
        laws = [(f"3, {CALLED[row['law']]}" + ", beaten" * row["beaten"], fit[row["law"]]) for row in ranking]
        approaches = [*laws, ("2, iso-FLOP curves", fit["isoflop"]), ("1, envelope", fit["envelope"])]
        rows = [
            {"approach": name, "a (N ~ C^a)": part["a"], "b (D ~ C^b)": part["b"]}
            for name, part in approaches if "a" in part
        ]  # fmt: skip
        out.append(table(rows, "exponents, by Chinchilla's three approaches (3: C taken as proportional to N D)"))
        skipped = [(name, html.escape(part["skipped"])) for name, part in approaches if "skipped" in part]
        out += [f"<p>Approach {name}: {why}.</p>" for name, why in skipped]
    if "rows" in fit.get("holdout", {}):
        keys = ("N", "D", "C", "measured", "predicted")
        rows = [
            {**{key: row[key] for key in keys}, "95% interval": "{:.4g} to {:.4g}".format(*row["ci95"]),
             "off by": f"{100 * row['error']:+.2f}%"} for row in fit["holdout"]["rows"]
        ]  # fmt: skip
        for key in KAPLANS:
            for row, joint in zip(rows, fit["holdout"].get(key, {}).get("rows", []), strict=False):
                row[f"by {CALLED[key]}"] = f"{joint['predicted']:.4g}, {100 * joint['error']:+.2f}%"
        out += ["<h2>Largest budgets, predicted from the smaller ones</h2>", table(rows)]
    rows = [
        {"law": part[key]["law"], "over": f"{len(part['rows'])} points, {part['points']}", "E": part[key].get("E"),
         "A": part[key]["A"], "alpha": part[key]["alpha"]}
        for part in fit.get("power_laws", {}).values()
        for key in ("with_floor", "without_floor") if "skipped" not in part[key]
    ]  # fmt: skip
    out += ["<h2>Power laws in one variable</h2>", table(rows)] if rows else []
    if fit.get("outliers"):
        rows = [{key: outlier[key] for key in ("row", "loss", "predicted", "z")} for outlier in fit["outliers"]]
        out += ["<h2>Likely outliers</h2>", table(rows, "rows over 4 robust standard deviations off the law")]
    return out


def _isoflop(found: Mapping[str, Any]) -> list[str]:
    """The minimum at each budget, by the average of the curve's forms and by each form."""
    if "budgets" not in found:
        return []
    rows = [
        {"C (FLOP)": budget["C"], "N": {"value": budget["N"], "ci95": budget["N_ci95"]},
         "tokens/parameter": budget["D/N"], "loss": budget["loss"],
         **{f"by a {name}": plotting.count(float(form["N"][b])) for name, form in found["forms"].items()}}
        for b, budget in enumerate(found["budgets"])
    ]  # fmt: skip
    weights = [
        f"{name} {100 * form['weight']:.0f}%" + " (refuted)" * form["refuted"] for name, form in found["forms"].items()
    ]
    return [table(rows, f"by iso-FLOP curves; weights of their forms: {', '.join(weights)}")]


def _exponents(fit: Mapping[str, Any]) -> dict[str, Any]:
    optimal, isoflop = fit["optimal"], fit["isoflop"]
    names = [pair[1] for pair in LAWS[optimal["law"]].terms]
    return {
        "fits best": CALLED[optimal["law"]], "of N": fit[optimal["law"]][names[0]],
        "of D": fit[optimal["law"]][names[1]], "a (N ~ C^a)": optimal["a"],
        "a by iso-FLOP curves": isoflop.get("a", "not done"),
    }  # fmt: skip
