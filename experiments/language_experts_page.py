"""The page of `experiments.language_experts`, from its records."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.transfer_runs import Mean, over_seeds, paired, select

EXPERTS = (1, 2, 4, 8)
SHOWN_SEED = 0  # of the models whose experts are drawn
INFORMATION = {"language": "language", "symbol": "symbol", "more": "language, the symbol being known"}

Records = Sequence[dict[str, Any]]


def floors(found: Records) -> dict[str, Any]:
    """The record of the floors, and of what each model costs."""
    (record,) = [each for each in found if each["what"] == "floors"]
    return record


def readings(found: Records, experts: int) -> list[dict[str, Any]]:
    """The records of what the models of so many experts do, by seed."""
    return select(found, what="reading", experts=experts)


def gap(found: Records, experts: int) -> Mean:
    """How far they end above the floor, in nats per token."""
    return over_seeds([each["gap"] for each in readings(found, experts)])


def arms(found: Records) -> list[int]:
    """The numbers of experts that have been read."""
    return [experts for experts in EXPERTS if readings(found, experts)]


def rows_of(cells: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown, its head first."""
    return [f"| {' | '.join(row)} |" for row in (cells[0], ["---"] * len(cells[0]), *cells[1:])]


def gap_table(found: Records) -> list[str]:
    """How each model ended."""
    rows = [["experts", "all parameters", "of a token", "FLOP of an update, a token", "loss", "above the floor",
             "less than dense"]]  # fmt: skip
    for experts in arms(found):
        cost = floors(found)["costs"][str(experts)]
        less = paired(readings(found, 1), readings(found, experts), "gap") if experts > 1 else None
        losses = over_seeds([each["loss"] for each in select(found, what="run", experts=experts)])
        rows.append([
            "1 (dense)" if experts == 1 else str(experts), f"{cost['total']:,}", f"{cost['active']:,}",
            f"{cost['flops']:,.0f}", losses.text(), gap(found, experts).text(), "" if less is None else less.text(),
        ])  # fmt: skip
    return rows_of(rows)


def information_table(found: Records) -> list[str]:
    """What the expert of a token says of it, in bits, by layer."""
    mine = [experts for experts in arms(found) if experts > 1]
    rows = [["experts", "layer", *INFORMATION.values(), "most possible"]]
    for experts in mine:
        records = readings(found, experts)
        for layer in range(len(records[0]["shares"])):
            means = [over_seeds([each[name][layer] for each in records]) for name in INFORMATION]
            cells = [mean._replace(low=np.maximum(mean.low, 0)).text(".2f") for mean in means]  # it is never below 0
            most = f"{min(np.log2(experts), np.log2(len(records[0]['gaps']))):.0f}"
            rows.append([str(experts), str(layer + 1), *cells, most])
    return rows_of(rows)


def main_share(found: Records, experts: int, layer: int) -> Mean:
    """The share of a language's tokens that go to the expert which has most of them, a mean over languages."""
    return over_seeds([np.array(each["shares"])[layer].max(axis=0).mean() for each in readings(found, experts)])


def claims(found: Records) -> list[str]:
    """What the gaps say, a sentence for each neighbouring pair of models."""
    said = []
    for few, many in itertools.pairwise(arms(found)):
        less = paired(readings(found, few), readings(found, many), "gap")
        if less is None or not np.isfinite(less.low):
            continue
        told = "nearer to the floor" if less.low > 0 else "farther from it" if less.high < 0 else "not told apart"
        said.append(f"{many} experts beside {few if few > 1 else 'the dense layer'}: {less.text()} nats, {told}.")
    return said


