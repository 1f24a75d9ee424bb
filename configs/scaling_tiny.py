"""A scaling study of small GPTs on the source text of Python's standard library: under 10 minutes on 2 cores.

jaxformer scaling scaling_tiny
"""

from ml_collections import ConfigDict


def get_config():
    """Six sizes over a 28-fold range of parameters, five budgets over a 32-fold range of compute."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "context_length": 64,
            "norm": "rms_norm",
            "feed_forward": {"activation": "gelu_tanh"},  # 4 * width wide at every size; the gated ones are rounded up
            "positions": "t5 or sinusoidal or none",  # the first that model.attention can have
            "use_bias": False,
            "initializer": "scaled",
        },
        "execution": {"steps_per_dispatch": 50},
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 512},
        "optimizer": {"learning_rate": 1.2e-2, "warmup_steps": 50, "schedule": "wsd", "final_fraction": 0.02,
                      "weight_decay": 0.05, "beta2": 0.98},
        "train": {"global_batch_size": 8, "log_every_steps": 50, "eval_rows": 1024},
        "ladder": {
            "widths": (12, 24, 36, 48, 72, 96),  # a head for every 12, and always two layers, as in scaling_gpt.py
            "head_width": 12,
            "layer_width": 1000,
            "min_layers": 2,
            "budgets": (2e10, 4.8e10, 1.15e11, 2.7e11, 6.5e11),
            "min_steps": 150,
            "min_tokens_per_parameter": 0.8,
            "max_tokens_per_parameter": 300.0,
            "learning_rates": (0.5, 1.0, 2.0),
            "learning_rate_exponent": 0.7,
            "searched_sizes": 4,
            "seeds": 2,
            "seeded_sizes": 3,
        },
    })  # fmt: skip
