"""Why attention: exact answers against length, of recurrent models without and with attention and of the Transformer.

    python -m experiments.why_attention --workdir=runs/why_attention --out=experiments/results/why_attention
    python -m experiments.why_attention --out=experiments/results/why_attention --stage=report

Every model learns to translate the `transduction` language, all its seeds in one compiled program; then it answers new
sources of each length, greedily, and its attention is compared with the alignment that the language has. The same
command continues after a stop: trained models are kept in the workdir, answers in records.jsonl.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import why_attention_page
from experiments.why_attention_reading import attention_weights, misaligned, pairs_of, right
from jaxformer.config import CheckpointConfig, Config, from_mapping, load, to_dict
from jaxformer.data.decoding_text import DecodingText, decoding_text
from jaxformer.data.mixture import open_text
from jaxformer.data.transduction import language, target_nats
from jaxformer.decoding import Sampling, generate
from jaxformer.models.flops import count_parameters
from jaxformer.modules import make_model
from jaxformer.runs import texts
from jaxformer.runs.command_line import file_path, integer, parser
from jaxformer.runs.pretrain import fit_vocabulary
from jaxformer.runtime.program import keep_compiled_programs, program
from jaxformer.storage import files, json_checksum
from jaxformer.training.checkpoint.manager import Checkpoints
from jaxformer.training.sweep.stacked_program import StackedProgram
from jaxformer.types import Params

SEEDS, STEPS, SAVE_EVERY = 5, 3000, 500
LENGTHS = range(4, 41)
PAIRS = 100  # of each length and seed
SHOWN = 12  # symbols of the pair whose alignments are drawn
LANGUAGE = {
    "data.language_symbols": "16", "data.language_synonyms": "2", "data.language_block": "2",
    "data.language_longest": str(LENGTHS[-1]), "data.language_tokens": "16000000",
}  # fmt: skip
COMMON = {"model.width": str(why_attention_page.WIDTH), "train.steps": str(STEPS), "train.global_batch_size": "32"}
BAHDANAU = {"model.attention.cell": "gru", "model.attention.decoder": "bahdanau"}
LUONG = {
    "model.attention.cell": "lstm", "model.attention.decoder": "luong", "model.attention.score": "general",
    "model.attention.input_feeding": "true",
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, str]]] = {  # name -> config, changes
    "none": ("recurrent_tiny", {**BAHDANAU, "model.attention.score": "none"}),
    "bahdanau": ("recurrent_tiny", {**BAHDANAU, "model.attention.score": "additive"}),
    "luong": ("recurrent_tiny", LUONG),
    "transformer": ("transduction", {}),
}


class Trained(NamedTuple):
    """A model's parameters, one tree for each seed, and its training loss."""

    params: list[Params]
    losses: list[dict[str, Any]]


def config_of(name: str, changes: dict[str, str]) -> Config:
    """The config of a model, with `changes` beside its own and the common ones."""
    config, own = MODELS[name]
    return from_mapping(load(config), LANGUAGE | COMMON | own | changes)


def train(config: Config, corpus: Any, seeds: int, folder: Path) -> Trained:
    """Trains all seeds of a config together, from where it stopped; `folder` keeps them."""
    every = [replace(config, seed=seed) for seed in range(seeds)]
    sources = [texts.batches_of(each, corpus) for each in every]
    model = make_model(config.model, config.loss, config.execution, config.optimizer.freeze)
    compiled = StackedProgram(model, config, seeds, sources[0][0])
    members = compiled.init(every)
    about = json_checksum.digest(json.dumps([to_dict(config), seeds], sort_keys=True).encode())
    store = Checkpoints(folder / "checkpoints", CheckpointConfig(save_every_minutes=None, keep=1), about)
    here = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), members)
    members, step = store.restore(here) or (members, 0)
    curve = folder / "losses.json"
    losses = [each for each in json.loads(curve.read_text())] if curve.exists() else []
    losses = [each for each in losses if each["step"] <= step]
    while step < config.train.steps:
        count = min(compiled.capacity, config.train.steps - step, SAVE_EVERY - step % SAVE_EVERY)
        chunk = compiled.place([[source[i] for i in range(step, step + count)] for source in sources])
        members, found = compiled.train(members, every, chunk)
        step += count
        if step % 100 == 0 or step == config.train.steps:
            losses.append({"step": step, "loss": np.asarray(found.loss)[:, count - 1].round(4).tolist()})
            print(f"{folder.name}: step {step}, loss {np.mean(losses[-1]['loss']):.4f}", flush=True)
        if step % SAVE_EVERY == 0 or step == config.train.steps:
            store.save(step, members)
            store.close()
            files.write_atomically(curve, json.dumps(losses).encode())
    return Trained([compiled.member(members, seed).params for seed in range(seeds)], losses)


