"""Fits all scaling laws that a table of losses allows, with one JSON-serializable result: `fit_table`.

Every number is {"value", "ci95", "stderr"}. If the data do not determine it, "value" is None and "why" is a clause that
completes the sentence "not determined by these data: ...".

>>> size, tokens = (axis.ravel() for axis in np.meshgrid(np.geomspace(1e6, 3e7, 6), np.geomspace(2e7, 2e9, 7)))
>>> noise = np.exp(0.005 * np.random.default_rng(0).normal(size=42))
>>> table = Table.of(n=size, d=tokens, loss=(1.8 + 480 * size**-0.35 + 2000 * tokens**-0.37) * noise)
>>> fit = fit_table(table, Settings(replicates=100, holdout=0, budgets=(1e18,)))
>>> low, high = fit["parametric"]["alpha"]["ci95"]
>>> low < 0.35 < high, fit["outliers"], fit["optimal"]["budgets"][0]["extrapolation"]
(True, [], 2.78)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.scaling import bootstrap, isoflop, laws, optimum, verdict
from jaxformer.scaling.law_fit import Settings, drawn_weights, fit_law, replicated, stuck_exponents
from jaxformer.scaling.table import Floats, Table
from jaxformer.scaling.verdict import CALLED

__all__ = [
    "CALLED", "Settings", "Table", "find_outliers", "fit_law", "fit_table", "fit_with_exponents", "predict_largest",
]  # fmt: skip

KAPLANS = {"kaplan": laws.KAPLAN, "kaplan_floor": laws.KAPLAN_FLOOR}
LAWS = {"parametric": laws.SUM, **KAPLANS}
OUTLIER_Z = 4.0
_CURVE_POINTS, _CURVE_REPLICATES = 40, 200
_FEW_CLUSTERS = 8


def fit_table(table: Table, settings: Settings | None = None) -> dict[str, Any]:
    """Fits everything the table allows.

    Args:
      table: with N, D and C for Chinchilla's three approaches; with one of them for its power law alone.
      settings: see `Settings`.

    Returns:
      "parametric" (E, A, B, alpha, beta; "profile" of E; "a", "b"; "starts"), "kaplan" and "kaplan_floor" (Kaplan's law
      without and with E), their "ranking" (see `verdict.rank`), "fits_best" ("parametric" or "kaplan_floor", the one
      of these two with the lower objective, whose E is the one to use), "optimal" (N, D, loss at the budgets, a and b,
      by the best of all laws: "law"), "isoflop", "envelope", "power_laws", "holdout", "outliers" and "residuals" of the
      best law, "warnings" (lines), "settings". A part that the table does not allow is {"skipped": why}.

    Raises:
      ConfigError: too few rows or sizes for L(N, D) (the message says how many are needed), or the parabolas of all
        budgets open downward.
    """
    settings = settings or Settings()
    few = table.num_clusters is not None and table.num_clusters < _FEW_CLUSTERS
    warnings = [f"only {table.num_clusters} clusters: intervals over fewer than {_FEW_CLUSTERS} are too narrow"] * few
    out: dict[str, Any] = {}
    if len(table.known) == 3:
        price = optimum.Price.of(table)
        how = settings.budget_tolerance, settings.replicates, settings.seed, price
        minima = _or_skip(isoflop.minima, table, *how)  # first, because it may raise NoMinimumError
        out |= _fitted_laws(table, settings, price)
        out["isoflop"] = minima
        out["envelope"] = _or_skip(isoflop.envelope, table, *how)
        out["holdout"] = _or_skip(predict_largest, table, settings)
        warnings += verdict.warnings(out)
        warnings += [f"iso-FLOP: {line}" for line in minima.get("left_out", [])]
        warnings += [f"envelope: {out['envelope']['note']}"] if out["envelope"].get("note") else []
    out["power_laws"] = _frontiers(table, settings, out)
    if "parametric" not in out and all("skipped" in law["with_floor"] for law in out["power_laws"].values()):
        raise ConfigError(next(iter(out["power_laws"].values()))["with_floor"]["skipped"])
    out["warnings"] = warnings
    out["settings"] = dataclasses.asdict(settings) | {
        "rows": len(table),
        "huber": "sum over rows, on log-residuals",
        "flops_constant": table.flops_constant,
        "derived": list(table.derived),
        "common_error": table.common_error,
        "clusters": table.num_clusters,
        "source": table.source,
    }
    return out


def fit_with_exponents(law: laws.Law, table: Table, settings: Settings) -> tuple[laws.Estimate, Floats, dict[str, Any]]:
    """`fit_law` of a law of N and D, whose parameters include the exponents "a" and "b" of the compute-optimal N ~ C^a
    and D ~ C^b, for C proportional to N D."""
    found, thetas, out = fit_law(law, table, settings)
    (_, of_n), (_, of_d) = law.terms
    best, drawn = (
        optimum.exponents(each[of_n], each[of_d]) for each in map(found.natural, (found.theta[None], thetas))
    )
    how = {"levels": bootstrap.tails(len(table), len(law.names), table.clusters), **_stuck(law, found.natural(thetas))}
    out |= {k: bootstrap.quantity(float(best[k][0]), drawn[k], max_width=0.5, **how) for k in best}
    return found, thetas, out


def _stuck(law: laws.Law, values: dict[str, Floats]) -> dict[str, Any]:
    """Options of `bootstrap.quantity` for quantities that depend on both exponents: not determined if one of the two
    reached a bound of its range."""
    low, high = laws.EXPONENT_RANGE
    stuck = stuck_exponents(law, values)
    bound = f"{' or '.join(stuck)} = {low} or {high}, the ends of its range"
    return {"at_bound": np.logical_or(*stuck.values()), "bound": bound}


def find_outliers(residuals: Floats, params: int) -> tuple[Floats, Floats]:
    """Indices of rows whose log-residual is over 4 robust standard deviations off, worst first, and every row's z."""
    z = (residuals - np.median(residuals)) / max(laws.robust_scale(residuals, params), 1e-9)
    index = np.flatnonzero(np.abs(z) > OUTLIER_Z)
    return index[np.argsort(-np.abs(z[index]))], z


