"""Plans of mixtures of experts, and of a pipeline of stages, on v5p and H100, without the chips.

    python -m experiments.expert_plans --out=experiments/results/expert_plans
    python -m experiments.expert_plans --out=experiments/results/expert_plans --only=olmoe_1b_7b-v5p

Every plan is made by a separate process and saved under plans/, with the processor seconds that it took; existing ones
are not compiled again. Finally it writes a table. TPUs need the extra `plan`, GPUs `cuda`.
"""

import json
import resource
from pathlib import Path
from typing import Any

from experiments.weak_scaling import compiled
from jaxformer.errors import ConfigError
from jaxformer.runs.command_line import file_path, parser
from jaxformer.runtime.hardware import GIB
from jaxformer.runtime.program import program


def _rows(number: int) -> tuple[str, ...]:
    return f"train.global_batch_size={number}", f"train.eval_rows={number}"


MICRO, CAPACITY = "execution.gradient_accumulation_steps=8", "model.feed_forward.dispatch=capacity"
# name -> config, topology, flags
CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "olmoe_1b_7b-v5p": ("olmoe_1b_7b", "v5p:4x4x8", ("execution.gradient_accumulation_steps=4",)),
    "olmoe_1b_7b-h100": ("olmoe_1b_7b", "h100:16x8", (MICRO,)),
    "olmoe_1b_7b-h100-capacity": ("olmoe_1b_7b", "h100:16x8", (MICRO, CAPACITY)),
    "mixtral_8x7b-v5p": ("mixtral_8x7b", "v5p:4x4x8", ()),
    "mixtral_8x7b-h100": ("mixtral_8x7b", "h100:16x8", ()),
    "mixtral_8x7b-h100-capacity": ("mixtral_8x7b", "h100:16x8", (CAPACITY,)),
    "glam_64b_64e-v5p": ("glam_64b_64e", "v5p:8x8x8", ()),
    "glam_64b_64e-v5p-gather": ("glam_64b_64e", "v5p:8x8x8", ("execution.expert_exchange=gather",)),
    "glam_64b_64e-h100": ("glam_64b_64e", "h100:64x8", ()),
    "glam_64b_64e-h100-dropless": ("glam_64b_64e", "h100:64x8", ("model.feed_forward.dispatch=dropless",)),
    "llama_70b_stages-v5p": ("llama_70b_stages", "v5p:8x8x8", ()),
    "llama_70b_stages-h100": ("llama_70b_stages", "h100:64x8", ()),
    "llama_70b_stages-h100-repeats": ("llama_70b_stages", "h100:64x8", ("execution.pipeline_repeats=2",)),
    # Weak scaling: as many rows for each device as above.
    "olmoe_1b_7b-h100-8x8": ("olmoe_1b_7b", "h100:8x8", (MICRO, *_rows(512))),
    "olmoe_1b_7b-h100-64x8": ("olmoe_1b_7b", "h100:64x8", (MICRO, "mesh.data=4", *_rows(4096))),
    "mixtral_8x7b-h100-capacity-8x8": ("mixtral_8x7b", "h100:8x8", (CAPACITY, *_rows(64))),
    "mixtral_8x7b-h100-capacity-64x8": ("mixtral_8x7b", "h100:64x8", (CAPACITY, "mesh.data=4", *_rows(512))),
    "glam_64b_64e-h100-512x8": ("glam_64b_64e", "h100:512x8", ("mesh.data=8", *_rows(8192))),
    "llama_70b_stages-h100-16x8": ("llama_70b_stages", "h100:16x8", _rows(256)),
    "llama_70b_stages-h100-128x8": ("llama_70b_stages", "h100:128x8", _rows(2048)),
}


def plan(name: str, file: Path) -> str:
    """Compiles one plan in a separate process; writes its file and returns a line about it."""
    config, topology, flags = CASES[name]
    before = _cpu_seconds()
    if why := compiled(config, topology, [f"--config.{flag}" for flag in flags], file):
        return why
    found = json.loads(file.read_text()) | {"cpu_seconds": round(_cpu_seconds() - before, 1)}
    file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return f"compiled in {found['cpu_seconds']:.0f} processor seconds"


def _cpu_seconds() -> float:
    """Of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row(name: str, found: dict[str, Any]) -> list[str]:
    """The cells of one plan."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items() if size > 1)
    cells = [name, found["topology"], mesh, f"{found['cpu_seconds']:.0f}", f"{found['memory']['total'] / GIB:.1f}"]
    cells.append("no" if found["memory"]["fits"] is False else "yes")
    if "roofline" not in found:
        return [*cells, *[""] * 6]
    times, sent, bound = found["roofline"], found["collectives"], found["minimum"]
    of_experts = sum(each["bytes"] for each in sent if each["axes"] == "expert")
    all_bytes, least = sum(each["bytes"] for each in sent), sum(bound.values())
    return [
        *cells, f"{1 / found['flops']['useful']:.2f}", f"{all_bytes / GIB:.1f}", f"{all_bytes / least:.2f}",
        "" if not of_experts else f"{of_experts / GIB:.1f}", f"{times['step']:.2f} s",
        f"{times['utilisation_no_overlap']:.0%} to {times['utilisation']:.0%}, {times['bound']}",
    ]  # fmt: skip


def table(plans: dict[str, dict[str, Any]]) -> str:
    """All plans in Markdown."""
    heads = ["plan", "devices", "mesh", "processor s", "GiB a device", "fits", "FLOP over the model's", "GiB sent",
             "over the bound", "over expert alone", "step at the least", "MFU, bound by"]  # fmt: skip
    rows = [heads, ["---"] * len(heads), *(row(name, found) for name, found in plans.items())]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def main() -> None:
    """Compiles missing plans, then writes the table."""
    arguments = parser(__doc__, "expert_plans")
    arguments.add_argument("--out", type=file_path, required=True, metavar="DIR", help="folder of plans and table")
    arguments.add_argument("--only", default="", metavar="NAME", help="beginning of a plan's name (default: all)")
    options = arguments.parse_args()
    chosen = [name for name in CASES if name.startswith(options.only)]
    if not chosen:
        raise ConfigError(f"--only: {options.only}; accepted: how one of {', '.join(CASES)} begins")
    (options.out / "plans").mkdir(parents=True, exist_ok=True)
    files = {name: options.out / "plans" / f"{name}.json" for name in CASES}
    for name in chosen:
        if not files[name].exists():
            print(f"{name}: {plan(name, files[name])}", flush=True)
    found = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    (options.out / "table.md").write_text(table(found))
    print(options.out / "table.md")


if __name__ == "__main__":
    program(main)
