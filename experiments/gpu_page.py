"""Write the results page of `experiments/benchmarks/gpu.sh` or `tpu.sh` from the records in its folder.

    python -m experiments.gpu_page runs/gpu

What is not there yet is said to be missing, so that the page can be read while parts are still running.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxformer.benchmarks.suite import RULER
from jaxformer.runtime.hardware import chip_of

TARGETS = {"gpt2": 0.45, "gpt2_350m": 0.50, "gpt2_1_5b": 0.55}  # utilisation of the chip's peak that is aimed at


def records(file: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; none if it is not there."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def median(values: list[float]) -> float:
    """The middle one, or the mean of the two in the middle."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    return ["", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)), ""]


def exactness(folder: Path) -> Iterator[str]:
    """The greatest relative error of each implementation and dtype over all cases, and what is wrong."""
    found = records(folder / "exactness.jsonl")
    if not found:
        yield "Not measured yet."
        return
    kinds = sorted({(each["implementation"], each["dtype"]) for each in found})
    rows = []
    for name, dtype in kinds:
        mine = [each for each in found if (each["implementation"], each["dtype"]) == (name, dtype)]
        worst = max(error for each in mine for error in each["errors"].values())
        wrong = [each["case"] for each in mine if not each["ok"]]
        rows.append([name, dtype, str(len(mine)), f"{worst:.1e}", ", ".join(wrong) or "nothing"])
    yield from table(["implementation", "dtype", "cases", "greatest error", "wrong"], rows)


def blocks(folder: Path) -> Iterator[str]:
    """The table of blocks."""
    file = folder / "blocks.json"
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    if not rows:
        yield "Not measured yet."
        return
    names = ["chip", "kernel", "width", "length", "block", "microseconds"]
    yield from table(names, [[str(row[name]) for name in names] for row in rows])


def benchmark(folder: Path, name: str, chip: str) -> Iterator[str]:
    """Medians of a suite's contestants, beside the first, and of the chip's peak where FLOP are known."""
    found = records(folder / f"{name}.jsonl")
    if not found:
        yield "Not measured yet."
        return
    known = chip_of(chip)
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in found:
        asked = {key: each[key] for key in ("shape", "dtype", "tokens", "rows", "size") if each.get(key) is not None}
        groups.setdefault(", ".join(f"{key} {value}" for key, value in asked.items()), []).append(each)
    for title, members in groups.items():
        ours = median(next(each for each in members if each["name"] != RULER)["measured"])
        rows = []
        for each in members:
            value = median(each["measured"])
            share = each["flop"] / value / known.flops if each.get("flop") and known and known.flops else None
            target = TARGETS.get(each.get("shape", "")) if name == "train" else None
            aim = f" (aim: {target})" if share is not None and target and each["name"] != RULER else ""
            shown = "" if share is None else f"{share:.3f}{aim}"
            scale, unit = (1e3, "ms") if each["in"] == "s" else (1.0, each["in"])
            counted = each["in"] == "s" and each["work"] and each["name"] != RULER
            rate = f"{each['work'] / value:,.4g} {each['unit']}" if counted else ""
            rows.append([each["name"], f"{scale * value:.4g} {unit}", rate, f"{value / ours:.3f}", shown])
        yield f"**{title}**"
        yield from table(["contestant", "median", "in a second", "time of the first's", "of the chip's peak"], rows)


def pretraining(folder: Path) -> Iterator[str]:
    """What each run's train records say of its speed, and where its time went."""
    files = sorted(folder.glob("pretrain*.jsonl"))
    if not files:
        yield "Not measured yet."
    for file in files:
        found = records(file)
        rows = [
            [str(each["step"]), f"{each['loss']:.3f}", f"{each['tokens_per_second']:,.0f}",
             f"{each['utilisation']:.3f}" if "utilisation" in each else ""]
            for each in found if each["kind"] == "train" and "tokens_per_second" in each
        ]  # fmt: skip
        yield f"**{file.stem}**"
        yield from table(["step", "loss", "tokens a second", "of the chip's peak"], rows)
        if found and (spent := found[-1].get("spent")):
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent.items() if name != "total")
            yield f"The run took {spent['total']:.0f} s; seconds that were no training: {parts}."


def page(folder: Path) -> str:
    """The whole page. `notes.md` in the folder, where somebody has written one, stands before the tables."""
    device = folder / "device.txt"
    said = (
        device.read_text(encoding="utf-8").strip()
        if device.exists()
        else "no accelerator: a rehearsal on CPU, whose times say nothing"
    )
    done = sorted(file.stem for file in folder.glob("*.done"))
    failed = sorted(file.stem for file in folder.glob("*.err") if file.stem not in done)
    parts: list[tuple[str, Iterator[str]]] = [
        ("Exactness: every implementation against float64", exactness(folder)),
        ("Sizes of blocks", blocks(folder)),
        *((f"Benchmark: {name}", benchmark(folder, name, said)) for name in ("train", "attention", "decode", "sweep")),
        ("Pretraining", pretraining(folder)),
    ]
    notes = folder / "notes.md"
    about = notes.read_text(encoding="utf-8").strip() if notes.exists() else ""
    finished = f"Done: {', '.join(done) or 'nothing'}. Failed: {', '.join(failed) or 'nothing'}."
    lines = [
        f"# {said}",
        "",
        "Written by `experiments/benchmarks/gpu.sh` or `tpu.sh` from the records beside this page.",
        "",
        about or finished,
    ]
    for title, text in parts:
        lines += ["", f"## {title}", "", *text]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes README.md into the folder that is the one argument."""
    folder = Path(sys.argv[1])
    (folder / "README.md").write_text(page(folder), encoding="utf-8")


if __name__ == "__main__":
    main()
