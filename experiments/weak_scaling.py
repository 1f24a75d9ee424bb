"""Predict weak scaling, 8 to 4096 chips with constant tokens per chip, from plans of the real train step.

    python -m experiments.weak_scaling --out=experiments/results/weak_scaling
    python -m experiments.weak_scaling --out=experiments/results/weak_scaling --only=llama_7b:v5e

Every plan is made by a separate process and saved under plans/. Existing plans are not compiled again, so the same
command continues after a stop, or in another environment (TPUs need the extra `plan`, GPUs `cuda`). Finally it writes
a table and a figure.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxformer.config import Config, from_mapping, load
from jaxformer.errors import ConfigError
from jaxformer.models.flops import count_parameters
from jaxformer.plan import topology
from jaxformer.runs.command_line import file_path, parser
from jaxformer.runtime.hardware import CHIPS, GIB
from jaxformer.runtime.program import program
from jaxformer.scaling import plotting

CONFIGS = Path(__file__).parent.parent / "configs"
BYTES = 16  # per parameter: itself, two moments and its gradient, in float32
SHARE = 0.25  # fraction of a chip's memory for these
# model -> rows per chip, tensor-parallel devices on TPUs and on GPUs
MODELS = {"gpt2_124m": (16, 1, 1), "gpt2_1_5b": (8, 1, 1), "llama_7b": (2, 1, 1), "llama_70b": (1, 4, 8)}
SLICES = {
    "v5e": ("2x4", "8x8", "16x16"),
    "v5p": ("2x2x2", "4x4x4", "8x8x8", "16x16x16"),
    "h100": ("1x8", "4x8", "8x8", "64x8", "512x8"),
}


class Case(NamedTuple):
    """A plan: a model on a slice of chips."""

    model: str
    chip: str
    shape: str

    @property
    def name(self) -> str:
        """Name for --only."""
        return f"{self.model}:{self.chip}:{self.shape}"


def cases(only: str = "") -> Iterator[Case]:
    """All cases whose names begin with `only`, small slices first."""
    found = [Case(m, chip, shape) for m in MODELS for chip, shapes in SLICES.items() for shape in shapes]
    yield from sorted((c for c in found if c.name.startswith(only)), key=devices)


def devices(case: Case) -> int:
    """Number of chips of the slice."""
    return math.prod(topology.parse(f"{case.chip}:{case.shape}")[1])


def file_of(case: Case, folder: Path) -> Path:
    """The file of a plan."""
    return folder / "plans" / f"{case.name.replace(':', '-')}.json"


def config_of(case: Case) -> tuple[Config, list[str]]:
    """The model's config, and the flags that set its mesh.

    Parameters, gradients and moments are sharded (`fsdp`, at least a node's eight chips) until they take at most a
    quarter of each chip's memory; the remaining factor is `data`. Layers are scanned and fully rematerialized.

    >>> config_of(Case("llama_7b", "h100", "8x8"))[1][:3]
    ['--config.mesh.data=8', '--config.mesh.fsdp=8', '--config.mesh.tensor=1']
    """
    config: Config = from_mapping(load(str(CONFIGS / f"{case.model}.py")))
    rows, on_tpus, on_gpus = MODELS[case.model]
    chip, count = CHIPS[case.chip], devices(case)
    tensor = on_gpus if chip.platform == "cuda" else on_tpus
    state, fsdp = BYTES * count_parameters(_sized(config)).total, max(1, 8 // tensor)
    while fsdp * tensor < count and state / (fsdp * tensor) > SHARE * (chip.memory or 0):
        fsdp *= 2
    data = count // (fsdp * tensor)
    flags = {
        "mesh.data": data, "mesh.fsdp": fsdp, "mesh.tensor": tensor, "train.global_batch_size": rows * count,
        "train.eval_rows": rows * count, "execution.gradient_accumulation_steps": 1, "execution.layers": "scan",
        "execution.remat": "full",
    }  # fmt: skip
    return config, [f"--config.{name}={value}" for name, value in flags.items()]


def _sized(config: Config) -> Any:
    """The model with a vocabulary size: a plan takes it from the tokenizer's settings."""
    return replace(config.model, vocab_size=config.model.vocab_size or config.data.tokenizer_vocab)


def plan(case: Case, file: Path) -> str:
    """Compiles one plan in a separate process; writes its file and returns a line about it.

    A case whose parameters, moments and gradients alone do not fit is not compiled.
    """
    config, flags = config_of(case)
    state = BYTES * count_parameters(_sized(config)).total / devices(case)
    if state > (CHIPS[case.chip].memory or math.inf):
        file.write_text(json.dumps({"skipped": f"parameters, moments and gradients alone take {state / GIB:.0f} GiB"}))
        return "does not fit"
    why = compiled(case.model, f"{case.chip}:{case.shape}", flags, file)
    return why or f"compiled in {json.loads(file.read_text())['seconds']:.0f} s"


def compiled(model: str, where: str, flags: Sequence[str], file: Path) -> str | None:
    """Has a separate process compile a plan and write its file. Returns why there is none; None: there is."""
    about = [f"--config={CONFIGS / model}.py", f"--topology={where}", f"--json={file}"]
    command = [sys.executable, "-m", "experiments.plan", *about, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if file.exists() else f"no plan: {(done.stderr.strip().splitlines() or [''])[-1]}"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """One row of the table for each existing plan."""
    out = []
    for case in cases():
        file = file_of(case, folder)
        if not file.exists():
            continue
        found = json.loads(file.read_text())
        row: dict[str, Any] = {"model": case.model, "chip": case.chip, "slice": case.shape, "chips": devices(case)}
        if "skipped" in found:
            out.append({**row, "why": found["skipped"]})
            continue
        mesh, memory, roofline = found["mesh"], found["memory"], found.get("roofline")
        row |= {
            "mesh": " x ".join(f"{axis} {mesh[axis]}" for axis in ("data", "fsdp", "tensor") if mesh[axis] > 1),
            "GiB": memory["total"] / GIB,
            "fits": memory["fits"],
        }
        if roofline:
            sent, bound = sum(each["bytes"] for each in found["collectives"]), sum(found["minimum"].values())
            row |= {
                "sent": sent / GIB,
                "over bound": sent / (bound or 1.0),
                "step": roofline["step"],
                "MFU": roofline["utilisation"],
                "MFU without overlap": roofline["utilisation_no_overlap"],
                "bound": roofline["bound"],
            }
        out.append(row)
    return out


def table(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    heads = ["model", "chips", "mesh", "GiB per chip", "fits", "GiB sent per chip", "over the communication bound",
             "roofline step", "MFU, full overlap", "MFU, no overlap", "bound by"]  # fmt: skip
    lines = [" | ".join(["", *heads, ""]).strip(), "|" + " --- |" * len(heads)]
    for row in sorted(rows, key=lambda r: (list(MODELS).index(r["model"]), r["chip"], r["chips"])):
        cells = [row["model"], f"{row['chips']} {row['chip']} ({row['slice']})"]
        if "why" in row:
            cells += ["", "", f"no: {row['why']}", *[""] * 6]
        elif "step" not in row:
            cells += [row["mesh"], f"{row['GiB']:.1f}", "no", *[""] * 6]
        else:
            cells += [row["mesh"], f"{row['GiB']:.1f}", "yes" if row["fits"] else "no", f"{row['sent']:.2f}",
                      f"{row['over bound']:.2f}", f"{1e3 * row['step']:.0f} ms", f"{row['MFU']:.0%}",
                      f"{row['MFU without overlap']:.0%}", row["bound"]]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def figure(rows: list[dict[str, Any]]) -> Any:
    """Predicted MFU against the number of chips, one panel per kind of chip: points are without overlap of computation
    and communication, bars extend to full overlap."""
    kinds = [chip for chip in SLICES if any(r["chip"] == chip and "step" in r for r in rows)]
    drawn, panels = plotting.panel(len(kinds))
    for axes, chip in zip([panels] if len(kinds) == 1 else panels, kinds, strict=True):
        for i, model in enumerate(MODELS):
            mine = [r for r in rows if r["model"] == model and r["chip"] == chip and r.get("fits") and "step" in r]
            if not mine:
                continue
            low, high = [r["MFU without overlap"] for r in mine], [r["MFU"] for r in mine]
            spread = [[0.0] * len(mine), [b - a for a, b in zip(low, high, strict=True)]]
            axes.errorbar([r["chips"] * 1.04**i for r in mine], low, yerr=spread, capsize=2, label=model,
                          marker=plotting.marker(i), **plotting.line_style(i, len(MODELS)))  # fmt: skip
        axes.set(xscale="log", xlabel=f"{chip} chips", ylabel="predicted MFU", xlim=(6, 6000),
                 ylim=(0, 1))  # fmt: skip
        axes.set_xticks([8, 64, 256, 512, 4096], ["8", "64", "256", "512", "4096"], minor=False)
        axes.minorticks_off()
        axes.legend(loc="upper center", ncols=len(MODELS), columnspacing=1.0)
    return drawn


def write(folder: Path) -> dict[str, Path]:
    """Writes `table.md` and the figure from the existing plans.

    Raises:
      ConfigError: there are none.
    """
    rows = rows_of(folder)
    if not any("step" in row for row in rows):
        raise ConfigError(f"--out: {folder} holds no plan yet")
    (folder / "table.md").write_text(table(rows))
    return {"table": folder / "table.md", "figure": plotting.save({"weak_scaling": figure(rows)}, folder)[0]}


def main() -> None:
    """Compiles missing plans, then writes the table and the figure."""
    arguments = parser(__doc__, "weak_scaling")
    arguments.add_argument("--out", type=file_path, required=True, metavar="DIR", help="folder of plans and figure")
    arguments.add_argument("--only", default="", metavar="NAME", help="beginning of MODEL:CHIP:SHAPE (default: all)")
    arguments.add_argument("--stage", choices=("plan", "report"), help="one stage alone (default: both)")
    options = arguments.parse_args()
    chosen = list(cases(options.only))
    if not chosen:
        raise ConfigError(f"--only: {options.only}; accepted: how one of {', '.join(c.name for c in cases())} begins")
    (options.out / "plans").mkdir(parents=True, exist_ok=True)
    for case in chosen if options.stage != "report" else ():
        file = file_of(case, options.out)
        if not file.exists():
            print(f"{case.name}: {plan(case, file)}", flush=True)
    if options.stage != "plan":
        for path in write(options.out).values():
            print(path)


if __name__ == "__main__":
    program(main)
