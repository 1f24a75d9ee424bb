"""The train step: forward, backward and update, ours and transformers' on torch."""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxformer.benchmarks.suite import RULER, Suite, in_process, need_peers, ruler, take_turns, torch_device
from jaxformer.config import Bert, Config, Dense, LossConfig, ModelConfig, OptimizerConfig, Softmax, from_mapping
from jaxformer.runtime.hardware import chip_of
from jaxformer.runtime.host_memory import keep_freed_memory, one_at_a_time, settle_heap
from jaxformer.types import Batch


class ModelShape(NamedTuple):
    """A published model and the rows of a step."""

    layers: int
    width: int
    heads: int
    context: int
    rows: int
    vocab: int
    steps: int = 1  # updates of one measurement
    family: str = "gpt"


SHAPES = {
    "tiny": ModelShape(4, 128, 4, 64, 12, 65, steps=20),
    "baby": ModelShape(6, 384, 6, 256, 16, 65),
    "gpt2": ModelShape(12, 768, 12, 1024, 1, 50304),
    "gpt2_350m": ModelShape(24, 1024, 16, 1024, 1, 50304),
    "gpt2_1_5b": ModelShape(48, 1600, 25, 1024, 1, 50304),
    "bert_128": ModelShape(12, 768, 12, 128, 8, 30522, family="bert"),
    "bert_512": ModelShape(12, 768, 12, 512, 2, 30522, family="bert"),
}


def contestants(options) -> Suite:
    """GPT-2's or BERT's train step with AdamW and clipping: torch eagerly (not on a GPU), torch compiled where a C++
    compiler is found, and ours, each in a process of its own with what its users have there; beside them a large
    product, by whose rate theirs are judged. On a GPU if JAX is on one.

    Raises:
      ConfigError: torch or transformers is not installed, or torch sees no GPU where JAX does.
    """
    import jax

    need_peers("train")
    shape = SHAPES[options.shape]
    shape = shape._replace(rows=options.rows or shape.rows)
    device = torch_device()
    on_gpu = device == "cuda"
    if on_gpu:
        shape = shape._replace(steps=max(10, shape.steps))  # a step is too short to be timed alone
    product, flop = ruler(options.dtype, *((8192, 10) if on_gpu else (2048, 1)))
    chip = chip_of(jax.devices()[0].device_kind)
    peak = (chip.flops or 0) if chip is not None and options.dtype == "bfloat16" else 0
    compiles = shutil.which("g++") is not None
    whose = {} if on_gpu and compiles else {"transformers on torch, eager": "eager"}  # a GPU's memory is for two
    if compiles:
        whose["transformers on torch, compiled"] = "compiled"
    whose["jaxformer"] = "ours"
    whose = {name: who for name, who in whose.items() if (options.only or "") in name}
    about = [json.dumps(shape), options.dtype, device]
    found = {name: in_process("jaxformer.benchmarks.train", who, *about) for name, who in whose.items()}
    tokens = shape.steps * shape.rows * shape.context
    each = tokens * flop_per_token(shape)
    return Suite({**found, RULER: product}, "tokens", tokens, {**dict.fromkeys(found, each), RULER: flop}, peak)


def steps(who: str, shape: ModelShape, dtype: str, device: str) -> Callable[[], None]:
    """`shape.steps` updates by "eager", "compiled" or "ours", with what its programs set for themselves."""
    if who == "ours":
        keep_freed_memory()
        return our_steps(shape, dtype)
    return torch_steps(shape, dtype, compiled=who == "compiled", device=device)


