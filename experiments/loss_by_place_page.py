"""The part of a comparison's page that says what `experiments.loss_by_place` measured: a table and a figure."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.runs.comparing import BASELINE
from jaxformer.scaling import plotting

PLACES, SPEED, FIGURE = "places.jsonl", "speed.jsonl", "places"
SHOWN = (0, 4, 32, 128)  # first places of the buckets that the table has
FEWEST = 1000  # tokens of a bucket that is told


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The records of a file; none if it is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def section(out: Path) -> list[str]:
    """Lines of the page; none if nothing was measured."""
    places, speed = lines_of(out / PLACES), {each["variant"]: each for each in lines_of(out / SPEED)}
    first = next((each for each in places if each["variant"] == BASELINE), None)
    if first is None or BASELINE not in speed:
        return []
    spans = [row for row in first["by_position"] if row["first"] in SHOWN]
    head = ["variant", "updates", "loss", *(f"at {_span(row)}" for row in spans), "tokens/s", "of the baseline's"]
    rows = [head, ["---"] * len(head)]
    for each in sorted(places, key=lambda each: each["loss"]):
        at = {row["first"]: f"{row['loss']:.3f}" for row in _told(each)}
        cells = [f"`{each['variant']}`", str(each["step"]), f"{each['loss']:.3f} ± {each['loss_stderr']:.3f}"]
        cells += [at.get(row["first"], "") for row in spans]
        rows.append([*cells, *_speed_cells(speed.get(each["variant"]), speed[BASELINE])])
    return [
        "## At one size",
        "",
        f"The run of width {speed[BASELINE]['width']} that the largest budget allows, its rate the best one tried, "
        "on the whole held-out text; the loss of a token by its place in its document, tokens a second on one core, "
        f"in updates of {first['tokens'] // first['step']} tokens, which all made in turns. Behind a memory, in which "
        "places are counted too, there are next to no first places.",
        "",
        "![loss by a token's place in its document](places.svg)",
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def _told(each: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in each["by_position"] if row["weight"] >= FEWEST]


def _speed_cells(mine: dict[str, Any] | None, baseline: dict[str, Any]) -> list[str]:
    """Tokens a second, and as a share of the baseline's; empty where it has not made its turns yet."""
    if mine is None:
        return ["", ""]
    ratio = np.median(np.array(baseline["seconds"]) / np.array(mine["seconds"]))
    return [f"{mine['tokens'] / np.median(mine['seconds']):,.0f}", f"{ratio:.2f}"]


def _span(row: dict[str, Any]) -> str:
    return str(row["first"]) if row["first"] == row["last"] else f"{row['first']} to {row['last']}"


def draw(out: Path) -> dict[str, bytes]:
    """The figure by its name: what each loses against the baseline, by place; none if nothing was measured."""
    if not section(out):
        return {}
    places = lines_of(out / PLACES)
    base = next(each for each in places if each["variant"] == BASELINE)
    known = {row["first"]: row["loss"] for row in base["by_position"]}
    others = sorted((each for each in places if each is not base), key=lambda each: -each["by_position"][-1]["loss"])
    with plotting.matplotlib().rc_context(plotting.STYLE):
        figure, axes = plotting.panel()
        axes.axhline(0, color="0.4", linewidth=1)
        for i, each in enumerate(others):
            both = [row for row in _told(each) if row["first"] in known]
            at = [row["first"] + 1 for row in both]
            lost = [row["loss"] - known[row["first"]] for row in both]
            style = plotting.line_style(i, len(others)) | {"marker": plotting.marker(i), "markersize": 4}
            axes.plot(at, lost, label=each["variant"], **style)
        axes.set(xscale="log", xlabel="place of the token in its document, from 1", ylabel="loss above dense, nats")
        plotting.log_ticks(axes.xaxis, lambda value: f"{value:g}")
        figure.legend(loc="outside right upper")
        return {FIGURE: plotting.encoded(figure, "svg", bbox_inches="tight")}
