"""The findings of a study, most important first: the report's first table, and the lines printed at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.scaling import isoflop, laws, plotting, verdict
from jaxformer.scaling.fit import CALLED, LAWS

_CURVES = f"{isoflop.BUDGETS} budgets with {isoflop.SIZES} sizes each, some smaller and some larger than the best"
# What would determine it.
_MORE = {
    "law": f"more runs, {verdict.FEWEST} at least: more sizes, budgets or seeds",
    "N": "sizes further apart",
    "D": "budgets further apart, so that each size is trained for more and for less text",
    "best": "more budgets, further apart, and more sizes, further apart",
    "curves": f"at least {_CURVES}",
    "E": "larger budgets, whose losses come closer to E",
    "held": f"{laws.SUM.rows_needed} runs or more below the largest budget: more budgets or sizes",
}


def table(fits: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Rows of "finding", "value", "95% interval", "not determined because", "add": what would determine it.

    They are of the first way of counting. Exponents, best sizes and losses are those of the law that fits best, E that
    of the better of the two laws with E.
    """
    first = next(iter(fits.values()))
    best, curves, held, ranking = (first[key] for key in ("optimal", "isoflop", "holdout", "ranking"))
    mine, at, called = first[best["law"]], best["budgets"][0], CALLED[best["law"]]
    (_, of_n), (_, of_d) = LAWS[best["law"]].terms
    if few := verdict.too_few(ranking[0]["count"]):
        out = [_row("law that fits best", why=f"{few}. The numbers below are by {called}", add="law")]
    else:
        out = [_row("law that fits best", f"{called}, residuals of {100 * mine['rms']:.2g} %")]
    if beaten := [CALLED[row["law"]] for row in ranking if row["beaten"]]:
        out.append(_row("laws that these data reject", ", ".join(beaten)))
    unknown = {"value": None, "why": _reason(curves, first)}
    out += [
        _quantity(f"{of_n}, exponent of N", mine[of_n], "{:.3g}".format, "N"),
        _quantity(f"{of_d}, exponent of D", mine[of_d], "{:.3g}".format, "D"),
        _quantity(f"a of best N ~ C^a, by {called}", best["a"], "{:.3f}".format, "best"),
        _quantity("a by iso-FLOP curves", curves.get("a", unknown), "{:.3f}".format,
                  "best" if "a" in curves else "curves"),
        _quantity(f"best N at {_flop(at['C'])}, by {called}", at["N"], plotting.count, "best"),
        *(
            _quantity(f"best N at {_flop(row['C'])}, by iso-FLOP curves", {"value": row["N"], "ci95": row["N_ci95"]},
                      plotting.count, "curves") for row in curves.get("budgets", [])[-1:]
        ),
        _quantity(f"best D at {_flop(at['C'])}, in tokens", at["D"], plotting.count, "best"),
        _quantity("loss there, nats per token", at["loss"], "{:.4g}".format, "best"),
        _quantity(f"E, irreducible loss, by {CALLED[first['fits_best']]}", first[first["fits_best"]]["E"],
                  "{:.4g}".format, "E"),
    ]  # fmt: skip
    if "skipped" in held:
        return [*out, _row("error of predicting the largest budget", why=_reason(held, first), add="held")]
    runs = "1 run" if len(held["rows"]) == 1 else f"{len(held['rows'])} runs"
    label = f"error of predicting {runs} above {_flop(held['fitted_up_to'])}, by "
    for key in sorted((row["law"] for row in ranking), key=lambda key: key != held["fits_best"]):
        part = held if key == "parametric" else held[key]
        if "skipped" not in part:
            off = f"{100 * part['mean_abs_error']:.2f} % on average, {100 * part['max_abs_error']:.2f} % at most"
            out.append(_row(label + CALLED[key], off))
            label = "the same, by "
    return out


def lacking(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each thing that would determine what these rows do not, with what it would determine."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(row["add"], []).append(row["finding"])
    return [f"To determine {'; '.join(found)}: {add}." for add, found in groups.items() if add]


def lines(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """The rows as text for a terminal, a line each, then what is lacking."""
    found = [
        f"{row['finding']}: not determined. {row['not determined because']}."
        if row["add"] else f"{row['finding']}: {row['value']} {row['95% interval']}".rstrip() for row in rows
    ]  # fmt: skip
    return found + lacking(rows)


def _row(finding: str, value: str = "not determined", ends: str = "", why: str = "", add: str = "") -> dict[str, str]:
    return {
        "finding": finding, "value": value, "95% interval": ends, "not determined because": why,
        "add": _MORE.get(add, ""),
    }  # fmt: skip


def _quantity(finding: str, quantity: Mapping[str, Any], number: Any, add: str) -> dict[str, str]:
    if quantity["value"] is None:
        return _row(finding, why=quantity["why"], add=add)
    return _row(finding, number(quantity["value"]), "[{}, {}]".format(*map(number, quantity["ci95"])))


def _flop(value: float) -> str:
    return f"{value:.2g} FLOP".replace("e+0", "e").replace("e+", "e")


def _reason(part: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Why a part was left out, without the name of the table."""
    return part.get("skipped", "").replace(f"{result['settings']['source']}: ", "")
