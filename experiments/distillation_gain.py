"""What a teacher is worth: half of its depth, distilled, or begun as its layers, or from scratch, at equal FLOP.

    python -m experiments.distillation_gain --out=experiments/results/distillation_gain
    python -m experiments.distillation_gain --out=experiments/results/distillation_gain --stage=report

The teacher is the model that `experiments.pretraining_gain` pretrains; its run is shared where the workdir is. What the
teacher computes while it teaches counts: a student that has one makes fewer updates. Each arm has the best one of some
learning rates. The same command continues after a stop: runs are kept in the workdir, how they ended in records.jsonl.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.transfer_runs import (
    TRIAL,
    Mean,
    Planned,
    arguments,
    best_rate,
    over_seeds,
    paired,
    parsed_of,
    pretrained,
    read,
    select,
    study,
    train,
    unfinished,
)  # fmt: skip
from jaxformer.config import Config
from jaxformer.models.distilled_model import teacher_flops
from jaxformer.models.flops import training_flops
from jaxformer.runs import manifest
from jaxformer.runtime.program import program
from jaxformer.scaling import plotting

STEPS, EVALUATIONS, ROWS = 200, 5, 60
RATES = ("1e-3", "3e-3", "1e-2")
LABELS = {
    "scratch": "from scratch", "layers": "begun as the teacher's layers", "distilled": "the same, and distilled",
}  # fmt: skip


def begin(options: Any) -> Planned:
    """A run that is every other layer of the teacher and has learned nothing: one update with a learning rate that
    changes no float32."""
    changes = {
        **student(options), "train.steps": "1", "optimizer.learning_rate": "1e-12", "optimizer.warmup_steps": "0",
        "distill.teacher": str(options.workdir / "pretrained"),
    }  # fmt: skip
    return Planned("half_depth", "bert_tiny", changes, {"arm": "beginning", "seed": 0})


def student(options: Any) -> dict[str, str]:
    """The fields that all students have."""
    layers = parsed_of(pretrained(options.workdir, options.width, options.pretraining_steps), options.workdir)
    return {
        "model.width": str(options.width), "model.num_layers": str(layers.config.model.num_layers // 2),
        "data.tokenizer_file": str(options.workdir / "pretrained" / "tokenizer.json"), "checkpoint.keep": "1",
    }  # fmt: skip


def costs(options: Any) -> dict[str, float]:
    """FLOP of an update on one token: of the student alone, and with the teacher's forward pass."""
    teacher: Config = manifest.read_config(options.workdir / "pretrained")
    size = {"model.vocab_size": str(teacher.model.vocab_size)}
    config = parsed_of(Planned("", "bert_tiny", student(options) | size, {}), options.workdir).config
    alone = training_flops(config.model, config.data, config.tune)
    return {"alone": alone, "taught": alone + teacher_flops(teacher.model, config.data)}