def torch_steps(shape: ModelShape, dtype: str, compiled: bool, device: str) -> Callable[[], None]:
    """`shape.steps` updates of transformers' model on torch, on "cpu" or "cuda"; bfloat16: under autocast."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    torch.set_float32_matmul_precision("highest" if device == "cpu" else "high")  # "high": TF32, as XLA's default
    sizes: dict[str, Any]
    rates: dict[str, Any]
    if shape.family == "gpt":
        sizes = {"n_layer": shape.layers, "n_embd": shape.width, "n_head": shape.heads, "n_positions": shape.context}
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=shape.vocab, **sizes, **rates)).train()
    else:
        sizes = {"num_hidden_layers": shape.layers, "hidden_size": shape.width, "num_attention_heads": shape.heads,
                 "intermediate_size": 4 * shape.width, "max_position_embeddings": shape.context}  # fmt: skip
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForMaskedLM(BertConfig(vocab_size=shape.vocab, **sizes, **rates)).train()
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda" or None)
    batch = example(shape)
    ids = torch.from_numpy(batch.tokens.astype(np.int64)).to(device)
    uncounted = torch.from_numpy(batch.weights == 0).to(device)
    labels = ids if shape.family == "gpt" else ids.masked_fill(uncounted, -100)
    run_model = torch.compile(model) if compiled else model
    extra = {"use_cache": False} if shape.family == "gpt" else {}

    def run() -> None:
        half = torch.autocast(device, torch.bfloat16) if dtype == "bfloat16" else contextlib.nullcontext()
        for _ in range(shape.steps):
            with half:
                loss = run_model(input_ids=ids, labels=labels, **extra).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss.item()

    return run


def model_config(shape: ModelShape, dtype: str) -> ModelConfig:
    """The same model as a config of ours: GPT-2 as published, or BERT as published."""
    model: dict[str, Any] = {
        "family": shape.family, "num_layers": shape.layers, "width": shape.width, "attention": Softmax(shape.heads),
        "context_length": shape.context, "vocab_size": shape.vocab, "dtype": dtype,
    }  # fmt: skip
    if shape.family == "gpt":
        return ModelConfig(**model, feed_forward=Dense(activation="gelu_tanh"))
    return ModelConfig(**model, block="post_norm", bert=Bert(token_types=2))


def example(shape: ModelShape) -> Batch:
    """One batch of random tokens; for BERT 15 % of them count."""
    rng = np.random.default_rng(0)
    size = (shape.rows, shape.context)
    ids = rng.integers(shape.vocab, size=size, dtype=np.int32)
    weights = np.ones(size) if shape.family == "gpt" else rng.random(size) < 0.15
    places = np.tile(np.arange(shape.context, dtype=np.int32), (shape.rows, 1))
    arrays: Any = (ids, ids, weights.astype(np.float32), places, np.ones(size, np.int32))
    return Batch(*arrays)


def flop_per_token(shape: ModelShape) -> float:
    """Of forward and backward, by `jaxformer.models.flops`; for BERT the head only where a token counts."""
    from jaxformer.models.flops import flops_per_token

    share = 1.0 if shape.family == "gpt" else 0.15
    return flops_per_token(model_config(shape, "float32"), shape.context, share).training


def our_steps(
    shape: ModelShape, dtype: str, model: ModelConfig | None = None, batch: Batch | None = None
) -> Callable[[], None]:
    """`shape.steps` updates in one dispatch. model: another one of that shape; batch: what it is trained on."""
    import jax

    from jaxformer.modules import make_model
    from jaxformer.parallel.mesh import make_mesh
    from jaxformer.training.optim import make_optimizer
    from jaxformer.training.step import compile_steps

    sizes = {"train": {"global_batch_size": shape.rows}, "execution": {"steps_per_dispatch": shape.steps}}
    config: Config = from_mapping(sizes)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    whole = make_model(model or model_config(shape, dtype), LossConfig())
    made = compile_steps(whole, make_optimizer(OptimizerConfig(), config.train.steps, whole.specs), mesh, config)
    with jax.set_mesh(mesh):
        chunk, count = made.place_chunk([batch or example(shape)] * shape.steps)
        held = [jax.block_until_ready(made.init())]
        program: Any = made.train
        train = one_at_a_time(program.lower(held[0], chunk, count).compile())
    settle_heap()  # as the training loop does

    def run() -> None:
        with jax.set_mesh(mesh):
            held[0], metrics = train(held[0], chunk, count)
            jax.block_until_ready((held[0], metrics))

    return run


if __name__ == "__main__":
    who, shape, dtype, device = sys.argv[1:]
    take_turns(steps(who, ModelShape(*json.loads(shape)), dtype, device))
