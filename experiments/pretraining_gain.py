"""What pretraining is worth: a small BERT tuned on labels that Python gives its own source, against one from scratch.

    python -m experiments.pretraining_gain --out=experiments/results/pretraining_gain
    python -m experiments.pretraining_gain --out=experiments/results/pretraining_gain --stage=report

One model is pretrained; then it is tuned on few and on more labels of three tasks, with all weights or with LoRA,
beside the same model from scratch with the same tokenizer, rows and updates. Each of them has the better one of two
learning rates. The same command continues after a stop: runs are kept in the workdir, how they ended in records.jsonl.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import pretraining_gain_page
from experiments.transfer_runs import (
    TRIAL,
    Planned,
    arguments,
    best_rate,
    keep,
    pretrained,
    read,
    study,
    train,
)  # fmt: skip
from jaxformer.config import Config
from jaxformer.data.mixture import open_text
from jaxformer.models.flops import training_flops
from jaxformer.modules import make_model
from jaxformer.parallel.mesh import make_mesh
from jaxformer.runs import manifest, texts
from jaxformer.runtime.program import program
from jaxformer.specs import count_params, only_trained
from jaxformer.training.optim import make_optimizer
from jaxformer.training.step import compile_steps

STEPS, WIDTH, RANK = 100, 128, 8
PAIRS, UPDATES = 9, 10  # of the two kinds of steps that are timed in turns, and updates of each


class Task(NamedTuple):
    """A task of the study: its config, what changes in it, and how many training examples are used (None: all)."""

    config: str
    changes: dict[str, str]
    examples: tuple[int | None, ...]


TASKS = {
    "exception_type": Task("tune_exception_type", {"train.global_batch_size": "16"}, (100, 400, None)),
    "token_kinds": Task("tune_token_kinds", {"train.global_batch_size": "8"}, (1, 8, 64)),
    "name_roles": Task(
        "tune_token_kinds",
        {"data.source": "name_roles", "model.head.outputs": "none", "train.global_batch_size": "8"},
        (1, 8, 64),
    ),
}
# Name -> learning rates, of which the better one is taken, and changes; PRETRAINED stands for the folder of that run.
ARMS = {
    "scratch": (("1e-3", "3e-3"), {}),
    "full": (("1e-3", "3e-3"), {"init_from": "PRETRAINED"}),
    "lora": (("1e-2",), {"init_from": "PRETRAINED", "tune.lora_rank": str(RANK)}),
}


def run_of(task: str, arm: str, examples: int | None, seed: int, rate: str, options: Any) -> Planned:
    """One run: a task from so many examples, by one of ARMS."""
    config, own, _ = TASKS[task]
    rates, changes = ARMS[arm]
    source = options.workdir / "pretrained"
    given = {
        "model.width": str(options.width), "train.steps": str(options.steps), "seed": str(seed),
        "train.eval_every_steps": str(options.steps), "tune.layer_decay": "1", "optimizer.learning_rate": rate,
        "data.labelled.max_examples": "none" if examples is None else str(examples), "checkpoint.keep": "1",
        "data.tokenizer_file": str(source / "tokenizer.json"), **own,
        **{field: value.replace("PRETRAINED", str(source)) for field, value in changes.items()},
    }  # fmt: skip
    about: dict[str, Any] = {"task": task, "arm": arm, "examples": examples, "rate": rate, "seed": seed}
    which = f"rate={rate}" if seed == TRIAL else f"seed={seed}"
    if seed == TRIAL:
        about["rates"] = rates
    name = f"{task},{arm},examples={'all' if examples is None else examples},{which}"
    return Planned(name, config, given, about)


def trials(options: Any, arms: Any = ARMS) -> list[Planned]:
    """The runs that choose the learning rates: of the middle number of examples, with a seed of their own."""
    return [
        run_of(task, arm, TASKS[task].examples[len(TASKS[task].examples) // 2], TRIAL, rate, options)
        for task in TASKS for arm in arms for rate in ARMS[arm][0] if len(ARMS[arm][0]) > 1
    ]  # fmt: skip


def counted(options: Any, found: list[dict[str, Any]], arms: Any = ARMS) -> Iterator[Planned]:
    """The runs that count, with the rates that were chosen (the first ones where that is still to be done); those of
    one seed after those of another, so that a study that was stopped has whole curves. LoRA has the most labels alone.
    """
    for seed in range(options.seeds):
        for task, about in TASKS.items():
            for arm in arms:
                rate = best_rate(found, task=task, arm=arm) or ARMS[arm][0][0]
                for examples in about.examples if arm != "lora" else about.examples[-1:]:
                    yield run_of(task, arm, examples, seed, rate, options)


def labels_of(config: Config) -> int:
    """Labels that a run can learn from, each counted once."""
    batches: Any = texts.batches_of(config, open_text(config.data, progress=False))
    rows = [batches.rows(np.array([number])).weights for number in range(batches.rows_per_epoch)]
    return int(sum((weights > 0).sum() for weights in rows))


def count_labels(out: Path, workdir: Path) -> None:
    """Records of each task and number of examples how many labels there are, as some run of it knows them."""
    found = read(out)
    for each in found:
        name = f"labels,{each.get('task')},{each.get('examples')}"
        if each.get("arm") != "scratch" or any(other["run"] == name for other in found):
            continue
        if (workdir / each["run"]).exists():
            about = {"task": each["task"], "examples": each["examples"], "arm": "labels", "seed": 0}
            labels = labels_of(manifest.read_config(workdir / each["run"]))
            found = keep(out, {"run": name, **about, "labels": labels})


def measure(out: Path, workdir: Path, task: str) -> None:
    """Records memory and time of a step of full tuning and of LoRA on a task, in turns: CPU seconds, which other
    programs that run beside it change less than the time on the clock."""
    found = read(out)
    name = f"cost,{task}"
    ends = [next((e for e in found if e.get("task") == task and e["arm"] == arm), None) for arm in ("full", "lora")]
    if any(each["run"] == name for each in found) or None in ends:
        return
    costs: dict[str, dict[str, Any]] = {}
    ready: dict[str, Any] = {}
    for arm, end in zip(("full", "lora"), ends, strict=True):
        assert end is not None
        config: Config = manifest.read_config(workdir / end["run"])
        model = make_model(config.model, config.loss, config.execution, config.optimizer.freeze, config.tune)
        optimizer = make_optimizer(config.optimizer, config.train.steps, model.specs)
        steps = compile_steps(model, optimizer, make_mesh(config.mesh, jax.devices()[:1]), config)
        batches = texts.batches_of(config, open_text(config.data, progress=False))
        chunk, count = steps.place_chunk([batches[i] for i in range(UPDATES)])
        compiled = steps.train.lower(steps.abstract_state, chunk, count).compile()  # type: ignore[attr-defined]
        ready[arm] = [compiled, steps.init(), chunk, count]
        costs[arm] = {
            "trained": count_params(only_trained(model.specs, model.specs)),
            "flops_per_token": training_flops(config.model, config.data, config.tune),
            "state_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(steps.abstract_state)),
            "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "seconds": [],
        }
    for turn in range(PAIRS + 1):
        for arm, (compiled, state, chunk, count) in ready.items():
            began = time.process_time()
            state, metrics = compiled(state, chunk, count)
            jax.block_until_ready(metrics.loss)
            ready[arm][1] = state
            if turn:  # the first one touches new memory
                costs[arm]["seconds"].append(round((time.process_time() - began) / UPDATES, 5))
    keep(out, {"run": name, "task": task, "arm": "cost", "seed": 0, "costs": costs})


def run(options: Any) -> bool:
    """Trains and measures what is missing. Returns False: it was stopped, or only planned."""
    plan, out, workdir = options.plan_only, options.out, options.workdir
    if not train([pretrained(workdir, options.width, options.pretraining_steps)], workdir, out, plan) and not plan:
        return False
    whole = True
    for arms in (("scratch", "full"), ("lora",)):
        if not train(trials(options, arms), workdir, out, plan) and not plan:
            return False
        whole = train(list(counted(options, read(out), arms)), workdir, out, plan)
        if not whole and not plan:
            return False
        if not plan:
            count_labels(out, workdir)
    for task in TASKS if not plan else ():
        measure(out, workdir, task)
    return not plan


def main() -> None:
    """Trains what is missing, and writes figure and page."""
    options = arguments(__doc__, "pretraining_gain", STEPS, WIDTH).parse_args()
    study(options, run, lambda found: {"labels": pretraining_gain_page.figure(found)}, pretraining_gain_page.page)


if __name__ == "__main__":
    program(main)
