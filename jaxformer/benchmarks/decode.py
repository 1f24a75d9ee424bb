"""Generating text: ours and transformers' on torch, the same shapes and random weights, greedily."""

from typing import Any

import numpy as np

from jaxformer.benchmarks.suite import Suite, torch_device
from jaxformer.benchmarks.train import SHAPES, model_config
from jaxformer.errors import ConfigError


def contestants(options) -> Suite:
    """128 new tokens (half the context of a short one) after a prompt of a quarter of the context.

    Every row goes to its limit: no stop token, and the peer is forbidden to end. Both on a GPU if JAX is on one.
    """
    try:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise ConfigError("--suite=decode needs torch and transformers: pip install 'jaxformer[peers]'") from None
    import jax

    from jaxformer.decoding import Sampling, generate, prepare_decode_params
    from jaxformer.models import gpt
    from jaxformer.specs import init_params

    layers, width, heads, context, _, vocab, _, family = SHAPES[options.shape]
    if family != "gpt":
        raise ConfigError(f"--shape: {options.shape}; --suite=decode accepts the shapes of GPTs")
    new, prompt, rows = min(128, context // 2), context // 4, options.rows or 1
    cfg = model_config(SHAPES[options.shape], options.dtype)
    params = prepare_decode_params(init_params(gpt.specs(cfg), jax.random.key(0)), cfg)
    shape: dict[str, Any] = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": context}
    device = torch_device()
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    model = (
        GPT2LMHeadModel(GPT2Config(**shape, vocab_size=vocab, bos_token_id=None, eos_token_id=None))
        .eval()
        .to(device, dtype)
    )

    ids = np.random.default_rng(0).integers(vocab, size=(rows, prompt), dtype=np.int32)
    tokens = torch.from_numpy(ids.astype(np.int64)).to(device)
    asked: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    def ours() -> None:
        generate(params, ids, cfg, sampling=Sampling(temperature=0.0), max_new_tokens=new)

    def peer() -> None:
        with torch.inference_mode():
            found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **asked).cpu()
        assert found.shape[1] == prompt + new

    return Suite({"transformers on torch": peer, "jaxformer": ours}, "tokens", rows * new)
