"""Encoder-decoders: the train step, its memory, and beam search, ours and transformers' on torch, the same shapes.

--task=train is the train step, memory that of a process that does three of them, beam four beams of 256 new tokens.
"""

import contextlib
import dataclasses
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxformer.benchmarks.suite import RULER, Suite, in_process, need_peers, ruler, take_turns, torch_device
from jaxformer.benchmarks.train import ModelShape, our_steps
from jaxformer.config import Config, ModelConfig, from_mapping, load
from jaxformer.runtime.host_memory import keep_freed_memory
from jaxformer.types import Batch

SHAPES = {"tiny": ("t5_tiny", 4), "t5_small": ("t5_small", 4), "bart_base": ("bart_base", 1)}  # config, rows of a step
TASKS = ("train", "memory", "beam")
STEPS = 3  # of --task=memory
BEAMS, NEW_TOKENS = 4, 256
WITHOUT = ("model.dropout", "model.attention.dropout")


def contestants(options) -> Suite:
    """Of one task. Beside a search of all new tokens stands one of a single token, which is what reading the source
    costs, and one of a source a quarter as long: what is left of a token does not depend on reading it again.

    Raises:
      ConfigError: torch or transformers is not installed.
    """
    need_peers("seq2seq")
    rows = options.rows or SHAPES[options.shape][1]
    return {"train": _train, "memory": _memory, "beam": _beam}[options.task](options.shape, options.dtype, rows)


def _whose() -> dict[str, str]:
    """Name of each contestant -> who it is, as `steps` has it."""
    found = {"transformers on torch, eager": "eager"}
    if shutil.which("g++"):
        found["transformers on torch, compiled"] = "compiled"
    return {**found, "jaxformer": "ours"}


def _train(shape: str, dtype: str, rows: int) -> Suite:
    from jaxformer.models.flops import flops_per_token

    cfg = model_of(shape, dtype)
    product, flop = ruler(dtype)
    about = [shape, dtype, str(rows), torch_device(), "turns"]
    found = {name: in_process("jaxformer.benchmarks.seq2seq", who, *about) for name, who in _whose().items()}
    tokens = rows * cfg.context_length
    each = tokens * flops_per_token(cfg, cfg.context_length, 1.0).training
    return Suite({**found, RULER: product}, "target tokens", tokens, {**dict.fromkeys(found, each), RULER: flop})


def _memory(shape: str, dtype: str, rows: int) -> Suite:
    def process(who: str) -> Callable[[], float]:
        command = [sys.executable, "-m", "jaxformer.benchmarks.seq2seq", who, shape, dtype, str(rows), "cpu", "memory"]
        return lambda: json.loads(subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1])

    return Suite({name: process(who) for name, who in _whose().items()})


