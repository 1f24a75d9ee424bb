"""Scaling of GPTs on text files: about an hour on one core, minutes on a GPU.

jaxformer scaling scaling_gpt --config.data.files='books/train-*.txt.xz' \
    --config.data.validation_files=books/validation.txt.xz --config.data.separator='\f'
"""

from ml_collections import ConfigDict


def get_config():
    """Seven sizes over a 32-fold range of parameters, four budgets over a 30-fold range of compute, two seeds."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "context_length": 128,
            "norm": "rms_norm",
            "feed_forward": {"activation": "gelu_tanh"},  # 4 * width wide at every size; the gated ones are rounded up
            # With biases by distance seeds end closer to each other, and lower, than with rotary positions.
            "positions": {"kind": "t5"},
            "use_bias": False,
            "initializer": "scaled",
        },
        "execution": {"steps_per_dispatch": 50},
        "data": {"tokenizer": "bpe", "tokenizer_vocab": 1024, "max_train_bytes": 130_000_000},
        "optimizer": {"learning_rate": 9e-3, "warmup_steps": 100, "schedule": "wsd", "final_fraction": 0.02,
                      "weight_decay": 0.05, "beta2": 0.98},
        # Small batches: with 2048 tokens a step the short runs of the larger models are short of steps, not of text.
        "train": {"global_batch_size": 4, "log_every_steps": 50, "eval_rows": 2048},
        "ladder": {
            "widths": (20, 40, 60, 80, 100, 140, 180),  # a head for every 20, and always two layers: a ladder that
            "head_width": 20,  # starts with one has a step in it
            "min_layers": 2,
            "layer_width": 1000,
            "budgets": (2.5e11, 7.8e11, 2.4e12, 7.5e12),
            "min_steps": 300,
            "min_tokens_per_parameter": 0.8,
            "max_tokens_per_parameter": 300.0,
            "learning_rates": (0.5, 1.0, 2.0),
            "learning_rate_exponent": 0.7,
            "searched_sizes": 4,  # the largest would spend twice its own cost on rates
            "seeds": 2,
            "seeded_sizes": 4,
        },
    })  # fmt: skip
