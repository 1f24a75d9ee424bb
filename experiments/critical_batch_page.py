"""The page of `experiments.critical_batch`, from its records: updates and tokens, beside the noise scale."""

import numpy as np

from experiments.critical_batch_fit import Measured, Records, best_updates, results
from experiments.critical_batch_search import BATCHES, LENGTH, updates_of
from jaxformer.scaling import plotting

CLOSE = 1.5  # the noise scale predicts within this factor


def figure(found: Records) -> bytes:
    """Updates against tokens with the fitted curves, and the critical batch beside the noise scale."""
    package = plotting.matplotlib()
    with package.rc_context(plotting.STYLE):
        drawn = package.figure.Figure(figsize=(8.4, 3.8), layout="constrained")
        left, right = drawn.subplots(1, 2)
        mine = results(found)
        batches = np.geomspace(min(BATCHES) / 2, max(BATCHES) * 2, 200) * LENGTH
        for i, (goal, of) in enumerate(mine.items()):
            style = plotting.line_style(i, len(mine))
            for seed in best_updates(found, goal).values():
                updates = [updates_of(each, goal) for each in seed.values()]
                tokens = [rows * LENGTH * each for rows, each in zip(seed, updates, strict=True)]
                left.plot(tokens, updates, plotting.marker(i), color=style["color"])
            updates = of.fit.updates * (1 + of.fit.batch / batches)
            left.plot(batches * updates, updates, label=f"loss {goal:g}", **style)
        left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="updates")
        right.set(yscale="log", xlabel="until a held-out loss of", ylabel="tokens in an update")
        shown = package.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}")
        for axis in (left.xaxis, right.yaxis):
            axis.set_major_locator(package.ticker.LogLocator(subs=(1, 3)))
            axis.set_major_formatter(shown)
            axis.set_minor_locator(package.ticker.NullLocator())
        if mine:
            left.legend(loc="best")
            one, other = (plotting.line_style(i, 2)["color"] for i in range(2))
            value = np.array([of.fit.batch for of in mine.values()])
            bars = np.array([(of.fit.batch - of.low, of.high - of.fit.batch) for of in mine.values()])
            style = {"marker": "o", "capsize": 3, "color": one, "label": "critical batch, measured"}
            right.errorbar(list(mine), value, np.maximum(bars, 0).T, **style)
            style = {"marker": "s", "linestyle": "--", "color": other, "label": "noise scale, on average"}
            right.plot(list(mine), [predicted(of) for of in mine.values()], **style)
            right.legend(loc="best")
            right.set_xticks(list(mine), [f"{goal:g}" for goal in mine])
            right.invert_xaxis()
        return plotting.encoded(drawn, "svg", bbox_inches="tight")


def predicted(of: Measured) -> float:
    """The critical batch by the noise scale, tokens: the geometric mean over seeds."""
    return float(np.exp(np.mean(np.log(of.noise))))


def table(found: Records) -> list[str]:
    """The goals, in Markdown."""
    rows = [["until a loss of", "seeds", "S_min", "E_min, tokens", "critical batch, tokens", "noise scale, tokens",
             "noise scale / measured"]]  # fmt: skip
    rows.append(["---"] * len(rows[0]))
    for goal, of in results(found).items():
        scales = ", ".join(f"{each:,.0f}" for each in of.noise)
        rows.append([
            f"{goal:g}", f"{len(of.noise)}", f"{of.fit.updates:.0f}", f"{of.fit.tokens:,.0f}",
            f"{of.fit.batch:,.0f} [{of.low:,.0f}, {of.high:,.0f}]", f"{predicted(of):,.0f} ({scales})",
            f"{predicted(of) / of.fit.batch:.2f}",
        ])  # fmt: skip
    return [f"| {' | '.join(row)} |" for row in rows]


def rates(found: Records) -> list[str]:
    """Updates at the best rate of each batch size, in Markdown."""
    rows = [["until a loss of", "seed", *(f"{each * LENGTH:,} tokens" for each in BATCHES)]]
    rows.append(["---"] * len(rows[0]))
    for goal in results(found):
        for seed, best in best_updates(found, goal).items():
            cells = [f"{updates_of(each, goal):.0f} ({each['rate']:g})" for each in best.values()]
            rows.append([f"{goal:g}", f"{seed}", *cells])
    return [f"| {' | '.join(row)} |" for row in rows]


def said(found: Records) -> str:
    """A sentence on the prediction."""
    ratios = [predicted(of) / of.fit.batch for of in results(found).values()]
    if not ratios:
        return "No seed has ended yet."
    close = sum(1 / CLOSE <= each <= CLOSE for each in ratios)
    return (
        f"The noise scale is within a factor of {CLOSE} of the measured critical batch at {close} of {len(ratios)} "
        f"losses; it is {min(ratios):.2f} to {max(ratios):.2f} times as large."
    )


def page(found: Records) -> str:
    """The page, in Markdown."""
    hours = sum(each["seconds"] for each in found) / 3600
    return "\n".join([
        "# critical_batch: does the noise scale predict how large a batch may be?",
        "",
        "Claim to be tested, after McCandlish et al. (2018): beyond the batch size that the gradient noise scale "
        "gives, more tokens in an update save few updates; below it, smaller batches save few tokens.",
        "",
        "![updates against tokens, and the critical batch beside the noise scale](critical_batch.svg)",
        "",
        said(found),
        "",
        *table(found),
        "",
        "S_min and E_min: updates with very large batches, and tokens with very small ones, from the beginning of "
        "training until the loss, by the fit of (S / S_min - 1) (E / E_min - 1) = 1; the critical batch is "
        "E_min / S_min. Intervals (95 %) are of a bootstrap over seeds and the residuals of the fit; of one seed the "
        "seeds are not in them. The noise scale is the mean over the updates until the loss, each weighted by "
        "1 / (1 + noise scale / batch), what it is worth by the same theory: of the best run of each batch size, then "
        "the geometric mean over sizes and seeds; in brackets of each seed.",
        "",
        "Updates until the loss, with the best learning rate in brackets:",
        "",
        *rates(found),
        "",
        "## How",
        "",
        "    python -m experiments.critical_batch --out=experiments/results/critical_batch",
        "    python -m experiments.critical_batch --out=experiments/results/critical_batch --stage=report",
        "",
        "A GPT of 2 layers of width 64, on the source text of Python's standard library in one byte-level BPE of 512 "
        "tokens, is trained by AdamW from scratch, at a constant rate after 16 updates, until the loss on 192 held-out "
        "rows has come down to the goal. The rate of each batch size is the best of a grid of factors of 2, searched "
        "until both neighbours of the best are worse, for each goal. There is no weight decay and no clipping. The "
        "noise scale is that of `train.noise_scale`, measured again each time that the updates have grown by a "
        "quarter, from 16 batches of 4,096 tokens in 16 micro-batches: variance and square of the gradient are "
        "averaged first, and then divided.",
        "",
        f"{len(found)} runs took {hours:.1f} hours on one shared core.",
        "",
        "What it does not show: larger models, and longer training.",
        "",
    ])  # fmt: skip
