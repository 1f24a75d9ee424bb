"""Coverage of the fits' intervals on simulated tables: how often they contain the true value.

    python -m experiments.coverage --tables=400 --out=experiments/results/coverage/isoflop.json
    python -m experiments.coverage --what=laws --tables=40 --out=experiments/results/coverage/laws.json
    python -m experiments.coverage --what=multipliers --out=experiments/results/coverage/multipliers.json

`isoflop`: 95 % intervals of the optimal size at each budget and of the exponent in N ~ C^a, by iso-FLOP curves. Tables
follow Kaplan's law, with and without E, and Chinchilla's sum, on the grid of `results/gpt_gutenberg` (which extends
further above the optimum than below; laws and noise as fitted there) and on grids that extend a factor of 6 each way:
centred on the optimum, on twice it, and drifting across it from budget to budget. `laws`: which law is found to fit
best, and whether the intervals of E and a by that law contain the truth; true E is 0 for Kaplan's law, 1.8172 for the
sum. `multipliers`: pairs of ladders of which one saves a known share of the compute (`experiments.simulated_ladders`).
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer import records
from jaxformer.runs.command_line import integer, parser, path_text
from jaxformer.runtime.program import program
from jaxformer.scaling import fit, isoflop, laws, optimum, report, results
from jaxformer.scaling.table import Table

NOVELS = Path(__file__).parent / "results" / "gpt_gutenberg" / "records.jsonl"
KAPLAN = {"N_c": 8.8e13, "alpha_N": 0.076, "D_c": 5.4e13, "alpha_D": 0.103}  # Kaplan et al. 2020
SUM = {"E": 1.8172, "A": 482.01, "alpha": 0.3478, "B": 2085.43, "beta": 0.3658}  # Besiroglu et al. 2024
LAWS = {"Kaplan's law": KAPLAN, "the sum": SUM}
NOISE, REACH = 0.003, 6.0


class Case(NamedTuple):
    """A design (N, D, C of a table), the law of its losses, and their relative noise."""

    design: Table
    law: dict[str, float]
    noise: float

    def losses(self) -> np.ndarray:
        """[I], without noise."""
        return loss_of(self.law, self.design.n, self.design.d)


def loss_of(law: dict[str, float], n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The loss by Kaplan's law if `law` has N_c, by the sum otherwise."""
    if "N_c" in law:
        inner = (law["N_c"] / n) ** (law["alpha_N"] / law["alpha_D"]) + law["D_c"] / d
        return law.get("E", 0.0) + inner ** law["alpha_D"]
    return law["E"] + law["A"] * n ** -law["alpha"] + law["B"] * d ** -law["beta"]


def best_size(law: dict[str, float], budget: float, price: optimum.Price) -> float:
    """log N of the lowest loss at a budget."""
    arrays = {name: np.array([value]) for name, value in law.items()}
    return float(np.log(optimum.allocate(arrays, budget, price)["N"][0]))


def cases() -> dict[str, Case]:
    """The designs, by name."""
    novels = results.table(results.points(records.load(NOVELS)), next(iter(results.CONVENTIONS)))
    groups: dict[tuple[float, float], list[float]] = {}
    for n, d, loss in zip(novels.n, novels.d, novels.loss, strict=True):
        groups.setdefault((n, d), []).append(np.log(loss))
    seeds = float(np.sqrt(np.mean([np.var(group, ddof=1) for group in groups.values() if len(group) > 1])))
    out = {}
    for key, form in fit.LAWS.items():
        found = laws.estimate(form, [novels.n, novels.d], novels.loss)
        natural = {name: float(value[0]) for name, value in found.natural(found.theta[None]).items()}
        out[f"novels, {fit.CALLED[key]}"] = Case(novels, natural, seeds)
    price = optimum.Price.constant(6.0)
    for name, law in reversed(LAWS.items()):
        for budgets, sizes in ((4, 5), (5, 7), (7, 8)):
            c = np.repeat(np.geomspace(1e17, 1e19, budgets), sizes)
            best = np.exp([best_size(law, budget, price) for budget in c])
            spread = np.tile(np.geomspace(1 / REACH, REACH, sizes), budgets)
            middles: dict[str, float | np.ndarray] = {"centred": 1.0}
            if (budgets, sizes) == (5, 7):
                middles |= {"twice": 2.0, "drifting": np.repeat(np.geomspace(0.5, 2, budgets), sizes)}
            for where, middle in middles.items():
                n = best * spread * middle
                design = Table.of(n=n, d=c / 6 / n, c=c, loss=np.ones(len(n)))
                out[f"{where}, {budgets} budgets of {sizes} sizes, {name}"] = Case(design, law, NOISE)
    return out


