"""The page of `experiments.long_context`, from its records; the figures are in `long_context_figures`."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments import long_context_figures as figures
from experiments.coordinates_page import slope
from experiments.long_context_tasks import CHUNK, LENGTHS, PAIRS, ROUNDS, SYMBOLS, VALUES, WORD, duplication_model
from experiments.transfer_runs import over_seeds
from jaxformer.benchmarks.long import MECHANISMS
from jaxformer.scaling import plotting

Records = Sequence[dict[str, Any]]
SHOWN, BESIDE = (1024, 16384, 65536), 16384  # rows of which times are shown; where dense attention is compared
LATE = 8192  # the shortest row of the second slope of time
STEEP = 1.1  # slopes above are named
SLOPES = "time", f"time from {LATE // 1024}k on", "temporaries"
COMMAND = "python -m experiments.long_context --out=experiments/results/long_context"


def ranged(values: Sequence[float], digits: int) -> str:
    """A mean over seeds with the lowest and the highest, as a cell: some seeds learn and others do not.

    >>> ranged([0.5, 0.7, 0.6], 2), ranged([0.5], 1)
    ('0.60 (0.50 to 0.70)', '0.5')
    """
    low, mean, high = (f"{each:.{digits}f}" for each in (min(values), float(np.mean(values)), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def of_part(found: Records, part: str) -> list[dict[str, Any]]:
    """The records of a part."""
    return [each for each in found if each["part"] == part]


def curve(found: Records, mechanism: str, field: str) -> list[tuple[int, float]]:
    """(tokens, median seconds or MiB) of a mechanism, by tokens; what is 0 MiB has no logarithm and is left out."""
    mine = [each for each in of_part(found, "slopes") if each["mechanism"] == mechanism]
    points = sorted((each["tokens"], float(np.median(each[field]))) for each in mine)
    return [point for point in points if point[1] > 0]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    return ["", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)), ""]


def about_slopes(found: Records) -> list[str]:
    """Slopes, times and temporaries of each mechanism."""
    mine = of_part(found, "slopes")
    if not mine:
        return ["", "Not measured yet."]
    names = [name for name in MECHANISMS if curve(found, name, "seconds")]
    dense, rows, steep = dict(curve(found, "dense", "seconds")).get(BESIDE), [], []
    for name in names:
        times, memory = dict(curve(found, name, "seconds")), dict(curve(found, name, "mib"))
        late = {tokens: seconds for tokens, seconds in times.items() if tokens >= LATE}
        slopes = [slope(list(each.items())) for each in (times, late, memory)]
        steep += [f"{what} of {name} ({s:.2f})" for what, s in zip(SLOPES, slopes, strict=True) if s > STEEP]
        cells = [name, *("" if math.isnan(each) else f"{each:.2f}" for each in slopes)]
        cells += [f"{1e3 * times[n]:,.0f}, {plotting.count(n / times[n])}" if n in times else "" for n in SHOWN]
        cells.append(f"{memory[SHOWN[-1]]:.4g} MiB" if SHOWN[-1] in memory else "")
        cells.append(f"{dense / times[BESIDE]:.3g}" if dense and BESIDE in times else "")
        rows.append(cells)
    lengths = sorted({each["tokens"] for each in mine})
    machine = sorted({f"{each['threads']} CPU threads with jax {each['jax']}" for each in mine})
    loads = [each["load"] for each in mine]
    head = [
        "mechanism",
        *(f"slope of {each}" for each in SLOPES),
        *(f"{n // 1024}k tokens: ms, tokens/s" for n in SHOWN),
    ]
    head += [f"temporaries at {SHOWN[-1] // 1024}k", f"times as fast as dense at {BESIDE // 1024}k"]
    unmeasured = [name for name in MECHANISMS if name not in names]
    return [
        "",
        f"![time for each token, and temporaries, against the length of the row]({figures.SLOPES}.svg)",
        *table(head, rows),
        f"Slopes are of logarithms over rows of {lengths[0]} to {lengths[-1]} tokens, each twice as long as the one "
        "before, by least squares: 1 is linear, 2 quadratic. In short rows, what their length does not change flattens "
        f"them, and a document is as long as the row. `strided` and `fixed` look at as many tokens as the root of the "
        f"row, so that they tend to 1.5. Above {STEEP}: {', '.join(steep) or 'none'}.",
        "",
        "Medians of one layer of four heads of width 64, float32, forward and backward; with the projections where the "
        "name is one of `model.attention`'s kinds that has no function of heads alone. `dense` is `chunked` attention, "
        "`dense by xla` keeps all scores; each is measured up to the row that still takes seconds. A document is 4096 "
        "tokens for all but `dense`, `funnel` and `linformer`. Temporaries are those that XLA states of the compiled "
        f"gradient. On {' and '.join(machine)}; the load when each began was {min(loads):.1f} to {max(loads):.1f}.",
        *(["", f"Not measured yet: {', '.join(unmeasured)}."] if unmeasured else []),
    ]


def about_favor(found: Records) -> list[str]:
    """Errors of Performer's attention, and their slopes against the number of features."""
    mine = of_part(found, "favor")
    if not mine:
        return ["", "Not measured yet."]
    features, rows = sorted({each["features"] for each in mine}), []
    ends = [m for m in features if m in (features[0], 64, 256, features[-1])]
    for deviation, kind, directions in figures.ways(mine):
        errors = figures.errors(mine, deviation, kind, directions)
        each_draw = zip(*errors.values(), strict=True)
        late = [m for m in errors if m >= 128]
        slopes = [[slope(list(zip(errors, draw, strict=True))) for draw in zip(*errors.values(), strict=True)]]
        slopes.append([slope([(m, errors[m][i]) for m in late]) for i, _ in enumerate(each_draw)])
        told = [over_seeds(each).text(".2f") if len(errors) > 1 else "" for each in slopes]
        measured = [over_seeds(errors[m]).text(".4f") if m in errors else "" for m in ends]
        rows.append([f"{deviation:g}", kind, directions, *told, *measured])
    head = ["deviation of q and k", "features", "directions", "slope", "slope from 128 on"]
    draws = len(mine[0]["errors"])
    return [
        "",
        f"![error of Performer's attention against its number of features]({figures.FAVOR}.svg)",
        *table(head + [f"error, m = {m}" for m in ends], rows),
        f"Relative root mean square error against exact softmax attention, both in float64: rows of 256 tokens, four "
        f"heads of width 64, normal queries, keys and values; mean of {draws} draws of all of them with its 95 % "
        "interval. The theory says a slope of -1/2 where errors are small. Near 1 the estimate says nothing yet, and "
        "the slope is flatter. Hyperbolic features have half as many directions: 64, one orthogonal set, at m = 128, "
        "where orthogonality gains most; hence their steeper slope over all m.",
    ]


