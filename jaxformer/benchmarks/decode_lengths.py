"""Time per new token after texts of different lengths: with a window the cache stays as it is, without it grows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxformer.benchmarks.suite import Suite
from jaxformer.benchmarks.train import SHAPES, model_config
from jaxformer.errors import ConfigError

LENGTHS = (128, 512, 2048, 4096)
WINDOW, BLOCK = 128, 32


def contestants(options) -> Suite:
    """Blocks of 32 new tokens after 128 to 4096, with a window of 128 and without, rotary positions."""
    import jax

    from jaxformer.config import Rotary
    from jaxformer.decoding import Sampling, prepare_decode_params, stream
    from jaxformer.models import gpt
    from jaxformer.specs import init_params

    shape = SHAPES[options.shape]
    if shape.family != "gpt":
        raise ConfigError(f"--shape: {options.shape}; --suite=decode_lengths accepts the shapes of GPTs")
    rows, new = options.rows or 1, BLOCK * (options.pairs + 1) + 1
    whole = replace(model_config(shape, options.dtype), positions=Rotary(), context_length=LENGTHS[-1] + new)

    def blocks(length: int, window: int | None) -> Callable[[], None]:
        attention: Any = whole.attention
        cfg = replace(whole, attention=replace(attention, window=window))
        params = prepare_decode_params(init_params(gpt.specs(cfg), jax.random.key(0)), cfg)
        ids = np.random.default_rng(0).integers(shape.vocab, size=(rows, length), dtype=np.int32)
        found = stream(params, ids, cfg, sampling=Sampling(temperature=0.0), max_new_tokens=new, block=BLOCK)
        next(found)  # the prompt, and the first token

        def run() -> None:
            jax.block_until_ready(next(found).tokens)

        return run

    named = {f"window {WINDOW}, after {n}": blocks(n, WINDOW) for n in LENGTHS}
    return Suite(named | {f"all, after {n}": blocks(n, None) for n in LENGTHS}, "tokens", rows * BLOCK)
