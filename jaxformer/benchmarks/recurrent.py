"""LSTM and GRU, forward and backward: ours and torch's."""

import importlib.util
import sys
from collections.abc import Callable

from jaxformer.benchmarks.suite import Suite, in_process, take_turns, torch_device
from jaxformer.runtime.host_memory import keep_freed_memory

ROWS, WIDTH = 16, 128


def contestants(options) -> Suite:
    """One layer of 128 units over 16 rows; gradients of all inputs. Torch's, if installed, in its own process."""
    import jax
    import jax.numpy as jnp

    from jaxformer.functional.recurrent import gru, lstm

    keep_freed_memory()
    found: dict[str, Callable[[], None]] = {}
    for name, gates, layer in (("lstm", 4, lstm), ("gru", 3, gru)):
        shapes = (ROWS, options.tokens, WIDTH), (WIDTH, gates * WIDTH), (WIDTH, gates * WIDTH), (gates * WIDTH,)
        keys = jax.random.split(jax.random.key(0), len(shapes))
        arrays = [0.1 * jax.random.normal(k, s, options.dtype) for k, s in zip(keys, shapes, strict=True)]

        def loss(*arrays, layer=layer):
            return jnp.sum(layer(*arrays)[0].astype(jnp.float32))

        grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))

        def run(grad=grad, arrays=arrays) -> None:
            jax.block_until_ready(grad(*arrays))

        found[name] = run
        if importlib.util.find_spec("torch") is not None:
            about = [name, str(options.tokens), options.dtype, torch_device()]
            found[f"torch's {name}"] = in_process("jaxformer.benchmarks.recurrent", *about)
    return Suite(found, "tokens", ROWS * options.tokens)


def torch_layer(name: str, tokens: int, dtype: str, device: str) -> Callable[[], None]:
    """The same of torch, on "cpu" or "cuda"."""
    import torch

    kind = getattr(torch, dtype)
    layer = getattr(torch.nn, name.upper())(WIDTH, WIDTH, batch_first=True).to(device, kind)
    x = torch.randn(ROWS, tokens, WIDTH, dtype=kind, device=device, requires_grad=True)

    def run() -> None:
        torch.autograd.grad(layer(x)[0].float().sum(), (x, *layer.parameters()))
        if device == "cuda":
            torch.cuda.synchronize()

    return run


if __name__ == "__main__":
    name, tokens, dtype, device = sys.argv[1:]
    take_turns(torch_layer(name, int(tokens), dtype, device))
