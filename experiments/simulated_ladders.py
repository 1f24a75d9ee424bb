"""Pairs of simulated ladders whose multiplier is known, and how often `scaling.compare`'s intervals hold it.

A run's loss is a law's L(N, M C), with the noise of seeds (a third of its variance shared along a trunk), a rate chosen
by the loss on a grid of factors of two whose best is elsewhere for each ladder, and held-out rows of which some are
harder than others, a little differently for each ladder. `experiments.coverage --what=multipliers` writes the table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments import coverage
from jaxformer.scaling import compare, optimum
from jaxformer.scaling.arms import ROWS, pack_rows

Floats = np.ndarray
# What is planted: M at the largest budget, and its factor per tenfold compute.
PLANTED = {
    "A/A": (1.0, 1.0),
    "half": (0.5, 1.0),
    "1.5": (1.5, 1.0),
    "1.5, growing": (1.5, 1.2),
}
RATE_BENDS = {"below": 0.03, "above": 0.017}  # log loss at a rate e times too low or too high; as on novels
TRUNK_SHARE = 1 / 3  # of the noise's variance, shared by the runs of one size, rate and seed
ROWS_READ, ROW_SPREAD, LADDER_SPREAD, RUN_SPREAD = 256, 0.2, 0.01, 0.02  # relative


class Truth(NamedTuple):
    """A ladder's design and law.

    Attributes:
      loss: (N, C) -> loss.
      sizes: budget -> sizes tried there.
      noise: of a run, relative.
      seeded: sizes, smallest first, that have two seeds.
    """

    loss: Callable[[Floats | float, Floats | float], Floats | float]
    sizes: dict[float, tuple[float, ...]]
    noise: float
    seeded: int = 3


def lopsided(n: Any, c: Any) -> Any:
    """A valley four times as steep towards large sizes as towards small ones, twice the best size away."""
    x = np.log(n) - 0.5 * np.log(c / 120)
    wall = (np.exp(0.9 * x) - 1 - 0.9 * x) / 0.81
    return 9.0 * np.asarray(c, float) ** -0.06 * np.exp(0.08 * wall)


def truths(noise: float = 0.0022) -> dict[str, Truth]:
    """The laws, each on five budgets over two decades with five sizes a factor of 4 either way."""
    price = optimum.Price.constant(6.0)
    found: dict[str, Truth] = {}
    grid = np.geomspace(1 / 4, 4, 5)
    for name, law in coverage.LAWS.items():
        whole = np.geomspace(1e17, 1e19, 5)
        sizes = {float(c): tuple(np.exp(coverage.best_size(law, c, price)) * grid) for c in whole}
        found[name] = Truth(lambda n, c, law=law: coverage.loss_of(law, n, c / 6 / n), sizes, noise)
    sizes = {float(c): tuple(np.sqrt(c / 120) * grid) for c in np.geomspace(1e13, 1e15, 5)}
    return found | {"a lopsided valley": Truth(lopsided, sizes, noise)}


def novels() -> dict[str, Truth]:
    """Kaplan's law and the sum, as fitted to the novels, on their grid of sizes and budgets, with their noise."""
    found = {}
    for key in ("kaplan", "parametric"):
        case = coverage.cases()[f"novels, {coverage.fit.CALLED[key]}"]
        of_n = optimum.Price.of(case.design)
        budgets: dict[float, set[float]] = {}
        for n, c in zip(case.design.n, case.design.c, strict=True):
            budgets.setdefault(min((2.5e11, 7.8e11, 2.4e12, 7.5e12), key=lambda b: abs(np.log(b / c))), set()).add(n)
        loss = lambda n, c, law=case.law, of_n=of_n: coverage.loss_of(law, n, c / np.exp(of_n.per_token(np.log(n))))  # noqa: E731
        found[f"novels, {coverage.fit.CALLED[key]}"] = Truth(
            loss, {c: tuple(sorted(ns)) for c, ns in budgets.items()}, case.noise, 4
        )
    return found


