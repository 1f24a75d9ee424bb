"""The input pipeline beside the step it feeds."""

import functools
from collections.abc import Callable
from dataclasses import replace

from jaxformer.benchmarks.suite import Suite
from jaxformer.benchmarks.train import ModelShape, our_steps
from jaxformer.config import DataConfig, Dense, ModelConfig, Rotary, Softmax


def contestants(options) -> Suite:
    """The input pipeline alone, beside gpt_tiny's train step: 12 rows of 256 tokens, of the source if there is one."""
    from jaxformer.data.batches import Batches
    from jaxformer.data.corpus import open_corpus

    config = DataConfig(tokenizer="bytes", max_train_bytes=4_000_000)
    found: dict[str, Callable[[], None]] = {}
    for name, objective, target in (
        ("next-token batches", "next_token", 256), ("masked batches", "masked", 256),
        ("span corruption batches", "span_corruption", 58), ("denoising batches", "denoising", 256),
        ("UL2's mixture batches", "mixture", 190),
    ):  # fmt: skip
        each = replace(config, objective=objective)
        corpus = open_corpus(each)
        batches = Batches(
            corpus.train, corpus.tokenizer, each, rows=12, context_length=target, source_length=256, seed=0
        )
        found[name] = functools.partial(take, batches)
    shape = ModelShape(layers=4, width=192, heads=3, context=256, rows=12, vocab=4096, steps=20)
    model = ModelConfig(
        num_layers=4, width=192, attention=Softmax(3), context_length=256, vocab_size=4096, dtype="bfloat16",
        feed_forward=Dense(activation="swiglu"), positions=Rotary(), norm="rms_norm",
    )  # fmt: skip
    found["train steps of gpt_tiny's shape"] = our_steps(shape, "bfloat16", model)
    return Suite(found, "tokens", 20 * 12 * 256)


def take(batches) -> None:
    """Twenty batches."""
    for step in range(20):
        batches[step]