def page(found: Records) -> str:
    """The page, in Markdown."""
    floor, mine = floors(found), arms(found)
    runs = select(found, what="run")
    end, seeds = runs[0], len({each["seed"] for each in runs})
    most, several = max(mine), [experts for experts in mine if experts > 1]
    extra = floor["costs"][str(most)]
    places = [f"layer {layer + 1} {main_share(found, most, layer).text('.2f')}"
              for layer in range(len(readings(found, most)[0]["shares"]))] if several else []  # fmt: skip
    return "\n".join([
        "# experts: sixteen languages, and 1 to 8 experts at equal FLOP for a token",
        "",
        "Claim to be tested, after Shazeer et al. (2017) and Fedus et al. (2021): where there is more to remember than "
        "a dense layer holds, a mixture of experts of that layer's width learns more with the same work for a token; "
        "and experts share out what there is to remember, here by language.",
        "",
        "![how far each model ends above the floor, against all its parameters and those that a token uses](gap.svg)",
        "",
        f"Nats per token on held-out rows, mean over {seeds} seeds with its 95 % interval; the last column is the "
        "difference to the dense model seed by seed:",
        "",
        *gap_table(found),
        "",
        *claims(found),
        "",
        "The text is in equal parts of 16 Markov languages of the same 32 symbols, each a table of 32 x 32 chances, "
        "and a row of 64 tokens is of one of them. A model that knew all tables and were told the language would lose "
        f"{floor['told']:.4f} nats per token, exactly. One that is not told has to find it out from the row, and would "
        f"lose {floor['best']:.4f} ± {floor['best_stderr']:.4f} (Bayes' mixture of the 16 known chains). That is the "
        "floor here: gaps are to what it loses on the very same held-out rows "
        f"({floor['held_out']:.4f}). A model that looks at one token, and so never tells the languages apart, cannot "
        f"lose less than {floor['blind']:.4f}.",
        "",
        *serving_text(found, most, places),
        "## How",
        "",
        "    python -m experiments.language_experts --out=experiments/results/experts",
        "    python -m experiments.language_experts --out=experiments/results/experts --stage=report",
        "",
        f"The config is `expert_languages`: a GPT of two layers of width 32, {end['step']:,} updates of 32 rows, "
        f"{end['tokens']:,} tokens, the text about once. A token goes to one expert, as wide as the "
        "dense layer (128), and its output is multiplied by the router's probability (Switch); no token is dropped. "
        "So a model of E experts costs a token what the dense one does, and the router: "
        f"{100 * extra['router_flops'] / extra['flops']:.1f} % of the FLOP at most. Two of half the width would leave "
        "nothing to compare at E = 2: both are then used for every token. Nobody tells the router of languages; its "
        "balance loss is 0.01, its z-loss 0.001. All have one learning rate, 4e-3, chosen for none of them.",
        "",
        f"Intervals are Student's over seeds of initial values and the order of rows; languages and held-out text "
        f"({floor['rows']:,} rows) are the same for all. No run is below the floor by 3 standard errors or more "
        "(`tests/experiments/test_language_experts.py`).",
        "",
        "What it does not show: models that have learned all they can, as all stop after the same number of updates; "
        "what a dense model of as many parameters does, at more FLOP; time, as products of few tokens for each expert "
        "are slower than one large one; natural text, other widths, more layers, or two experts for a token.",
        "",
    ])  # fmt: skip


def serving_text(found: Records, most: int, places: Sequence[str]) -> list[str]:
    """Which expert serves which language, in Markdown; nothing while there are only dense models."""
    if not places:
        return []
    least = np.floor(1000 * min(floors(found)["sure"], 0.9999)) / 1000
    return [
        "## Which expert serves which language",
        "",
        "![of each language and of each symbol the share of its tokens that go to each expert, by layer](experts.svg)",
        "",
        f"The model of {most} experts with seed {SHOWN_SEED}, on the tokens in the second half of held-out rows; where "
        f"that begins, Bayes' mixture gives the row's language a chance above {least:.3f}. Columns are sorted by the "
        "expert that has most of them. That expert has of a language's tokens, mean over languages and seeds: "
        f"{'; '.join(places)}; without any preference it would be {1 / most:.3g}.",
        "",
        *specialty(found, most),
        "",
        "Mutual information in bits of a token's expert with its language, with the symbol that it is, and with the "
        "language where the symbol is known already; none can be above the last column. As languages use symbols with "
        "different frequencies, a router of symbols alone says something of the language; the third column has none of "
        "that:",
        "",
        *information_table(found),
        "",
    ]


def specialty(found: Records, experts: int) -> list[str]:
    """Whether experts share out languages or symbols, in a sentence for each layer."""
    said = []
    for layer in range(len(readings(found, experts)[0]["shares"])):
        less = over_seeds([each["symbol"][layer] - each["language"][layer] for each in readings(found, experts)])
        what = "symbols rather than languages" if less.low > 0 else "languages rather than symbols"
        if less.low > 0 or less.high < 0:
            said.append(f"In layer {layer + 1} experts share out {what}.")
    return said
