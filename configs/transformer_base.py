"""The base model of "Attention is all you need" (Vaswani et al. 2017, table 3) on pairs of sentences.

jaxformer pretrain transformer_base --config.data.files='/data/en-de/*.tsv'
"""

from ml_collections import ConfigDict


def get_config():
    """Sinusoids, post-norm, one table for source, target and output; Adam with the inverse square root of the step.

    The published schedule, width ** -0.5 * min(step ** -0.5, step * 4000 ** -1.5), has its peak at 7e-4. Rows hold
    pairs packed after each other: 96 rows of 256 tokens are about the 25,000 tokens of a published batch.
    """
    return ConfigDict({
        "model": {
            "family": "encoder_decoder",
            "block": "post_norm",
            "num_layers": 6,
            "width": 512,
            "encoder": {"source_length": 256},
            "context_length": 256,
            "vocab_size": 37_056,
            "attention": {"num_heads": 8},
            "positions": "sinusoidal",
            "feed_forward": {"activation": "relu"},
            "dropout": 0.1,
            "initializer": "glorot",
            "dtype": "bfloat16",
        },
        "execution": {"steps_per_dispatch": 1},
        "data": {"source": "files", "files": ("data/*.tsv",), "tokenizer_vocab": 37_000, "objective": "pairs",
                 "long_pairs": "skip"},
        "loss": {"label_smoothing": 0.1},
        "optimizer": {"learning_rate": 7e-4, "schedule": "inverse_sqrt", "warmup_steps": 4000, "beta2": 0.98,
                      "epsilon": 1e-9, "weight_decay": 0.0, "clip_norm": None},
        "train": {"steps": 100_000, "global_batch_size": 96, "eval_every_steps": 1000, "eval_rows": 960,
                  "log_every_steps": 10},
        "checkpoint": {"save_every_minutes": 15.0, "keep_every_steps": 10_000},
    })  # fmt: skip
