"""Measure jaxformer beside what one would use instead: alternating runs in one session, medians, ratios and spread.

    python -m experiments.benchmark --suite=train --shape=tiny     (needs the extra `peers`: torch, transformers)
    python -m experiments.benchmark --suite=attention --tokens=1024
    python -m experiments.benchmark --suite=data
    python -m experiments.benchmark --suite=import

--out FILE.jsonl keeps every single measurement. Timings on a shared machine wander: believe ratios, not times.
"""

import contextlib
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.command_line import parser
from jaxformer.config import Config, ConfigError, DataConfig, LossConfig, ModelConfig, OptimizerConfig, from_mapping
from jaxformer.process import program

# name -> layers, width, heads, context, rows, vocabulary
SHAPES = {
    "tiny": (4, 128, 4, 64, 12, 65),
    "baby": (6, 384, 6, 256, 16, 65),
    "gpt2": (12, 768, 12, 1024, 1, 50304),
}


def main() -> None:
    """Prints one line per contestant: median, spread, and the ratio to the first."""
    arguments = parser(__doc__, "benchmark")
    arguments.add_argument("--suite", required=True, choices=sorted(SUITES))
    arguments.add_argument("--pairs", type=int, default=7, metavar="N", help="rounds of alternating runs (default 7)")
    arguments.add_argument("--shape", default="tiny", choices=SHAPES, help="train: the GPT's shape")
    arguments.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="train, attention")
    arguments.add_argument("--tokens", type=int, default=1024, help="attention: length of the row")
    arguments.add_argument("--out", type=Path, help="JSONL file to append every measurement to")
    options = arguments.parse_args()
    if options.pairs < 1:
        raise ConfigError(f"--pairs: {options.pairs}; accepted: at least 1")
    contestants, unit, work = SUITES[options.suite](options)
    times = alternate(contestants, options.pairs)
    first = None
    for name, found in times.items():
        median = float(np.median(found))
        first = median if first is None else first
        rate = f", {work / median:,.4g} {unit}/s" if work else ""
        print(f"{name}: median {1e3 * median:.4g} ms, {1e3 * min(found):.4g} to {1e3 * max(found):.4g}{rate}, "
              f"{median / first:.3f} of the first")  # fmt: skip
        if options.out is not None:
            record = {"suite": options.suite, "name": name, "seconds": found, "work": work, "unit": unit}
            record |= {key: value for key, value in vars(options).items() if key not in ("out", "suite")}
            with open(options.out, "a") as file:
                file.write(json.dumps(record) + "\n")


def alternate(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant in every round, after one round that only warms up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - began)
    return times


def imports(options):
    """A fresh interpreter that imports jax and numpy, and one that imports jaxformer."""

    def fresh(line: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", line], check=True)

    lines = {"import jax, numpy": "import jax, numpy, jax.numpy", "import jaxformer": "import jaxformer"}
    return {name: fresh(line) for name, line in lines.items()}, "", 0


def data(options):
    """The input pipeline alone, beside the train step that consumes it: gpt_tiny's rows of 12 x 256 tokens."""
    from jaxformer.data.batches import Batches
    from jaxformer.data.corpus import open_corpus

    config = DataConfig(tokenizer="bytes", max_train_bytes=4_000_000)
    masked = DataConfig(tokenizer="bytes", max_train_bytes=4_000_000, objective="masked")
    contestants: dict[str, Callable[[], object]] = {}
    for name, each in (("next-token batches", config), ("masked batches", masked)):
        corpus = open_corpus(each)
        batches = Batches(corpus.train, corpus.tokenizer, each, rows=12, context_length=256, seed=0)
        contestants[name] = functools.partial(lambda found: [found[i] for i in range(20)], batches)
    layers, width, heads = 4, 192, 3
    model = ModelConfig(
        num_layers=layers, width=width, num_heads=heads, context_length=256, vocab_size=4096, dtype="bfloat16",
        activation="swiglu", positions="rotary", norm="rms_norm",
    )  # fmt: skip
    contestants["train steps of gpt_tiny's shape"] = our_steps(model, rows=12, steps=20)
    return contestants, "tokens", 20 * 12 * 256


def attention(options):
    """Forward and backward of causal attention, 12 heads of 64: ours and JAX's own."""
    import jax
    import jax.numpy as jnp

    from jaxformer import attention, causal

    shape = (1, options.tokens, 12, 64)
    arrays = [jax.random.normal(jax.random.key(i), shape, options.dtype) for i in range(3)]

    def timed(function: Callable) -> Callable[[], object]:
        grad = jax.jit(jax.grad(lambda q, k, v: function(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2)))
        return lambda: jax.block_until_ready(grad(*arrays))

    contestants = {
        name: timed(functools.partial(lambda name, q, k, v: attention(q, k, v, causal(), implementation=name), name))
        for name in ("xla", "chunked")
    }
    contestants["jax.nn.dot_product_attention"] = timed(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    )
    return contestants, "tokens", options.tokens


def train(options):
    """The train step (forward, backward, AdamW) of a GPT-2 of the shape: ours, and transformers' on torch."""
    try:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise ConfigError("--suite=train needs torch and transformers: pip install 'jaxformer[peers]'") from None
    layers, width, heads, context, rows, vocab = SHAPES[options.shape]
    steps = {"tiny": 20, "baby": 1, "gpt2": 1}[options.shape]
    ours = ModelConfig(
        num_layers=layers, width=width, num_heads=heads, context_length=context, vocab_size=vocab,
        activation="gelu_tanh", dtype=options.dtype,
    )  # fmt: skip
    shape: dict[str, Any] = {
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "n_positions": context,
        "vocab_size": vocab,
    }
    model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(vocab, (rows, context))
    half = torch.autocast("cpu", torch.bfloat16) if options.dtype == "bfloat16" else contextlib.nullcontext()

    def peer() -> None:
        for _ in range(steps):
            with half:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    contestants = {"transformers on torch, eager": peer, "jaxformer": our_steps(ours, rows, steps)}
    return contestants, "tokens", steps * rows * context


def our_steps(model: ModelConfig, rows: int, steps: int) -> Callable[[], None]:
    """`steps` updates in one dispatch, with the programs' own settings."""
    import jax

    from jaxformer.modules import make_model
    from jaxformer.process import keep_freed_memory
    from jaxformer.sharding import make_mesh
    from jaxformer.training.optim import make_optimizer
    from jaxformer.training.step import compile_steps
    from jaxformer.types import Batch

    keep_freed_memory()
    config: Config = from_mapping({"train": {"batch_rows": rows, "steps_per_dispatch": steps}})
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    whole = make_model(model, LossConfig())
    made = compile_steps(whole, make_optimizer(OptimizerConfig(), config.train.steps, whole.specs), mesh, config)
    shape = (rows, model.context_length)
    ids = np.random.default_rng(0).integers(model.vocab_size or 1, size=shape, dtype=np.int32)
    places = np.tile(np.arange(shape[1], dtype=np.int32), (rows, 1))
    arrays: Any = (ids, ids, np.ones(shape, np.float32), places, np.ones(shape, np.int32))
    batch = Batch(*arrays)
    with jax.set_mesh(mesh):
        chunk, count = made.place_chunk([batch] * steps)
        held = [made.init()]

    def run() -> None:
        with jax.set_mesh(mesh):
            held[0], metrics = made.train(held[0], chunk, count)
            jax.block_until_ready((held[0], metrics))

    return run


SUITES = {"import": imports, "data": data, "attention": attention, "train": train}


if __name__ == "__main__":
    program(main)
