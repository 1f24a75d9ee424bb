"""The train step: forward, backward and update."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxformer.config import Config, ConfigError, LossConfig, ModelConfig, OptimizerConfig, from_mapping

# name -> layers, width, heads, context, rows, vocabulary
SHAPES = {
    "tiny": (4, 128, 4, 64, 12, 65),
    "baby": (6, 384, 6, 256, 16, 65),
    "gpt2": (12, 768, 12, 1024, 1, 50304),
}


def contestants(options):
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

    found = {"transformers on torch, eager": peer, "jaxformer": our_steps(ours, rows, steps)}
    return found, "tokens", steps * rows * context


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