def read(name: str, seed: int, params: Params, config: Config, words: DecodingText, count: int) -> dict[str, Any]:
    """The record of one trained model: of each length the share of answers and of symbols that are right, and of
    symbols that attend elsewhere; of a Transformer in the layer that attends best on other pairs."""
    cfg, drawn = config.model, language(config.data)
    tried = pairs_of(config, words, LENGTHS[len(LENGTHS) // 2], 1, count)
    errors = [misaligned(weights, tried) for weights in attention_weights(params, tried, cfg)]
    layer = int(np.argmin(errors)) if errors else None
    record: dict[str, Any] = {"model": name, "seed": seed, "pairs": count, "layer": layer}
    record |= {"lengths": list(LENGTHS), "exact": [], "symbols": [], "misaligned": []}
    for length in LENGTHS:
        pairs = pairs_of(config, words, length, 0, count)
        out = generate(
            params, np.full((count, 1), words.start), cfg, sources=list(pairs.source_ids), stop=[words.end],
            sampling=Sampling(temperature=0), max_new_tokens=LENGTHS[-1] + 1, suppress=words.suppress,
        ).tokens  # fmt: skip
        found = right(out, pairs, drawn, words)
        record["exact"].append(round(float(found.all(axis=1).mean()), 4))
        record["symbols"].append(round(float(found[:, :-1].mean()), 4))
        if layer is not None:
            record["misaligned"].append(round(misaligned(attention_weights(params, pairs, cfg)[layer], pairs), 4))
    shown = jax.tree.map(lambda x: x[:1], pairs_of(config, words, SHOWN, 0, 1))
    if seed == 0 and layer is not None:
        record["shown"] = np.asarray(attention_weights(params, shown, cfg)[layer])[0, :-1].round(3).tolist()
        record["aligned"] = shown.aligned[0].tolist()
    return record


def run(name: str, options: Any) -> None:
    """Trains and reads one model; its records are added to those in the folder of results."""
    kept = options.out / "records.jsonl"
    done = why_attention_page.records(kept) if kept.exists() else []
    if {each["seed"] for each in done if each["model"] == name} >= set(range(options.seeds)):
        return
    config = config_of(name, {"train.steps": str(options.steps)})
    corpus = open_text(config.data, progress=False)
    config = fit_vocabulary(config, corpus.tokenizer)
    folder = options.workdir / name
    folder.mkdir(parents=True, exist_ok=True)
    trained = train(config, corpus, options.seeds, folder)
    words = decoding_text(corpus.tokenizer, config)
    about = {
        "params": count_parameters(config.model).total, "steps": config.train.steps,
        "tokens": config.train.steps * config.train.global_batch_size * config.model.context_length,
        "floor": round(target_nats(config.data), 4),
    }  # fmt: skip
    found = [read(name, seed, params, config, words, options.pairs) for seed, params in enumerate(trained.params)]
    for seed, each in enumerate(found):
        each |= about | {"losses": [[one["step"], one["loss"][seed]] for one in trained.losses]}
        print(f"{name}, seed {seed}: {np.mean(each['exact']):.3f} of the answers right", flush=True)
    lines = [json.dumps(each) for each in [*(one for one in done if one["model"] != name), *found]]
    files.write_atomically(kept, ("\n".join(lines) + "\n").encode())


def main() -> None:
    """Trains what is missing, reads it, and writes figures and page."""
    arguments = parser(__doc__, "why_attention")
    arguments.add_argument("--out", type=file_path, required=True, metavar="DIR", help="folder of records and page")
    arguments.add_argument("--workdir", type=file_path, default=Path("runs/why_attention"), help="of trained models")
    arguments.add_argument("--only", choices=tuple(MODELS), help="one model alone (default: all)")
    arguments.add_argument("--stage", choices=("train", "report"), help="one stage alone (default: both)")
    for option, usual in (("seeds", SEEDS), ("steps", STEPS), ("pairs", PAIRS)):
        arguments.add_argument(f"--{option}", type=integer(1), default=usual)
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage != "report":
        keep_compiled_programs()
        for name in MODELS if options.only is None else (options.only,):
            run(name, options)
    if options.stage != "train":
        for path in why_attention_page.write(options.out):
            print(path)


if __name__ == "__main__":
    program(main)
