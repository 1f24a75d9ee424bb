"""Attention, forward and backward: ours, JAX's own, flax's and torch's."""

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from jaxformer.benchmarks.suite import Suite, in_process, take_turns, torch_device

HEADS, WIDTH = 12, 64
GPU_TOKENS, GPU_CALLS = 32768, 10  # of one call on a GPU, and calls of one measurement: less is over too soon
MOST = 16 * 2**30  # bytes of scores that an implementation with all of them is asked for


def contestants(options) -> Suite:
    """Forward and backward of causal attention, 12 heads of 64: one row; on a GPU ten times 32768 tokens, and our
    kernels for packed documents too, with an end of a document in every 700 tokens. What keeps all scores is left out
    where they need more than 16 GiB. Torch's, if installed, in its own process."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxformer.functional.attention import attention
    from jaxformer.functional.attention_choice import unavailable
    from jaxformer.masks import causal, segments

    tokens = options.tokens
    rows, calls = work_of(tokens, torch_device())
    arrays = [jax.random.normal(jax.random.key(i), (rows, tokens, HEADS, WIDTH), options.dtype) for i in range(3)]
    documents = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32) // 700, (rows, tokens))

    def timed(function: Callable) -> Callable[[], None]:
        grad = jax.jit(jax.grad(lambda q, k, v: function(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2)))

        def run() -> None:
            for _ in range(calls):
                out = grad(*arrays)
            jax.block_until_ready(out)

        return run

    def ours(name: str, mask: Any) -> Callable[[], None]:
        return timed(lambda q, k, v: attention(q, k, v, mask, implementation=name))

    small = 4 * rows * HEADS * tokens**2 <= MOST
    names = [n for n in ("xla", "chunked", "cudnn", "flash_gpu") if unavailable(n) is None]
    names = [n for n in names if (n != "cudnn" or options.dtype == "bfloat16") and (n != "xla" or small)]
    found = {name: ours(name, causal()) for name in names}
    packed = causal() & segments(documents)
    found |= {f"{name}, documents": ours(name, packed) for name in names if torch_device() == "cuda" and name != "xla"}
    if small:
        dot_product = functools.partial(jax.nn.dot_product_attention, is_causal=True)
        found["jax.nn.dot_product_attention"] = timed(dot_product)
        mask = nn.make_causal_mask(jnp.ones((rows, tokens)))
        found["flax.linen.dot_product_attention"] = timed(lambda q, k, v: nn.dot_product_attention(q, k, v, mask=mask))
    if importlib.util.find_spec("torch") is not None:
        about = [str(tokens), options.dtype, torch_device()]
        found["torch's scaled_dot_product_attention"] = in_process("jaxformer.benchmarks.attention", *about)
    return Suite(found, "tokens", rows * tokens * calls)


def work_of(tokens: int, device: str) -> tuple[int, int]:
    """Rows of so many tokens, and how often one run computes them, on "cpu" or "cuda"."""
    return (max(1, GPU_TOKENS // tokens), GPU_CALLS) if device == "cuda" else (1, 1)


def torch_attention(tokens: int, dtype: str, device: str) -> Callable[[], None]:
    """The same of torch, on "cpu" or "cuda"; heads are first there."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    rows, calls = work_of(tokens, device)
    kind, shape = getattr(torch, dtype), (rows, HEADS, tokens, WIDTH)
    q, k, v = (torch.randn(shape, dtype=kind, device=device, requires_grad=True) for _ in range(3))

    def run() -> None:
        for _ in range(calls):
            total = scaled_dot_product_attention(q, k, v, is_causal=True).float().sum()
            torch.autograd.grad(total, (q, k, v))
        if device == "cuda":
            torch.cuda.synchronize()

    return run


if __name__ == "__main__":
    tokens, dtype, device = sys.argv[1:]
    take_turns(torch_attention(int(tokens), dtype, device))