def ladder(truth: Truth, m: float, growth: float, rng: np.random.Generator, hard: Floats) -> list[dict[str, Any]]:
    """The final records of a ladder whose M is `m` at the largest budget and falls by `growth` for each tenth of it;
    `hard` [J] is how much harder each held-out row is."""
    own = hard + LADDER_SPREAD * rng.standard_normal(len(hard))
    best, drift = rng.uniform(-0.5, 0.5), rng.normal(0.0, 0.1)  # of the rates, in steps of the grid and by size
    top, widths = max(truth.sizes), sorted({n for sizes in truth.sizes.values() for n in sizes})
    trunks: dict[tuple[int, int, int], float] = {}
    out: list[dict[str, Any]] = []

    def run(width: int, c: float, factor: int, seed: int) -> dict[str, Any]:
        n = widths[width]
        off = np.log(2.0) * (factor - best - drift * (width - len(widths) / 2))
        trunk = trunks.setdefault((width, factor, seed), rng.standard_normal())
        noise = np.sqrt(TRUNK_SHARE) * trunk + np.sqrt(1 - TRUNK_SHARE) * rng.standard_normal()
        y = np.log(truth.loss(n, c * m * growth ** np.log10(c / top)))
        y += RATE_BENDS["below" if off < 0 else "above"] * off**2 + truth.noise * noise
        rows = np.exp(y) * (1 + own + RUN_SPREAD * rng.standard_normal(len(own)) / np.sqrt(len(own)))
        return {
            "kind": "final", "run": f"w{width}-c{c:.3g}-lr{factor}-s{seed}", "role": "learning rate", "width": width,
            "params": float(n), "flops": float(c), "tokens": float(c / 6 / n), "status": "finished", "seed": seed,
            "learning_rate": 0.01 * 2.0**factor, "loss": float(rows.mean()),
            "loss_stderr": float(rows.std() / np.sqrt(len(rows))), ROWS: pack_rows(rows, np.ones(len(rows))),
        }  # fmt: skip

    for width, n in enumerate(widths):
        mine = [c for c, sizes in sorted(truth.sizes.items()) if n in sizes]
        middle = len(mine) // 2
        tried = {c: [run(width, c, factor, 0) for factor in (-1, 0, 1)] for c in mine[: middle + 1]}
        chosen = 0
        for c in mine:
            if c in tried:
                least = min(tried[c], key=lambda record: record["loss"])
                chosen = tried[c].index(least) - 1
                out += [each for each in tried[c] if each is not least] + [{**least, "role": "ladder"}]
            else:
                out.append({**run(width, c, chosen, 0), "role": "ladder"})
            if width < truth.seeded:
                out.append({**run(width, c, chosen, 1), "role": "ladder"})
    return out


def multiplier_coverage(
    truth: Truth, planted: str, pairs: int, replicates: int = 400, kept: bool = True
) -> dict[str, Any]:
    """How often the intervals hold M at the largest budget and its trend, how wide they are, and the verdicts."""
    m, growth = PLANTED[planted]
    out: dict[str, Any] = {"m_held": 0, "trend_held": 0, "trend_not_1": 0, "verdicts": {}}
    error, width, slope = [], [], []
    for seed in range(pairs):
        rng = np.random.default_rng(seed)
        hard = ROW_SPREAD * rng.standard_normal(ROWS_READ)
        both = [ladder(truth, *plan, rng, hard) for plan in ((1.0, 1.0), (m, growth))]
        if not kept:
            both = [[{k: v for k, v in record.items() if k != ROWS} for record in each] for each in both]
        found = compare.compare(*both, replicates=replicates, seed=seed)
        top = max(truth.sizes)
        at = m * growth ** np.log10(found.at / top)
        out["m_held"] += bool(found.flop.low <= at <= found.flop.high)
        out["trend_held"] += bool(found.trend.low <= growth <= found.trend.high)
        out["trend_not_1"] += bool(found.trend.low > 1 or found.trend.high < 1)
        out["verdicts"][found.verdict] = out["verdicts"].get(found.verdict, 0) + 1
        error.append(np.log(found.flop.value / at))
        width.append(np.log(found.flop.high / found.flop.low))
        slope.append([np.log(found.trend.value / growth), np.log(found.trend.high / found.trend.low)])
    digits = {"m_error": np.mean(error), "m_sd": np.std(error), "m_width": np.median(width),
              "trend_error": np.mean(slope, 0)[0], "trend_sd": np.std(slope, 0)[0],
              "trend_width": np.median(slope, 0)[1]}  # fmt: skip
    return {**out, **{name: round(float(value), 4) for name, value in digits.items()}, "pairs": pairs}


def coverage_table(pairs: int, log: Callable[[str], None] = print) -> dict[str, Any]:
    """`multiplier_coverage` of every truth and plan; of A/A also without the rows' losses."""
    out = {}
    for name, truth in {**truths(), **novels()}.items():
        for planted in PLANTED:
            out[f"{name}; {planted}"] = multiplier_coverage(truth, planted, pairs)
        out[f"{name}; A/A, rows not kept"] = multiplier_coverage(truth, "A/A", pairs, kept=False)
        for key in [key for key in out if key.startswith(f"{name};")]:
            held = {part: out[key][part] for part in ("m_held", "trend_held", "trend_not_1")}
            log(f"{key}: {held} of {pairs}")
    return out
