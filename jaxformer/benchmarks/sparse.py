"""A layer of Longformer's and of BigBird's attention beside transformers', and beside ours that is dense."""

import sys
from collections.abc import Callable
from typing import Any

from jaxformer.benchmarks.suite import Suite, in_process, need_peers, take_turns
from jaxformer.errors import ConfigError
from jaxformer.runtime.host_memory import keep_freed_memory

HEADS, WIDTH, WINDOW, BLOCK = 4, 64, 512, 64  # heads, their width; tokens of a window, of a block
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"kind": "softmax"},
    "longformer": {"kind": "longformer", "attention_window": WINDOW, "global_tokens": 1},
    "bigbird": {"kind": "bigbird", "block": BLOCK, "random_blocks": 3},
}


def contestants(options: Any) -> Suite:
    """One row of `--tokens` tokens, in both directions, with its projections; gradients of the row and all weights.

    Raises:
      ConfigError: torch or transformers is not installed, or a row of another length than theirs take.
    """
    if options.tokens % WINDOW:
        raise ConfigError(f"--tokens: {options.tokens}; --suite=sparse accepts multiples of {WINDOW}")
    need_peers("sparse")
    keep_freed_memory()
    found: dict[str, Callable[[], None]] = {}
    for name in KINDS:
        found[name] = our_layer(name, options.tokens, options.dtype)
        if name != "dense":
            about = [name, str(options.tokens), options.dtype]
            found[f"transformers' {name}"] = in_process("jaxformer.benchmarks.sparse", *about)
    return Suite(found, "tokens", options.tokens)


def our_layer(name: str, tokens: int, dtype: str) -> Callable[[], None]:
    """The layer of a BERT."""
    import jax
    import jax.numpy as jnp

    from jaxformer.config import ModelConfig
    from jaxformer.functional.layer import NO_CONTEXT
    from jaxformer.functional.sublayers import MIXERS
    from jaxformer.specs import init_params

    cfg = ModelConfig(
        family="bert", width=HEADS * WIDTH, context_length=tokens, positions="none",  # type: ignore[arg-type]
        attention={"num_heads": HEADS, **KINDS[name]},  # type: ignore[arg-type]
    )  # fmt: skip
    mixer = MIXERS[cfg.attention.kind]
    params = init_params(mixer.specs(cfg), jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (1, tokens, cfg.width), dtype)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(mixer.apply(params, x, cfg, NO_CONTEXT)[0].astype(jnp.float32))

    grad = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()

    def run() -> None:
        jax.block_until_ready(grad(params, x))

    return run


def torch_layer(name: str, tokens: int, dtype: str) -> Callable[[], None]:
    """The same of transformers; BigBird's in training, in which it counts no block twice."""
    import torch
    from torch import nn
    from transformers import BigBirdConfig, LongformerConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    width, kind = HEADS * WIDTH, getattr(torch, dtype)
    sizes: dict[str, Any] = {"hidden_size": width, "num_attention_heads": HEADS, "num_hidden_layers": 1}
    rates: dict[str, Any] = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "sep_token_id": 2}
    if name == "longformer":
        layer: Any = LongformerSelfAttention(LongformerConfig(**sizes, **rates, attention_window=[WINDOW]), 0)
        scores = torch.zeros(1, tokens, dtype=kind)
        scores[:, 0] = 10000.0  # its first token is global
        flags = {"is_index_masked": scores < 0, "is_index_global_attn": scores > 0, "is_global_attn": True}
        given = {"attention_mask": scores, **flags}
    else:
        of = BigBirdConfig(**sizes, **rates, block_size=BLOCK, num_random_blocks=3, max_position_embeddings=tokens)
        layer = BigBirdBlockSparseAttention(of, seed=0).train()
        blocked, band, start, end = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, tokens), BLOCK)
        given = {"band_mask": band, "from_mask": start, "to_mask": end}
        given |= {"from_blocked_mask": blocked, "to_blocked_mask": blocked}
    layer, out = layer.to(kind), nn.Linear(width, width).to(kind)
    x = torch.randn(1, tokens, width, dtype=kind, requires_grad=True)
    weights = [x, *(each for each in layer.parameters()), *out.parameters()]

    def run() -> None:
        torch.autograd.grad(out(layer(x, **given)[0]).float().sum(), weights, allow_unused=True)

    return run


if __name__ == "__main__":
    name, tokens, dtype = sys.argv[1:]
    take_turns(torch_layer(name, int(tokens), dtype))