def run_of(arm: str, seed: int, rate: str, options: Any) -> Planned:
    """One run of an arm."""
    flops = costs(options)
    steps = options.steps if arm != "distilled" else round(options.steps * flops["alone"] / flops["taught"])
    changes = {
        "scratch": {},
        "layers": {"init_from": str(options.workdir / "half_depth")},
        "distilled": {"distill.teacher": str(options.workdir / "pretrained")},
    }[arm]
    given = {
        **student(options), **changes, "train.steps": str(steps), "seed": str(seed), "optimizer.learning_rate": rate,
        "train.eval_every_steps": str(max(steps // EVALUATIONS, 1)), "train.eval_rows": str(ROWS),
        "execution.steps_per_dispatch": "5", "train.global_batch_size": "12",
    }  # fmt: skip
    about: dict[str, Any] = {"arm": arm, "rate": rate, "seed": seed}
    if seed == TRIAL:
        about["rates"] = RATES
    return Planned(f"half,{arm},{f'rate={rate}' if seed == TRIAL else f'seed={seed}'}", "bert_tiny", given, about)


def counted(options: Any, found: Sequence[dict[str, Any]]) -> Iterator[Planned]:
    """The runs that count, with the learning rates that were chosen; seed by seed."""
    for seed in range(options.seeds):
        for arm in LABELS:
            yield run_of(arm, seed, best_rate(found, arm=arm) or RATES[0], options)


def run(options: Any) -> bool:
    """Trains what is missing. Returns False: it was stopped, or only planned."""
    first = [pretrained(options.workdir, options.width, options.pretraining_steps)]
    if not train(first, options.workdir, options.out, options.plan_only):
        return False
    stages = (
        lambda: [begin(options)],
        lambda: [run_of(arm, TRIAL, rate, options) for arm in LABELS for rate in RATES],
        lambda: list(counted(options, read(options.out))),
    )
    for stage in stages:
        if not train(stage(), options.workdir, options.out, options.plan_only) and not options.plan_only:
            return False
    return not options.plan_only


def arms(found: Sequence[dict[str, Any]]) -> list[str]:
    """The arms that have runs which count."""
    return [arm for arm in LABELS if select(found, arm=arm)]


def figure(found: Sequence[dict[str, Any]]) -> bytes:
    """Held-out loss against FLOP: means over seeds, their intervals shaded; the ends, over all rows, as hollow points;
    the teacher's as a line."""
    with plotting.matplotlib().rc_context(plotting.STYLE | {"font.size": 13.0, "legend.fontsize": 12.0}):
        drawn, axes = plotting.panel()
        for i, arm in enumerate(arms(found)):
            curves = np.array([each["curve"] for each in select(found, arm=arm)])
            flops, (value, low, high) = curves[0, :, 0] / 1e12, np.array([*map(over_seeds, curves[:, :, 1].T)]).T
            style = plotting.line_style(i, len(LABELS))
            axes.plot(flops[:-1], value[:-1], label=LABELS[arm], marker=plotting.marker(i), **style)
            axes.fill_between(flops[:-1], low[:-1], high[:-1], color=style["color"], alpha=0.2, linewidth=0)
            # How it ended is over all rows, and not a point of the curve.
            end = {"marker": plotting.marker(i), "markerfacecolor": "none", "color": style["color"], "capsize": 4}
            axes.errorbar(flops[-1], value[-1], np.abs([[low[-1]], [high[-1]]] - value[-1]), **end)
        (teacher,) = [each for each in found if each["run"] == "pretrained"]
        axes.axhline(teacher["loss"], color="0.5", linewidth=1, linestyle=":", label="the teacher")
        axes.set(xlabel="training compute (TFLOP), the teacher's included", ylabel="nats per masked token")
        axes.legend(loc="best")
        return plotting.encoded(drawn, "svg", bbox_inches="tight")


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """How each arm ended, in Markdown."""
    rows = [["student", "learning rate", "updates", "FLOP", "loss", "right, %", "loss, less that of the layers"]]
    rows.append(["---"] * len(rows[0]))
    for arm in arms(found):
        mine = select(found, arm=arm)
        right = over_seeds([100 * each["accuracy"] for each in mine])
        less = paired(mine, select(found, arm="layers"), "loss") if arm != "layers" else None
        rows.append([
            LABELS[arm], f"{mine[0]['rate']}{', the largest tried' if mine[0]['rate'] == RATES[-1] else ''}",
            f"{mine[0]['step']:,}", f"{mine[0]['flops']:.3g}",
            over_seeds([each["loss"] for each in mine]).text(), right.text(".1f"),
            "" if less is None else less.text("+.3f"),
        ])  # fmt: skip
    return [f"| {' | '.join(row)} |" for row in rows]


def said(less: Mean | None, what: str, than: str) -> str:
    """A sentence on the difference of two losses."""
    if less is None or not np.isfinite(less.low):
        return f"Whether {what} ends below {than} is not known yet."
    told = "below" if less.high < 0 else "above" if less.low > 0 else "where these seeds cannot tell it from"
    return f"{what[0].upper()}{what[1:]} ends {told} {than}: {less.text('+.3f')} nats."


def page(found: Sequence[dict[str, Any]]) -> str:
    """The page, in Markdown."""
    (teacher,) = [each for each in found if each["run"] == "pretrained"]
    begun = next((each for each in found if each["run"] == "half_depth"), None)
    by = {arm: select(found, arm=arm) for arm in arms(found)}
    seeds = len({each["seed"] for mine in by.values() for each in mine})
    compare = [("layers", "scratch", "the student begun as layers", "the one from scratch"),
               ("distilled", "layers", "the distilled student", "the one begun as layers alone")]  # fmt: skip
    return "\n".join([
        "# distillation_gain: half the depth, with a teacher and without, at equal FLOP",
        "",
        "Claim to be tested, after Sanh et al. (2019): a student with every other layer of its teacher learns more "
        "from the teacher's probabilities than from the text alone, even if the teacher's forward passes are counted.",
        "",
        "![the held-out loss against training compute, beside the teacher's](loss.svg)",
        "",
        f"On held-out files, mean over {seeds} seeds with its 95 % interval; the last column is the difference seed by "
        "seed:",
        "",
        *table(found),
        "",
        *unfinished(found, [{"arm": arm} for arm in LABELS]),
        *(said(paired(by[a], by[b], "loss"), what, than) for a, b, what, than in compare if a in by and b in by),
        "",
        f"The teacher's loss is {teacher['loss']:.3f}, {100 * teacher['accuracy']:.1f} % right, after "
        f"{teacher['flops']:.3g} FLOP, which are not counted for any student."
        + ("" if begun is None else f" Every other layer of it, before any training, has {begun['loss']:.3f}."),
        "",
        "## How",
        "",
        "    python -m experiments.distillation_gain --out=experiments/results/distillation_gain",
        "    python -m experiments.distillation_gain --out=experiments/results/distillation_gain --stage=report",
        "",
        "The teacher is `bert_tiny` at half its width (4 layers of width 64), pretrained for "
        f"{teacher['step']:,} updates (`--width=128`: `bert_tiny` itself); students have 2 layers. `distilled` is "
        "DistilBERT's recipe: 5 T² KL at T = 2, 2 of the loss of the text, 1 of the cosine of the last states, and "
        "the student begins as the teacher's layers 0 and 2. `layers` begins there too, and has the loss of the text "
        "alone: its `init_from` is a distilled run of one update at a learning rate of 1e-12. All have the schedule "
        "of `bert_tiny`, warm-up and cosine, over their own number of updates.",
        "",
        f"Each arm has the best of the learning rates {', '.join(RATES)}, by the accuracy of a run with a seed that "
        "does not count. Intervals are Student's over seeds of initial values, masks and the order of rows; there is "
        f"one teacher. Curves are over {ROWS} held-out rows, the hollow points at their ends and the table over all.",
        "",
        "What it does not show: longer training, where a student from scratch catches up; larger models; each term of "
        "the loss by itself.",
        "",
    ])  # fmt: skip


def main() -> None:
    """Trains what is missing, and writes figure and page."""
    options = arguments(__doc__, "distillation_gain", STEPS).parse_args()
    study(options, run, lambda found: {"loss": figure(found)}, page)


if __name__ == "__main__":
    program(main)
