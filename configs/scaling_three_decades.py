"""Scaling of GPTs on text files over three decades of compute, 1e12 to 1e15 FLOP: for a GPU; a day on 2 cores.

jaxformer scaling scaling_three_decades --config.data.files='books/train-*.txt.xz' \
    --config.data.validation_files=books/validation.txt.xz --config.data.separator='\f'
"""

from jaxformer.config import load


def get_config():
    """Nine sizes of 0.07 to 11 million parameters, three layers and more, rows of 256 tokens, seven budgets."""
    config = load("scaling_gpt")
    config["model"] |= {"context_length": 256, "dtype": "bfloat16"}
    config["data"] |= {"max_train_bytes": None}
    config["optimizer"] |= {"learning_rate": 1e-2, "weight_decay": 0.1}
    config["train"] |= {"global_batch_size": 8, "eval_rows": 1024}
    config["ladder"] |= {
        "widths": (32, 48, 64, 96, 128, 192, 256, 320, 384),
        "head_width": 16,
        "min_layers": 3,
        "layer_width": 64,
        "budgets": (1e12, 3.2e12, 1e13, 3.2e13, 1e14, 3.2e14, 1e15),
        "min_steps": 150,
        "min_tokens_per_parameter": 0.5,
        "max_tokens_per_parameter": 130.0,
        "learning_rate_extensions": 1,
        "searched_sizes": 5,
        "seeded_sizes": 3,
        "max_epochs": 1.6,
    }
    return config
