"""Plot the loss curves of runs from their records, or another number that training records have.

    jaxformer curves runs/gpt_tiny --out=curve.png
    jaxformer curves runs/a runs/b --label=narrow --label=wide --out=curve.svg
    jaxformer curves runs/a --metric=grad_norm --out=norm.svg

Losses are in bits per byte if all runs have them, else in nats per token. A mixture has a curve for each of its
sources.
"""

import math
from pathlib import Path
from typing import Any

from jaxformer import records
from jaxformer.errors import ConfigError
from jaxformer.runs import manifest
from jaxformer.runs.command_line import parser, path_text, workdir_text
from jaxformer.scaling import plotting
from jaxformer.storage import files
from jaxformer.storage.address import place
from jaxformer.training.evaluate import SPLIT

# Okabe and Ito's colours, which colour-blind readers can distinguish; markers distinguish series in black and white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
STYLES = ("-", "--", ":", "-.")  # all held-out text, and that of each source
ENDINGS = (".png", ".svg", ".pdf")
NO_METRICS = {"version", "step", "tokens", "seconds", "time"}  # numbers of training records that only say when
COMPRESSORS = {"gzip -9": (0, (4, 2)), "xz -9": (0, (1, 1))}

Recorded = tuple[list[dict], list[dict]]  # what `recorded` returns


def main() -> None:
    """Losses, or what `--metric` names, against training tokens."""
    arguments = parser(__doc__, "curves")
    arguments.add_argument("runs", nargs="*", type=workdir_text, metavar="RUN", help="directories of runs")
    arguments.add_argument("--workdir", action="append", type=workdir_text, metavar="RUN", help="the same; repeatable")
    arguments.add_argument("--label", action="append", help="name in the legend, one for each run; repeatable")
    arguments.add_argument(
        "--metric", help="a number of the training records to plot in place of losses, such as grad_norm"
    )
    arguments.add_argument("--out", required=True, type=path_text, help="figure to write: .png, .svg or .pdf")
    options = arguments.parse_intermixed_args()
    options.workdir = options.runs + (options.workdir or [])
    if not options.workdir:
        raise ConfigError("--workdir: is needed; see --help")
    labels = options.label or [place(workdir).name for workdir in options.workdir]
    if len(labels) != len(options.workdir):
        raise ConfigError(f"--label: {len(labels)} given for {len(options.workdir)} workdirs; accepted: one for each")
    for workdir in options.workdir:
        if not (place(workdir) / "records.jsonl").is_file():
            there = (place(workdir) / manifest.FILE_NAME).is_file()
            why = " (it was imported, not trained)" if there and "imported" in manifest.read(workdir) else ""
            raise ConfigError(f"--workdir: {workdir} has no records.jsonl{why}")
    for label in options.label or []:
        if not label.isprintable():
            raise ConfigError(f"--label: {label!r}; accepted: text that can be printed")
    matplotlib = plotting.matplotlib()

    out = Path(options.out)
    if out.suffix not in ENDINGS:
        raise ConfigError(f"--out: {out}; accepted: a figure to write, of {', '.join(ENDINGS)}")
    if out.exists() and not out.is_file():
        raise ConfigError(f"--out: {out} is not a file; accepted: a figure to write")
    figure = matplotlib.figure.Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    runs = [recorded(place(workdir)) for workdir in options.workdir]
    unit = _draw_losses(axes, runs, labels) if options.metric is None else _draw_metric(axes, runs, labels, options)
    axes.set(xlabel="training tokens", ylabel=unit)
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    for text in axes.legend(frameon=False, fontsize=9).get_texts():
        text.set_parse_math(False)  # folder names may contain $
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(out, plotting.encoded(figure, out.suffix[1:], dpi=150))
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be written ({error.strerror or error})") from None
    print(out)