def _beam(shape: str, dtype: str, rows: int) -> Suite:
    import jax
    import torch

    from jaxformer.decoding import beam_search, prepare_decode_params
    from jaxformer.functional.position_encodings import encoding_of
    from jaxformer.models import encoder_decoder
    from jaxformer.specs import init_params

    cfg = model_of(shape, dtype)
    assert cfg.encoder is not None
    new = NEW_TOKENS if encoding_of(cfg).extends else min(NEW_TOKENS, cfg.context_length)
    params = prepare_decode_params(init_params(encoder_decoder.specs(cfg), jax.random.key(0)), cfg)
    device = torch_device()
    model = peer(cfg).eval().to(device, getattr(torch, dtype))
    sources = example(cfg, rows).inputs["source_tokens"]  # type: ignore[index]
    ids = torch.from_numpy(sources.astype(np.int64)).to(device)
    asked: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "num_beams": BEAMS}

    def theirs() -> None:
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        assert found.shape == (rows, new + 1)

    def ours(count: int, length: int) -> Callable[[], None]:
        start = np.zeros((rows, 1), np.int32)

        def run() -> None:
            options: dict[str, Any] = {"beams": BEAMS, "max_new_tokens": count, "sources": sources[:, :length]}
            found = beam_search(params, start, cfg, length_penalty=1.0, **options)
            assert found.tokens.shape == (rows, BEAMS, count)

        return run

    length = cfg.encoder.source_length
    return Suite({
        "transformers on torch": theirs,
        "jaxformer": ours(new, length),
        "jaxformer, 1 token": ours(1, length),
        "jaxformer, a source a quarter as long": ours(new, length // 4),
        "jaxformer, 1 token, a source a quarter as long": ours(1, length // 4),
    })  # fmt: skip


def model_of(shape: str, dtype: str) -> ModelConfig:
    """The model of a config that comes with jaxformer, without dropout."""
    config: Config = from_mapping(load(SHAPES[shape][0]), {"model.dtype": dtype, **dict.fromkeys(WITHOUT, "0")})
    size = config.model.vocab_size or config.data.tokenizer_vocab
    return dataclasses.replace(config.model, vocab_size=size)


def example(cfg: ModelConfig, rows: int) -> Batch:
    """One batch of random tokens, a pair in each row."""
    assert cfg.encoder is not None and cfg.vocab_size is not None
    rng = np.random.default_rng(0)
    target, source = (rows, cfg.context_length), (rows, cfg.encoder.source_length)
    ids, read = (rng.integers(2, cfg.vocab_size, size=size, dtype=np.int32) for size in (target, source))
    places, read_places = (np.tile(np.arange(size[1], dtype=np.int32), (rows, 1)) for size in (target, source))
    inputs: Any = {"source_tokens": read, "source_positions": read_places, "source_segments": np.ones_like(read)}
    shifted = np.concatenate([np.zeros((rows, 1), np.int32), ids[:, :-1]], axis=1)
    arrays: Any = (shifted, ids, np.ones(target, np.float32), places, np.ones_like(ids), inputs)
    return Batch(*arrays)


def peer(cfg: ModelConfig) -> Any:
    """transformers' T5 or BART of the same sizes, without dropout."""
    from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

    heads, hidden = cfg.attention.num_heads, cfg.feed_forward.hidden_width(cfg.width)
    assert cfg.encoder is not None and cfg.vocab_size is not None
    layers = cfg.encoder.num_layers or cfg.num_layers
    common: dict[str, Any] = {"vocab_size": cfg.vocab_size, "d_model": cfg.width, "pad_token_id": 0,
                              "eos_token_id": 1, "decoder_start_token_id": 0}  # fmt: skip
    if cfg.positions.kind == "t5":
        common["feed_forward_proj"] = {"relu": "relu", "geglu_tanh": "gated-gelu"}[cfg.feed_forward.activation]
        common["tie_word_embeddings"] = cfg.tie_embeddings
        return T5ForConditionalGeneration(T5Config(
            **common, d_kv=cfg.head_size, d_ff=hidden, num_layers=layers, num_decoder_layers=cfg.num_layers,
            num_heads=heads, dropout_rate=0.0,
        ))  # fmt: skip
    return BartForConditionalGeneration(BartConfig(
        **common, encoder_layers=layers, decoder_layers=cfg.num_layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=hidden, decoder_ffn_dim=hidden, bos_token_id=0,
        max_position_embeddings=max(cfg.context_length, cfg.encoder.source_length), dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, forced_eos_token_id=None,
    ))  # fmt: skip


def steps(who: str, shape: str, dtype: str, rows: int, device: str) -> Callable[[], None]:
    """One update by "eager", "compiled" or "ours", with what its programs set for themselves."""
    cfg = model_of(shape, dtype)
    if who == "ours":
        keep_freed_memory()
        sizes = ModelShape(cfg.num_layers, cfg.width, cfg.attention.num_heads, cfg.context_length, rows, 0)
        return our_steps(sizes, dtype, cfg, example(cfg, rows))
    return torch_step(cfg, rows, compiled=who == "compiled", device=device)


def torch_step(cfg: ModelConfig, rows: int, compiled: bool, device: str) -> Callable[[], None]:
    """One update of transformers' model on torch, on "cpu" or "cuda"; bfloat16: under autocast."""
    import torch

    model = peer(cfg).train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = example(cfg, rows)
    labels, ids = (
        torch.from_numpy(each.astype(np.int64)).to(device)
        for each in (batch.targets, batch.inputs["source_tokens"])  # type: ignore[index]
    )
    run_model = torch.compile(model) if compiled else model

    def run() -> None:
        half = torch.autocast(device, torch.bfloat16) if cfg.dtype == "bfloat16" else contextlib.nullcontext()
        with half:
            loss = run_model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return run


if __name__ == "__main__":
    who, shape, dtype, rows, device, how = sys.argv[1:]
    run = steps(who, shape, dtype, int(rows), device)
    if how == "turns":
        take_turns(run)
    else:
        for _ in range(STEPS):
            run()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10))
