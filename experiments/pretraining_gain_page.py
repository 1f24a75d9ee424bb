"""Figure and page of `experiments.pretraining_gain`, from its records."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.transfer_runs import TRIAL, Mean, over_seeds, paired, select, unfinished
from jaxformer.scaling import plotting

LABELS = {"scratch": "from scratch", "full": "pretrained", "lora": "pretrained, LoRA"}
TITLES = {
    "token_kinds": "kind of each token", "name_roles": "role of each name", "exception_type": "exception caught",
}  # fmt: skip
PICTURE = "the share of held-out labels that are right against the number of labels learned from"


def tasks(found: Sequence[dict[str, Any]]) -> list[str]:
    """The tasks that have runs which count."""
    return [task for task in TITLES if select(found, task=task, arm="scratch")]


def counts(found: Sequence[dict[str, Any]], task: str) -> list[Any]:
    """The numbers of examples of a task, the smallest first; None, which is all, the last."""
    known = {each["examples"] for each in select(found, task=task, arm="scratch")}
    return sorted(known, key=lambda count: (count is None, count or 0))


def labels(found: Sequence[dict[str, Any]], task: str, examples: Any) -> int | None:
    """How many labels there are in so many examples; None: not counted yet."""
    known = select(found, task=task, examples=examples, arm="labels")
    return known[0]["labels"] if known else None


def share(found: Sequence[dict[str, Any]], task: str, arm: str, examples: Any) -> Mean | None:
    """Accuracy over seeds; None: no run has ended."""
    mine = select(found, task=task, arm=arm, examples=examples)
    return over_seeds([each["accuracy"] for each in mine]) if mine else None


def gain(
    found: Sequence[dict[str, Any]], task: str, examples: Any, arm: str = "full", to: str = "scratch"
) -> Mean | None:
    """How much more of the labels are right, seed by seed."""
    ours, theirs = (select(found, task=task, arm=each, examples=examples) for each in (arm, to))
    return paired(ours, theirs, "accuracy")


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Accuracy by task and number of labels, in Markdown."""
    head = ["task", "examples", "labels", LABELS["scratch"], LABELS["full"], "gain", "most frequent label"]
    rows = [head, ["---"] * len(head)]
    for task in tasks(found):
        for examples in counts(found, task):
            means = [share(found, task, arm, examples) for arm in ("scratch", "full")]
            more, known = gain(found, task, examples), labels(found, task, examples)
            usual = select(found, task=task, arm="scratch")[0]["majority_accuracy"]
            rows.append([
                f"`{task}`", "all" if examples is None else str(examples), "" if known is None else f"{known:,}",
                *("" if mean is None else mean.text() for mean in means), "" if more is None else more.text("+.3f"),
                f"{usual:.3f}",
            ])  # fmt: skip
    return [f"| {' | '.join(row)} |" for row in rows]


def figure(found: Sequence[dict[str, Any]]) -> bytes:
    """Accuracy against labels, a panel for each task: means over seeds, their intervals shaded."""
    shown = tasks(found)
    with plotting.matplotlib().rc_context(plotting.STYLE | {"font.size": 13.0, "legend.fontsize": 12.0}):
        drawn, panels = plotting.panel(max(len(shown), 2))
        drawn.set_size_inches(6.4, 3.0 * len(panels))
        for axes in panels[len(shown) :]:
            axes.set_axis_off()
        for axes, task in zip(panels, shown, strict=False):
            every = counts(found, task)
            at = [labels(found, task, examples) or i + 1 for i, examples in enumerate(every)]
            for i, arm in enumerate(("scratch", "full")):
                means = [share(found, task, arm, examples) for examples in every]
                known = [(x, mean) for x, mean in zip(at, means, strict=True) if mean is not None]
                if not known:
                    continue
                style = plotting.line_style(i, 3)
                x, (value, low, high) = [x for x, _ in known], np.array([mean for _, mean in known]).T
                axes.plot(x, value, label=LABELS[arm], marker=plotting.marker(i), **style)
                axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
            lora = share(found, task, "lora", every[-1])
            if lora is not None:
                reach = None if not np.isfinite(lora.low) else [[lora.value - lora.low], [lora.high - lora.value]]
                axes.errorbar(
                    [at[-1] * 1.12], [lora.value], yerr=reach, label=LABELS["lora"], marker=plotting.marker(2),
                    linestyle="none", capsize=3, color=plotting.line_style(2, 3)["color"], markeredgecolor="0.3",
                    ecolor="0.5",
                )  # fmt: skip
            axes.set(xscale="log", ylabel="right", title=TITLES[task])
            plotting.log_ticks(axes.xaxis)
        panels[len(shown) - 1].set_xlabel("labels learned from")
        panels[0].legend(loc="best")
        return plotting.encoded(drawn, "svg", bbox_inches="tight")


def verdict(found: Sequence[dict[str, Any]]) -> str:
    """In how many places the interval of the gain is above 0, or below it, in words."""
    gains = [gain(found, task, examples) for task in tasks(found) for examples in counts(found, task)]
    known = [each for each in gains if each is not None and np.isfinite(each.low)]
    above, below = sum(each.low > 0 for each in known), sum(each.high < 0 for each in known)
    return (
        f"Of {len(known)} comparisons the interval of the gain lies above 0 in {above}, below 0 in {below}, and "
        f"holds 0 in {len(known) - above - below}."
    )