def _draw_losses(axes: Any, runs: list[Recorded], labels: list[str]) -> str:
    """Training and held-out losses, in one unit, which is returned; in bits per byte if all runs have them."""
    # Training loss is in nats per token; the last evaluation's ratio converts it to bits per byte. One axis, one unit.
    ends = [each[-1] for found, _ in runs for each in by_split(found).values()]
    in_bits = all(evals for _, evals in runs) and all("bits_per_byte" in r and r["loss"] > 0 for r in ends)
    tops: list[float] = []
    levels: dict[str, float] = {}  # of general compressors; equal ones are drawn once
    for index, ((found, evals), label) in enumerate(zip(runs, labels, strict=True)):
        factor = evals[-1]["bits_per_byte"] / evals[-1]["loss"] if in_bits else 1.0
        colour = COLOURS[index % len(COLOURS)]
        steps = [r for r in found if r["kind"] == "train"]
        axes.plot(
            [r["tokens"] for r in steps], [factor * float(r["loss"]) for r in steps],
            color=colour, alpha=0.35, lw=1, label=f"{label}, training batches",
        )  # fmt: skip
        for number, (split, each) in enumerate(by_split(found).items()):
            unit = each[-1]["bits_per_byte"] / each[-1]["loss"] if in_bits else 1.0
            axes.errorbar(
                [r["tokens"] for r in each],
                [unit * r["loss"] for r in each],
                yerr=[1.96 * unit * r["loss_stderr"] for r in each],
                color=colour, marker=MARKERS[(index + number) % len(MARKERS)], capsize=3,
                ls=STYLES[number % len(STYLES)], markerfacecolor="white" if number else colour,
                label=f"{label}, {split} (95 % interval): {unit * each[-1]['loss']:.2f} at the end",
            )  # fmt: skip
        finals = [r for r in found if r["kind"] == "final"] if in_bits else []
        for name, level in (finals[-1].get("compressed_bits_per_byte", {}) if finals else {}).items():
            if levels.setdefault(f"{name} on the same bytes: {level:.2f}", level) is level:
                style = COMPRESSORS.get(name, "-.")
                axes.axhline(level, color="0.3", ls=style, lw=1, label=f"{name} on the same bytes: {level:.2f}")
        tops += [1.8 * factor * float(r["loss"]) for r in evals]
    if finite := [top for top in tops if math.isfinite(top)]:
        axes.set_ylim(top=max(finite))
    return f"loss, {'bits per byte' if in_bits else 'nats per token'}"


def _draw_metric(axes: Any, runs: list[Recorded], labels: list[str], options: Any) -> str:
    """One number of the training records of each run; its name is returned."""
    name = options.metric
    for index, ((found, _), label, workdir) in enumerate(zip(runs, labels, options.workdir, strict=True)):
        steps = [each for each in found if each["kind"] == "train"]
        known = {key for each in steps for key, value in each.items() if isinstance(value, int | float)} - NO_METRICS
        if name not in known:
            accepted = f"accepted: {' or '.join(sorted(known))}" if known else "it has none; accepted: another run"
            raise ConfigError(f"--metric: {name!r}; {workdir} has no such number in its training records; {accepted}")
        having = [each for each in steps if name in each]
        axes.plot(
            [each["tokens"] for each in having], [float(each[name]) for each in having],
            color=COLOURS[index % len(COLOURS)], marker=MARKERS[index % len(MARKERS)], ms=3,
            ls=STYLES[index // len(COLOURS) % len(STYLES)], lw=1, label=label,
        )  # fmt: skip
    return name


def recorded(workdir: Path) -> Recorded:
    """All records of a run, and the evaluations on all its held-out text among them.

    Raises:
      ConfigError, RecordError: they are not those of the run.
    """
    path = workdir / "records.jsonl"
    found = records.latest(records.load(path))
    if (workdir / manifest.FILE_NAME).exists():
        records.check_run(path, found, manifest.fingerprints(workdir)[0])
    if not any(each["kind"] in ("train", "eval") for each in found):
        raise ConfigError(f"--workdir: {path} has no records of training or evaluations; accepted: a run that has some")
    return found, by_split(found).get(SPLIT, [])


def by_split(found: list[dict]) -> dict[str, list[dict]]:
    """The evaluations of a run by what they are of: all held-out text first, then that of each source of a mixture."""
    splits = sorted({r["split"] for r in found if r["kind"] == "eval"}, key=lambda split: (split != SPLIT, split))
    return {split: [r for r in found if r["kind"] == "eval" and r["split"] == split] for split in splits}
