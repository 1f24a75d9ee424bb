"""The page of `experiments.critical_batch`, from its records: updates and tokens, beside the noise scale."""

import numpy as np

from experiments.critical_batch_fit import Records, noise_scale, results, whole_seeds
from experiments.critical_batch_search import LENGTH
from experiments.transfer_runs import Mean, over_seeds
from jaxformer.scaling import plotting

CLOSE = 1.5  # the noise scale predicts within this factor


def figure(found: Records) -> bytes:
    """Updates against tokens with the fitted curves, and the critical batch beside the noise scale."""
    package = plotting.matplotlib()
    with package.rc_context(plotting.STYLE):
        drawn = package.figure.Figure(figsize=(8.4, 3.8), layout="constrained")
        left, right = drawn.subplots(1, 2)
        mine = results(found)
        for i, (point, of) in enumerate(mine.items()):
            style = plotting.line_style(i, len(mine))
            for seed in whole_seeds(found, point).values():
                tokens = [each * LENGTH * updates for each, updates in seed.items()]
                left.plot(tokens, list(seed.values()), plotting.marker(i), color=style["color"])
            batches = np.geomspace(min(seed) / 2, max(seed) * 2, 200) * LENGTH
            updates = of.fit.updates * (1 + of.fit.batch / batches)
            left.plot(batches * updates, updates, label=f"after {point} updates", **style)
        left.set(xscale="log", yscale="log", xlabel="tokens E", ylabel="updates S")
        if mine:
            left.legend(loc="best")
        value = np.array([of.fit.batch for of in mine.values()])
        bars = np.array([(of.fit.batch - of.low, of.high - of.fit.batch) for of in mine.values()]).reshape(-1, 2)
        if mine:
            one, other = (plotting.line_style(i, 2)["color"] for i in range(2))
            scales = [noise_scale(found, point) for point in mine]
            style = {"marker": "o", "capsize": 3, "color": one, "label": "measured"}
            right.errorbar(list(mine), value, np.maximum(bars, 0).T, **style)
            right.plot(list(mine), scales, marker="s", linestyle="--", color=other, label="noise scale")
            right.legend(loc="best")
        right.set(xscale="log", yscale="log", xlabel="updates before", ylabel="tokens")
        right.set_xticks(list(mine), [f"{point:,}" for point in mine])
        right.xaxis.set_minor_locator(package.ticker.NullLocator())
        return plotting.encoded(drawn, "svg", bbox_inches="tight")


def about(found: Records, point: int) -> tuple[Mean, Mean]:
    """Losses at a point and at the end of its branches."""
    mine = [each for each in found if each["what"] == "noise" and each["point"] == point]
    return over_seeds([each["loss"] for each in mine]), over_seeds([each["target"] for each in mine])


def table(found: Records) -> list[str]:
    """The points, in Markdown."""
    rows = [["updates before", "seeds", "loss from", "to", "S_min", "E_min, tokens", "critical batch, tokens",
             "noise scale, tokens", "noise scale / measured"]]  # fmt: skip
    rows.append(["---"] * len(rows[0]))
    for point, of in results(found).items():
        scale, (begin, end) = noise_scale(found, point), about(found, point)
        rows.append([
            f"{point}", f"{of.seeds}", f"{begin.value:.2f}", f"{end.value:.2f}", f"{of.fit.updates:.0f}",
            f"{of.fit.tokens:,.0f}", f"{of.fit.batch:,.0f} [{of.low:,.0f}, {of.high:,.0f}]", f"{scale:,.0f}",
            f"{scale / of.fit.batch:.2g}",
        ])  # fmt: skip
    return [f"| {' | '.join(row)} |" for row in rows]


def rates(found: Records) -> list[str]:
    """Updates at the best rate of each batch size, in Markdown."""
    branches = [each for each in found if each["what"] == "branch" and each["updates"] is not None]
    every = sorted({each["rows"] for each in branches})
    rows = [["updates before", "seed", *(f"{each * LENGTH:,} tokens" for each in every)]]
    rows.append(["---"] * len(rows[0]))
    for point, seed in sorted({(each["point"], each["seed"]) for each in branches}):
        cells = []
        for size in every:
            mine = [r for r in branches if (r["point"], r["seed"], r["rows"]) == (point, seed, size)]
            best = min(mine, key=lambda each: each["updates"], default=None)
            cells.append("" if best is None else f"{best['updates']:.0f} ({best['rate']:g})")
        rows.append([f"{point}", f"{seed}", *cells])
    return [f"| {' | '.join(row)} |" for row in rows]


def said(found: Records) -> str:
    """A sentence on the prediction."""
    ratios = [noise_scale(found, point) / of.fit.batch for point, of in results(found).items()]
    if not ratios:
        return "No point has ended yet."
    close = sum(1 / CLOSE <= each <= CLOSE for each in ratios)
    return (
        f"The noise scale is within a factor of {CLOSE} of the measured critical batch at {close} of {len(ratios)} "
        f"points; it is {min(ratios):.2g} to {max(ratios):.2g} times as large."
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
        "S_min and E_min: updates with very large batches, and tokens with very small ones, by the fit of "
        "(S / S_min - 1) (E / E_min - 1) = 1; the critical batch is E_min / S_min. Intervals (95 %) are of a bootstrap "
        "over seeds and the residuals of the fit; of one seed the seeds are not in them.",
        "",
        "Updates until the lower loss, with the best learning rate in brackets:",
        "",
        *rates(found),
        "",
        "## How",
        "",
        "    python -m experiments.critical_batch --out=experiments/results/critical_batch",
        "    python -m experiments.critical_batch --out=experiments/results/critical_batch --stage=report",
        "",
        "A GPT of 2 layers of width 64, on the source text of Python's standard library in one byte-level BPE of 512 "
        "tokens, is trained for each number of updates of 1,024 tokens, with AdamW and a cosine to zero. From there, "
        "with the optimizer's state as it is, it goes on at a constant rate on other rows of the text, until the loss "
        "on 192 held-out rows is lower by the amount in the table. The rate of each batch size is the best of a grid "
        "of factors of 2, searched until both neighbours of the best are worse. There is no weight decay and no "
        "clipping. The noise scale is that of `train.noise_scale` at the point, from 32 batches of 4,096 tokens in 16 "
        "micro-batches: variance and square of the gradient are averaged first, and then divided.",
        "",
        f"{len(found)} records took {hours:.1f} hours on one shared core.",
        "",
        "What it does not show: larger models, and longer training. The noise scale is that of plain gradients at the "
        "beginning of a branch, where AdamW divides them by their size and the branch lasts for a while.",
        "",
    ])  # fmt: skip