def about_needle(found: Records) -> list[str]:
    """Shares of answers that are right, by mixer and length of the row."""
    mine = of_part(found, "needle")
    if not mine:
        return ["", "Not measured yet."]
    rows, held = [], []
    for mixer in figures.mixers(mine):
        of = [each for each in mine if each["mixer"] == mixer]
        shares = {n: [np.sum(e["right"][str(n)]) / np.sum(e["tried"][str(n)]) for e in of] for n in LENGTHS}
        rows.append([mixer, str(len(of)), *(ranged(shares[n], 2) for n in LENGTHS), f"{figures.last_loss(of):.3f}"])
        held += [mixer] if np.mean(shares[LENGTHS[-1]]) > 0.9 else []
    head = ["mixer", "seeds", *(f"rows of {n}" for n in LENGTHS), "training loss at the end"]
    return [
        "",
        f"![answers that are right against the distance of the needle]({figures.NEEDLE}.svg)",
        *table(head, rows),
        f"{PAIRS} tokens of a row of random filler say that a key has a value; the last {PAIRS} ask for the keys in "
        f"another order. Right is the value itself, of {VALUES}; chance is {1 / VALUES:.2f}. Two layers of width 64 "
        f"without positions, {mine[0]['steps']} updates of 32 rows of {LENGTHS[0]} tokens for every mixer, at one "
        f"learning rate ({mine[0]['rate']:g}), which suits dense attention; longer rows were never trained on. Means "
        "over seeds, with the lowest and the highest. "
        f"Above 0.9 in rows of {LENGTHS[-1]}: {', '.join(held) or 'none'}.",
        "",
        "A needle is one token, so that a look-up by content is all it takes. So this says nothing of how well a mixer "
        "joins neighbours, of other rates, of more updates, or of text.",
    ]


def about_duplication(found: Records) -> list[str]:
    """Shares of w that are right, by rounds in training and in evaluation."""
    mine = of_part(found, "duplication")
    if not mine:
        return ["", "Not measured yet."]
    rows, names = [], dict.fromkeys(each["trained"] for each in mine)
    for trained in names:
        of = [each for each in mine if each["trained"] == trained]
        cells = [ranged([each["right"][rounds] for each in of], 3) for rounds in ROUNDS]
        rows.append([trained, str(len(of)), *cells, f"{figures.last_loss(of):.3f}"])
    best = {name: float(np.mean([e["right"][name] for e in mine if e["trained"] == name])) for name in names}
    unsolved = [f"{name} ({share:.3f})" for name, share in best.items() if share < 0.99]
    head = ["trained with", "seeds", *(f"read with {each}" for each in ROUNDS), "training loss at the end"]
    return [
        *table(head, rows),
        f"Rows 0w0w with a random w of {WORD} symbols, of {SYMBOLS}; the share of the second w that is right, teacher "
        f"forced, on rows never trained on; means over seeds, with the lowest and the highest. "
        f"One layer of width 64, {mine[0]['steps']} updates of 32 rows. `full`: "
        f"queries that are the keys see all earlier tokens; otherwise rounds of LSH, each of which lets a token see "
        f"the last {CHUNK} of its bucket (one of {duplication_model('1').attention.num_buckets(2 * WORD + 2)}), with "
        "new rotations in every update. Not solved, read as it was trained: "
        f"{', '.join(unsolved) or 'none'}. The paper has w of 511 of 127 symbols and 150,000 updates.",
    ]


def page(found: Records) -> str:
    """The page, in Markdown."""
    return "\n".join([
        "# long_context: what long rows cost, and what is still found in them",
        "",
        f"    {COMMAND}",
        "",
        "## Time and memory",
        *about_slopes(found),
        "",
        "## Performer: error against features",
        *about_favor(found),
        "",
        "## Needles",
        *about_needle(found),
        "",
        "## Reformer's duplication",
        *about_duplication(found),
        "",
    ])  # fmt: skip
