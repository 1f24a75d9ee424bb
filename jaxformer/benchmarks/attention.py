"""Attention, forward and backward: ours, JAX's own, flax's and torch's."""

import functools
import importlib.util
import sys
from collections.abc import Callable

from jaxformer.benchmarks.suite import Suite, in_process, take_turns, torch_device

HEADS, WIDTH = 12, 64


def contestants(options) -> Suite:
    """Forward and backward of causal attention, one row, 12 heads of 64. Torch's, if installed, in its own process."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxformer.functional.attention import attention
    from jaxformer.functional.attention_choice import unavailable
    from jaxformer.masks import causal

    shape = (1, options.tokens, HEADS, WIDTH)
    arrays = [jax.random.normal(jax.random.key(i), shape, options.dtype) for i in range(3)]

    def timed(function: Callable) -> Callable[[], None]:
        grad = jax.jit(jax.grad(lambda q, k, v: function(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2)))

        def run() -> None:
            jax.block_until_ready(grad(*arrays))

        return run

    found = {
        name: timed(functools.partial(lambda name, q, k, v: attention(q, k, v, causal(), implementation=name), name))
        for name in ("xla", "chunked", "cudnn", "flash_gpu")
        if unavailable(name) is None and (name != "cudnn" or options.dtype == "bfloat16")
    }
    found["jax.nn.dot_product_attention"] = timed(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
    mask = nn.make_causal_mask(jnp.ones((1, options.tokens)))
    found["flax.linen.dot_product_attention"] = timed(lambda q, k, v: nn.dot_product_attention(q, k, v, mask=mask))
    if importlib.util.find_spec("torch") is not None:
        about = [str(options.tokens), options.dtype, torch_device()]
        found["torch's scaled_dot_product_attention"] = in_process("jaxformer.benchmarks.attention", *about)
    return Suite(found, "tokens", options.tokens)


def torch_attention(tokens: int, dtype: str, device: str) -> Callable[[], None]:
    """The same of torch, on "cpu" or "cuda"; heads are first there."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    kind, shape = getattr(torch, dtype), (1, HEADS, tokens, WIDTH)
    q, k, v = (torch.randn(shape, dtype=kind, device=device, requires_grad=True) for _ in range(3))

    def run() -> None:
        total = scaled_dot_product_attention(q, k, v, is_causal=True).float().sum()
        torch.autograd.grad(total, (q, k, v))
        if device == "cuda":
            torch.cuda.synchronize()

    return run


if __name__ == "__main__":
    tokens, dtype, device = sys.argv[1:]
    take_turns(torch_attention(int(tokens), dtype, device))
