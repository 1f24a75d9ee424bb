"""Fit scaling laws to a table of losses, with intervals:

    jaxformer fit --csv runs.csv --n params --d tokens --loss loss --out fit/

writes fit/fit.json and figures (PNG and SVG). `--c COLUMN` (training FLOP) can replace --n or --d (C = 6 N D), or be
given with both. With only one of --n, --d, --c, it fits the power law of that variable. For the published table of
Hoffmann et al. (2022), as fitted by Besiroglu et al. (2024):

    jaxformer fit --csv table.csv --n "Model Size" --c "Training FLOP" --loss loss \\
        --drop-highest-loss 5 --out fit/
"""

import hashlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from jaxformer.errors import ConfigError, ProgramError
from jaxformer.runs.command_line import Parser, finite, integer, parser, path_text
from jaxformer.scaling import figures, fit, plotting, report, verdict
from jaxformer.scaling.table import Table
from jaxformer.storage import credentials


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns exit code 0.

    Raises:
      ConfigError, ProgramError: an error that the user can fix, in one line; nothing has been written.
    """
    args = _arguments().parse_args(argv)
    if not (args.n or args.d or args.c):
        raise ConfigError("give at least one of --n, --d and --c: the columns of parameters, tokens and FLOP")
    out = _writable(args.out)
    settings = fit.Settings.of_flags(
        delta=args.delta, replicates=args.bootstrap, seed=args.seed, resampling=args.resampling,
        budgets=tuple(args.budget), holdout=args.holdout,
    )  # fmt: skip
    table = Table.from_csv(
        args.csv,
        n=args.n,
        d=args.d,
        c=args.c,
        loss=args.loss,
        cluster=args.cluster,
        flops_constant=args.flops_constant,
    ).drop_highest_loss(args.drop_highest_loss)
    digest = hashlib.sha256(Path(args.csv).read_bytes()).hexdigest()
    if not args.no_figures:
        plotting.matplotlib(", or --no-figures")
    result = fit.fit_table(table, settings)
    words = credentials.mask_command(sys.argv[1:] if argv is None else argv)
    result["settings"] |= {
        "command": shlex.join(["jaxformer", "fit", *words]),
        "columns": {"N": args.n, "D": args.d, "C": args.c, "loss": args.loss, "cluster": args.cluster},
        "drop_highest_loss": args.drop_highest_loss,
        "sha256": digest,
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = [] if args.no_figures else plotting.save(figures.draw(table, result), out)
        report.write_json(out / "fit.json", result)
    except OSError as error:
        raise ProgramError(f"{error.filename or out}: {(error.strerror or str(error)).lower()}") from None
    print(summary(result))
    print(f"\nwrote {out / 'fit.json'}" + (f" and figures in {len(written)} files beside it" if written else ""))
    return 0


def summary(result: dict[str, Any]) -> str:
    """The result as text for a terminal."""
    settings = result["settings"]
    derived = "".join(f"; {name} from C = {settings['flops_constant']:g} N D" for name in settings["derived"])
    lines = [f"{settings['source']}: {settings['rows']} row{'s' * (settings['rows'] != 1)}{derived}"]
    if "parametric" in result:
        lines += _parametric_lines(result)
    else:
        for name, law in result["power_laws"].items():
            lines += [f"{name}:", *_law_lines(law)]
    if result.get("outliers"):
        shown = [f"{o['where']} (z = {o['z']:+.1f})" for o in result["outliers"][:8]]
        more, high = len(result["outliers"]) - len(shown), sum(o["z"] > 0 for o in result["outliers"])
        lines += [
            "",
            f"likely outliers, more than {fit.OUTLIER_Z:g} robust standard deviations off the law:",
            "  " + ", ".join(shown) + (f" and {more} more, see fit.json" if more else ""),
            f"  {high} too high, {len(result['outliers']) - high} too low; "
            "--drop-highest-loss K leaves out the K highest losses",
        ]
    lines += [f"note: {line}" for line in result["warnings"]]
    return "\n".join(lines)


def _parametric_lines(result: dict[str, Any]) -> list[str]:
    optimal, ranking = result["optimal"], result["ranking"]
    lines = ["", verdict.fits_best(ranking)]
    lines += [f"E, the irreducible loss: {_text(result[result['fits_best']]['E'])}"]
    count = result["settings"]["replicates"]
    for row in ranking:
        law = result[row["law"]]
        lines += ["", f"{verdict.CALLED[row['law']]}: {law['law']}   (95% intervals from {count} bootstrap replicates)"]
        if row["beaten"]:
            lines.append(f"  beaten clearly by {verdict.CALLED[ranking[0]['law']]}: these data reject this law")
        names = fit.LAWS[row["law"]].names
        width = max(map(len, names)) + 1
        lines += [f"  {name:<{width}}{_text(law[name])}" for name in names]
        if "profile" in law:
            low, high = law["profile"]["ci95"]
            lines.append(f"  E by profile likelihood: {low:.4g} to {high:.4g}")
    lines += ["", "compute-optimal size and tokens, N ~ C^a, D ~ C^b"]
    methods = {row["law"]: verdict.CALLED[row["law"]] + " (beaten)" * row["beaten"] for row in ranking}
    methods |= {"isoflop": "iso-FLOP curves", "envelope": "envelope"}
    width = max(map(len, methods.values())) + 2
    for part, name in methods.items():
        found = result[part]
        if "skipped" in found:
            lines.append(f"  {name:<{width}}{_reason(found, result)}")
        else:
            lines += [f"  {name:<{width}}a = {_text(found['a'])}", f"  {'':<{width}}b = {_text(found['b'])}"]
    lines += [
        f"  at C = {b['C']:.3g} FLOP, by iso-FLOP curves: N {_text({'value': b['N'], 'ci95': b['N_ci95']})}"
        for b in result["isoflop"].get("budgets", [])
    ]
    for row in optimal["budgets"]:
        far = f", {row['extrapolation']:g} times the table's largest" if row["extrapolation"] > 1 else ""
        lines.append(f"  at C = {row['C']:.3g} FLOP{far}, by {verdict.CALLED[optimal['law']]}:")
        lines += [f"    {key:<6}{_text(row[key])}" for key in ("N", "D", "D/N", "loss")]
    return [*lines, "", *_holdout_lines(result)]


def _holdout_lines(result: dict[str, Any]) -> list[str]:
    held = result["holdout"]
    if "skipped" in held:
        return [f"largest budgets held out: {_reason(held, result)}"]
    rows = "1 row" if len(held["rows"]) == 1 else f"{len(held['rows'])} rows"
    lines = [f"{rows} above {held['fitted_up_to']:.3g} FLOP, predicted from the {held['fitted_rows']} below:"]
    for row in result["ranking"]:
        part = held if row["law"] == "parametric" else held[row["law"]]
        if "skipped" not in part:
            mean, most = 100 * part["mean_abs_error"], 100 * part["max_abs_error"]
            lines.append(f"  off by {mean:.2f}% on average, {most:.2f}% at most, by {verdict.CALLED[row['law']]}")
    return lines


def _law_lines(law: dict[str, Any]) -> list[str]:
    lines = []
    for fitted in (law["with_floor"], law["without_floor"]):
        if "skipped" in fitted:
            lines.append(f"  {fitted['skipped']}")
        else:
            lines.append(f"  {fitted['law']}")
            lines += [f"    {name:<6}{_text(fitted[name])}" for name in ("E", "A", "alpha") if name in fitted]
    return lines


def _reason(part: dict[str, Any], result: dict[str, Any]) -> str:
    return "not done: " + part["skipped"].removeprefix(f"{result['settings']['source']}: ")


def _text(quantity: dict[str, Any]) -> str:
    if quantity["value"] is None:
        return f"not determined by these data: {quantity['why']}"
    low, high = quantity["ci95"]
    return f"{quantity['value']:<10.4g}[{low:.4g}, {high:.4g}]"


def _writable(path: str) -> Path:
    """The output folder, if it or its nearest existing parent is a writable folder; checked before the work."""
    out = nearest = Path(path)
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"--out: {nearest} is a file; accepted: a folder to write into")
    if not os.access(nearest, os.W_OK):
        raise ConfigError(f"--out: {nearest} is not writable")
    return out


def _arguments() -> Parser:
    made = parser(__doc__, "fit")
    made.add_argument("--csv", required=True, type=path_text, metavar="FILE", help="table, header line first")
    made.add_argument("--n", metavar="COLUMN", help="parameters")
    made.add_argument("--d", metavar="COLUMN", help="training tokens")
    made.add_argument("--c", metavar="COLUMN", help="training FLOP")
    made.add_argument("--loss", required=True, metavar="COLUMN", help="final loss, nats per token")
    made.add_argument("--cluster", metavar="COLUMN", help="rows with the same entry are resampled together")
    made.add_argument("--out", required=True, type=path_text, metavar="DIR", help="folder for fit.json and the figures")
    made.add_argument(
        "--drop-highest-loss", type=integer(0), default=0, metavar="K", help="leave out the K highest losses"
    )
    made.add_argument("--budget", type=finite, nargs="+", action="extend", default=[], metavar="C",
                      help="FLOP to find the best N and D for (default: the largest, and ten times it)")  # fmt: skip
    made.add_argument("--holdout", type=integer(0), default=1, metavar="K", help="largest budgets to predict (1)")
    made.add_argument("--flops-constant", type=float, default=6.0, metavar="K", help="C = K N D (default 6)")
    made.add_argument("--delta", type=finite, default=1e-3, help="of Huber's function on log-residuals (default 0.001)")
    made.add_argument(
        "--bootstrap", type=integer(100, 100_000), default=1000, metavar="R", help="replicates (default 1000)"
    )
    made.add_argument("--resampling", default="weights", help="weights (default) or rows, see scaling/bootstrap.py")
    made.add_argument("--seed", type=integer(0), default=0, help="of the bootstrap (default 0)")
    made.add_argument("--no-figures", action="store_true", help="write fit.json only")
    return made
