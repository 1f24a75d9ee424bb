"""Turns the records of a study into fits, figures and a report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.scaling import figures, findings, plotting, report, run_figures
from jaxformer.scaling.fit import Settings, Table, fit_table
from jaxformer.storage import files

Record = Mapping[str, Any]
# Ways to count N and C; the first is the main one.
CONVENTIONS = {
    "all parameters, exact FLOP": lambda r: (r["params"], r["flops"]),
    "all parameters, C = 6ND": lambda r: (r["params"], 6.0 * r["params"] * r["tokens"]),
    "without embeddings, C = 6ND": lambda r: (r["params_non_embedding"], 6.0 * r["params_non_embedding"] * r["tokens"]),
}
NEEDED = ("run", "trunk", "role", "status", "width", "params", "params_non_embedding", "tokens", "flops", "loss",
          "loss_stderr")  # fmt: skip
CURVE_POINTS = 400


def points(records: Sequence[Record]) -> list[Record]:
    """The final records used in the fits: the ladder's finished runs.

    Raises:
      ConfigError: a final record lacks a field, or no run of the ladder has finished.
    """
    finals = [record for record in records if record["kind"] == "final"]
    for record in finals:
        if missing := [name for name in NEEDED if name not in record]:
            raise ConfigError(f"records: the final record of {record.get('run', '?')} lacks {', '.join(missing)}")
    found = [record for record in finals if record["role"] == "ladder" and record["status"] == "finished"]
    if not found:
        raise ConfigError(f"records: none of {len(finals)} runs is a finished point of the ladder")
    return found


def table(found: Sequence[Record], convention: str, source: str = "records") -> Table:
    """The points as a table to fit, N and C counted by one of CONVENTIONS."""
    n, c = zip(*(CONVENTIONS[convention](record) for record in found), strict=True)
    # All runs are evaluated on the same validation rows; the best run's standard error is closest to that of the rows.
    common = float(min(found, key=lambda r: r["loss"])["loss_stderr"])
    return Table.of(
        n=n, c=c, d=[r["tokens"] for r in found], loss=[r["loss"] for r in found], source=source,
        names=[str(r["run"]) for r in found], common_error=common if np.isfinite(common) else 0.0,
    )  # fmt: skip


def fit(records: Sequence[Record], settings: Settings, source: str = "records") -> dict[str, dict[str, Any]]:
    """The fits by each convention's name.

    Raises:
      ConfigError: as `points` and `fit.fit_table`.
    """
    found = points(records)
    fits = {name: fit_table(table(found, name, source), settings) for name in CONVENTIONS}
    finals = [record for record in records if record["kind"] == "final"]
    warnings = next(iter(fits.values()))["warnings"]
    if diverged := [record["run"] for record in finals if record["status"] == "diverged"]:
        warnings.append(f"{len(diverged)} run{'s' * (len(diverged) > 1)} diverged: {', '.join(diverged)}")
    warnings += double_minima(_tried(finals))
    return fits


def double_minima(tried: Sequence[Record]) -> list[str]:
    """A line for each size whose loss against the learning rate has more than one minimum.

    >>> runs = [{"params": 5000, "learning_rate": rate, "loss": loss} for rate, loss in ((1, 3.0), (2, 3.2), (4, 3.1))]
    >>> double_minima(runs)[0].partition(" (")[0]
    'N = 5k: the loss has 2 minima over the learning rate, at 1 and 4'
    """
    out = []
    for size in sorted({record["params"] for record in tried}):
        mine = sorted((r["learning_rate"], float(r["loss"])) for r in tried if r["params"] == size)
        ends = [np.inf, *(loss if np.isfinite(loss) else np.inf for _, loss in mine), np.inf]
        low = [i for i in range(1, len(ends) - 1) if ends[i - 1] > ends[i] < ends[i + 1]]
        if len(low) > 1:
            rise = max(ends[low[0] : low[-1]]) - sorted(ends[i] for i in low)[1]
            at = " and ".join(f"{mine[i - 1][0]:g}" for i in low)
            out.append(
                f"N = {plotting.count(size)}: the loss has {len(low)} minima over the learning rate, at {at} (between "
                f"them it is {rise:.2g} nats higher); which of them is the best may be chance"
            )
    return out


def against_floor(fits: Mapping[str, Mapping[str, Any]], nats: float, standard_error: float = 0.0) -> str:
    """A line that compares the fitted irreducible loss E, by the law that fits best, with the known entropy of a
    synthetic language, up to 1.96 standard errors of that entropy.

    >>> fit = {"fits_best": "parametric", "parametric": {"E": {"value": 1.5, "ci95": [1.4, 1.6]}}}
    >>> against_floor({"all": fit}, 1.47)
    "entropy bound: 1.4700 nats per token; E 1.5 [1.4, 1.6] contains it, the interval's half width is 6.67 % of E"
    """
    first = next(iter(fits.values()))
    found = first[first["fits_best"]]["E"]
    line = f"entropy bound: {nats:.4f} nats per token; E {report.interval(found)}"
    if found["value"] is not None:
        low, high = found["ci95"]
        margin = 1.96 * standard_error
        contains = "contains it" if low - margin <= nats <= high + margin else "does NOT contain it"
        line += f" {contains}, the interval's half width is {100 * (high - low) / 2 / found['value']:.3g} % of E"
    if first["fits_best"] == "kaplan_floor":
        other, rms = first["parametric"]["E"], [100 * first[key]["rms"] for key in ("kaplan_floor", "parametric")]
        undetermined = other["value"] is None and "estimate" in other
        added = f"{other['estimate']:.4g}, not determined" if undetermined else report.interval(other)
        line += (
            f". This E is by Kaplan's law with a floor, which fits better: residuals of {rms[0]:.3g} % (root mean "
            f"square) against the sum's {rms[1]:.3g} %. The sum's E: {added}"
        )
    return line


def write_fits(directory: Path, fits: Mapping[str, Mapping[str, Any]]) -> Path:
    """Writes `fit.json`: the first fit as `jaxformer fit` writes it, and all of them under "conventions"."""
    return report.write_json(directory / "fit.json", {**next(iter(fits.values())), "conventions": fits})


def write_report(
    directory: Path,
    title: str,
    records: Sequence[Record],
    fits: Mapping[str, Mapping[str, Any]],
    *,
    notes: Sequence[str] = (),
    commands: Sequence[str] = (),
    manifest: Record | None = None,
) -> Path:
    """Writes `report.html` and `figures/` (PNG and SVG); returns the page's path."""
    found = points(records)
    finals = [record for record in records if record["kind"] == "final"]
    name, first = next(iter(fits.items()))
    drawn = figures.draw(table(found, name), first)
    rates = [
        {"N": r["params"], "learning_rate": r["learning_rate"], "loss": r["loss"], "chosen": r["role"] == "ladder"}
        for r in _tried(finals)
    ]
    if len({(r["N"], r["learning_rate"]) for r in rates}) > len({r["N"] for r in rates}):
        drawn["learning_rate"] = run_figures.learning_rate_curves(rates)
    drawn["training"] = run_figures.training_curves(_curves(records))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        plotting.save(drawn, files.make_folder(directory / "figures"))
    except OSError as error:
        raise ConfigError(f"workdir {directory}: figures: {error.strerror}") from None
    ordered = sorted(finals, key=lambda r: (r["width"], r["tokens"], r["learning_rate"], r["seed"]))
    tables: dict[str, Sequence[Record]] = {"Runs": [_row(record) for record in ordered]}
    if spread := seed_spread(found):
        tables["Seeds"] = spread
    rows = findings.table(fits)
    text = report.page(
        title,
        fits,
        {key: report.embed(figure) for key, figure in drawn.items()},
        found=[{key: value for key, value in row.items() if key != "add"} for row in rows],
        lacking=findings.lacking(rows),
        notes=notes,
        tables=tables,
        commands=commands,
        manifest=manifest,
    )
    return report.write(directory / "report.html", text)