def costs(found: Sequence[dict[str, Any]]) -> list[str]:
    """LoRA beside full tuning, in Markdown; nothing where no run of it has ended."""
    with_lora = [task for task in tasks(found) if share(found, task, "lora", counts(found, task)[-1]) is not None]
    if not with_lora:
        return []
    rows = [["task", "all weights", "LoRA", "difference"], ["---"] * 4]
    for task in with_lora:
        most = counts(found, task)[-1]
        means = [share(found, task, arm, most) for arm in ("full", "lora")]
        more = gain(found, task, most, "lora", "full")
        rows.append([f"`{task}`", *("" if each is None else each.text() for each in [*means]),
                     "" if more is None else more.text("+.3f")])  # fmt: skip
    known = {each["task"]: each["costs"] for each in select(found, arm="cost")}
    more_rows = [["task", "", "trained", "FLOP a token", "state", "temporaries", "CPU time of an update"], ["---"] * 7]
    ratios = []
    for task, both in known.items():
        for arm, cost in both.items():
            more_rows.append([
                f"`{task}`", "all weights" if arm == "full" else "LoRA", f"{cost['trained']:,}",
                f"{cost['flops_per_token']:.3g}", f"{cost['state_bytes'] / 2**20:.2f} MiB",
                f"{cost['temporary_bytes'] / 2**20:.1f} MiB", f"{1000 * float(np.median(cost['seconds'])):.0f} ms",
            ])  # fmt: skip
        each = np.array(both["lora"]["seconds"]) / np.array(both["full"]["seconds"])
        ratios.append(f"`{task}` {np.median(each):.2f} ({each.min():.2f} to {each.max():.2f})")
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not known:
        return lines
    return [
        *lines, "", *(f"| {' | '.join(row)} |" for row in more_rows), "",
        f"CPU time of an update with LoRA, as a part of that with all weights, median and range over turns in which "
        f"the two alternate: {', '.join(ratios)}. State is parameters and moments; temporaries are what XLA's program "
        "has beside it, most of it activations, which both need.",
    ]  # fmt: skip


def page(found: Sequence[dict[str, Any]]) -> str:
    """The page, in Markdown."""
    before = next((each for each in found if each["run"] == "pretrained"), None)
    some = select(found, task=tasks(found)[0], arm="scratch")[0]
    seeds = len({each["seed"] for each in found if each["arm"] in LABELS and each["seed"] != TRIAL})
    chosen = []
    for task in tasks(found):
        rates = [f"{LABELS[arm]} {mine[0]['rate']}" for arm in LABELS if (mine := select(found, task=task, arm=arm))]
        chosen.append(f"`{task}` {', '.join(rates)}")
    lora = costs(found)
    places: list[dict[str, Any]] = [
        {"task": task, "arm": arm, "examples": count} for task in TITLES for arm in LABELS
        for count in (counts(found, task) or [None])[-1 if arm == "lora" else 0 :]
    ]  # fmt: skip
    return "\n".join([
        "# pretraining_gain: what pretraining is worth when there are few labels",
        "",
        "Claim to be tested: a BERT pretrained on Python's own source and then tuned has more of the labels right than "
        "the same model from scratch, the more so the fewer labels there are.",
        "",
        f"![{PICTURE}](labels.svg)",
        "",
        f"Held-out labels that are right, mean over {seeds} seeds with its 95 % interval, and the difference seed by "
        "seed:",
        "",
        *table(found),
        "",
        verdict(found),
        "",
        *unfinished(found, places),
        *(["## LoRA beside all weights", "", "With the most labels, at equal updates:", "", *lora, ""] if lora else []),
        "## How",
        "",
        "    python -m experiments.pretraining_gain --out=experiments/results/pretraining_gain",
        "    python -m experiments.pretraining_gain --out=experiments/results/pretraining_gain --stage=report",
        "",
        "The model is `bert_tiny`, 4 layers of width 128. "
        + ("" if before is None else
           f"It was pretrained once, for {before['step']:,} updates and {before['tokens']:,} tokens: "
           f"{before['loss']:.3f} nats per masked token on held-out files, {100 * before['accuracy']:.1f} % right. ")
        + f"Every tuning run makes {some['step']} updates, from scratch as well, with the tokenizer of the pretrained "
        "one, without layer decay; few labels are read many times. An example of the first two tasks is a file, of "
        "the third the lines around one `except`. Files held out are those that pretraining did not see either.",
        "",
        "From scratch and pretrained, each has the better of two learning rates, 1e-3 and 3e-3, by held-out labels, "
        "tried with the middle number of examples and a seed that does not count; LoRA's is 1e-2: "
        f"{'; '.join(chosen)}.",
        "",
        "Intervals are Student's over seeds of initial values (of the head alone, where weights are pretrained) and of "
        "the order of rows. The examples are the same for all seeds, there is one pretrained model, and the held-out "
        "labels are the same: `exception_type` has "
        f"{held_out(found)} of them, so that an accuracy has a standard error of its own, beside the interval.",
        "",
        "`records.jsonl` has how every run ended. What it does not show: larger models, longer tuning from scratch, "
        "text that is not Python.",
        "",
    ])  # fmt: skip


def held_out(found: Sequence[dict[str, Any]]) -> str:
    """About how many labels `exception_type` holds out, from the standard error of a share."""
    mine = [each for each in select(found, task="exception_type") if each.get("accuracy_stderr")]
    sizes = [each["accuracy"] * (1 - each["accuracy"]) / each["accuracy_stderr"] ** 2 for each in mine]
    return f"about {round(float(np.median(sizes)), -1):.0f}" if sizes else "few"
