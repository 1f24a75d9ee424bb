"""What experts are worth: 16 languages in one mixture, and models of 1, 2, 4 and 8 experts at equal FLOP for a token.

    python -m experiments.language_experts --out=experiments/results/experts
    python -m experiments.language_experts --out=experiments/results/experts --stage=report

The least loss of any model is known, so what a model has not learned is its gap to that. The same command continues
after a stop: trained models are kept in the workdir; how they ended, and which expert served which language, in
records.jsonl.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import language_experts_figures
from experiments import language_experts_page as pages
from experiments import language_experts_reading as reading
from experiments.transfer_runs import Planned, keep, parsed_of, read, study, study_flags, train
from jaxformer.config import Config
from jaxformer.data.mixture import open_text
from jaxformer.models.flops import count_parameters, training_flops
from jaxformer.modules import make_model
from jaxformer.runs.pretrain import open_run
from jaxformer.runtime.program import program

SEEDS, STEPS, EVALUATIONS = 5, 2000, 5
TEXT: dict[str, str] = {}  # changes of the text, for tests


def run_of(experts: int, seed: int, steps: int) -> Planned:
    """One run: with one expert the dense model, else experts of the dense layer's width, one of them for each token.

    One and not two of half the width, as two experts of half the width with two for each token would be a dense layer.
    """
    kind = {"kind": "dense"} if experts == 1 else {"count": str(experts)}
    changes = {
        **{f"model.feed_forward.{name}": value for name, value in kind.items()}, **TEXT,
        "model.vocab_size": "64", "seed": str(seed), "checkpoint.keep": "1", "train.steps": str(steps),
        "train.eval_every_steps": str(max(steps // EVALUATIONS, 1)),
    }  # fmt: skip
    about = {"what": "run", "experts": experts, "seed": seed}
    return Planned(f"experts={experts},seed={seed}", "expert_languages", changes, about)


def costs(experts: int) -> dict[str, float]:
    """Of a model: all parameters, those that a token uses, and FLOP of an update on one token; and what the routers of
    all layers are of that: parameters and FLOP."""
    config = parsed_of(run_of(experts, 0, STEPS), Path()).config
    model, routers = config.model, 0 if experts == 1 else experts * config.model.num_layers
    counted = count_parameters(model)
    return {
        "total": counted.total, "active": counted.active, "flops": training_flops(model, config.data),
        "router": routers * model.width, "router_flops": 3 * 2 * routers * model.width,
    }  # fmt: skip


def read_run(
    planned: Planned, workdir: Path, rows: dict[str, reading.HeldOutRows], places: np.ndarray
) -> dict[str, Any]:
    """The record of what a trained model does on held-out rows: its gap to the floor, and where its tokens go.

    Args:
      planned: the run.
      workdir: of the study.
      rows: by language.
      places: [ids] the symbol that each token id stands for.
    """
    run = open_run(workdir / planned.name)
    cfg, compute = run.config.model, jax.jit(make_model(run.config.model, run.config.loss, run.config.execution).loss)
    symbols, experts = int(places.max()) + 1, planned.about["experts"]
    counts = np.zeros((cfg.num_layers, experts, len(rows), symbols))
    gaps = []
    for number, each in enumerate(rows.values()):
        nats = []
        for batch in each.batches:
            nll, weight = compute(run.params, batch, None)[1]["loss"]
            nats.append(np.asarray(nll)[np.asarray(weight) > 0])
            if experts > 1:
                chosen = np.asarray(reading.choices(run.params, batch, cfg))[..., 0]
                counts[:, :, number] += tokens_of(chosen, batch, places, experts)
        gaps.append(reading.mean_of(each, np.concatenate(nats) - each.best))
    means, errors = np.array(gaps).T
    found: dict[str, Any] = {
        "gap": round(float(means.mean()), 5),
        "gap_stderr": round(float(np.linalg.norm(errors)) / len(gaps), 5),
        "gaps": means.round(4).tolist(),
    }
    if experts > 1:
        each_layer = [reading.informations(layer) for layer in counts]
        found |= {name: [round(layer[name], 4) for layer in each_layer] for name in each_layer[0]}
        for name, axis in (("shares", 3), ("symbol_shares", 2)):
            tokens = counts.sum(axis=axis)
            found[name] = (tokens / tokens.sum(axis=1, keepdims=True)).round(4).tolist()
    about = planned.about | {"what": "reading"}
    return {"run": f"{planned.name},reading", **about, **found}


def tokens_of(chosen: np.ndarray, batch: Any, places: np.ndarray, experts: int) -> np.ndarray:
    """[L, E, symbols] how many tokens of each symbol went to each expert, in the second half of rows: there nearly all
    of them can be told to be of their language.

    Args:
      chosen: [L, B, T].
      batch: of the tokens.
      places: [ids] the symbol of each token id.
      experts: E.
    """
    symbols = places[np.asarray(batch.tokens)]
    counted = (np.asarray(batch.segments) > 0) & (symbols >= 0)
    counted[:, : counted.shape[1] // 2] = False
    size = int(places.max()) + 1
    pairs = chosen[:, counted] * size + symbols[counted]
    return np.stack([np.bincount(layer, minlength=experts * size).reshape(experts, size) for layer in pairs])


def run(options: Namespace) -> bool:
    """Trains and reads what is missing. Returns False: it was stopped, or only planned."""
    runs = [run_of(experts, seed, options.steps) for seed in range(options.seeds) for experts in pages.EXPERTS]
    if not train(runs, options.workdir, options.out, options.plan_only):
        return False
    known = {each["run"] for each in read(options.out)}
    todo = [each for each in runs if f"{each.name},reading" not in known]
    if todo or "floors" not in known:
        config: Config = parsed_of(runs[0], options.workdir).config
        text = open_text(config.data, progress=False)
        rows = reading.held_out(config, text)
        places = reading.symbol_of_id(next(iter(config.data.parts().values())), text.tokenizer)
        floors = {name: round(float(value), 5) for name, value in reading.floors(config, rows).items()}
        every = [costs(experts) for experts in pages.EXPERTS]
        about: dict[str, Any] = {"rows": sum(len(each.own) for each in rows.values())}
        about["costs"] = {str(experts): cost for experts, cost in zip(pages.EXPERTS, every, strict=True)}
        keep(options.out, {"run": "floors", "what": "floors", "seed": 0, **floors, **about})
        for each in todo:
            keep(options.out, read_run(each, options.workdir, rows, places))
            print(f"{each.name} is read", flush=True)
    return True


def main() -> None:
    """Trains what is missing, and writes figures and page."""
    flags = study_flags(__doc__, "language_experts", "runs/language_experts", seeds=SEEDS, steps=STEPS)
    study(flags.parse_args(), run, language_experts_figures.figures, pages.page)


if __name__ == "__main__":
    program(main)