def budgets(c: Floats, settings: Settings) -> list[Floats]:
    """Rows of each budget, ascending, as `predict_largest` counts budgets."""
    groups = isoflop.budget_groups(c, settings.budget_tolerance)
    if not groups:
        order = np.argsort(c, kind="stable")
        size = max(2, -(-len(order) // 10))
        groups = [order[max(end - size, 0) : end] for end in range(len(order), 0, -size)][::-1]
    return groups


def predict_largest(table: Table, settings: Settings) -> dict[str, Any]:
    """Fits L(N, D), and Kaplan's laws, without the largest budgets and predicts those.

    Without groups of equal budgets, a tenth of the rows (at least two), in the order of C, counts as a budget.

    Returns:
      "rows": [{"row", "N", "D", "C", "measured", "predicted", "ci95", "error"}], error = predicted / measured - 1;
      "mean_abs_error", "max_abs_error"; "best": the error at the predicted row of lowest loss; "objective" on the
      fitted rows; "fitted_rows"; "kaplan", "kaplan_floor": the same for those laws, or {"skipped": why}; "fits_best":
      as in `fit_table`, on the fitted rows.

    Raises:
      ConfigError: holdout is 0, or too few budgets or rows remain.
    """
    if settings.holdout == 0:
        raise ConfigError("no budgets to predict (--holdout=0)")
    groups = budgets(table.c, settings)
    if settings.holdout >= len(groups):
        raise ConfigError(f"{table.source}: {len(groups)} budgets; holdout {settings.holdout} leaves none to fit")
    held = np.sort(np.concatenate(groups[-settings.holdout :]))
    rest = table.take(np.setdiff1d(np.arange(len(table)), held))
    rest, test = dataclasses.replace(rest, source=f"{table.source}: without its largest budgets"), table.take(held)
    out = _forecast(laws.SUM, rest, test, settings)
    out |= {key: _or_skip(_forecast, law, rest, test, settings) for key, law in KAPLANS.items()}
    out["fits_best"] = verdict.closer({"parametric": out, **out})
    return {**out, "fitted_rows": len(rest), "fitted_up_to": float(rest.c.max())}


def _forecast(law: laws.Law, rest: Table, test: Table, settings: Settings) -> dict[str, Any]:
    """The rows of `test` as predicted by a fit to `rest`, with the measured losses."""
    known, wanted = [rest.n, rest.d], [test.n, test.d]
    found = laws.estimate(law, known, rest.loss, delta=settings.delta, where=rest.source)
    thetas = laws.replicate(found, known, rest.loss, drawn_weights(rest, settings))
    levels = bootstrap.tails(len(rest), len(law.names), rest.clusters)
    low, high = np.quantile(found.predict(thetas, wanted), levels, axis=0)
    predicted = found.predict(found.theta[None], wanted)[0]
    error = predicted / test.loss - 1
    columns = zip(test.rows, test.n, test.d, test.c, test.loss, predicted, low, high, error, strict=True)
    keys = ("N", "D", "C", "measured", "predicted")
    rows = [
        {"row": int(row), **{k: float(v) for k, v in zip(keys, values, strict=True)}, "ci95": [float(lo), float(hi)],
         "error": float(off)} for row, *values, lo, hi, off in columns
    ]  # fmt: skip
    return {
        "rows": rows,
        "objective": found.value,
        "mean_abs_error": float(np.abs(error).mean()),
        "max_abs_error": float(np.abs(error).max()),
        "best": float(error[test.loss.argmin()]),
    }


def _fitted_laws(table: Table, settings: Settings, price: optimum.Price) -> dict[str, Any]:
    """The laws of N and D, their ranking, and the results of the best one."""
    fitted = {"parametric": fit_with_exponents(laws.SUM, table, settings)}
    out: dict[str, Any] = {"parametric": fitted["parametric"][2]}
    for key, law in KAPLANS.items():
        try:
            fitted[key] = fit_with_exponents(law, table, settings)
            out[key] = fitted[key][2]
        except ConfigError as error:
            out[key] = {"skipped": str(error)}
    count = table.num_clusters or len(table)
    for key, floor in verdict.settle_floor(out, count).items():
        out[key]["E"] = floor
    out["ranking"], out["fits_best"] = verdict.rank(out, count), verdict.closer(out)
    best = out["ranking"][0]["law"]
    found, thetas, parameters = fitted[best]
    return out | {"optimal": {"law": best, "a": parameters["a"], "b": parameters["b"],
                              **_optimal(found, thetas, table, settings, price)},
                  **_misfits(found, table)}  # fmt: skip


def _misfits(found: laws.Estimate, table: Table) -> dict[str, Any]:
    """Residuals of a law, and the likely outliers."""
    residuals = np.log(table.loss / found.predict(found.theta[None], [table.n, table.d])[0])
    flagged, z = find_outliers(residuals, len(found.theta))
    return {
        "outliers": [
            {"row": int(table.rows[i]), "where": table.names[i], "loss": float(table.loss[i]), "z": float(z[i]),
             "predicted": float(table.loss[i] * np.exp(-residuals[i]))} for i in flagged
        ],
        "residuals": {"row": table.rows.tolist(), "log": residuals.tolist(), "z": z.tolist(),
                      "scale": laws.robust_scale(residuals, len(found.theta))},
    }  # fmt: skip


def _optimal(
    found: laws.Estimate, thetas: Floats, table: Table, settings: Settings, price: optimum.Price
) -> dict[str, Any]:
    """Optimal N, D and loss at the requested budgets, and along a curve up to them."""
    value, values = found.natural(found.theta[None]), replicated(found, thetas, table, settings)
    top = float(table.c.max())
    levels = bootstrap.tails(len(table), len(found.theta), table.clusters)
    stuck = _stuck(found.law, values)
    budgets = []
    for budget in settings.budgets or (top, 10 * top):
        at, spread = optimum.allocate(value, budget, price), optimum.allocate(values, budget, price)
        row: dict[str, Any] = {
            k: bootstrap.quantity(
                float(at[k][0]), spread[k], levels=levels, max_ratio=10.0, **({} if k == "loss" else stuck)
            )
            for k in at
        }
        budgets.append({"C": float(budget), "extrapolation": float(f"{budget / top:.3g}"), **row})
    # For the figures: optimal N, D and loss along the budgets, each with its 95 % band.
    reach = np.geomspace(table.c.min(), max(top, *(row["C"] for row in budgets)), _CURVE_POINTS)
    few = {name: column[:_CURVE_REPLICATES] for name, column in values.items()}
    middles, spreads = ([optimum.allocate(each, budget, price) for budget in reach] for each in (value, few))
    curve = {"C": reach.tolist()}
    for key in ("N", "D", "loss"):
        curve[key] = [float(at[key][0]) for at in middles]
        curve[f"{key}_low"], curve[f"{key}_high"] = np.quantile([at[key] for at in spreads], levels, axis=1).tolist()
    return {
        "flops_per_parameter_token": float(np.exp(price.log_flops[0])) if price.is_constant else None,
        "budgets": budgets,
        "curve": curve,
    }


def _frontiers(table: Table, settings: Settings, fits: dict[str, Any]) -> dict[str, Any]:
    """L(N), L(D), L(C): power laws of the rows on the Pareto frontier of loss and that variable.

    Args:
      fits: the laws of N and D, if there are any: no frontier determines an E that they do not.
    """
    alone, out = len(table.known) == 1, {}
    for name in table.known:
        chosen = np.arange(len(table)) if alone else np.sort(isoflop.lowest(table.column(name), table.loss))
        part = dataclasses.replace(table.take(chosen), source=f"{table.source}, L({name})", clusters=None)
        forms = {
            key: _or_skip(lambda *args: fit_law(*args)[2], laws.Law((name,), floor), part, settings)
            for key, floor in (("with_floor", True), ("without_floor", False))
        }
        if "parametric" in fits and "E" in forms["with_floor"]:
            forms["with_floor"]["E"] = verdict.settle_frontier(forms["with_floor"]["E"], fits)
        out[f"L({name})"] = {"rows": part.rows.tolist(), "points": "all rows" if alone else "frontier", **forms}
    return out


def _or_skip(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """A part of the result, or {"skipped": why} if the table does not allow it."""
    try:
        return function(*args)
    except isoflop.NoMinimumError:
        raise
    except ConfigError as error:
        return {"skipped": str(error)}
