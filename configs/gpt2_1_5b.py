"""GPT-2 124M (Radford et al. 2019) on the user's files or TFDS; 0.5M tokens a step as in nanoGPT's reproduction.

python -m experiments.pretrain --config=configs/gpt2_1_5b.py --config.data.files='/data/openwebtext/*.txt.xz'
"""

from ml_collections import ConfigDict


def get_config():
    """Learned positions, GELU (tanh form), LayerNorm with biases, tied embeddings; 480 rows of 1024 tokens."""
    return ConfigDict({
        "model": {
            "family": "gpt",
            "num_layers": 48,
            "width": 1600,
            "num_heads": 25,
            "context_length": 1024,
            "vocab_size": 50304,
            "activation": "gelu_tanh",
            "dtype": "bfloat16",
        },
        "data": {"source": "files", "files": ("data/*.txt",), "tokenizer_vocab": 50257},
        "optimizer": {"learning_rate": 1.5e-4, "warmup_steps": 2000},
        "train": {"steps": 600_000, "batch_rows": 480, "micro_batches": 5, "steps_per_dispatch": 1,
                  "eval_every_steps": 1000, "eval_rows": 960, "log_every_steps": 10},
        "checkpoint": {"save_every_minutes": 15.0, "keep_every_steps": 50_000},
    })  # fmt: skip
