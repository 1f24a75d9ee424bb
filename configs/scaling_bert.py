"""Scaling of BERTs (masked tokens) on text files: about 2 hours on 2 cores, minutes on a GPU.

python -m experiments.scaling --config=configs/scaling_bert.py --config.data.files='books/train-*.txt.xz' \
    --config.data.validation_files=books/validation.txt.xz --config.data.separator='\f'
"""

from ml_collections import ConfigDict


def get_config():
    """The ladder of scaling_gpt.py with the masked objective: 15 % of the tokens, 80/10/10."""
    return ConfigDict({
        "model": {
            "family": "bert",
            "context_length": 128,
            "norm": "rms_norm",
            "activation": "swiglu",
            "positions": "rotary",
            "use_bias": False,
            "initializer": "scaled",
        },
        "data": {"tokenizer": "bpe", "tokenizer_vocab": 1024, "max_train_bytes": 130_000_000, "objective": "masked"},
        "optimizer": {"learning_rate": 1.2e-2, "warmup_steps": 40, "schedule": "wsd", "final_fraction": 0.02,
                      "weight_decay": 0.05, "beta2": 0.98},
        "train": {"batch_rows": 16, "steps_per_dispatch": 20, "log_every_steps": 20, "eval_rows": 4096},
        "ladder": {
            "widths": (32, 48, 64, 96, 128, 176),
            "head_width": 16,
            "layer_width": 32,
            "budgets": (1e12, 3.1e12, 9.7e12, 3e13),
            "min_tokens_per_parameter": 0.5,
            "max_tokens_per_parameter": 250.0,
            "learning_rates": (0.5, 1.0, 2.0),
            "learning_rate_exponent": 0.7,
            "seeds": 3,
            "seeded_sizes": 2,
        },
    })  # fmt: skip
