"""Figure and page of `experiments.objectives`, from its records."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.transfer_runs import over_seeds, paired, select
from jaxformer.scaling import plotting


class Arm(NamedTuple):
    """One way to pretrain.

    Attributes:
      label: its name on the page.
      kind: what `pretraining_objectives` calls it.
      task: how the task is told to a model of that family.
    """

    label: str
    kind: str
    task: str


ARMS = {
    "next_token": Arm("next token, a GPT", "next_token", "instructions"),
    "prefix_lm": Arm("prefix LM, a GPT", "prefix_lm", "instructions"),
    "span_corruption": Arm("T5's spans", "span_corruption", "pairs"),
    "denoising": Arm("BART's noise", "denoising", "pairs"),
    "mixture": Arm("UL2's mixture", "mixture", "pairs"),
    "scratch": Arm("the task itself, an encoder-decoder", "pairs", "pairs"),
}


def tuned(found: Sequence[dict[str, Any]], arm: str) -> list[dict[str, Any]]:
    """How the runs of an arm ended, by seed."""
    return select(found, arm=arm, part="tuning")


def arms(found: Sequence[dict[str, Any]]) -> list[str]:
    """The arms that have runs which ended, the best one first."""
    known = [arm for arm in ARMS if tuned(found, arm)]
    return sorted(known, key=lambda arm: over_seeds([each["loss"] for each in tuned(found, arm)]).value)


def figure(found: Sequence[dict[str, Any]]) -> bytes:
    """The loss on the task: a point for each seed, and the mean."""
    shown = arms(found)[::-1]
    with plotting.matplotlib().rc_context(plotting.STYLE | {"font.size": 13.0}):
        drawn, axes = plotting.panel()
        for row, arm in enumerate(shown):
            losses = [each["loss"] for each in tuned(found, arm)]
            color = plotting.line_style(0, 2)["color"]
            axes.plot(losses, np.full(len(losses), row), "o", color=color, markerfacecolor="none", markersize=8)
            axes.plot([np.mean(losses)], [row], "|", color=color, markersize=22, markeredgewidth=2)
        axes.set(yticks=range(len(shown)), yticklabels=[ARMS[arm].label for arm in shown])
        axes.set(xlabel="nats per token of what follows", ylim=(-0.6, len(shown) - 0.4))
        return plotting.encoded(drawn, "svg", bbox_inches="tight")


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """How each arm ended, in Markdown."""
    head = ["pretrained on", "updates", "FLOP", "then updates", "FLOP", "loss on what follows", "minus next token's"]
    rows = [head, ["---"] * len(head)]
    base = tuned(found, "next_token")
    for arm in arms(found):
        mine, first = tuned(found, arm), select(found, arm=arm, part="pretraining")[0]
        less = paired(mine, base, "loss") if arm != "next_token" else None
        rows.append([
            ARMS[arm].label, f"{first['step']:,}", f"{first['flops']:.3g}", f"{mine[0]['step']:,}",
            f"{mine[0]['flops']:.3g}", over_seeds([each["loss"] for each in mine]).text(".4f"),
            "" if less is None else less.text("+.4f"),
        ])  # fmt: skip
    return [f"| {' | '.join(row)} |" for row in rows]


def page(found: Sequence[dict[str, Any]]) -> str:
    """The page, in Markdown."""
    seeds = {arm: len(tuned(found, arm)) for arm in ARMS}
    error = max(each["loss_stderr"] for arm in ARMS for each in tuned(found, arm))
    told = "One seed each" if max(seeds.values()) == 1 else "Means over seeds, with 95 % intervals (Student's)"
    missing = [f"`{arm}` has {count} of {max(seeds.values())} seeds" for arm, count in seeds.items()
               if count < max(seeds.values())]  # fmt: skip
    return "\n".join([
        "# objectives: which of five prepares a small model best to go on with a text, at equal FLOP",
        "",
        "The losses of objectives that hide different tokens cannot be compared. So every model is tuned on one task "
        "after its pretraining: what follows a stretch of a novel, the same pairs of stretches, in the same tokens, "
        "for all.",
        "",
        "![the loss on what follows, by what a model was pretrained on](loss.svg)",
        "",
        f"{told}; nats per token of what follows, on pairs from novels that were held out (standard error over them "
        f"at most {error:.3f}, shared by all); the last column seed by seed:",
        "",
        *table(found),
        "",
        *([f"Not all have run: {', '.join(missing)}. The command below goes on.", ""] if missing else []),
        "## How",
        "",
        "    python -m experiments.objectives --files='books/train-*.txt.xz' \\",
        "        --validation=books/validation.txt.xz --out=experiments/results/objectives",
        "",
        "The config is `pretraining_objectives`: width 96, an encoder and a decoder of two layers each, or a GPT of "
        "four, which has nearly as many parameters; one tokenizer of 1024 entries for all. FLOP are those that a whole "
        "row takes, places without a token included: UL2's rows have many, because its targets differ in length. "
        "A pair is about 160 tokens and the 80 that follow. Tuning takes a fifth of the compute and begins with the "
        "pretrained weights, at half the learning rate for all; `the task itself` is pretrained on the pairs, then "
        "goes on with them in the same way. The GPTs are tuned with causal attention, which a prefix LM has to "
        "unlearn.",
        "",
        "Others found alike that a causal GPT on next tokens goes on with a text best where nothing else follows (Wang "
        "et al. 2022), and that T5's spans leave a model that needs long training on plain text to do so (Lester et "
        "al. 2021).",
        "",
        "What it does not show: longer training, larger models, other tasks (those that ask for what stands between, "
        "or for a label, favour objectives that hide spans), and the best learning rate of each.",
        "",
    ])  # fmt: skip
