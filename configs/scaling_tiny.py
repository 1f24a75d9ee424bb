"""A scaling study of small GPTs on the source text of Python's standard library: under 10 minutes on 2 cores.

python -m experiments.scaling --config=configs/scaling_tiny.py
"""

from ml_collections import ConfigDict


def get_config():
    """Five sizes of 15 to 140 thousand parameters, four budgets; learning rates are chosen at each size."""
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
        "optimizer": {"learning_rate": 1.6e-2, "warmup_steps": 30, "schedule": "wsd", "final_fraction": 0.02,
                      "weight_decay": 0.05, "beta2": 0.98},
        "train": {"batch_rows": 16, "steps_per_dispatch": 20, "log_every_steps": 20, "eval_rows": 1024},
        "ladder": {
            "widths": (16, 24, 32, 48, 64),
            "head_width": 8,
            "layer_width": 32,
            "budgets": (4e10, 1.2e11, 3.6e11, 1.08e12),
            "min_steps": 60,
            "min_tokens_per_parameter": 2.5,
            "max_tokens_per_parameter": 200.0,
            "learning_rates": (0.5, 1.0, 2.0),
            "seeds": 2,
        },
    })  # fmt: skip
