"""Sixteen generated languages, more than a small dense layer holds: what experts are for. Two minutes, no download.

jaxformer pretrain expert_languages
jaxformer pretrain expert_languages --config.model.feed_forward.kind=dense
"""

from ml_collections import ConfigDict

LANGUAGES = 16


def get_config():
    """All languages have the same 32 symbols; of which one a row is, the model has to find out."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "num_layers": 2,
            "width": 32,
            "attention": {"num_heads": 2},
            "context_length": 64,
            "norm": "rms_norm",
            "feed_forward": {"kind": "experts", "count": 8, "top_k": 1, "activation": "gelu"},
            "positions": "rotary",
            "use_bias": False,
            "initializer": "scaled",
        },
        "execution": {"steps_per_dispatch": 50},
        "data": {"mixture": {
            f"language_{seed:02}": {
                "source": "markov", "language_symbols": 32, "language_order": 1, "language_seed": seed,
                "language_tokens": 250_000, "validation_fraction": 0.04,
            }
            for seed in range(LANGUAGES)
        }},
        "optimizer": {"learning_rate": 4e-3, "warmup_steps": 100, "final_fraction": 0.02},
        "train": {"steps": 2000, "global_batch_size": 32, "eval_every_steps": 500, "eval_rows": 640},
    })  # fmt: skip