def seed_spread(found: Sequence[Record]) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds, for every point with several."""
    groups: dict[tuple[int, int], list[Record]] = {}
    for record in found:
        groups.setdefault((record["width"], record["tokens"]), []).append(record)
    return [
        {
            "width": width, "D": float(tokens), "seeds": len(mine),
            "mean loss": float(np.mean([r["loss"] for r in mine])),
            "standard deviation": float(np.std([r["loss"] for r in mine], ddof=1)),
        }
        for (width, tokens), mine in sorted(groups.items()) if len(mine) > 1
    ]  # fmt: skip


def _tried(finals: Sequence[Record]) -> list[Record]:
    """The runs of each size with which its learning rates were compared: at the most tokens that all rates reached."""
    out = []
    for width in sorted({record["width"] for record in finals}):
        seed = min(record["seed"] for record in finals if record["width"] == width)
        mine = [record for record in finals if record["width"] == width and record["seed"] == seed]
        rates = {record["learning_rate"] for record in mine}
        by_tokens = {t: [r for r in mine if r["tokens"] == t] for t in {r["tokens"] for r in mine}}
        whole = [t for t, those in by_tokens.items() if {r["learning_rate"] for r in those} == rates]
        out += by_tokens[max(whole)] if whole else []
    return out


def _curves(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Training curves of the longest run of each size, including its trunk."""
    out = []
    finals = {r["run"]: r for r in records if r["kind"] == "final"}
    ladder = [r for r in finals.values() if r["role"] == "ladder"]
    for width in sorted({record["width"] for record in ladder}):
        longest = max((r for r in ladder if r["width"] == width), key=lambda r: (r["tokens"], -r["seed"]))
        own = [r for r in records if r["kind"] == "train" and r["run"] == longest["run"]]
        start = own[0]["step"] if own else longest["branched_at"]
        trunk = [
            r for r in records
            if r["kind"] == "train" and r["trunk"] == longest["trunk"] and r["run"] != longest["run"]
            and r["step"] < start and r["step"] <= finals.get(r["run"], {"branched_at": 0})["branched_at"]
        ]  # fmt: skip
        curve = sorted([*trunk, *own], key=lambda r: r["step"])
        curve = curve[:: max(1, len(curve) // CURVE_POINTS)]
        out.append({"N": longest["params"], "tokens": [r["tokens"] for r in curve], "loss": [r["loss"] for r in curve]})
    return out


def _row(record: Record) -> dict[str, Any]:
    return {
        "run": record["run"], "role": record["role"], "N": float(record["params"]), "D": float(record["tokens"]),
        "C (FLOP)": f"{record['flops']:.3g}", "tokens/parameter": f"{record['tokens'] / record['params']:.3g}",
        "learning rate": f"{record['learning_rate']:g}",
        "loss": f"{float(record['loss']):.4f} ± {float(record['loss_stderr']):.4f}", "status": record["status"],
    }  # fmt: skip
