"""BigBird base (Zaheer et al. 2020): rows of 4096 tokens, blocks of 64 with 3 random ones, on the user's files.

jaxformer pretrain bigbird_base --config.data.files='/data/long/*.jsonl.gz'
jaxformer plan bigbird_base --topology=v5e:4x4
"""

from ml_collections import ConfigDict


def get_config():
    """Post-norm blocks, learned positions, token types; the published vocabulary rounded up."""
    return ConfigDict({
        "model": {
            "family": "bert",
            "block": "post_norm",
            "num_layers": 12,
            "width": 768,
            "attention": {"kind": "bigbird", "num_heads": 12, "block": 64, "random_blocks": 3, "dropout": 0.1},
            "feed_forward": {"activation": "gelu_tanh"},
            "context_length": 4096,
            "vocab_size": 50368,
            "norm_epsilon": 1e-12,
            "bert": {"token_types": 2, "next_sentence": False},
            "dropout": 0.1,
            "dtype": "bfloat16",
        },
        "execution": {"steps_per_dispatch": 1},
        "data": {"source": "files", "files": ("data/*.txt",), "tokenizer_vocab": 50358, "objective": "masked"},
        "optimizer": {"learning_rate": 1e-4, "schedule": "linear", "warmup_steps": 10_000, "final_fraction": 0.0,
                      "beta2": 0.999, "epsilon": 1e-6, "weight_decay": 0.01},
        "train": {"steps": 500_000, "global_batch_size": 256, "eval_every_steps": 5000,
                  "eval_rows": 2560, "log_every_steps": 10},
        "checkpoint": {"save_every_minutes": 15.0, "keep_every_steps": 100_000},
    })  # fmt: skip
