"""A small GPT on a mixture: seven rows of one generated language to three of another. No download, half a minute.

jaxformer pretrain gpt_mixture
jaxformer curves --workdir=runs/gpt_mixture --out=mixture.png
"""

from ml_collections import ConfigDict


def get_config():
    """Both languages have the same 32 symbols; which one a row is of, the model has to find out."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "num_layers": 2,
            "width": 64,
            "attention": {"num_heads": 2},
            "context_length": 64,
            "positions": "rotary",
        },
        "execution": {"steps_per_dispatch": 10},
        "data": {"mixture": {
            "chain": {"weight": 0.7, "source": "markov", "language_order": 1, "language_tokens": 400_000},
            "rules": {"weight": 0.3, "source": "hierarchy", "language_tokens": 200_000},
        }},
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 30},
        "train": {"steps": 300, "global_batch_size": 16, "eval_every_steps": 100, "eval_rows": 128},
    })  # fmt: skip
