"""A layer of 8 experts, 2 for a token, beside a dense layer of the same work for a token, forward and backward."""

from collections.abc import Callable

from jaxformer.benchmarks.suite import Suite
from jaxformer.runtime.host_memory import keep_freed_memory

EXPERTS, PER_TOKEN = 8, 2


def contestants(options) -> Suite:
    """SwiGLU, `--tokens` tokens at once, the width of `--shape`; gradients of all inputs. The router is part of it."""
    import jax
    import jax.numpy as jnp

    from jaxformer.benchmarks.train import SHAPES
    from jaxformer.config import Dense, Experts, ModelConfig
    from jaxformer.functional.layer import NO_CONTEXT
    from jaxformer.functional.sublayers import sublayers_of
    from jaxformer.specs import init_params

    keep_freed_memory()
    width = SHAPES[options.shape].width
    hidden = 4 * width // PER_TOKEN
    kinds = {
        "dense layer": Dense(width=PER_TOKEN * hidden, activation="swiglu"),
        f"{EXPERTS} experts, {PER_TOKEN} for a token": Experts(
            count=EXPERTS, top_k=PER_TOKEN, width=hidden, activation="swiglu"
        ),
    }
    found: dict[str, Callable[[], None]] = {}
    for name, kind in kinds.items():
        cfg = ModelConfig(width=width, feed_forward=kind, use_bias=False, dtype=options.dtype)
        layer = sublayers_of(cfg)["mlp"]
        x, g = (jax.random.normal(jax.random.key(n), (1, options.tokens, width), options.dtype) for n in (1, 2))
        params = init_params(layer.specs(cfg), jax.random.key(0))

        def loss(params, x, g, cfg=cfg, layer=layer):
            return jnp.sum((layer.apply(params, x, cfg, NO_CONTEXT)[0] * g).astype(jnp.float32))

        grad = jax.jit(jax.grad(loss, argnums=(0, 1)))

        def run(grad=grad, arrays=(params, x, g)) -> None:
            jax.block_until_ready(grad(*arrays))

        found[name] = run
    return Suite(found, "tokens", options.tokens)