def isoflop_coverage(case: Case, tables: int, replicates: int = 400) -> dict[str, Any]:
    """How often the intervals contain each budget's optimal size, and the exponent; also their widths and errors.

    If the fit leaves out a budget of a table, all intervals of that table count as misses.
    """
    price = optimum.Price.of(case.design)
    clean, rng = case.losses(), np.random.default_rng(0)
    held, error, width, missed = [], [], [], 0
    columns: dict[str, Any] = {"n": case.design.n, "d": case.design.d, "c": case.design.c}
    wanted = len(isoflop.minima(Table.of(**columns, loss=clean), replicates=100, price=price)["budgets"])
    for seed in range(tables):
        loss = clean * np.exp(case.noise * rng.standard_normal(len(clean)))
        found = isoflop.minima(Table.of(**columns, loss=loss), replicates=replicates, seed=seed, price=price)
        if len(found["budgets"]) < wanted:
            missed += 1
            continue
        log_c = np.log([budget["C"] for budget in found["budgets"]])
        true = np.array([best_size(case.law, budget["C"], price) for budget in found["budgets"]])
        ends = np.log([budget["N_ci95"] for budget in found["budgets"]])
        slope, (low, high) = np.polyfit(log_c, true, 1)[0], found["a"]["ci95"]
        held.append([*((ends[:, 0] <= true) & (true <= ends[:, 1])), low <= slope <= high])
        middle = found["a"].get("estimate", found["a"]["value"])
        error.append([*(np.log([budget["N"] for budget in found["budgets"]]) - true), middle - slope])
        width.append([*np.ptp(ends, axis=1), high - low])
    by_name = {"coverage": np.sum(held, 0) / tables, "mean_error": np.mean(error, 0), "sd_error": np.std(error, 0),
               "width": np.median(width, 0)}  # fmt: skip
    digits = {name: [round(float(v), 4) for v in column] for name, column in by_name.items()}
    return {
        "budgets": {name: values[:-1] for name, values in digits.items()},
        "a": {name: values[-1] for name, values in digits.items()},
        "tables": tables,
        "left_out": missed,
    }


def law_coverage(law: dict[str, float], tables: int, replicates: int = 300) -> dict[str, Any]:
    """Which law fits best, how often E counts as determined, and how often E and a cover the truth; noise 0.5 %."""
    c = np.repeat(np.geomspace(1e17, 1e19, 7), 6)
    price = optimum.Price.constant(6.0)
    n = np.exp([best_size(law, budget, price) for budget in c]) * np.tile(np.geomspace(1 / REACH, REACH, 6), 7)
    clean = loss_of(law, n, c / 6 / n)
    pair = ("alpha_N", "alpha_D") if "N_c" in law else ("alpha", "beta")
    truth = law[pair[1]] / (law[pair[0]] + law[pair[1]])
    counts: dict[str, Any] = {"best": {}, "sum_beaten": 0, "sum_E_pinned": 0, "best_E_pinned": 0, "best_E_holds": 0,
                              "best_a_holds": 0, "sum_a_holds": 0, "isoflop_a_holds": 0}  # fmt: skip
    for seed in range(tables):
        loss = clean * np.exp(0.005 * np.random.default_rng(seed).standard_normal(len(n)))
        found = fit.fit_table(Table.of(n=n, c=c, loss=loss), fit.Settings(replicates=replicates, seed=seed, holdout=0))
        best = found["ranking"][0]["law"]
        counts["best"][best] = counts["best"].get(best, 0) + 1
        counts["sum_beaten"] += any(row["law"] == "parametric" and row["beaten"] for row in found["ranking"])
        floor = found[found["fits_best"]]["E"]
        counts["sum_E_pinned"] += found["parametric"]["E"]["value"] is not None
        counts["best_E_pinned"] += floor["value"] is not None
        counts["best_E_holds"] += floor["ci95"][0] <= law.get("E", 0.0) <= floor["ci95"][1]
        for name, part in (("best", "optimal"), ("sum", "parametric"), ("isoflop", "isoflop")):
            low, high = found[part]["a"]["ci95"]
            counts[f"{name}_a_holds"] += bool(low <= truth <= high)
    return {**counts, "tables": tables}


def main() -> int:
    """Runs the simulations; returns exit code 0."""
    arguments = parser(__doc__, "coverage")
    arguments.add_argument(
        "--what", choices=("isoflop", "laws", "multipliers"), default="isoflop", help="intervals of what"
    )
    arguments.add_argument("--tables", type=integer(1, 10**6), default=100, help="tables of each case (default 100)")
    arguments.add_argument(
        "--out", required=True, type=path_text, metavar="FILE.json", help="where to write the counts"
    )
    args = arguments.parse_args()
    found: dict[str, Any] = {}
    if args.what == "laws":
        for name, law in LAWS.items():
            found[name] = law_coverage(law, args.tables)
            print(name, found[name], flush=True)
    elif args.what == "multipliers":
        from experiments import simulated_ladders  # which imports this file

        found = simulated_ladders.coverage_table(args.tables, lambda line: print(line, flush=True))
    else:
        for name, case in cases().items():
            found[name] = isoflop_coverage(case, args.tables)
            print(f"{name}: {found[name]['budgets']['coverage']}, a {found[name]['a']['coverage']}", flush=True)
    command = " ".join(["python -m experiments.coverage", *sys.argv[1:]])
    report.write_json(args.out, {"command": command, "cases": found})
    return 0


if __name__ == "__main__":
    program(main)
