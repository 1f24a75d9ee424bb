"""Attention, forward and backward."""

import functools
from collections.abc import Callable

from experiments.benchmarks.suite import Suite


def contestants(options) -> Suite:
    """Forward and backward of causal attention, 12 heads of 64: ours and JAX's own."""
    import jax
    import jax.numpy as jnp

    from jaxformer import attention, causal
    from jaxformer.functional.attention import missing

    shape = (1, options.tokens, 12, 64)
    arrays = [jax.random.normal(jax.random.key(i), shape, options.dtype) for i in range(3)]

    def timed(function: Callable) -> Callable[[], None]:
        grad = jax.jit(jax.grad(lambda q, k, v: function(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2)))

        def run() -> None:
            jax.block_until_ready(grad(*arrays))

        return run

    found = {
        name: timed(functools.partial(lambda name, q, k, v: attention(q, k, v, causal(), implementation=name), name))
        for name in ("xla", "chunked", "cudnn")
        if missing(name) is None and (name != "cudnn" or options.dtype == "bfloat16")
    }
    found["jax.nn.dot_product_attention"] = timed(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
    return Suite(found, "tokens", options.tokens)
