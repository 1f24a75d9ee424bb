"""How many choices a capacity drops, and what that costs: 8 experts on 16 languages, for several capacity factors.

    python -m experiments.expert_capacity --out=experiments/results/capacity
    python -m experiments.expert_capacity --out=experiments/results/capacity --stage=report

The same command continues after a stop: trained models are kept in the workdir, how they ended in records.jsonl.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.language_experts import run_of
from experiments.language_experts_page import rows_of
from experiments.transfer_runs import Mean, Planned, keep, over_seeds, paired, read, select, study, study_flags, train
from jaxformer import records
from jaxformer.runtime.program import program
from jaxformer.scaling import plotting

SEEDS, STEPS, EXPERTS = 3, 2000, 8
FACTORS = (None, 4.0, 2.0, 1.5, 1.25, 1.0, 0.5)  # None: no capacity
STRETCHES = {"first": "first tenth of the updates", "last": "last tenth"}

Records = Sequence[dict[str, Any]]


def arm_of(factor: float | None) -> str:
    """What a row of the table is called.

    >>> arm_of(1.25), arm_of(None)
    ('1.25', 'dropless')
    """
    return "dropless" if factor is None else f"{factor:g}"


def capacity_run(factor: float | None, seed: int, steps: int) -> Planned:
    """One run: that of `language_experts` with so many experts, and a capacity."""
    plain = run_of(EXPERTS, seed, steps)
    given = {} if factor is None else {"dispatch": "capacity", "capacity_factor": str(factor)}
    changes = plain.changes | {f"model.feed_forward.{name}": value for name, value in given.items()}
    return Planned(f"factor={arm_of(factor)},seed={seed}", plain.config, changes, {"arm": arm_of(factor), "seed": seed})


def routed(path: Path) -> dict[str, float]:
    """Means over the first and the last tenth of the updates, from the records of a run: the share of the choices that
    found their expert full, and the choices of the busiest expert as a multiple of their mean."""
    steps = [each for each in records.latest(records.load(path)) if each["kind"] == "train"]
    tenth, found = max(len(steps) // 10, 1), {}
    for stretch, inside in zip(STRETCHES, (steps[:tenth], steps[-tenth:]), strict=True):
        for field in ("expert_dropped", "expert_load"):
            found[f"{field}_{stretch}"] = round(float(np.mean([each[field] for each in inside])), 5)
    return found


def run(options: Namespace) -> bool:
    """Trains what is missing. Returns False: it was stopped, or only planned."""
    runs = [capacity_run(factor, seed, options.steps) for seed in range(options.seeds) for factor in FACTORS]
    if not train(runs, options.workdir, options.out, options.plan_only):
        return False
    known = {each["run"]: each for each in read(options.out)}
    for each in runs:
        record = known[each.name]
        if "expert_load_last" not in record:
            keep(options.out, record | routed(options.workdir / each.name / "records.jsonl"))
    return True


def arms(found: Records) -> list[str]:
    """Those that have records, in the order of the table."""
    return [arm for arm in map(arm_of, FACTORS) if select(found, arm=arm)]


def mean_of(found: Records, arm: str, field: str) -> Mean:
    """Of a field, over the seeds of a row of the table."""
    return over_seeds([each[field] for each in select(found, arm=arm)])


def costlier(found: Records, arm: str) -> Mean | None:
    """How much more is lost than without a capacity, seed by seed."""
    return paired(select(found, arm=arm), select(found, arm="dropless"), "loss")


def table(found: Records) -> list[str]:
    """The table of the page."""
    rows = [["capacity factor", "dropped, first tenth", "dropped, last tenth", "busiest expert, last tenth",
             "held-out loss", "more than dropless"]]  # fmt: skip
    for arm in arms(found):
        fields = ("expert_dropped_first", "expert_dropped_last", "expert_load_last")
        dropped, late, load = (mean_of(found, arm, field) for field in fields)
        more = costlier(found, arm)
        rows.append([
            arm, f"{dropped.value:.3f}", late.text(), f"{load.value:.2f}", mean_of(found, arm, "loss").text(),
            "" if arm == "dropless" or more is None else more.text("+.3f"),
        ])  # fmt: skip
    return rows_of(rows)


def figures(found: Records) -> dict[str, bytes]:
    """Dropped choices and lost nats against the capacity factor."""
    mine = [arm for arm in arms(found) if arm != "dropless"]
    factors = [float(arm) for arm in mine]
    package = plotting.matplotlib()
    with package.rc_context(plotting.STYLE | {"font.size": 13.0, "axes.titlesize": 13.0, "legend.fontsize": 12.0}):
        drawn = package.figure.Figure(figsize=(9, 3.8), layout="constrained")
        left, right = drawn.subplots(1, 2)
        for i, (stretch, label) in enumerate(STRETCHES.items()):
            means = [mean_of(found, arm, f"expert_dropped_{stretch}").value for arm in mine]
            left.plot(factors, means, marker=plotting.marker(i), color=plotting.shade(0.7 * i), label=label)
        value, low, high = np.array([costlier(found, arm) for arm in mine]).T
        bars = np.nan_to_num([value - low, high - value])
        right.errorbar(factors, value, bars, marker=plotting.marker(0), color=plotting.shade(0), capsize=4)
        right.axhline(0, linewidth=1, color="grey")
        for axes, name in ((left, "share of the choices dropped"), (right, "nats a token more than dropless")):
            axes.set(xscale="log", xlabel="capacity factor", title=name)
            axes.set_xticks(factors, ["" if factor in (1.25, 1.5) else f"{factor:g}" for factor in factors])
            axes.minorticks_off()
        left.set_ylim(bottom=0)
        left.legend()
        return {"capacity": plotting.encoded(drawn, "svg", bbox_inches="tight")}


def said(found: Records) -> str:
    """What the losses say, in a sentence."""
    told = {arm: costlier(found, arm) for arm in arms(found) if arm != "dropless"}
    worse = [arm for arm, more in told.items() if more is not None and more.low > 0]
    if not worse:
        return "No capacity is told apart from dropless by its loss."
    return f"Told apart from dropless by its loss, and worse: a capacity factor of {', '.join(worse)}."


def page(found: Records) -> str:
    """The page, in Markdown."""
    end, seeds = found[0], len({each["seed"] for each in found})
    return "\n".join([
        "# capacity: how many choices find their expert full, and what that costs",
        "",
        "With `model.feed_forward.dispatch=capacity` an expert takes at most `capacity_factor` k T / E tokens of a row "
        "(Lepikhin et al. 2020; Fedus et al. 2021); a choice beyond that adds nothing to its token.",
        "",
        "![dropped choices and loss against the capacity factor](capacity.svg)",
        "",
        f"Means over {seeds} seeds with their 95 % intervals (Student's); losses in nats a token on all held-out rows; "
        "the last column is the difference seed by seed. The busiest expert is a multiple of the mean: 1 if all are "
        "equally busy.",
        "",
        *table(found),
        "",
        said(found),
        "",
        "Of the whole batch the busiest expert has less than twice the mean, so a factor of 2 would drop next to "
        "nothing if rows were like the batch. They are not: a row is of one of 16 languages, and has 64 tokens, of "
        "which an expert takes 8 times the factor.",
        "",
        "## How",
        "",
        "    python -m experiments.expert_capacity --out=experiments/results/capacity",
        "    python -m experiments.expert_capacity --out=experiments/results/capacity --stage=report",
        "",
        f"The config is `expert_languages`, as in `experts`: {EXPERTS} experts, one for a token, {end['step']:,} "
        f"updates of 32 rows, {end['tokens']:,} tokens, balance loss 0.01. All have one learning rate, 4e-3. "
        "Evaluations keep the capacity.",
        "",
        "What it does not show: longer rows of mixed text, where shares of a row are nearer to those of the batch; two "
        "experts for a token; larger models.",
        "",
    ])  # fmt: skip


def main() -> None:
    """Trains what is missing, and writes figure and page."""
    flags = study_flags(__doc__, "expert_capacity", "runs/expert_capacity", seeds=SEEDS, steps=STEPS)
    study(flags.parse_args(), run, figures, page)


if __name__ == "__main__":
    program(main)
