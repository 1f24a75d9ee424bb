"""The input pipeline beside the step it feeds."""

import functools
from collections.abc import Callable

from experiments.benchmarks.train import our_steps
from jaxformer.config import DataConfig, ModelConfig


def contestants(options):
    """The input pipeline alone, beside the train step that consumes it: gpt_tiny's rows of 12 x 256 tokens."""
    from jaxformer.data.batches import Batches
    from jaxformer.data.corpus import open_corpus

    config = DataConfig(tokenizer="bytes", max_train_bytes=4_000_000)
    masked = DataConfig(tokenizer="bytes", max_train_bytes=4_000_000, objective="masked")
    found: dict[str, Callable[[], object]] = {}
    for name, each in (("next-token batches", config), ("masked batches", masked)):
        corpus = open_corpus(each)
        batches = Batches(corpus.train, corpus.tokenizer, each, rows=12, context_length=256, seed=0)
        found[name] = functools.partial(lambda batches: [batches[i] for i in range(20)], batches)
    layers, width, heads = 4, 192, 3
    model = ModelConfig(
        num_layers=layers, width=width, num_heads=heads, context_length=256, vocab_size=4096, dtype="bfloat16",
        activation="swiglu", positions="rotary", norm="rms_norm",
    )  # fmt: skip
    found["train steps of gpt_tiny's shape"] = our_steps(model, rows=12, steps=20)
    return found, "tokens", 20 * 12 * 256
