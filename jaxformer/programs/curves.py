"""Plot the loss curves of runs from their records.

jaxformer curves --workdir=runs/gpt_tiny --out=curve.png
jaxformer curves --workdir=runs/a --workdir=runs/b --label=narrow --label=wide --out=curve.svg
"""

import math
from pathlib import Path

from jaxformer import records
from jaxformer.errors import ConfigError
from jaxformer.runs import manifest
from jaxformer.runs.command_line import parser, path_text
from jaxformer.scaling import plotting
from jaxformer.storage import files

# Okabe and Ito's colours, which colour-blind readers can distinguish; markers distinguish series in black and white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
ENDINGS = (".png", ".svg", ".pdf")
COMPRESSORS = {"gzip -9": (0, (4, 2)), "xz -9": (0, (1, 1))}


def main() -> None:
    """Validation and training loss against training tokens; in bits per byte if all runs have them."""
    arguments = parser(__doc__, "curves")
    arguments.add_argument(
        "--workdir", action="append", required=True, type=path_text, help="directory of a run; may be repeated"
    )
    arguments.add_argument("--label", action="append", help="name in the legend, one for each workdir")
    arguments.add_argument("--out", required=True, type=path_text, help="figure to write: .png, .svg or .pdf")
    options = arguments.parse_args()
    labels = options.label or [Path(workdir).name for workdir in options.workdir]
    if len(labels) != len(options.workdir):
        raise ConfigError(f"--label: {len(labels)} given for {len(options.workdir)} workdirs; accepted: one for each")
    for workdir in options.workdir:
        if not (Path(workdir) / "records.jsonl").is_file():
            raise ConfigError(f"--workdir: {workdir} has no records.jsonl")
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
    runs = [recorded(Path(workdir)) for workdir in options.workdir]
    # Training loss is in nats per token; the last evaluation's ratio converts it to bits per byte. One axis, one unit.
    in_bits = all(evals and "bits_per_byte" in evals[-1] and evals[-1]["loss"] > 0 for _, evals in runs)
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
        ending = f": {factor * evals[-1]['loss']:.2f} at the end" if evals else ""
        axes.errorbar(
            [r["tokens"] for r in evals],
            [factor * r["loss"] for r in evals],
            yerr=[1.96 * factor * r["loss_stderr"] for r in evals],
            color=colour, marker=MARKERS[index % len(MARKERS)], capsize=3,
            label=f"{label}, validation (95 % interval){ending}",
        )  # fmt: skip
        finals = [r for r in found if r["kind"] == "final"] if in_bits else []
        for name, level in (finals[-1].get("compressed_bits_per_byte", {}) if finals else {}).items():
            if levels.setdefault(f"{name} on the same bytes: {level:.2f}", level) is level:
                style = COMPRESSORS.get(name, "-.")
                axes.axhline(level, color="0.3", ls=style, lw=1, label=f"{name} on the same bytes: {level:.2f}")
        tops += [1.8 * factor * float(r["loss"]) for r in evals]
    if finite := [top for top in tops if math.isfinite(top)]:
        axes.set_ylim(top=max(finite))
    axes.set(xlabel="training tokens", ylabel=f"loss, {'bits per byte' if in_bits else 'nats per token'}")
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


def recorded(workdir: Path) -> tuple[list[dict], list[dict]]:
    """All records of a run, and its evaluations among them. Raises ConfigError, RecordError: not those of the run."""
    path = workdir / "records.jsonl"
    found = records.latest(records.load(path))
    if (workdir / manifest.FILE_NAME).exists():
        records.check_run(path, found, manifest.fingerprints(workdir)[0])
    return found, [r for r in found if r["kind"] == "eval"]
