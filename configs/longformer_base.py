"""Longformer base (Beltagy et al. 2020): rows of 4096 tokens, a window of 512, on the user's files.

The published model goes on from RoBERTa's weights for 65,000 steps; this config has that schedule, by a straight line.

jaxformer pretrain longformer_base --config.data.files='/data/long/*.jsonl.gz'
jaxformer plan longformer_base --topology=v5e:4x4
"""

from ml_collections import ConfigDict


def get_config():
    """Post-norm blocks, learned positions, the vocabulary of RoBERTa rounded up."""
    return ConfigDict({
        "model": {
            "family": "bert",
            "block": "post_norm",
            "num_layers": 12,
            "width": 768,
            "attention": {"kind": "longformer", "num_heads": 12, "attention_window": 512, "dropout": 0.1},
            "context_length": 4096,
            "vocab_size": 50304,
            "dropout": 0.1,
            "dtype": "bfloat16",
        },
        "execution": {"steps_per_dispatch": 1},
        "data": {"source": "files", "files": ("data/*.txt",), "tokenizer_vocab": 50265, "objective": "masked"},
        "optimizer": {"learning_rate": 3e-5, "schedule": "linear", "warmup_steps": 500, "final_fraction": 0.0,
                      "beta2": 0.999, "epsilon": 1e-6, "weight_decay": 0.01},
        "train": {"steps": 65_000, "global_batch_size": 64, "eval_every_steps": 5000,
                  "eval_rows": 640, "log_every_steps": 10},
        "checkpoint": {"save_every_minutes": 15.0},
    })  # fmt: skip
