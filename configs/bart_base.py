"""BART base (Lewis et al. 2020): text infilling and shuffled sentences, on the user's files or TFDS.

jaxformer pretrain bart_base --config.data.files='/data/text/*.jsonl.gz'
"""

from ml_collections import ConfigDict


def get_config():
    """Post-norm blocks, learned positions, a norm of the embeddings; 6 + 6 layers of width 768."""
    return ConfigDict({
        "model": {
            "family": "encoder_decoder",
            "block": "post_norm",
            "num_layers": 6,
            "width": 768,
            "encoder": {"source_length": 1024},
            "context_length": 1024,
            "vocab_size": 50304,
            "attention": {"num_heads": 12, "dropout": 0.1},
            "positions": "learned",
            "embedding_norm": True,
            "dropout": 0.1,
            "dtype": "bfloat16",
        },
        "execution": {"steps_per_dispatch": 1},
        "data": {"source": "files", "files": ("data/*.jsonl",), "tokenizer_vocab": 50_265, "objective": "denoising"},
        "loss": {"label_smoothing": 0.1},
        "optimizer": {"learning_rate": 4e-4, "schedule": "linear", "warmup_steps": 10_000, "final_fraction": 0.0,
                      "beta2": 0.98, "epsilon": 1e-6, "weight_decay": 0.01, "clip_norm": 0.1},
        "train": {"steps": 500_000, "global_batch_size": 256, "eval_every_steps": 5000, "eval_rows": 2560,
                  "log_every_steps": 10},
        "checkpoint": {"save_every_minutes": 15.0, "keep_every_steps": 100_000},
    })  # fmt: skip
