"""Figures and page of `experiments.why_attention`, from its records."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.errors import ConfigError
from jaxformer.scaling import bootstrap, plotting
from jaxformer.storage import files

LABELS = {
    "none": "no attention", "bahdanau": "Bahdanau et al. 2015", "luong": "Luong et al. 2015",
    "transformer": "Transformer",
}  # fmt: skip
WIDTH = 64
BANDS = ((4, 10), (11, 20), (21, 30), (31, 40))  # lengths that a column of the table is over
PICTURES = {
    "accuracy": "the share of answers that are right throughout, against the length of the source",
    "alignments": "what each model attends to while it translates one pair, beside the alignment of the language",
}


class Mean(NamedTuple):
    """A mean over seeds and its 95 % interval (Student's), each a number or [lengths]."""

    value: Any
    low: Any
    high: Any


def records(file: Path) -> list[dict[str, Any]]:
    """The records of a file, one for each model and seed."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def over_seeds(values: Any) -> Mean:
    """`values`: [seeds, ...] shares. Bounds are kept between 0 and 1; of one seed there is no interval: nan.

    >>> [float(each) for each in over_seeds([0.5, 0.7, 0.6])]
    [0.6, 0.352, 0.848]
    """
    values = np.asarray(values, float)
    mean, seeds = values.mean(axis=0), len(values)
    if seeds < 2:
        return Mean(mean, *(np.full_like(mean, np.nan),) * 2)
    half = bootstrap.special().stdtrit(seeds - 1, 0.975) * values.std(axis=0, ddof=1) / np.sqrt(seeds)
    return Mean(*(np.round(each, 3) for each in (mean, np.maximum(mean - half, 0), np.minimum(mean + half, 1))))


def of_model(found: Sequence[dict[str, Any]], name: str, field: str) -> np.ndarray:
    """[seeds, lengths] of a field; no rows where a model has none of it."""
    return np.array([each[field] for each in found if each["model"] == name and each[field]], float)


def in_band(found: Sequence[dict[str, Any]], name: str, field: str, band: tuple[int, int]) -> str:
    """The mean over the lengths of a band, with its interval, as a cell."""
    values = of_model(found, name, field)
    if not values.size:
        return ""
    lengths = np.array(found[0]["lengths"])
    inside = (lengths >= band[0]) & (lengths <= band[1])
    if not inside.any():
        return ""
    mean = over_seeds(values[:, inside].mean(axis=1))
    if not np.isfinite(mean.low):
        return f"{mean.value:.3f}"
    return f"{mean.value:.3f} [{mean.low:.3f}, {mean.high:.3f}]"


def names(found: Sequence[dict[str, Any]]) -> list[str]:
    """The models that have records, in the order of LABELS."""
    return [name for name in LABELS if any(each["model"] == name for each in found)]


def table(found: Sequence[dict[str, Any]], field: str) -> list[str]:
    """A field by model and band of lengths, in Markdown."""
    head = ["model", *(f"{low} to {high} symbols" for low, high in BANDS)]
    rows = [[LABELS[name], *(in_band(found, name, field, band) for band in BANDS)] for name in names(found)]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *(row for row in rows if any(row[1:])))]


def accuracy(found: Sequence[dict[str, Any]]) -> Any:
    """Exact answers against length: the mean over seeds, its interval shaded."""
    with plotting.matplotlib().rc_context(plotting.STYLE | {"font.size": 13.0, "legend.fontsize": 12.0}):
        drawn, axes = plotting.panel()
        mine = names(found)
        for i, name in enumerate(mine):
            mean, style = over_seeds(of_model(found, name, "exact")), plotting.line_style(i, len(mine))
            lengths = found[0]["lengths"]
            axes.plot(lengths, mean.value, label=LABELS[name], marker=plotting.marker(i), markevery=(i, 4), **style)
            axes.fill_between(lengths, mean.low, mean.high, color=style["color"], alpha=0.2, linewidth=0)
        axes.set(xlabel="symbols in the source", ylabel="answers that are right", ylim=(-0.02, 1.04))
        axes.legend(loc="best")
    return drawn


def alignments(found: Sequence[dict[str, Any]]) -> Any:
    """Weights of one pair, the known alignment first: targets downwards, sources to the right."""
    shown = {each["model"]: each for each in found if "shown" in each}
    with plotting.matplotlib().rc_context(
        plotting.STYLE | {"font.size": 13.0, "axes.titlesize": 13.0, "axes.grid": False}
    ):
        drawn, panels = plotting.panel(2)
        drawn.clear()
        drawn.set_size_inches(6.4, 6.6)
        panels = drawn.subplots(2, 2, sharex=True, sharey=True).ravel()
        aligned = next(iter(shown.values()))["aligned"]
        known = np.eye(len(aligned), len(aligned) + 1)[aligned]
        pictures = {
            "the language's own": known,
            **{LABELS[n]: np.array(shown[n]["shown"]) for n in LABELS if n in shown},
        }
        for axes in panels[len(pictures) :]:
            axes.set_axis_off()
        for axes, (label, weights) in zip(panels, pictures.items(), strict=False):
            axes.imshow(weights, cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
            axes.plot(aligned, range(len(aligned)), ".", color="#D55E00", markersize=4)
            axes.set_title(label)
            axes.set(xticks=[0, 5, 10], yticks=[0, 5, 10])
        drawn.supxlabel("place in the source")
        drawn.supylabel("place in the target")
    return drawn


def loss_of(found: Sequence[dict[str, Any]], name: str, before: int = 0) -> float:
    """The mean training loss over a model's seeds at the end, or so many updates before it; nan: not recorded."""
    mine = [each for each in found if each["model"] == name]
    return float(np.mean([dict(each["losses"]).get(each["steps"] - before, np.nan) for each in mine]))


def page(found: Sequence[dict[str, Any]]) -> str:
    """The page, in Markdown."""
    first = found[0]
    seeds = len({each["seed"] for each in found})
    sizes = ", ".join(
        f"{LABELS[name]} {next(each['params'] for each in found if each['model'] == name):,}" for name in names(found)
    )
    ends = ", ".join(f"{LABELS[name]} {loss_of(found, name):.4f}" for name in names(found))
    still = [
        f"Without attention it was still falling ({loss_of(found, name, before=1000):.4f} a thousand updates before)."
        for name in names(found)
        if name == "none"
    ]
    layers = sorted({each["layer"] + 1 for each in found if each["model"] == "transformer"})
    return "\n".join([
        "# why_attention: answers against length, without attention and with it",
        "",
        "Claim, as in figure 2 of Bahdanau et al. (2015): a model that hands its decoder one state answers long "
        "sources worse than short ones, and one whose decoder attends to all of the source's states does not.",
        "",
        f"![{PICTURES['accuracy']}](accuracy.svg)",
        "",
        f"Answers that are right throughout, mean over {seeds} seeds with its 95 % interval:",
        "",
        *table(found, "exact"),
        "",
        "Symbols that are right:",
        "",
        *table(found, "symbols"),
        "",
        "## Alignment",
        "",
        f"![{PICTURES['alignments']}](alignments.svg)",
        "",
        "The language says which symbol of the source each symbol of the target comes from (the dots). The share of "
        "symbols for which a model attends most to another one, the target being given:",
        "",
        *table(found, "misaligned"),
        "",
        "Of the Transformer it is the mean of the heads of the decoder's layer that is best in this on other pairs "
        f"(layer {' or '.join(map(str, layers))}). Nobody told any model of the alignment. Where two neighbours may be "
        "exchanged, the state of either knows of the other: Bahdanau's decoder looks at both, and is right all the "
        "same. Attention is no explanation of an answer by itself." if layers else "",
        "",
        "## How",
        "",
        "    python -m experiments.why_attention --workdir=runs/why_attention --out=experiments/results/why_attention",
        "    python -m experiments.why_attention --out=experiments/results/why_attention --stage=report",
        "",
        "The language is `transduction` with the task translate: 16 symbols, each with two synonyms of which either is "
        "right, neighbours in a hidden order; sources of 4 to 40 symbols in training, all lengths alike. All models "
        f"have width {WIDTH}, the recurrent ones one layer on each side and the Transformer two: {sizes} parameters. "
        f"Each is trained for {first['steps']} updates, {first['tokens']:,} target tokens. The training loss of the "
        f"last batch is {ends} nats a token; on the language as a whole no model's can be below {first['floor']:.4f}.",
        *still,
        "All of it takes about an hour of one core.",
        "",
        f"An answer is chosen greedily and counts if each symbol is a synonym of the right one and it ends where it "
        f"should; {first['pairs']} new sources of each length for each seed. Bands in the figure and intervals in the "
        "tables are Student's over seeds. `records.jsonl` has every share of every length and seed, and the loss every "
        "100 updates.",
        "",
        "What it does not show: what larger states do, natural text, or lengths beyond those trained on.",
        "",
    ])  # fmt: skip


def write(folder: Path) -> list[Path]:
    """Writes the figures and README.md of a folder from its records.

    Raises:
      ConfigError: there are none yet.
    """
    if not (folder / "records.jsonl").exists():
        raise ConfigError(f"--out: {folder} has no records.jsonl yet; accepted: --stage=train first")
    found = records(folder / "records.jsonl")
    figures = {"accuracy": accuracy(found)}
    if any("shown" in each for each in found):
        figures["alignments"] = alignments(found)
    paths = [folder / f"{name}.svg" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        files.write_atomically(path, plotting.encoded(figure, "svg", bbox_inches="tight"))
    files.write_atomically(folder / "README.md", page(found).encode())
    return [*paths, folder / "README.md"]
