"""A scaling study of small GPTs on the source text of Python's standard library: under 10 minutes on 2 cores.

python -m experiments.scaling --config=configs/scaling_tiny.py
"""

from ml_collections import ConfigDict


def get_config():
    """Five sizes of 40 thousand to 0.9 million parameters, four budgets; learning rates are chosen at each size."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "context_length": 64,
            "norm": "rms_norm",
            "activation": "swiglu",
            "positions": "rotary",
            "use_bias": False,
            "initializer": "scaled",
        },
        "data": {"source": "stdlib", "tokenizer": "bpe", "tokenizer_vocab": 512},
        "optimizer": {"learning_rate": 8e-3, "warmup_steps": 30, "schedule": "wsd", "final_fraction": 0.02,
                      "weight_decay": 0.05, "beta2": 0.98},
        "train": {"batch_rows": 16, "steps_per_dispatch": 20, "log_every_steps": 20, "eval_rows": 1024},
        "ladder": {
            "widths": (24, 32, 48, 64, 96),
            "head_width": 8,
            "layer_width": 32,
            "budgets": (6e10, 1.8e11, 5.4e11, 1.6e12),
            "min_steps": 60,
            "min_tokens_per_parameter": 1.5,
            "max_tokens_per_parameter": 120.0,
            "learning_rates": (0.5, 1.0, 2.0),
        },
    })  # fmt: skip
