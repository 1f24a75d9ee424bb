"""Pairs whose best possible loss is known: an encoder-decoder learns a cipher with synonyms, to within 1 % of it.

jaxformer pretrain transduction
jaxformer pretrain transduction:reverse
"""

from ml_collections import ConfigDict

TASKS = ("translate", "copy", "reverse", "sort")


def get_config(task="translate"):
    """The blocks of 2017 but for the norms, which come first; sources of 4 to 20 symbols, four to five pairs a row."""
    if task not in TASKS:
        raise ValueError(f"{task!r}; accepted: {', '.join(TASKS)}")
    return ConfigDict({
        "model": {
            "family": "encoder_decoder",
            "num_layers": 2,
            "width": 128,
            "attention": {"num_heads": 4},
            "context_length": 64,
            "encoder": {"source_length": 64},
            "positions": "sinusoidal",
            "feed_forward": {"activation": "relu"},
            "initializer": "glorot",
        },
        "execution": {"steps_per_dispatch": 20},
        "data": {"source": "transduction", "objective": "pairs", "language_task": task, "language_symbols": 32,
                 "language_shortest": 4, "language_longest": 20, "language_tokens": 5_000_000,
                 "validation_fraction": 0.02},
        "optimizer": {"learning_rate": 2e-3, "warmup_steps": 100, "beta2": 0.98, "final_fraction": 0.02,
                      "weight_decay": 0.0},
        "train": {"steps": 800, "global_batch_size": 32, "eval_every_steps": 400},
    })  # fmt: skip
